//! HTTP requests to gateways.

use std::time::Duration;

use futures::StreamExt;
use hearth_controller_core::names::{GATEWAY_PORT, METRICS_PORT, host_port};
use tokio::time::{Instant, sleep, timeout_at};

/// Scrape timeout: a gateway responds immediately or is busy with more important work.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Response size limit, larger than any gateway's response.
const MOST_BYTES: usize = 2 << 20;

/// The longest that a gateway which is watched takes for a text; it has one every few seconds.
const SILENCE: Duration = Duration::from_secs(12);
/// The last line of each text.
const END: &[u8] = b"# EOF\n";
/// What is wrong with a gateway from which no text came in time.
const SILENT: &str = "it sends nothing";
/// The least time between two texts of a gateway that is watched.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// Client for gateways' metrics.
pub(super) struct Client {
    http: reqwest::Client,
    metrics_port: u16,
}

impl Client {
    /// Builds one. Gateways are scraped too rarely for their connections to be kept, no proxy knows Pods' addresses, and a Pod's response
    /// must not redirect the operator elsewhere.
    pub(super) fn new() -> reqwest::Result<Self> {
        Self::with_port(METRICS_PORT)
    }

    /// The same for gateways that have their metrics on this port.
    pub(super) fn with_port(metrics_port: u16) -> reqwest::Result<Self> {
        let http = reqwest::Client::builder()
            .tls_certs_only([])
            .connect_timeout(TIMEOUT)
            .pool_max_idle_per_host(0)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()?;
        Ok(Self { http, metrics_port })
    }

    /// Scrapes a gateway; one of an earlier version has its metrics on the API port.
    pub(super) async fn metrics(&self, address: &str) -> Result<String, String> {
        match self.scrape(address, self.metrics_port).await {
            Ok(text) => Ok(text),
            Err(error) => self.scrape(address, GATEWAY_PORT).await.map_err(|_| error),
        }
    }

    async fn scrape(&self, address: &str, port: u16) -> Result<String, String> {
        let url = format!("http://{}/metrics", host_port(address, port));
        text(self.http.get(url).timeout(TIMEOUT)).await
    }

    /// Has a gateway push its metrics: `take` gets each text until it returns `false`. Returns why the gateway sends none any more.
    pub(super) async fn watch(
        &self,
        address: &str,
        mut take: impl FnMut(&str) -> bool,
    ) -> Result<(), String> {
        let endpoint = host_port(address, self.metrics_port);
        let request = self.http.get(format!("http://{endpoint}/metrics/watch"));
        let mut due = Instant::now() + SILENCE;
        let opened = timeout_at(due, opened(request));
        let mut chunks = opened.await.map_err(|_| SILENT)??.bytes_stream();
        let mut read = Vec::new();
        loop {
            let chunk = timeout_at(due, chunks.next()).await.map_err(|_| SILENT)?;
            let chunk = chunk.ok_or("the watch has ended")?;
            let mut searched = read.len().saturating_sub(END.len());
            read.extend_from_slice(&chunk.map_err(|error| error.to_string())?);
            while let Some(end) = find(&read[searched..], END) {
                let rest = read.split_off(searched + end + END.len());
                let text = String::from_utf8(read).map_err(|error| error.to_string())?;
                (read, searched) = (rest, 0);
                if !take(&text) {
                    return Ok(());
                }
                // However much it has to say.
                sleep(LEAST_PAUSE).await;
                due = Instant::now() + SILENCE;
            }
            if read.len() > MOST_BYTES {
                return Err(format!("more than {MOST_BYTES} bytes"));
            }
        }
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|it| it == part)
}

async fn opened(request: reqwest::RequestBuilder) -> Result<reqwest::Response, String> {
    let response = request.send().await.map_err(|error| error.to_string())?;
    match response.status().is_success() {
        true => Ok(response),
        false => Err(response.status().to_string()),
    }
}

/// Body of a response.
async fn text(request: reqwest::RequestBuilder) -> Result<String, String> {
    let mut chunks = opened(request).await?.bytes_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk.map_err(|error| error.to_string())?);
        if bytes.len() > MOST_BYTES {
            return Err(format!("more than {MOST_BYTES} bytes"));
        }
    }
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "hearth_requests_queued 0\n# EOF\n";

    #[tokio::test]
    async fn a_gateway_is_scraped_over_http() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("port");
        let port = listener.local_addr().expect("address").port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("client");
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.expect("request");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", TEXT.len());
            stream
                .write_all((head + TEXT).as_bytes())
                .await
                .expect("answer");
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let client = Client::new().expect("client");
        let text = client.scrape("127.0.0.1", port).await;
        assert_eq!(text.as_deref(), Ok(TEXT));
        let again = client.scrape("127.0.0.1", port).await;
        assert!(again.is_err(), "nobody listens any more");
        assert!(server.await.expect("server").starts_with("GET /metrics "));
    }

    #[tokio::test]
    async fn a_gateway_pushes_until_it_ends_or_is_silent() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("port");
        let port = listener.local_addr().expect("address").port();
        let server = tokio::spawn(async move {
            for parts in [
                // Two texts, one of them in two parts.
                vec!["a 1\n# EOF\nb", " 2\n# EOF\n", "c"],
                vec!["a 1\n# EOF\n"; 3],
            ] {
                let (mut stream, _) = listener.accept().await.expect("client");
                let mut request = [0; 1024];
                let read = stream.read(&mut request).await.expect("request");
                assert!(request[..read].starts_with(b"GET /metrics/watch "));
                let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
                stream.write_all(head.as_bytes()).await.expect("head");
                for part in parts {
                    stream.write_all(part.as_bytes()).await.expect("part");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        });
        let client = Client::with_port(port).expect("client");
        let mut texts = Vec::new();
        let ended = client.watch("127.0.0.1", |text| {
            texts.push(text.to_owned());
            true
        });
        assert_eq!(ended.await, Err("the watch has ended".to_owned()));
        assert_eq!(texts, ["a 1\n# EOF\n", "b 2\n# EOF\n"]);
        let mut taken = 0;
        let ended = client.watch("127.0.0.1", |_| {
            taken += 1;
            taken < 2
        });
        assert_eq!((ended.await, taken), (Ok(()), 2));
        server.await.expect("server");
        let refused = client.watch("127.0.0.1", |_| true).await;
        assert!(refused.is_err(), "nobody listens any more");
    }

    #[tokio::test]
    async fn a_gateway_that_only_drips_is_not_waited_for() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("port");
        let port = listener.local_addr().expect("address").port();
        let drips = async {
            let (mut stream, _) = listener.accept().await.expect("client");
            _ = stream.read(&mut [0; 1024]).await.expect("request");
            let head = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            head.await.expect("head");
            // The client reads it before time stands still.
            sleep(Duration::from_millis(100)).await;
            let began = Instant::now();
            tokio::time::pause();
            while stream.write_all(b"a").await.is_ok() && began.elapsed() < 2 * SILENCE {
                sleep(SILENCE / 4).await;
            }
        };
        let client = Client::with_port(port).expect("client");
        let watch = client.watch("127.0.0.1", |_| true);
        let ended = tokio::select! {
            ended = watch => ended,
            () = drips => Ok(()),
        };
        assert_eq!(ended, Err(SILENT.to_owned()));
    }

    #[tokio::test]
    async fn a_gateway_sends_the_operator_nowhere() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let bind = async || tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let (gateway, inside) = (bind().await.expect("port"), bind().await.expect("port"));
        let port = gateway.local_addr().expect("address").port();
        let elsewhere = inside.local_addr().expect("address");
        let server = tokio::spawn(async move {
            let (mut stream, _) = gateway.accept().await.expect("client");
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await.expect("request");
            let answer = format!(
                "HTTP/1.1 302 Found\r\nlocation: http://{elsewhere}/latest/meta-data\r\ncontent-length: 0\r\n\r\n"
            );
            stream.write_all(answer.as_bytes()).await.expect("answer");
        });
        let answer = Client::new()
            .expect("client")
            .scrape("127.0.0.1", port)
            .await;
        assert_eq!(answer, Err("302 Found".to_owned()));
        server.await.expect("server");
        let follows = tokio::time::timeout(Duration::from_millis(200), inside.accept()).await;
        assert!(follows.is_err(), "the redirect was followed");
    }
}
