//! `POST /v1/completions`.

use serde_json::Value;

use super::fields::{Fields, wrong};
use super::options::{self, GenerationOptions};
use super::{MAX_CHOICES, MAX_PROMPTS, MAX_TOP_LOGPROBS};
use crate::error::ApiError;

/// OpenAI's bound on generated tokens for this endpoint if the request names none.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// One prompt, as text or as token ids.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text; the tokenizer puts in front what the model expects there (BOS).
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// A request for text completions.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Name of the served model.
    pub model: String,
    /// One or more prompts; each gets `options.n` choices.
    pub prompts: Vec<Prompt>,
    /// Generation options. `max_tokens` is always set: OpenAI's default here is 16.
    pub options: GenerationOptions,
    /// Number of alternatives in the log-probabilities; `None` if none are requested.
    pub logprobs: Option<u32>,
    /// Whether each answer begins with its prompt.
    pub echo: bool,
}

pub(super) fn read(mut fields: Fields) -> Result<CompletionRequest, ApiError> {
    let mut options = options::read(&mut fields)?;
    options.max_tokens =
        Some(options::read_max_tokens(&mut fields, "max_tokens")?.unwrap_or(DEFAULT_MAX_TOKENS));
    let model = fields.required_string("model")?;
    let prompts = read_prompts(fields.require("prompt")?)?;
    let choices = prompts.len() * options.n as usize;
    if choices > MAX_CHOICES as usize {
        return Err(ApiError::parameter(
            "n",
            format!(
                "{} prompts with 'n' {} make {choices} choices: at most {MAX_CHOICES} are accepted in one request",
                prompts.len(),
                options.n
            ),
        ));
    }
    let logprobs = fields
        .integer("logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?
        .map(|count| count as u32);
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        return Err(ApiError::parameter(
            "echo",
            "'echo' together with 'logprobs' is not supported: the prompt's own log-probabilities are not computed",
        )
        .with_code("unsupported_parameter"));
    }
    fields.refuse(
        "suffix",
        |value| value == "",
        "the models here complete at the end, they do not fill in; leave it out",
    )?;
    let n = i64::from(options.n);
    fields.refuse(
        "best_of",
        |value| value.as_i64() == Some(n),
        "choices are not ranked; ask for them by 'n'",
    )?;
    fields.finish()?;
    Ok(CompletionRequest {
        model,
        prompts,
        options,
        logprobs,
        echo,
    })
}

fn read_prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    const MUST_BE: &str =
        "a string, an array of strings, an array of token ids, or an array of such arrays";
    let items = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(items) => items,
        other => return Err(wrong("prompt", &other, MUST_BE)),
    };
    if items.is_empty() {
        return Err(ApiError::parameter(
            "prompt",
            "'prompt' is an empty array: give at least one prompt",
        ));
    }
    if items[0].is_number() {
        return Ok(vec![Prompt::Tokens(read_tokens(&items, "prompt")?)]);
    }
    if items.len() > MAX_PROMPTS {
        return Err(ApiError::parameter(
            "prompt",
            format!(
                "'prompt' has {} prompts: at most {MAX_PROMPTS} are accepted in one request",
                items.len()
            ),
        ));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(i, item)| {
            let path = format!("prompt[{i}]");
            match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(tokens) => Ok(Prompt::Tokens(read_tokens(&tokens, &path)?)),
                other => Err(wrong(&path, &other, "a string or an array of token ids")),
            }
        })
        .collect()
}

fn read_tokens(items: &[Value], path: &str) -> Result<Vec<u32>, ApiError> {
    items
        .iter()
        .enumerate()
        .map(|(i, item)| {
            item.as_u64()
                .and_then(|token| u32::try_from(token).ok())
                .ok_or_else(|| wrong(&format!("{path}[{i}]"), item, "a token id"))
        })
        .collect()
}
