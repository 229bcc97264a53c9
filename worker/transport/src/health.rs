//! Health of a process, reported to its supervisor through `grpc.health.v1`.
//!
//! A probe has no certificate, so the same answers are available in plaintext on a separate port
//! ([`Health::listen`]), which is already open while a worker loads.

use std::{net::SocketAddr, sync::Arc};

use tokio::{sync::Mutex, task::AbortHandle};
use tonic::service::Routes;
use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

use crate::{Listener, ServerOptions, TransportError, serve};

/// Name of the service that is SERVING as long as the process answers at all, for liveness probes.
/// Readiness probes use the service with the empty name.
pub const LIVE: &str = "live";

/// Health status of a process: `""` is SERVING while it takes requests, [`LIVE`] always. Clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
    /// Whether the process is ending; locked while a status is written, so that no earlier one is written afterwards.
    is_ending: Arc<Mutex<bool>>,
}

impl Health {
    /// Creates the status of a process that is alive but not ready yet.
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

    /// Sets whether requests are taken. Has no effect once the process is ending.
    pub async fn set_ready(&self, is_ready: bool) {
        let is_ending = self.is_ending.lock().await;
        if !*is_ending {
            self.say(is_ready).await;
        }
    }

    /// Stops taking requests; those in flight may continue.
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

    /// The health service, to be added to a server.
    pub fn service(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }

    /// Also serves it on `address` in plaintext, until the returned port is dropped. Requires a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError::Bind`] if the address is in use, is not ours or does not resolve.
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
    /// The address, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HealthPort {
    fn drop(&mut self) {
        self.task.abort();
    }
}
