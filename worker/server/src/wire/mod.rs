//! The OpenAI wire format: requests are read member by member, so that a parameter is either understood,
//! refused with the reason, or refused as unknown; never silently ignored.
//!
//! Three kinds of parameters ask for nothing that changes the answer and are accepted without effect, because
//! the official clients send them: `user`, `safety_identifier`, `metadata`, `prompt_cache_key` (Hearth's prefix
//! cache finds equal prefixes by itself), `service_tier` as `auto` or `default`, and any parameter of the API
//! whose value is its default (`store: false`, `modalities: ["text"]`, `suffix: null` …).

mod chat;
mod completion;
mod fields;
mod json;
mod message;
mod options;
pub mod response;
mod tool;

pub use chat::{ChatRequest, ResponseFormat};
pub use completion::{CompletionRequest, Prompt};
pub use message::{Message, Role};
pub use options::GenerationOptions;
pub use tool::{Tool, ToolChoice};

use serde_json::Value;

use crate::error::ApiError;
use fields::Fields;
pub(crate) use fields::clip;

/// Maximum number of choices that one request may ask for.
pub const MAX_CHOICES: u32 = 128;
/// Maximum number of stop strings.
pub const MAX_STOPS: usize = 4;
/// Maximum bytes of one stop string: it is searched for after every token.
pub const MAX_STOP_BYTES: usize = 4096;
/// Maximum number of alternatives in a token's logprobs.
pub const MAX_TOP_LOGPROBS: u32 = 20;
/// Maximum number of prompts of one completion request.
pub const MAX_PROMPTS: usize = 128;

/// Reads the body of `POST /v1/chat/completions`.
///
/// Errors: 400 with the position for text that is not UTF-8 or not JSON, else with the parameter at fault.
pub fn parse_chat(body: &[u8]) -> Result<ChatRequest, ApiError> {
    chat::read(Fields::new(parse_json(body)?, "")?)
}

/// Reads the body of `POST /v1/completions`.
///
/// Errors: 400 with the position for text that is not UTF-8 or not JSON, else with the parameter at fault.
pub fn parse_completion(body: &[u8]) -> Result<CompletionRequest, ApiError> {
    completion::read(Fields::new(parse_json(body)?, "")?)
}

fn parse_json(body: &[u8]) -> Result<Value, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        ApiError::invalid(format!(
            "the request body is not UTF-8: byte {at} is 0x{:02x}. Send JSON encoded as UTF-8",
            body.get(at).copied().unwrap_or_default()
        ))
        .with_code("invalid_utf8")
    })?;
    // Some editors and shells put it at the start of a file.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim().is_empty() {
        return Err(
            ApiError::invalid("the request body is empty: send a JSON object")
                .with_code("invalid_json"),
        );
    }
    json::read(text)
}
