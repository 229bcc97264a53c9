//! The listening side: connections, their limits, and graceful shutdown.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use hearth_transport::{ClientOptions, Clients};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api;
use crate::app::{App, unix_seconds};
use crate::backlog::Backlog;
use crate::config::{GatewayConfig, GatewayError, Limits};
use crate::connection::{self, Drain, Patience, Service};
use crate::https;
use crate::keys::ApiKeys;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::router::{Role, WorkerPool, WorkerRoute};

/// Smallest buffer that hyper takes.
const LEAST_HEADER_BYTES: usize = 8192;
/// Send buffer of one connection in bytes, which the system doubles for its own use. It reports that bytes were taken
/// once a third is free: that is what a client must take within the time after which it is cut off.
const SEND_BYTES: usize = 32 << 10;
/// Bytes of one HTTP/2 stream that are buffered in addition to what the backlog counts.
const HTTP2_SEND_BYTES: usize = 64 << 10;
/// Time for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for streams to carry the error that ends them, once the grace period is over.
const CUT_OFF: Duration = Duration::from_secs(2);
/// Maximum number of connections of those who scrape, which is quick, or watch, which only a few may.
const METRICS_CONNECTIONS: usize = 32;
/// Pause after an error of the listener, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A gateway that is ready to serve.
pub struct Gateway {
    app: Arc<App>,
    acceptor: Option<TlsAcceptor>,
}

/// Serves the OpenAI API on `listener` until `shutdown` is ready, then finishes requests on open connections within
/// `limits.drain_grace`; those on new connections are answered for `limits.drain_late`, then refused with 503. Returns once
/// all open connections have ended, with the number of requests that had to be cut off. Dropping the future stops at once.
///
/// # Errors
/// [`GatewayError`] when the configuration cannot be used.
pub async fn serve(
    config: GatewayConfig,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<u64, GatewayError> {
    Gateway::start(config)?.serve(listener, shutdown).await
}

impl Gateway {
    /// Reads the model's directory and starts watching the workers. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`GatewayError`] when the configuration cannot be used.
    pub fn start(config: GatewayConfig) -> Result<Self, GatewayError> {
        let clients = Clients::new(ClientOptions {
            tls: config.worker_tls.clone(),
            ..ClientOptions::default()
        });
        Self::start_with(config, &clients)
    }

    /// Starts as [`Gateway::start`] does, over existing clients.
    ///
    /// # Errors
    /// [`GatewayError`] when the configuration cannot be used.
    pub fn start_with(config: GatewayConfig, clients: &Clients) -> Result<Self, GatewayError> {
        if config.decode.is_empty() && !config.has_changing_members {
            return Err(GatewayError::NoWorkers);
        }
        let model = Arc::new(ServedModel::open(&config)?);
        let keys = config.api_keys.as_deref().map(ApiKeys::open).transpose()?;
        let acceptor = config.https.as_ref().map(https::acceptor).transpose()?;
        let GatewayConfig {
            decode,
            prefill,
            routing,
            limits,
            predicted,
            cors_origins,
            tracer,
            ..
        } = config;
        let decode = decode
            .into_iter()
            .map(|at| WorkerRoute::at(Role::Decode, at));
        let prefill = prefill
            .into_iter()
            .map(|at| WorkerRoute::at(Role::Prefill, at));
        let members: Vec<WorkerRoute> = decode.chain(prefill).collect();
        let pool = WorkerPool::start(clients, &members, routing.clone())?;
        let metrics = Arc::new(Metrics::new(&model.name, pool.clone(), predicted));
        let backlog = Backlog::new(limits.backlog_bytes, limits.client_stall, metrics.clone());
        let app = Arc::new(App {
            model,
            pool,
            metrics,
            tracer,
            backlog,
            keys,
            cors_origins,
            routing,
            limits,
            created: unix_seconds(),
            is_draining: AtomicBool::new(false),
            closing: CancellationToken::new(),
            cut_off: AtomicU64::new(0),
        });
        Ok(Self { app, acceptor })
    }

    /// Returns the HTTP service by itself, without a socket.
    pub fn router(&self) -> Router {
        api::router(self.app.clone())
    }

    /// The pool of workers, with their health and load.
    pub fn pool(&self) -> &Arc<WorkerPool> {
        &self.app.pool
    }

    /// Tells how many choices of answers have not ended, also while [`Gateway::serve`] runs.
    pub fn open_choices(&self) -> impl Fn() -> u64 + use<> {
        let metrics = Arc::clone(&self.app.metrics);
        move || metrics.demand.choices() as u64
    }

    /// Serves `/metrics` on a separate listener for as long as it is polled; runs beside [`Gateway::serve`].
    pub fn serve_metrics(&self, listener: TcpListener) -> impl Future<Output = ()> + use<> {
        let router = api::metrics_router(self.app.clone());
        let drain = Drain::new(self.app.limits.drain_idle);
        let connections = self.connections(router, None, drain);
        let places = Arc::new(Semaphore::new(METRICS_CONNECTIONS));
        async move {
            let mut open = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = accept(&listener, &places) => {
                        if let Some((stream, place)) = taken(accepted).await {
                            open.spawn(connections.clone().run(stream, place, false));
                        }
                    }
                    Some(_) = open.join_next() => {}
                }
            }
        }
    }

    fn connections(
        &self,
        router: Router,
        acceptor: Option<TlsAcceptor>,
        drain: Drain,
    ) -> Arc<Connections> {
        let limits = &self.app.limits;
        Arc::new(Connections {
            builder: builder(limits),
            acceptor,
            service: Service {
                router,
                drain,
                patience: Patience {
                    headers: limits.header_timeout,
                    keep_alive: limits.keep_alive,
                    stall: limits.client_stall,
                },
                metrics: self.app.metrics.clone(),
            },
        })
    }

    /// See [`serve`].
    ///
    /// # Errors
    /// [`GatewayError::Listen`] when the socket has no address.
    pub async fn serve(
        self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<u64, GatewayError> {
        let limits = &self.app.limits;
        // Connections inherit it. By default the system would buffer megabytes for a client that does not read.
        if let Err(error) = SockRef::from(&listener).set_send_buffer_size(SEND_BYTES) {
            tracing::warn!(%error, "the size of send buffers cannot be set");
        }
        let drain = Drain::new(limits.drain_idle);
        let connections = self.connections(self.router(), self.acceptor.clone(), drain.clone());
        let places = Arc::new(Semaphore::new(limits.connections));
        let open = TaskTracker::new();
        let mut shutdown = pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                accepted = accept(&listener, &places) => accepted,
            };
            if let Some((stream, place)) = taken(accepted).await {
                open.spawn(connections.clone().run(stream, place, false));
            }
        }
        self.app.is_draining.store(true, Ordering::Relaxed);
        drain.begin();
        self.app.pool.end();
        let (waiting, listener) = waiting(listener, &places);
        for (stream, place) in waiting {
            open.spawn(connections.clone().run(stream, place, false));
        }
        open.close();
        let began = Instant::now();
        tracing::info!(connections = open.len(), "draining");
        let ended = async {
            if timeout(limits.drain_grace, open.wait()).await.is_err() {
                tracing::warn!(connections = open.len(), "the rest is cut off");
                self.app.closing.cancel();
                let _ = timeout(CUT_OFF, open.wait()).await;
            }
            let seconds = began.elapsed().as_secs_f32();
            tracing::info!(seconds, "drained");
        };
        tokio::select! {
            () = ended => {}
            never = late(listener, &places, &connections, &open, began + limits.drain_late) => match never {},
        }
        Ok(self.app.cut_off.load(Ordering::Relaxed))
    }
}

/// Answers connections that arrive while the gateway is shutting down: up to `until` like those that are `open`, which the
/// shutdown waits for. After that, requests on them are refused with an error that tells clients to try again, and the
/// gateway's health can still be read.
async fn late(
    listener: Option<TcpListener>,
    places: &Arc<Semaphore>,
    connections: &Arc<Connections>,
    open: &TaskTracker,
    until: Instant,
) -> Infallible {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    let mut refused = JoinSet::new();
    loop {
        tokio::select! {
            accepted = accept(&listener, places) => {
                let Some((stream, place)) = taken(accepted).await else {
                    continue;
                };
                let is_late = Instant::now() >= until;
                let connection = connections.clone().run(stream, place, is_late);
                if is_late {
                    refused.spawn(connection);
                } else {
                    open.spawn(connection);
                }
            }
            Some(_) = refused.join_next() => {}
        }
    }
}

/// Returns the connection; after an error, logs it, pauses and returns `None`.
async fn taken<T>(accepted: io::Result<T>) -> Option<T> {
    match accepted {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            tracing::warn!(%error, "a connection could not be accepted");
            sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

/// A connection and its permit among those that may be open.
type Accepted = (TcpStream, OwnedSemaphorePermit);

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> io::Result<Accepted> {
    let place = places
        .clone()
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, place))
}

/// Accepts the connections that clients have already opened, which may carry requests. Gives back the listener if the
/// system allows.
fn waiting(listener: TcpListener, places: &Arc<Semaphore>) -> (Vec<Accepted>, Option<TcpListener>) {
    let mut accepted = Vec::new();
    let Ok(listener) = listener.into_std() else {
        return (accepted, None);
    };
    while let Ok(place) = places.clone().try_acquire_owned() {
        let Ok((stream, _)) = listener.accept() else {
            break;
        };
        let stream = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| TcpStream::from_std(stream));
        if let Ok(stream) = stream {
            accepted.push((stream, place));
        }
    }
    (accepted, TcpListener::from_std(listener).ok())
}

fn builder(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // This also ends connections that wait for their next request; our own timers tell the two apart. Without it a
        // connection is not read between two requests, and would not be seen to be idle.
        .header_read_timeout(limits.keep_alive + limits.header_timeout)
        .max_headers(limits.headers)
        .max_buf_size(limits.header_bytes.max(LEAST_HEADER_BYTES));
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(Duration::from_secs(20)))
        .max_send_buf_size(HTTP2_SEND_BYTES)
        .max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX));
    builder
}

/// Shared state of all connections.
struct Connections {
    builder: auto::Builder<TokioExecutor>,
    acceptor: Option<TlsAcceptor>,
    service: Service,
}

impl Connections {
    async fn run(self: Arc<Self>, stream: TcpStream, _place: OwnedSemaphorePermit, is_late: bool) {
        match &self.acceptor {
            None => self.serve(stream, is_late).await,
            Some(acceptor) => match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => self.serve(stream, is_late).await,
                Ok(Err(error)) => tracing::debug!(%error, "TLS handshake"),
                Err(_) => tracing::debug!("TLS handshake timed out"),
            },
        }
    }

    async fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        is_late: bool,
    ) {
        connection::serve(stream, &self.builder, self.service.clone(), is_late).await;
    }
}
