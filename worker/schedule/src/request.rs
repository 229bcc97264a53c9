//! What is asked of the scheduler, and where a sequence stands.

use hearth_kernels::BlockId;
use hearth_kvcache::Provenance;

/// Names a sequence in one scheduler; a smaller one came earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Compute the prompt here, then decode.
    Generate,
    /// Another worker, of this provenance, computes the prompt; its KV is imported, then decode.
    ImportThenGenerate(Provenance),
    /// Compute the prompt only; the blocks stay until [`crate::Scheduler::export_done`].
    Export,
}

impl Work {
    /// What computes the prompt. What is generated is always computed here.
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
    /// The answer tokens so far, where a stream moved here.
    pub generated: Vec<u32>,
    /// Upper bound of tokens to sample; of no effect for [`Work::Export`].
    pub max_new_tokens: usize,
    /// What to do.
    pub work: Work,
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waits in the queue; holds no block.
    Waiting,
    /// Holds blocks that another actor fills with imported KV of the prompt.
    WaitingKv,
    /// Its tokens (after a preemption: prompt and answer) are being computed in chunks.
    Prefilling,
    /// Yields a token each step.
    Decoding,
    /// Its prompt is computed; its blocks are kept for the reader.
    Exporting,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The engine called the token the last.
    Stop,
    /// `max_new_tokens` are there.
    Length,
}

/// Where imported KV goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportTarget {
    /// Blocks of the sequence from position 0; cover `tokens` tokens.
    pub blocks: Vec<BlockId>,
    /// First token whose KV is missing. KV before it lies in blocks that others share: never write there.
    pub first_token: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
}
