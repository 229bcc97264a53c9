//! The step loop: schedule, modules, sampler.
//!
//! An [`Engine`] owns one model and its KV cache. Requests come in by [`Engine::generate`] and
//! [`Engine::prefill`], answers go out by callbacks; one thread runs all forward passes.
//!
//! **Invariants**
//! - A token is a function of (seed, index, logits, the request's own tokens). Together with batch-invariant
//!   kernels that makes an answer the same whatever shares its batch, whether its KV was computed here, reused
//!   or imported, and wherever it was taken up again.
//! - Every request that was accepted ends with exactly one `Finished`, `Done` or `Failed`, unless the caller
//!   let go of it.
//! - No async runtime and no network: what a caller does with events is the caller's business.

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
