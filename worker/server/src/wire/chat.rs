//! `POST /v1/chat/completions`.

use serde_json::{Map, Value};

use super::MAX_TOP_LOGPROBS;
use super::fields::{Fields, clip, wrong};
use super::message::{self, Message};
use super::options::{self, GenerationOptions};
use super::tool::{self, Tool, ToolChoice};
use crate::error::ApiError;

/// Form that the answer must have.
#[derive(Clone, Debug, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON that follows this schema.
    JsonSchema(Value),
}

/// A request for the next message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Name of the served model.
    pub model: String,
    /// The conversation so far; at least one message.
    pub messages: Vec<Message>,
    /// Generation options.
    pub options: GenerationOptions,
    /// Number of alternatives in the log-probabilities; `None` if none are requested.
    pub logprobs: Option<u32>,
    /// Form of the answer.
    pub response_format: ResponseFormat,
    /// Functions that may be called.
    pub tools: Vec<Tool>,
    /// Whether a tool is called.
    pub tool_choice: ToolChoice,
    /// Whether one answer may have more than one call.
    pub parallel_tool_calls: bool,
    /// Members that the chat template sees besides the messages (`chat_template_kwargs`).
    pub template_arguments: Map<String, Value>,
}

pub(super) fn read(mut fields: Fields) -> Result<ChatRequest, ApiError> {
    let mut options = options::read(&mut fields)?;
    options.max_tokens = read_bound(&mut fields)?;
    let model = fields.required_string("model")?;
    let messages = message::read(&mut fields)?;
    let logprobs = read_logprobs(&mut fields)?;
    let response_format = read_format(&mut fields)?;
    let (tools, tool_choice) = tool::read(&mut fields)?;
    let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let template_arguments = match fields.take("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(map)) => check_template_arguments(map)?,
        Some(other) => return Err(wrong("chat_template_kwargs", &other, "an object")),
    };
    refuse_unsupported(&mut fields)?;
    fields.finish()?;
    Ok(ChatRequest {
        model,
        messages,
        options,
        logprobs,
        response_format,
        tools,
        tool_choice,
        parallel_tool_calls,
        template_arguments,
    })
}

/// Reads `max_completion_tokens`, or its older name.
fn read_bound(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let new = options::read_max_tokens(fields, "max_completion_tokens")?;
    let old = options::read_max_tokens(fields, "max_tokens")?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(ApiError::parameter(
            "max_tokens",
            format!(
                "'max_tokens' is {old} and 'max_completion_tokens' is {new}: give one of them, they mean the same"
            ),
        )),
        _ => Ok(new.or(old)),
    }
}

fn read_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?;
    match (wanted, top) {
        (false, Some(top)) if top > 0 => Err(ApiError::parameter(
            "top_logprobs",
            format!("'top_logprobs' is {top}, which needs 'logprobs': true"),
        )),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
    }
}

fn read_format(fields: &mut Fields) -> Result<ResponseFormat, ApiError> {
    let Some(mut format) = fields.object("response_format")? else {
        return Ok(ResponseFormat::Text);
    };
    let kind = format.required_string("type")?;
    let read = match kind.as_str() {
        "text" => ResponseFormat::Text,
        "json_object" => ResponseFormat::JsonObject,
        "json_schema" => {
            let path = "response_format.json_schema";
            let mut schema = Fields::new(format.require("json_schema")?, path)?;
            let name = schema.required_string("name")?;
            tool::check_name(&name, "response_format.json_schema.name")?;
            schema.string("description")?;
            // Every schema is enforced; `strict: false` asks for less than that and gets more.
            schema.boolean("strict")?;
            let value = match schema.take("schema") {
                None => Value::Object(Map::new()),
                Some(value @ (Value::Object(_) | Value::Bool(true))) => value,
                Some(other) => {
                    return Err(wrong(
                        "response_format.json_schema.schema",
                        &other,
                        "a JSON schema (an object)",
                    ));
                }
            };
            schema.finish()?;
            ResponseFormat::JsonSchema(value)
        }
        other => {
            return Err(ApiError::parameter(
                "response_format.type",
                format!(
                    "'response_format.type' is '{}': it must be text, json_object or json_schema",
                    clip(other, 40)
                ),
            ));
        }
    };
    format.finish()?;
    Ok(read)
}

/// Refuses members that would replace what the request itself decides.
fn check_template_arguments(map: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    for name in ["messages", "tools", "add_generation_prompt"] {
        if map.contains_key(name) {
            let path = format!("chat_template_kwargs.{name}");
            return Err(ApiError::parameter(
                path.clone(),
                format!("'{path}' cannot be set: the request itself decides it"),
            ));
        }
    }
    Ok(map)
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    let text_only = |value: &Value| {
        value
            .as_array()
            .is_some_and(|all| all.len() == 1 && all[0] == "text")
    };
    let never = |_: &Value| false;
    fields.refuse(
        "modalities",
        text_only,
        "answers are text; send [\"text\"] or leave it out",
    )?;
    fields.refuse("audio", never, "answers are text")?;
    fields.refuse(
        "prediction",
        never,
        "predicted outputs are not used; leave it out",
    )?;
    fields.refuse(
        "web_search_options",
        never,
        "the server does not search the web; give the model a tool",
    )?;
    fields.refuse(
        "functions",
        |value| value.as_array().is_some_and(Vec::is_empty),
        "it is deprecated; use 'tools'",
    )?;
    fields.refuse(
        "function_call",
        never,
        "it is deprecated; use 'tool_choice'",
    )?;
    fields.refuse(
        "reasoning_effort",
        never,
        "how a model reasons is set by its chat template: use 'chat_template_kwargs', for example {\"enable_thinking\": false}",
    )?;
    fields.refuse(
        "verbosity",
        |value| value == "medium",
        "ask for length in the messages",
    )?;
    fields.refuse(
        "prompt_cache_retention",
        never,
        "prefixes stay cached while memory lasts; leave it out",
    )
}
