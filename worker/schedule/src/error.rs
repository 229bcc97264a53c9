//! What the scheduler refuses.

use crate::SequenceId;

/// A call that the scheduler refuses; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An option is out of its range.
    #[error("{field} is 0: give at least 1")]
    Option {
        /// The option.
        field: &'static str,
    },
    /// No place in the queue.
    #[error("the queue is full: {waiting} requests wait, the limit is {limit}; try again later")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Upper bound.
        limit: usize,
    },
    /// A request without tokens has no logits.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// Nothing to generate.
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
        /// Blocks that they fill.
        needed_blocks: usize,
        /// Blocks of the cache.
        blocks: usize,
    },
    /// The sequence has ended, was cancelled or never was.
    #[error("sequence {} is not known: it has ended or was cancelled", .0.0)]
    UnknownSequence(SequenceId),
    /// The sequence does not wait for KV.
    #[error("sequence {} does not wait for KV", .0.0)]
    NotImporting(SequenceId),
    /// The sequence is no finished export.
    #[error("sequence {} has no finished prefill to release", .0.0)]
    NotExporting(SequenceId),
    /// An imported prompt without the token behind it, or with one that an earlier worker sampled already.
    #[error(
        "sequence {}: a token behind an imported prompt is due where the answer has none (came: {sampled}, answer: {generated} tokens)",
        .sequence.0
    )]
    ImportedToken {
        /// The sequence.
        sequence: SequenceId,
        /// Whether a token came.
        sampled: bool,
        /// Answer tokens that were there.
        generated: usize,
    },
    /// The result of a step that is not in flight.
    #[error("step {step} is not in flight (the last one is {last})")]
    StaleStep {
        /// The step of the result.
        step: u64,
        /// The last step that was scheduled.
        last: u64,
    },
    /// A span wanted logits, and no token came.
    #[error("step {step} has no token for sequence {}", .sequence.0)]
    MissingToken {
        /// The step.
        step: u64,
        /// The sequence.
        sequence: SequenceId,
    },
    /// A token for a span that wanted none, or a second one.
    #[error("step {step} has a token too many for sequence {}", .sequence.0)]
    UnexpectedToken {
        /// The step.
        step: u64,
        /// The sequence.
        sequence: SequenceId,
    },
    /// The block cache refused; a fault of the scheduler.
    #[error("KV blocks of sequence {}: {reason}", .sequence.0)]
    Blocks {
        /// The sequence.
        sequence: SequenceId,
        /// What the cache said.
        reason: String,
    },
}
