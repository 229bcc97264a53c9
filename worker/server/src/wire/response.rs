//! Answers in the form that the official client libraries read.

use serde::Serialize;
use serde_json::{Map, Value};

/// Reason an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model's end token, or a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The model called tools.
    ToolCalls,
}

impl FinishReason {
    /// The word on the wire, and the label in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of all prompts, each counted once however many choices it has.
    pub prompt_tokens: u32,
    /// Tokens generated in all choices, end tokens included.
    pub completion_tokens: u32,
    /// Their sum.
    pub total_tokens: u32,
    /// Details of the prompt's tokens.
    pub prompt_tokens_details: PromptTokensDetails,
}

/// Part of the prompt's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Tokens whose KV cache entries were reused from an earlier request.
    pub cached_tokens: u32,
}

/// `logprobs.content[i]` of a chat choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token's text; bytes that are not UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm; -9999 stands for minus infinity.
    pub logprob: f32,
    /// The token's bytes; `null` for one without text.
    pub bytes: Option<Vec<u8>>,
    /// The most probable tokens at this position.
    pub top_logprobs: Vec<TopLogprob>,
}

/// One alternative.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopLogprob {
    /// The token's text.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Option<Vec<u8>>,
}

/// `logprobs` of a chat choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One for each token of the answer.
    pub content: Vec<TokenLogprob>,
    /// Always null: refusals are not told apart from answers.
    pub refusal: Option<()>,
}

/// `logprobs` of a text completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Their log-probabilities.
    pub token_logprobs: Vec<f32>,
    /// Alternatives by text; `null` if none were requested.
    pub top_logprobs: Option<Vec<Map<String, Value>>>,
    /// Number of characters before each token in the choice's text.
    pub text_offset: Vec<usize>,
}

/// A complete tool call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// Id that ties the result to the call.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Function that is called.
    pub function: FunctionCall,
}

/// Name and arguments.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FunctionCall {
    /// The function's name.
    pub name: String,
    /// JSON text as the model wrote it.
    pub arguments: String,
}

/// A tool call, or the next part of one, in a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCallDelta {
    /// Index of the call in the answer.
    pub index: u32,
    /// Sent in the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Sent in the call's first delta.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// New part of the function's name and arguments.
    pub function: FunctionDelta,
}

/// New part of a call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionDelta {
    /// Sent in the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text to append.
    pub arguments: String,
}

/// The message of a chat choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: &'static str,
    /// `null` if the answer consists of calls alone.
    pub content: Option<String>,
    /// Always null.
    pub refusal: Option<()>,
    /// Absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// One choice of a chat completion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Index from 0.
    pub index: u32,
    /// The answer.
    pub message: AssistantMessage,
    /// Log-probabilities, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Reason the choice ended.
    pub finish_reason: FinishReason,
}

/// The answer of `POST /v1/chat/completions`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatCompletion {
    /// `chatcmpl-…`.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// Served name.
    pub model: String,
    /// Choices in order of their index.
    pub choices: Vec<ChatChoice>,
    /// Token counts.
    pub usage: Usage,
    /// Model, numerics and seed: equal fingerprints and equal requests give equal answers.
    pub system_fingerprint: String,
}

/// New part of a chat choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatDelta {
    /// Sent in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text to append.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Calls to merge by index.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// One choice of a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Index from 0.
    pub index: u32,
    /// New part of the choice.
    pub delta: ChatDelta,
    /// Log-probabilities of the tokens whose text is in this chunk.
    pub logprobs: Option<ChatLogprobs>,
    /// Sent in the choice's last chunk.
    pub finish_reason: Option<FinishReason>,
}

/// One event of a streamed chat completion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk {
    /// The same in all chunks.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// Served name.
    pub model: String,
    /// Fingerprint as in [`ChatCompletion`].
    pub system_fingerprint: String,
    /// One, or none in the chunk that carries the usage.
    pub choices: Vec<ChatChunkChoice>,
    /// Absent unless `include_usage`; then `null` in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// One choice of a text completion, whole or in part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// The text, or its new part.
    pub text: String,
    /// Index from 0: prompt times `n` plus choice.
    pub index: u32,
    /// Log-probabilities, if requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// `null` in all chunks but a choice's last.
    pub finish_reason: Option<FinishReason>,
}

/// The answer of `POST /v1/completions`, or one event of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion {
    /// `cmpl-…`.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// Served name.
    pub model: String,
    /// Choices in order of their index; in a stream one, or none in the chunk that carries the usage.
    pub choices: Vec<CompletionChoice>,
    /// Always present in a whole answer; in a stream as in [`ChatChunk`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Fingerprint as in [`ChatCompletion`].
    pub system_fingerprint: String,
}

/// A served model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Name that requests give.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Unix time in seconds since when it has been served.
    pub created: u64,
    /// `hearth`.
    pub owned_by: &'static str,
    /// Maximum tokens of prompt and answer together.
    pub max_model_len: u32,
}

/// The answer of `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<Model>,
}
