//! The gateway: the OpenAI API over HTTP, in front of prefill and decode workers.
//!
//! A request passes [`wire`] (every parameter is understood or refused by name), the model's chat template and
//! tokenizer, and becomes jobs on workers that [`router`] chooses; [`failover`] keeps each stream whole when a worker
//! dies; tokens become text, stop strings end it, and [`tools`] separates calls from content.
//!
//! **Invariants**
//! - The gateway holds no weights and computes no logits. All it keeps of a stream is its tokens, which is what
//!   another worker needs to continue it.
//! - No accepted request is lost: it ends in a complete answer or in an error that says why.
//! - Only work occupies a worker's slot: output that a client has not taken waits here, within a budget.
//! - No parameter is silently ignored.
//! - A client that disconnects takes its work with it: dropping a response drops the workers' streams.
//!
//! Decisions that clients see: `<think>` blocks stay in `content`, as the model wrote them. `max_tokens` is an upper
//! bound, so one beyond the context ends with `finish_reason: "length"`, while a prompt that leaves no room is
//! a 400. `completion_tokens` counts every generated token, the end token included. A request without `seed` gets
//! one, shown in `system_fingerprint`, so that any answer can be repeated.

#![forbid(unsafe_code)]

mod api;
mod app;
mod backlog;
mod choice;
mod config;
mod connection;
mod cors;
mod demand;
mod error;
pub mod failover;
mod gateway;
mod generation;
mod https;
mod keys;
mod metrics;
mod model;
pub mod router;
mod schema;
mod stop;
pub mod tools;
pub mod wire;

pub use config::{GatewayConfig, GatewayError, HttpsFiles, Limits, Predicted, Routing};
pub use cors::CorsOrigin;
pub use error::{ApiError, ErrorType};
pub use gateway::{Gateway, serve};
pub use hearth_transport::{Endpoint, Tls, TlsFiles};
pub use stop::{Released, StopMatcher};
