//! A port of this machine that leads to a port of a Pod, through the API server.
//!
//! It ends within the Pod, so that no NetworkPolicy has to let anybody in.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Portforwarder};
use kube::client::UpgradeConnectionError;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::access::Access;
use crate::cluster::failure::Failure;

/// A forwarded port; dropping it ends it, with its connections.
pub(super) struct Forward {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Forward {
    /// Forwards a port of this machine that only its own programs can reach.
    ///
    /// # Errors
    /// The API server's, in words: it may not be allowed.
    pub(super) async fn open(
        access: &Access,
        namespace: &str,
        pod: &str,
        port: u16,
    ) -> anyhow::Result<Self> {
        let route = Route {
            api: Api::namespaced(access.client.clone(), namespace),
            pod: pod.to_owned(),
            port,
        };
        // Opened before anybody connects, so that a refusal is told as one.
        let first = route.open().await;
        let first = first.map_err(|failure| access.told("Ports of Pods", &failure))?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.context("no port of this machine can be opened")?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(serve(listener, route, first));
        Ok(Self { address, task })
    }

    /// `http://HOST:PORT`.
    pub(super) fn base(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where connections go.
struct Route {
    api: Api<Pod>,
    pod: String,
    port: u16,
}

impl Route {
    async fn open(&self) -> Result<Portforwarder, Failure> {
        let opened = self.api.portforward(&self.pod, &[self.port]).await;
        opened.map_err(|error| match &error {
            kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status))
                if matches!(status.as_u16(), 401 | 403) =>
            {
                Failure::Forbidden(format!(
                    "forwarding a port of the Pod {} is refused ({status}): it takes the right to create pods/portforward",
                    self.pod
                ))
            }
            kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) => {
                Failure::Server(format!(
                    "the API server answers {status} for the Pod {}",
                    self.pod
                ))
            }
            _ => Failure::from(&error),
        })
    }
}

async fn serve(listener: TcpListener, route: Route, first: Portforwarder) {
    let mut opened = Some(first);
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let forwarder = match opened.take() {
            Some(first) => Ok(first),
            None => route.open().await,
        };
        // Otherwise the client sees its connection closed, and says so.
        if let Ok(forwarder) = forwarder {
            connections.spawn(carry(socket, forwarder, route.port));
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(mut socket: TcpStream, mut forwarder: Portforwarder, port: u16) {
    if let Some(mut stream) = forwarder.take_stream(port) {
        // Whichever side closes first, the other one is closed as well.
        let _ = copy_bidirectional(&mut socket, &mut stream).await;
    }
    forwarder.abort();
}
