//! The server side.

use std::{future::Future, net::SocketAddr, time::Duration};

use tonic::{
    service::Routes,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    CONNECTION_WINDOW_BYTES, MAX_MESSAGE_BYTES, STREAM_WINDOW_BYTES, Tls, TransportError,
    accept::secured,
    listen::listen,
    v1::{
        agent_server::{Agent, AgentServer},
        control_server::{Control, ControlServer},
        decode_server::{Decode, DecodeServer},
        group_server::{Group, GroupServer},
        prefill_server::{Prefill, PrefillServer},
    },
};

/// Concurrent calls on one connection. A gateway has a single connection to each worker: the usual 200 would
/// silently delay its calls, and 20 callers that disconnect at once would look like an attack.
const MAX_STREAMS: u32 = 8192;

/// Options for a server's connections.
#[derive(Clone)]
pub struct ServerOptions {
    /// Certificates; `None` uses plaintext.
    pub tls: Option<Tls>,
    /// Time between pings on a connection.
    pub keepalive_interval: Duration,
    /// Time after which an unanswered ping closes the connection, and with it the requests of a caller that
    /// is gone.
    pub keepalive_timeout: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            tls: None,
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(20),
        }
    }
}

/// A bound listening socket.
pub struct Listener {
    pub(crate) incoming: TcpIncoming,
    address: SocketAddr,
}

impl Listener {
    /// Binds `address`, such as `127.0.0.1:7001`, or `[::]:7001` for any; port 0 picks a free one. See [`listen`].
    /// Requires a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError::Bind`] if the address is in use, is not ours or does not resolve.
    pub fn bind(address: &str) -> Result<Self, TransportError> {
        let failed = |reason| TransportError::Bind {
            address: address.to_owned(),
            reason,
        };
        let listener = listen(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let incoming = TcpIncoming::from(listener);
        Ok(Self {
            address: incoming.local_addr().map_err(failed)?,
            incoming: incoming.with_nodelay(Some(true)),
        })
    }

    /// The address, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Serves until `shutdown` completes and the calls in flight have ended.
///
/// # Errors
/// [`TransportError::Serve`] if the listener fails.
pub async fn serve(
    listener: Listener,
    routes: Routes,
    options: &ServerOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), TransportError> {
    let Listener { incoming, address } = listener;
    let server = builder(options).add_routes(routes);
    let served = match options.tls.clone() {
        None => {
            server
                .serve_with_incoming_shutdown(incoming, shutdown)
                .await
        }
        Some(tls) => {
            let secured = secured(incoming, tls);
            server.serve_with_incoming_shutdown(secured, shutdown).await
        }
    };
    served.map_err(|e| TransportError::Serve {
        address: address.to_string(),
        reason: crate::client::innermost(&e),
    })
}

pub(crate) fn builder(options: &ServerOptions) -> Server {
    let ServerOptions {
        tls: _,
        keepalive_interval,
        keepalive_timeout,
    } = options;
    Server::builder()
        .tcp_nodelay(true)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_pending_accept_reset_streams(Some(MAX_STREAMS as usize))
        .http2_keepalive_interval(Some(*keepalive_interval))
        .http2_keepalive_timeout(Some(*keepalive_timeout))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
}

/// Wraps the decode service with this crate's message limits.
pub fn decode<T: Decode>(service: T) -> DecodeServer<T> {
    DecodeServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Wraps the prefill service with this crate's message limits.
pub fn prefill<T: Prefill>(service: T) -> PrefillServer<T> {
    PrefillServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Wraps the control service with this crate's message limits.
pub fn control<T: Control>(service: T) -> ControlServer<T> {
    ControlServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Wraps the service of a group's members with this crate's message limits.
pub fn group<T: Group>(service: T) -> GroupServer<T> {
    GroupServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Wraps the agent service with this crate's message limits.
pub fn agent<T: Agent>(service: T) -> AgentServer<T> {
    AgentServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}
