//! Pure scheduling: choice of the rows of the next forward pass.
//!
//! [`Scheduler::schedule`] decides a [`Step`], the engine runs it, and [`Scheduler::update`] takes the
//! result. There is no device handle, no clock and no random number here: the same calls give the same steps.
//!
//! **Policy**
//! - Each step decodes every sequence that can decode (at most `max_batch`), and in addition computes at most
//!   `chunk_tokens` prompt tokens, first come, first served. Neither waits for the other.
//! - Requests are admitted in order of arrival, once there is a place in the batch and there are blocks for all
//!   their tokens. No request overtakes the first in the queue.
//! - When decoding needs a block and none is left, the youngest sequence gives up its blocks, and its prompt and
//!   answer are recomputed later; numerics are batch-invariant, so the output is the same. A prompt that another
//!   device computed is imported from there again. The oldest is never preempted, so progress is guaranteed.
//!
//! **Invariant**: a token that was sampled is never sampled again, whatever is preempted, imported or repeated.

#![forbid(unsafe_code)]

mod error;
mod request;
mod scheduler;
mod step;

pub use error::ScheduleError;
pub use hearth_kvcache::Provenance;
pub use request::{FinishReason, ImportTarget, Phase, Request, SequenceId, Work};
pub use scheduler::{Scheduler, SchedulerOptions, SchedulerStats};
pub use step::{Admission, Finished, Sampled, SpanKind, Step, StepResult, StepSpan, Update};
