//! Errors of requests, and of the engine itself.

use crate::{grammar::GrammarError, sampler::SamplingError};

/// Reason a request was refused or ended without its answer, or the engine cannot run.
///
/// Cloneable because one failed step ends several requests.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// A prompt needs at least one token: its logits choose the first answer token.
    #[error("the prompt is empty: give at least one token")]
    PromptEmpty,
    /// Prompt, replayed tokens and one more do not fit the context.
    #[error(
        "{tokens} tokens of prompt and answer leave no room in a context of {context_length}: shorten the prompt by {}",
        (tokens + 1).saturating_sub(*context_length)
    )]
    PromptTooLong {
        /// Prompt and replayed tokens.
        tokens: usize,
        /// Maximum tokens of a sequence.
        context_length: usize,
    },
    /// There is nothing to generate.
    #[error("max_tokens is 0: ask for at least 1")]
    MaxTokensZero,
    /// A token that the model does not have.
    #[error("{field}[{index}] is token {token}, and the model has {vocab} (ids 0 to {})", vocab.saturating_sub(1))]
    UnknownToken {
        /// `prompt`, `generated`, `tokens` …
        field: &'static str,
        /// Index in that list.
        index: usize,
        /// The token.
        token: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// A prefill asks for no tokens' KV.
    #[error(
        "first_token is {first_token}, and the request has {tokens} tokens: send at least the last one's KV"
    )]
    NothingToExport {
        /// First token whose KV is wanted.
        first_token: usize,
        /// Tokens of the request.
        tokens: usize,
    },
    /// More alternatives requested than the API allows.
    #[error("top_logprobs is {asked}: at most {limit}")]
    TooManyLogprobs {
        /// Number requested.
        asked: usize,
        /// Upper bound.
        limit: usize,
    },
    /// A sampling parameter is out of its range, or the logits cannot be sampled.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The grammar does not compile, or the tokens contradict it.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The queue is full.
    #[error(
        "the queue is full: {waiting} requests run or wait, the limit is {limit}; try again later"
    )]
    QueueFull {
        /// Requests in the engine.
        waiting: usize,
        /// `max_batch + max_queue`.
        limit: usize,
    },
    /// The engine is draining.
    #[error("the worker is draining and takes no new requests: send it to another worker")]
    Draining,
    /// The engine's thread has ended.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// The reason, as far as known.
        reason: String,
    },
    /// A forward pass failed; every request of its batch ends with this.
    #[error("the forward pass failed: {reason}")]
    Forward {
        /// The model's error.
        reason: String,
    },
    /// KV from another worker does not fit the request.
    #[error("KV of layer {layer} from token {first_token}: {detail}")]
    Import {
        /// Layer of the message.
        layer: usize,
        /// First token of the message.
        first_token: usize,
        /// The mismatch.
        detail: String,
    },
    /// The prefill worker ended before it delivered everything.
    #[error("prefill did not deliver: {detail}")]
    Prefill {
        /// The part that is missing or wrong.
        detail: String,
    },
    /// The scheduler rejected a call from the engine.
    #[error("a fault of the engine: {reason}")]
    Internal {
        /// The scheduler's message.
        reason: String,
    },
    /// Options that contradict each other or the model.
    #[error("{field} is {value}: {remedy}")]
    Options {
        /// Name of the option.
        field: &'static str,
        /// Its value.
        value: String,
        /// The remedy, as shown to the user.
        remedy: String,
    },
}

impl EngineError {
    /// Whether the request itself is at fault: no other worker would answer it either.
    pub fn is_request_fault(&self) -> bool {
        match self {
            Self::PromptEmpty
            | Self::PromptTooLong { .. }
            | Self::MaxTokensZero
            | Self::UnknownToken { .. }
            | Self::NothingToExport { .. }
            | Self::TooManyLogprobs { .. } => true,
            Self::Sampling(e) => e.is_request_fault(),
            Self::Grammar(e) => e.is_request_fault(),
            Self::QueueFull { .. }
            | Self::Draining
            | Self::Stopped { .. }
            | Self::Forward { .. }
            | Self::Import { .. }
            | Self::Prefill { .. }
            | Self::Internal { .. }
            | Self::Options { .. } => false,
        }
    }
}
