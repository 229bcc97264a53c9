//! How a process is, told to whoever supervises it by `grpc.health.v1`.
//!
//! A probe carries no certificate, so the same answers can be had in plain on a port of their own
//! ([`Health::listen`]), which is open while a worker still loads.

use std::{net::SocketAddr, sync::Arc};

use tokio::{sync::Mutex, task::AbortHandle};
use tonic::service::Routes;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::{Listener, ServerOptions, TransportError, serve};

/// Name of the service that is SERVING for as long as the process answers at all: a liveness probe asks for it.
/// The service of readiness probes has the empty name.
pub const LIVE: &str = "live";

/// What a process says of itself: `""` is SERVING while it takes requests, [`LIVE`] always. Clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
    /// The process is ending; held while a status is written, so that none of before is written after it.
    is_ending: Arc<Mutex<bool>>,
}

impl Health {
    /// Alive, and not ready yet.
    pub async fn starting() -> Self {
        let reporter = HealthReporter::new();
        reporter
            .set_service_status("", ServingStatus::NotServing)
            .await;
        reporter
            .set_service_status(LIVE, ServingStatus::Serving)
            .await;
        Self {
            reporter,
            is_ending: Arc::default(),
        }
    }

    /// Whether requests are taken. Once the process is ending this changes nothing.
    pub async fn set_ready(&self, is_ready: bool) {
        let is_ending = self.is_ending.lock().await;
        if !*is_ending {
            self.say(is_ready).await;
        }
    }

    /// No requests are taken from now on; those in flight may go on.
    pub async fn end(&self) {
        let mut is_ending = self.is_ending.lock().await;
        *is_ending = true;
        self.say(false).await;
    }

    async fn say(&self, is_ready: bool) {
        let status = if is_ready {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        self.reporter.set_service_status("", status).await;
    }

    /// The service, beside others of a server.
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Answers on `address` too, in plain, until the port is dropped. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError::Bind`] when the address is taken, is not ours or does not resolve.
    pub fn listen(&self, address: &str) -> Result<HealthPort, TransportError> {
        let listener = Listener::bind(address)?;
        let address = listener.address();
        let routes = Routes::new(self.service());
        let task = tokio::spawn(async move {
            let options = ServerOptions::default();
            serve(listener, routes, &options, std::future::pending()).await
        });
        Ok(HealthPort {
            address,
            task: task.abort_handle(),
        })
    }
}

/// A port for probes; closed when dropped.
#[derive(Debug)]
pub struct HealthPort {
    address: SocketAddr,
    task: AbortHandle,
}

impl HealthPort {
    /// The address, with the port that was taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HealthPort {
    fn drop(&mut self) {
        self.task.abort();
    }
}
