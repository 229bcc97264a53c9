//! What can go wrong with a request, and with the engine itself.

use crate::{grammar::GrammarError, sampler::SamplingError};

/// Why a request was refused or ended without its answer, or why the engine cannot run.
///
/// Cloneable, since one failed step ends several requests.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// A prompt needs at least one token: its logits choose the first answer token.
    #[error("the prompt is empty: give at least one token")]
    PromptEmpty,
    /// Prompt, replayed tokens and one more do not fit.
    #[error(
        "{tokens} tokens of prompt and answer leave no room in a context of {context_length}: shorten the prompt by {}",
        (tokens + 1).saturating_sub(*context_length)
    )]
    PromptTooLong {
        /// Prompt and replayed tokens.
        tokens: usize,
        /// Tokens of a whole sequence.
        context_length: usize,
    },
    /// Nothing to generate.
    #[error("max_tokens is 0: ask for at least 1")]
    MaxTokensZero,
    /// A token that the model does not have.
    #[error("{field}[{index}] is token {token}, and the model has {vocab} (ids 0 to {})", vocab.saturating_sub(1))]
    UnknownToken {
        /// `prompt`, `generated`, `tokens` …
        field: &'static str,
        /// Place in that list.
        index: usize,
        /// The token.
        token: u32,
        /// Vocabulary of the model.
        vocab: usize,
    },
    /// A prefill asks for the KV of nothing.
    #[error(
        "first_token is {first_token}, and the request has {tokens} tokens: send at least the last one's KV"
    )]
    NothingToExport {
        /// First token whose KV is wanted.
        first_token: usize,
        /// Tokens of the request.
        tokens: usize,
    },
    /// More alternatives than the API has.
    #[error("top_logprobs is {asked}: at most {limit}")]
    TooManyLogprobs {
        /// Asked for.
        asked: usize,
        /// Upper bound.
        limit: usize,
    },
    /// A sampling parameter is out of its range, or the logits cannot be sampled.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The grammar does not compile, or contradicts the tokens.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// No place in the queue.
    #[error(
        "the queue is full: {waiting} requests run or wait, the limit is {limit}; try again later"
    )]
    QueueFull {
        /// Requests in the engine.
        waiting: usize,
        /// `max_batch + max_queue`.
        limit: usize,
    },
    /// The engine takes no new requests.
    #[error("the worker is draining and takes no new requests: send it to another worker")]
    Draining,
    /// The engine's thread ended.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why, as far as known.
        reason: String,
    },
    /// A forward pass failed; every request of its batch ends with this.
    #[error("the forward pass failed: {reason}")]
    Forward {
        /// The model's own error.
        reason: String,
    },
    /// KV from another worker does not fit the request.
    #[error("KV of layer {layer} from token {first_token}: {detail}")]
    Import {
        /// Layer of the message.
        layer: usize,
        /// First token of the message.
        first_token: usize,
        /// What does not fit.
        detail: String,
    },
    /// The prefill worker ended without all that it owed.
    #[error("prefill did not deliver: {detail}")]
    Prefill {
        /// What is missing or wrong.
        detail: String,
    },
    /// The scheduler refused what the engine asked of it.
    #[error("a fault of the engine: {reason}")]
    Internal {
        /// The scheduler's words.
        reason: String,
    },
    /// Options that contradict each other or the model.
    #[error("{field} is {value}: {remedy}")]
    Options {
        /// Name of the option.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to write instead.
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
