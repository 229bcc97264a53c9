//! An HTTP proxy that leads to one server, whatever it is asked for.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

/// A proxy. An absolute URL it passes on as it is, of which servers take the path; of CONNECT it makes a tunnel.
#[derive(Clone)]
pub struct ProxyServer {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl ProxyServer {
    /// Starts a proxy in front of this server.
    pub async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            heads: Arc::default(),
        };
        let heads = Arc::clone(&proxy.heads);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let heads = Arc::clone(&heads);
                // A client that goes away breaks its own tunnel alone.
                tokio::spawn(async move { serve(client, server, &heads).await.ok() });
            }
        });
        proxy
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// First lines of the requests of all connections, such as `CONNECT hub.example:443 HTTP/1.1`.
    pub fn asked(&self) -> Vec<String> {
        let heads = self.heads.lock().unwrap();
        let first = heads.iter().filter_map(|head| head.lines().next());
        first.map(str::to_owned).collect()
    }

    /// Heads of these requests.
    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

async fn serve(
    mut client: TcpStream,
    server: SocketAddr,
    heads: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if client.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let is_tunnel = head.starts_with("CONNECT ");
    heads.lock().unwrap().push(head.clone());
    let mut server = TcpStream::connect(server).await?;
    if is_tunnel {
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        server.write_all(&bytes[end..]).await?;
    } else {
        // One request a connection, so that each is seen.
        let closing = head.replacen("\r\n", "\r\nConnection: close\r\n", 1);
        server.write_all(closing.as_bytes()).await?;
    }
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}
