//! What goes into the engine and what comes out.

use std::sync::Arc;

use bytes::Bytes;
use hearth_kernels::KvDType;

use crate::{EngineError, grammar::GrammarTokenizer, sampler::SamplingParams};

/// How much KV the engine holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// Blocks of `block_tokens` tokens.
    Blocks(usize),
    /// Bytes over all layers; rounded down to whole blocks.
    Bytes(u64),
}

/// Limits of an engine; all are fixed at its start.
#[derive(Clone)]
pub struct EngineOptions {
    /// Memory for keys and values.
    pub kv: KvBudget,
    /// Tokens of one KV block, a power of two.
    pub block_tokens: usize,
    /// Element type of keys and values.
    pub kv_dtype: KvDType,
    /// Sequences that run at the same time.
    pub max_batch: usize,
    /// Rows of one forward pass: decode rows first, then chunks of prompts.
    pub chunk_tokens: usize,
    /// Tokens of prompt and answer together.
    pub context_length: usize,
    /// Requests that may wait beside the `max_batch` that run.
    pub max_queue: usize,
    /// What its bits depend on beside the weights: KV of other numerics is kept apart from its own.
    pub numerics: String,
    /// Needed for grammars; `None`: a request with a grammar is refused.
    pub grammar_tokenizer: Option<Arc<GrammarTokenizer>>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            kv: KvBudget::Blocks(1024),
            block_tokens: 16,
            kv_dtype: KvDType::Bf16,
            max_batch: 16,
            chunk_tokens: 256,
            context_length: 4096,
            max_queue: 1024,
            numerics: String::new(),
            grammar_tokenizer: None,
        }
    }
}

/// Names a request within one engine, for [`crate::Engine::import_kv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a JSON schema (as text) accepts.
    JsonSchema(String),
    /// A grammar in llguidance's dialect of Lark.
    Lark(String),
}

/// Who computes the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PrefillLocation {
    /// This engine, in chunks between decode rows.
    #[default]
    Local,
    /// Another worker: the engine reserves blocks, asks by [`GenerateEvent::NeedsKv`] and waits for
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
    /// Answer tokens that an earlier worker delivered: computed again, not sent again.
    pub generated: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Upper bound of answer tokens, `generated` included.
    pub max_tokens: usize,
    /// A token of these is reported and ends the answer with [`FinishReason::Stop`].
    pub stop_tokens: Vec<u32>,
    /// Constraint on the answer.
    pub grammar: Option<Grammar>,
    /// Report log-probabilities, with so many alternatives a token (0: only the chosen token's).
    pub logprobs: Option<u32>,
    /// Who computes the prompt.
    pub prefill: PrefillLocation,
}

/// An alternative to the chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopLogprob {
    /// Token.
    pub id: u32,
    /// Natural logarithm of its probability before temperature and filters.
    pub logprob: f32,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token, or the grammar's end.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
}

/// What a request for an answer yields, in this order: `Started`, `NeedsKv` where the prompt is computed
/// elsewhere, `Token`s, then `Finished` or `Failed`, and nothing behind that. `NeedsKv` comes again between tokens
/// when a prompt of other numerics has lost its blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerateEvent {
    /// The request left the queue.
    Started {
        /// Tokens whose KV was at hand.
        cached_tokens: usize,
    },
    /// Blocks are reserved: compute the prompt elsewhere and import its KV from `first_token` on.
    NeedsKv {
        /// First token whose KV is missing.
        first_token: usize,
    },
    /// One answer token.
    Token {
        /// The token.
        id: u32,
        /// Its index among the answer's tokens; the first one after a replay is `generated.len()`.
        index: usize,
        /// Natural logarithm of its probability before temperature and filters, when asked for.
        logprob: Option<f32>,
        /// The likeliest tokens, most likely first.
        top: Vec<TopLogprob>,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
    },
    /// The answer ends here without being complete.
    Failed(EngineError),
}

/// A request for the KV of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PrefillInput {
    /// Identifier for logs.
    pub request_id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// KV before this token is at hand with the caller.
    pub first_token: usize,
}

/// What a prefill yields: `Kv` for each layer of each chunk, then `Done` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillEvent {
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
    /// All KV was sent.
    Done {
        /// `[vocab]`, logits of the last token.
        logits: Vec<f32>,
        /// Tokens whose KV was at hand here.
        cached_tokens: usize,
    },
    /// The prefill ends here.
    Failed(EngineError),
}

/// Counters and gauges; counters grow from the engine's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences that hold KV.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Blocks of KV.
    pub kv_blocks_total: usize,
    /// Blocks that running sequences hold.
    pub kv_blocks_used: usize,
    /// Prompt tokens whose KV was reused.
    pub prefix_hit_tokens: u64,
    /// Prompt tokens looked up.
    pub prefix_query_tokens: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Answer tokens sampled.
    pub generated_tokens: u64,
    /// Bytes of weights read by forward passes.
    pub weight_bytes_read: u64,
    /// Bytes of KV imported and exported.
    pub kv_bytes_moved: u64,
    /// Forward passes.
    pub steps: u64,
    /// Seconds spent in forward passes.
    pub step_seconds: f64,
    /// Sequences that gave up their KV and were computed again.
    pub preemptions: u64,
    /// Bytes of weights held ready by the residency policy.
    pub resident_bytes: u64,
    /// No new requests are taken.
    pub draining: bool,
}

/// Whether the engine can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Requests are served.
    Healthy,
    /// Forward passes fail one after another, or the engine has stopped.
    Unhealthy(String),
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that ended by themselves.
    pub ended: usize,
    /// Requests cancelled when the grace period was over.
    pub cut_off: usize,
}
