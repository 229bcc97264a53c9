//! Requests to the scheduler, and the phases of a sequence.

use hearth_kernels::BlockId;
use hearth_kvcache::Provenance;

/// Identifies a sequence within one scheduler; ids increase in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// The work that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Compute the prompt here, then decode.
    Generate,
    /// Import the KV of a prompt that another worker, with this provenance, computes; then decode.
    ImportThenGenerate(Provenance),
    /// Compute only the prompt; the blocks are kept until [`crate::Scheduler::export_done`].
    Export,
}

impl Work {
    /// Provenance of the prompt. The answer is always computed here.
    pub fn prompt(self) -> Provenance {
        match self {
            Self::ImportThenGenerate(provenance) => provenance,
            Self::Generate | Self::Export => Provenance::OWN,
        }
    }
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Answer tokens so far, if the stream moved here from another worker.
    pub generated: Vec<u32>,
    /// Largest number of tokens to sample; ignored for [`Work::Export`].
    pub max_new_tokens: usize,
    /// The work to do.
    pub work: Work,
}

/// Phase of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waiting in the queue; holds no blocks.
    Waiting,
    /// Holds blocks that another actor fills with the prompt's imported KV.
    WaitingKv,
    /// Its tokens (after a preemption: prompt and answer) are being computed in chunks.
    Prefilling,
    /// Yields one token per step.
    Decoding,
    /// Its prompt has been computed; its blocks are kept until they are read.
    Exporting,
}

/// Reason an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The engine marked the token as the last one.
    Stop,
    /// `max_new_tokens` have been sampled.
    Length,
}

/// Destination of imported KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportTarget {
    /// Blocks of the sequence from position 0; they cover `tokens` tokens.
    pub blocks: Vec<BlockId>,
    /// First token whose KV is missing. KV before it is in blocks shared with other sequences: never write there.
    pub first_token: usize,
    /// Tokens in the prompt.
    pub tokens: usize,
}
