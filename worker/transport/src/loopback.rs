//! A worker in this process, over in-memory pipes: the same services and messages, without a port.
//!
//! For tests. [`Loopback::kill`] breaks the pipes in mid-message, like `kill -9` of a worker.

use std::sync::{Mutex, PoisonError};

use futures::{StreamExt, stream};
use hyper_util::rt::TokioIo;
use tokio::{io::DuplexStream, runtime::Runtime, sync::mpsc};
use tonic::{
    service::Routes,
    transport::{Endpoint as TonicEndpoint, Uri},
};

use crate::{Endpoint, ServerOptions, TransportError, Worker, server::builder};

/// Capacity of a pipe in bytes.
const PIPE_BYTES: usize = 1 << 20;

/// A worker that runs until it is killed or dropped.
pub struct Loopback {
    worker: Worker,
    server: Mutex<Option<Runtime>>,
}

impl Loopback {
    /// Serves `routes` on a separate thread under the given name.
    ///
    /// # Errors
    /// [`TransportError::Serve`] if the thread cannot be started.
    pub fn start(endpoint: Endpoint, routes: Routes) -> Result<Self, TransportError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|e| TransportError::Serve {
                address: endpoint.to_string(),
                reason: e.to_string(),
            })?;
        let (pipes, accepted) = mpsc::unbounded_channel::<DuplexStream>();
        let incoming = stream::unfold(accepted, |mut accepted| async move {
            accepted.recv().await.map(|pipe| (pipe, accepted))
        });
        let mut server = builder(&ServerOptions::default());
        runtime.spawn(async move {
            server
                .add_routes(routes)
                .serve_with_incoming(incoming.map(Ok::<_, std::io::Error>))
                .await
        });
        let channel = TonicEndpoint::from_static("http://loopback").connect_with_connector_lazy(
            tower::service_fn(move |_: Uri| {
                let pipes = pipes.clone();
                async move {
                    let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
                    let refused = |_| std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
                    pipes.send(theirs).map_err(refused)?;
                    Ok::<_, std::io::Error>(TokioIo::new(ours))
                }
            }),
        );
        Ok(Self {
            worker: Worker::over(endpoint, channel),
            server: Mutex::new(Some(runtime)),
        })
    }

    /// Returns the connection to it.
    pub fn worker(&self) -> Worker {
        self.worker.clone()
    }

    /// Ends the worker and all its work at once; later calls are refused as by a closed port.
    pub fn kill(&self) {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = server.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.kill();
    }
}
