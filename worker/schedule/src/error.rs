//! Errors of the scheduler.

use crate::SequenceId;

/// A call rejected by the scheduler; its state is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An option is out of its range.
    #[error("{field} is 0: give at least 1")]
    Option {
        /// Name of the option.
        field: &'static str,
    },
    /// The queue is full.
    #[error("the queue is full: {waiting} requests wait, the limit is {limit}; try again later")]
    QueueFull {
        /// Requests in the queue.
        waiting: usize,
        /// Largest number of requests in the queue.
        limit: usize,
    },
    /// A request without tokens has no logits.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The request asks for no tokens.
    #[error("max_new_tokens is 0: ask for at least 1")]
    NothingToGenerate,
    /// The request would not fit even alone.
    #[error(
        "{tokens} tokens of prompt and answer need {needed_blocks} KV blocks, and the cache has {blocks}\n  \
         ask for fewer tokens, or give the worker more KV memory"
    )]
    TooLong {
        /// Tokens whose KV is stored.
        tokens: usize,
        /// Blocks needed for them.
        needed_blocks: usize,
        /// Blocks in the cache.
        blocks: usize,
    },
    /// The sequence has ended, was cancelled or never existed.
    #[error("sequence {} is not known: it has ended or was cancelled", .0.0)]
    UnknownSequence(SequenceId),
    /// The sequence is not waiting for KV.
    #[error("sequence {} does not wait for KV", .0.0)]
    NotImporting(SequenceId),
    /// The sequence is not a finished export.
    #[error("sequence {} has no finished prefill to release", .0.0)]
    NotExporting(SequenceId),
    /// An imported prompt without the token that follows it, or with one that an earlier worker already sampled.
    #[error(
        "sequence {}: a token behind an imported prompt is due where the answer has none (came: {sampled}, answer: {generated} tokens)",
        .sequence.0
    )]
    ImportedToken {
        /// The sequence.
        sequence: SequenceId,
        /// Whether a token was given.
        sampled: bool,
        /// Number of answer tokens that already existed.
        generated: usize,
    },
    /// The result of a step that is not the first of those in flight.
    #[error("step {step} is not the first one in flight (the last one is {last})")]
    StaleStep {
        /// The step of the result.
        step: u64,
        /// The last step that was scheduled.
        last: u64,
    },
    /// A span requested logits, but the result has no token for it.
    #[error("step {step} has no token for sequence {}", .sequence.0)]
    MissingToken {
        /// The step.
        step: u64,
        /// The sequence.
        sequence: SequenceId,
    },
    /// A token for a span that requested none, or a second token for one that did.
    #[error("step {step} has a token too many for sequence {}", .sequence.0)]
    UnexpectedToken {
        /// The step.
        step: u64,
        /// The sequence.
        sequence: SequenceId,
    },
    /// The block cache rejected a call; a bug in the scheduler.
    #[error("KV blocks of sequence {}: {reason}", .sequence.0)]
    Blocks {
        /// The sequence.
        sequence: SequenceId,
        /// The cache's error.
        reason: String,
    },
}
