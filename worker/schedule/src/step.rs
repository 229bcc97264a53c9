//! A step and its result.

use hearth_kernels::BlockId;

use crate::{FinishReason, ImportTarget, SequenceId};

/// Kind of computation of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// One row: the last sampled token.
    Decode,
    /// A chunk of a prompt, or of a replay.
    Prefill,
    /// One row: the token that the step before this one, still in flight, gives to the sequence.
    Ahead,
}

/// Rows of one sequence in a forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSpan {
    /// The sequence.
    pub sequence: SequenceId,
    /// The computation.
    pub kind: SpanKind,
    /// Tokens of the rows, at least one; none if the kind is [`SpanKind::Ahead`].
    pub tokens: Vec<u32>,
    /// Absolute position of the first row.
    pub start: usize,
    /// Blocks from position 0; they cover `start + rows()` tokens.
    pub blocks: Vec<BlockId>,
    /// Whether the last row's logits are needed. Except for exports, the result must have a token for them.
    pub wants_logits: bool,
}

impl StepSpan {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self.kind {
            SpanKind::Ahead => 1,
            SpanKind::Decode | SpanKind::Prefill => self.tokens.len(),
        }
    }
}

/// A sequence that left the queue in this step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its tokens, prompt and answer.
    pub tokens: usize,
    /// Tokens whose KV was found. Later steps may find more; see [`StepSpan::start`].
    pub cached_tokens: usize,
    /// Destination of the prompt's KV if it is computed elsewhere; also after a preemption if its bits differ from
    /// ours.
    pub import: Option<ImportTarget>,
    /// Whether it ran before and was preempted.
    pub again: bool,
}

/// The engine's next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Number of the step, counted from 1.
    pub number: u64,
    /// Decode rows by age, then chunks by age.
    pub spans: Vec<StepSpan>,
    /// Sequences that left the queue.
    pub admitted: Vec<Admission>,
    /// Sequences that gave up their blocks and are queued again.
    pub preempted: Vec<SequenceId>,
}

impl Step {
    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Rows of the forward pass.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(StepSpan::rows).sum()
    }
}

/// A token that the engine sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The sequence.
    pub sequence: SequenceId,
    /// The token.
    pub token: u32,
    /// Whether it ends the answer (stop token, stop string, end of grammar).
    pub last: bool,
}

/// Result of a computed step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepResult {
    /// [`Step::number`].
    pub step: u64,
    /// One token for each span that wanted logits, except exports. Tokens of sequences that were cancelled in the
    /// meantime are ignored.
    pub sampled: Vec<Sampled>,
}

/// A sequence that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The sequence; its blocks are released.
    pub sequence: SequenceId,
    /// Reason for the end.
    pub reason: FinishReason,
}

/// Changes made by an update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Sequences that ended.
    pub finished: Vec<Finished>,
    /// Exports whose KV is complete; they hold their blocks until [`crate::Scheduler::export_done`].
    pub exported: Vec<SequenceId>,
}
