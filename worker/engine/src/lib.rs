//! The step loop: schedule, modules, sampler.
//!
//! An [`Engine`] owns one model and its KV cache. Requests arrive through [`Engine::generate`] and
//! [`Engine::prefill`], answers leave through callbacks; one thread runs all forward passes.
//!
//! **Invariants**
//! - A token is a function of (seed, index, logits, the request's own tokens). Together with batch-invariant
//!   kernels, this makes an answer the same whatever else is in its batch, whether its KV was computed here, reused
//!   or imported, and wherever it was resumed.
//! - Every accepted request ends with exactly one `Finished`, `Done` or `Failed`, unless the caller
//!   dropped it.
//! - No async runtime and no network: callers decide what to do with events.

#![forbid(unsafe_code)]

mod api;
mod engine;
mod error;
mod export;
mod forward;
pub mod grammar;
mod import;
mod progress;
mod request;
pub mod sampler;
mod shared;
mod step;
mod unread;
mod watch;
mod work;

pub use api::{
    DrainReport, EngineOptions, EngineStats, FinishReason, GenerateEvent, GenerateInput, Grammar,
    Health, KvBudget, PrefillEvent, PrefillInput, PrefillLocation, RequestId, TopLogprob,
};
pub use engine::{Engine, RequestHandle};
pub use error::EngineError;
pub use grammar::{GrammarError, GrammarTokenizer};
pub use sampler::{SamplingError, SamplingParams};

#[cfg(test)]
mod tests;
