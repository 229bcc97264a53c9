//! Answers, as the official client libraries read them.

use serde::Serialize;
use serde_json::{Map, Value};

/// Why an answer ended.
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

/// A part of the prompt's tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Tokens whose keys and values were reused from an earlier request.
    pub cached_tokens: u32,
}

/// `logprobs.content[i]` of a chat choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token's text; bytes that are no UTF-8 by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm; -9999 stands for minus infinity.
    pub logprob: f32,
    /// The token's bytes; `null` for one that stands for no text.
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
    /// Always null: answers and refusals are not told apart.
    pub refusal: Option<()>,
}

/// `logprobs` of a text completion.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Their log-probabilities.
    pub token_logprobs: Vec<f32>,
    /// Alternatives by text; `null` when none were asked.
    pub top_logprobs: Option<Vec<Map<String, Value>>>,
    /// Characters before each token in the choice's text.
    pub text_offset: Vec<usize>,
}

/// A call of a tool, whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// Ties the result to the call.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What is called.
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

/// A call of a tool, or the next part of one, in a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCallDelta {
    /// Which call of the answer.
    pub index: u32,
    /// Sent in the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Sent in the call's first delta.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// What is new.
    pub function: FunctionDelta,
}

/// What is new of a call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionDelta {
    /// Sent in the call's first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text to be appended.
    pub arguments: String,
}

/// The message of a chat choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: &'static str,
    /// `null` when the answer is calls alone.
    pub content: Option<String>,
    /// Always null.
    pub refusal: Option<()>,
    /// Absent when there are none.
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
    /// When asked.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
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

/// What is new in a chat choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatDelta {
    /// Sent in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text to be appended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Calls to be merged by index.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// One choice of a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Index from 0.
    pub index: u32,
    /// What is new.
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
    /// The text, or what is new of it.
    pub text: String,
    /// Index from 0: prompt times `n` plus choice.
    pub index: u32,
    /// When asked.
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
    /// Always there in a whole answer; in a stream as in [`ChatChunk`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// Fingerprint as in [`ChatCompletion`].
    pub system_fingerprint: String,
}

/// A model that is served.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// The name that requests give.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Unix time in seconds since when it is served.
    pub created: u64,
    /// `hearth`.
    pub owned_by: &'static str,
    /// Tokens that prompt and answer may have together.
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
