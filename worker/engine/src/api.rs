//! The engine's inputs and outputs.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hearth_kernels::KvDType;
use hearth_kernels::ops::DeviceMemory;
use hearth_kernels::trace::Trace;
use hearth_model::{SentKv, StreamedStats};

use crate::{EngineError, grammar::GrammarTokenizer, sampler::SamplingParams};

/// Size of the engine's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// Blocks of `block_tokens` tokens.
    Blocks(usize),
    /// Bytes across all layers, rounded down to whole blocks.
    Bytes(u64),
}

/// Limits of an engine; all are fixed at its start.
#[derive(Clone)]
pub struct EngineOptions {
    /// Memory for keys and values.
    pub kv: KvBudget,
    /// Tokens per KV block, a power of two.
    pub block_tokens: usize,
    /// Element type of keys and values.
    pub kv_dtype: KvDType,
    /// Sequences that run at the same time.
    pub max_batch: usize,
    /// Maximum rows per forward pass: decode rows first, then prompt chunks.
    pub chunk_tokens: usize,
    /// The same for a pass that no answer waits for, if that is more.
    pub idle_chunk_tokens: Option<usize>,
    /// Whether a prompt is computed in one pass, whatever its length, and a pass goes on as long as anybody wants it: where
    /// weights come over a link in every pass, a second one costs their way again. Needs `chunk_tokens` of a whole
    /// context.
    pub whole_prompts: bool,
    /// Maximum tokens of prompt and answer together.
    pub context_length: usize,
    /// Requests that may wait in addition to the `max_batch` that run.
    pub max_queue: usize,
    /// Steps that may be in flight at once on a device that queues them, at least 1. With 2, the next step of answers is
    /// launched before the last token of each has reached the host.
    pub steps_in_flight: usize,
    /// Time for which requests wait for a lost member of the group that runs the model; then they are told, since another worker may
    /// answer them.
    pub group_patience: Duration,
    /// Everything but the weights that the engine's results depend on, down to the bit;
    /// KV with other numerics is kept apart from its own.
    pub numerics: String,
    /// Needed for grammars; if `None`, a request with a grammar is refused.
    pub grammar_tokenizer: Option<Arc<GrammarTokenizer>>,
    /// Receives the steps, each from its start, or the end of the one before, to its landing.
    pub trace: Option<Arc<Trace>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            kv: KvBudget::Blocks(1024),
            block_tokens: 16,
            kv_dtype: KvDType::Bf16,
            max_batch: 16,
            chunk_tokens: 256,
            idle_chunk_tokens: None,
            whole_prompts: false,
            context_length: 4096,
            max_queue: 1024,
            steps_in_flight: 2,
            group_patience: Duration::from_secs(120),
            numerics: String::new(),
            grammar_tokenizer: None,
            trace: None,
        }
    }
}

/// Identifies a request within one engine, for [`crate::Engine::import_kv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Constraint on an answer's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a JSON schema (as text) accepts.
    JsonSchema(String),
    /// A grammar in llguidance's Lark dialect.
    Lark(String),
}

/// The worker that computes the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PrefillLocation {
    /// This engine, in chunks between decode rows.
    #[default]
    Local,
    /// Another worker: the engine reserves blocks, emits [`GenerateEvent::NeedsKv`] and waits for
    /// [`crate::Engine::import_kv`] and [`crate::Engine::import_done`].
    Remote {
        /// That worker's numerics.
        numerics: String,
    },
}

/// A request for an answer.
#[derive(Clone, Debug, Default)]
pub struct GenerateInput {
    /// Identifier for logs.
    pub request_id: String,
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Answer tokens that an earlier worker has delivered; they are recomputed but not sent again.
    pub generated: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Maximum number of answer tokens, including `generated`.
    pub max_tokens: usize,
    /// Any of these tokens is reported and ends the answer with [`FinishReason::Stop`].
    pub stop_tokens: Vec<u32>,
    /// Constraint on the answer.
    pub grammar: Option<Grammar>,
    /// Report log-probabilities, with this many alternatives per token (0: only the chosen token's).
    pub logprobs: Option<u32>,
    /// The worker that computes the prompt.
    pub prefill: PrefillLocation,
}

/// An alternative to the chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopLogprob {
    /// Token.
    pub id: u32,
    /// Natural logarithm of its probability, before temperature and filters.
    pub logprob: f32,
}

/// Reason an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, or the end of the grammar.
    Stop,
    /// `max_tokens` was reached, or the context is full.
    Length,
}

/// Events of a request for an answer, in this order: `Started`, `NeedsKv` if the prompt is computed
/// elsewhere, `Token`s, then `Finished` or `Failed`, and nothing after that. `NeedsKv` is repeated between tokens
/// when a prompt with other numerics has lost its blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerateEvent {
    /// The request left the queue.
    Started {
        /// Tokens whose KV was already cached.
        cached_tokens: usize,
    },
    /// Blocks are reserved: compute the prompt elsewhere and import its KV starting at `first_token`.
    NeedsKv {
        /// First token whose KV is missing.
        first_token: usize,
    },
    /// One answer token.
    Token {
        /// The token.
        id: u32,
        /// Its index in the answer; after a replay, the first one is `generated.len()`.
        index: usize,
        /// Natural logarithm of its probability before temperature and filters, if requested.
        logprob: Option<f32>,
        /// The most likely tokens, in descending order.
        top: Vec<TopLogprob>,
    },
    /// The answer is complete.
    Finished {
        /// Reason the answer ended.
        reason: FinishReason,
    },
    /// The answer ends here, incomplete.
    Failed(EngineError),
}

/// A request for the KV of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PrefillInput {
    /// Identifier for logs.
    pub request_id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The caller already has the KV before this token.
    pub first_token: usize,
    /// Whether a rank that has peers reads it without them, if it can.
    pub alone: bool,
}

/// Events of a prefill: `Started`, `Kv` for each layer of each chunk, then `Done` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
    /// The request left the queue.
    Started {
        /// Tokens whose KV was already cached here.
        cached_tokens: usize,
    },
    /// KV of a run of tokens in one layer, sent as soon as that layer is computed.
    Kv {
        /// Layer.
        layer: usize,
        /// Absolute position of the first token.
        first_token: usize,
        /// Number of tokens.
        tokens: usize,
        /// `tokens * KvLayout::token_layer_bytes()` bytes.
        data: Bytes,
    },
    /// All KV has been sent.
    Done {
        /// Logits of the last token, `[vocab]`.
        logits: Vec<f32>,
        /// Tokens whose KV was already cached here.
        cached_tokens: usize,
    },
    /// The prefill ends here.
    Failed(EngineError),
}

/// Counters and gauges; counters start at 0 when the engine starts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences that hold KV.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// KV blocks in total.
    pub kv_blocks_total: usize,
    /// KV blocks held by running sequences.
    pub kv_blocks_used: usize,
    /// Prompt tokens whose KV was reused.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were looked up.
    pub prefix_query_tokens: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Answer tokens sampled.
    pub generated_tokens: u64,
    /// Bytes of weights read by forward passes.
    pub weight_bytes_read: u64,
    /// Bytes of KV, imported and exported.
    pub kv_bytes_moved: u64,
    /// What was sent to other ranks of a group of keys and values.
    pub sent_kv: SentKv,
    /// Forward passes.
    pub steps: u64,
    /// Seconds spent in forward passes.
    pub step_seconds: f64,
    /// Times that a sequence gave up its KV to be recomputed later.
    pub preemptions: u64,
    /// Bytes of weights that the residency policy holds ready.
    pub resident_bytes: u64,
    /// What passes did whose experts came over a link.
    pub streamed: StreamedStats,
    /// Memory of a device that has its own; zeros for the host's.
    pub device: DeviceMemory,
    /// Whether new requests are refused.
    pub draining: bool,
}

/// Whether the engine can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Requests are served.
    Healthy,
    /// Forward passes fail repeatedly, or the engine has stopped.
    Unhealthy(String),
    /// The group of ranks that run the model has lost one, for this reason: requests wait until it is complete again.
    Apart(String),
    /// The device is lost, for this reason: no pass will succeed again.
    DeviceLost(String),
}

/// Outcome of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that ended on their own.
    pub ended: usize,
    /// Requests that failed at the end of the grace period, or of the patience with their group.
    pub cut_off: usize,
}
