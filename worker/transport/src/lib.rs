//! Protobuf and tonic: messages between gateway and workers, and the setup of their connections.
//!
//! - [`v1`]: messages and services, generated from `proto/hearth/v1`.
//! - [`client`]: one persistent connection per worker; [`server`]: the other end; [`tls`]: mutual TLS for both.
//! - [`RpcError`]: distinguishes a worker that is gone from an invalid request, which decides failover.
//! - [`CallContext`]: request id and [`trace_context`], carried as metadata; [`spans`]: what a process adds to a trace;
//!   [`deadline`]: limits on streams.
//! - [`Health`]: answers to probes, also on a separate port.
//! - [`origin`]: the origins of web pages that the endpoint may be opened to.
//! - [`DeviceOffer`]: offers devices to a kubelet.
//! - [`measure_link`]: latency and bandwidth between two processes; [`stream`]: a connection that is not gRPC.
//! - [`kv`]: KV messages of bounded size; [`loopback`]: a worker without a port, for tests.
//!
//! **Invariants**
//! - Nothing here depends on a model or an engine.
//! - Dropping a response stream reaches the other end as a reset of that stream: cancellation needs no message.

#![forbid(unsafe_code)]

mod accept;
pub mod client;
mod context;
pub mod deadline;
pub mod device_plugin;
mod endpoint;
mod error;
mod health;
mod identity;
pub mod kv;
mod link;
mod listen;
pub mod loopback;
pub mod origin;
mod secret;
pub mod server;
pub mod spans;
pub mod stream;
pub mod tls;
pub mod trace_context;

pub use client::{ClientOptions, Clients, Worker};
pub use context::CallContext;
pub use device_plugin::{DeviceOffer, DeviceOfferError};
pub use endpoint::{Endpoint, EndpointError};
pub use error::{RpcError, RpcErrorKind, TransportError};
pub use health::{Health, HealthPort, LIVE};
pub use link::{LinkError, LinkRates, answer_link, measure_link};
pub use listen::listen;
pub use server::{Listener, ServerOptions, serve};
pub use tls::{OPERATOR_NAME, Tls, TlsError, TlsFiles, TlsNames};
pub use tonic;
pub use tonic_health;

/// Messages and services of `hearth.v1`, generated from `proto/hearth/v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("hearth.v1");
}

/// Largest message that either end accepts: a piece of KV is far smaller, but the logits of a prefill may not be.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Largest message that an agent's caller accepts: it asks the agents of all nodes, any of which may be compromised.
pub const MAX_AGENT_MESSAGE_BYTES: usize = 1 << 20;

/// Bytes in flight on one stream until the receiver has read some.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;

/// Bytes in flight on one connection.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
