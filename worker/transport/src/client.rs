//! The client side: one persistent connection per worker.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::{
    Status,
    transport::{Channel, Endpoint as TonicEndpoint, Uri},
};
use tonic_health::pb::health_client::HealthClient;

use crate::{
    CONNECTION_WINDOW_BYTES, Endpoint, MAX_AGENT_MESSAGE_BYTES, MAX_MESSAGE_BYTES, RpcError,
    STREAM_WINDOW_BYTES, Tls, TransportError,
    v1::{
        agent_client::AgentClient, control_client::ControlClient, decode_client::DecodeClient,
        group_client::GroupClient, prefill_client::PrefillClient,
    },
};

/// Options for a client's connections.
#[derive(Clone)]
pub struct ClientOptions {
    /// Certificates; `None` uses plaintext.
    pub tls: Option<Tls>,
    /// Time limit for connecting.
    pub connect_timeout: Duration,
    /// Time between pings, including on connections without calls.
    pub keepalive_interval: Duration,
    /// Time after which an unanswered ping closes the connection and its calls.
    pub keepalive_timeout: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            tls: None,
            connect_timeout: Duration::from_secs(3),
            keepalive_interval: Duration::from_secs(5),
            keepalive_timeout: Duration::from_secs(15),
        }
    }
}

/// Connections to workers; clones share them. Requires a tokio runtime.
#[derive(Clone, Default)]
pub struct Clients {
    options: ClientOptions,
    kept: Arc<Mutex<HashMap<Endpoint, Worker>>>,
}

impl Clients {
    /// Creates a client without any connections.
    pub fn new(options: ClientOptions) -> Self {
        Self {
            options,
            kept: Arc::default(),
        }
    }

    /// Returns the worker at `endpoint`. The first call dials it, and so does the first call after its connection
    /// broke: a call to a worker that is down fails with [`crate::RpcErrorKind::Gone`].
    ///
    /// # Errors
    /// [`TransportError::Configuration`] if tonic rejects the address or the certificates.
    pub fn worker(&self, endpoint: &Endpoint) -> Result<Worker, TransportError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(worker) = kept.get(endpoint) {
            return Ok(worker.clone());
        }
        let worker = Worker::over(endpoint.clone(), dial(endpoint, &self.options)?);
        kept.insert(endpoint.clone(), worker.clone());
        Ok(worker)
    }

    /// Keeps a worker that was connected by other means, such as [`crate::loopback`].
    pub fn keep(&self, worker: Worker) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(worker.endpoint.clone(), worker);
    }

    /// Drops the connection to a worker that left; calls in flight continue.
    pub fn forget(&self, endpoint: &Endpoint) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.remove(endpoint);
    }
}

/// A connection to one worker; cheap to clone.
#[derive(Clone, Debug)]
pub struct Worker {
    endpoint: Endpoint,
    channel: Channel,
}

impl Worker {
    /// Creates a worker over an existing channel.
    pub fn over(endpoint: Endpoint, channel: Channel) -> Self {
        Self { endpoint, channel }
    }

    /// Its address.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Classifies a failed call to this worker.
    pub fn error(&self, status: &Status) -> RpcError {
        RpcError::new(&self.endpoint, status)
    }

    /// Its decode service.
    pub fn decode(&self) -> DecodeClient<Channel> {
        DecodeClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Its prefill service.
    pub fn prefill(&self) -> PrefillClient<Channel> {
        PrefillClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Its control service.
    pub fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Its service as a member of a group.
    pub fn group(&self) -> GroupClient<Channel> {
        GroupClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Its agent service.
    pub fn agent(&self) -> AgentClient<Channel> {
        AgentClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_AGENT_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_AGENT_MESSAGE_BYTES)
    }

    /// Its health service (`grpc.health.v1`).
    pub fn health(&self) -> HealthClient<Channel> {
        HealthClient::new(self.channel.clone())
    }
}

fn dial(endpoint: &Endpoint, options: &ClientOptions) -> Result<Channel, TransportError> {
    let ClientOptions {
        tls,
        connect_timeout,
        keepalive_interval,
        keepalive_timeout,
    } = options;
    let refused = |e: tonic::transport::Error| TransportError::Configuration {
        endpoint: endpoint.to_string(),
        reason: innermost(&e),
    };
    let uri = |scheme| format!("{scheme}://{endpoint}");
    // The connector does TLS, unknown to tonic, which would reject an https address.
    let tonic = TonicEndpoint::from_shared(uri("http"))
        .map_err(refused)?
        .tcp_nodelay(true)
        .connect_timeout(*connect_timeout)
        .http2_keep_alive_interval(*keepalive_interval)
        .keep_alive_timeout(*keepalive_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let Some(tls) = tls else {
        return Ok(tonic.connect_lazy());
    };
    let origin = TonicEndpoint::from_shared(uri("https")).map_err(refused)?;
    let (endpoint, tls) = (endpoint.clone(), tls.clone());
    let connector = tower::service_fn(move |_: Uri| {
        let (endpoint, tls) = (endpoint.clone(), tls.clone());
        async move { Ok::<_, io::Error>(TokioIo::new(secured(&endpoint, &tls).await?)) }
    });
    Ok(tonic
        .origin(origin.uri().clone())
        .connect_with_connector_lazy(connector))
}

/// Opens a new connection with the current certificates.
pub(crate) async fn secured(endpoint: &Endpoint, tls: &Tls) -> io::Result<TlsStream<TcpStream>> {
    let name = tls.server_name(endpoint.host())?;
    let stream = TcpStream::connect((endpoint.host(), endpoint.port())).await?;
    stream.set_nodelay(true)?;
    tls.connector().connect(name, stream).await
}

/// Returns the last message in an error's chain: tonic's own says only "transport error".
pub(crate) fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
