//! Messages of a conversation, validated and converted to the form that chat templates expect.

use serde_json::{Map, Value};

use super::fields::{Fields, clip, wrong};
use super::tool::check_name;
use crate::error::ApiError;

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions from the application.
    System,
    /// The newer name for it; shown to the template as `system`, which models were trained with.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// One message. `template_value` has string content (text parts joined by a line feed; `null` only for an
/// assistant that called tools) and, where it has calls, arguments as the JSON text that the model wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Author of the message.
    pub role: Role,
    /// The message as a chat template reads it.
    pub template_value: Value,
}

/// Reads `messages`.
pub(super) fn read(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let items = match fields.require("messages")? {
        Value::Array(items) => items,
        other => return Err(wrong("messages", &other, "an array")),
    };
    if items.is_empty() {
        return Err(ApiError::parameter(
            "messages",
            "'messages' is empty: give at least one message",
        ));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(i, item)| read_message(item, &format!("messages[{i}]")))
        .collect()
}

fn read_message(value: Value, path: &str) -> Result<Message, ApiError> {
    let mut fields = Fields::new(value, path)?;
    let role = read_role(&mut fields)?;
    let mut out = Map::new();
    let shown = match role {
        Role::System | Role::Developer => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    out.insert("role".to_owned(), Value::from(shown));
    let content = read_content(&mut fields, role)?;
    let mut calls = None;
    match role {
        Role::Assistant => {
            calls = read_calls(&mut fields)?;
            if let Some(reasoning) = fields.string("reasoning_content")? {
                out.insert("reasoning_content".to_owned(), Value::String(reasoning));
            }
            if let Some(refusal) = fields.string("refusal")? {
                out.insert("refusal".to_owned(), Value::String(refusal));
            }
            fields.refuse("audio", |_| false, "the model reads and writes text")?;
            fields.refuse(
                "function_call",
                |_| false,
                "it is deprecated; use 'tool_calls'",
            )?;
            // OpenAI's client sends back what it was given, including this empty list.
            fields.refuse(
                "annotations",
                |value| value.as_array().is_some_and(Vec::is_empty),
                "answers carry no annotations",
            )?;
        }
        Role::Tool => {
            let id = fields.required_string("tool_call_id")?;
            out.insert("tool_call_id".to_owned(), Value::String(id));
        }
        _ => {}
    }
    if let Some(name) = fields.string("name")? {
        out.insert("name".to_owned(), Value::String(name));
    }
    fields.finish()?;
    match content {
        Some(text) => out.insert("content".to_owned(), Value::String(text)),
        None if calls.is_some() || out.contains_key("refusal") => {
            out.insert("content".to_owned(), Value::Null)
        }
        None => {
            return Err(ApiError::parameter(
                format!("{path}.content"),
                format!("'{path}.content' is missing"),
            )
            .with_code("missing_required_parameter"));
        }
    };
    if let Some(calls) = calls {
        out.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(Message {
        role,
        template_value: Value::Object(out),
    })
}

fn read_role(fields: &mut Fields) -> Result<Role, ApiError> {
    let path = fields.path_of("role");
    let role = fields.required_string("role")?;
    match role.as_str() {
        "system" => Ok(Role::System),
        "developer" => Ok(Role::Developer),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "tool" => Ok(Role::Tool),
        "function" => Err(ApiError::parameter(
            path.clone(),
            format!("'{path}' is 'function', which is deprecated: use 'tool' with 'tool_call_id'"),
        )),
        other => Err(ApiError::parameter(
            path.clone(),
            format!(
                "'{path}' is '{}': it must be system, developer, user, assistant or tool",
                clip(other, 40)
            ),
        )),
    }
}

fn read_content(fields: &mut Fields, role: Role) -> Result<Option<String>, ApiError> {
    let path = fields.path_of("content");
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong(&path, &other, "a string or an array of text parts")),
    };
    let texts = parts
        .into_iter()
        .enumerate()
        .map(|(i, part)| read_part(part, &format!("{path}[{i}]"), role))
        .collect::<Result<Vec<String>, _>>()?;
    Ok(Some(texts.join("\n")))
}

fn read_part(value: Value, path: &str, role: Role) -> Result<String, ApiError> {
    let mut part = Fields::new(value, path)?;
    let kind = part.required_string("type")?;
    let text = match kind.as_str() {
        "text" => part.required_string("text")?,
        "refusal" if role == Role::Assistant => part.required_string("refusal")?,
        other => {
            return Err(ApiError::parameter(
                format!("{path}.type"),
                format!(
                    "'{path}.type' is '{}': the model reads text, so parts must be of type 'text'",
                    clip(other, 40)
                ),
            )
            .with_code("unsupported_content"));
        }
    };
    part.finish()?;
    Ok(text)
}

fn read_calls(fields: &mut Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let path = fields.path_of("tool_calls");
    let Some(items) = fields.array("tool_calls")? else {
        return Ok(None);
    };
    if items.is_empty() {
        return Ok(None);
    }
    items
        .into_iter()
        .enumerate()
        .map(|(i, item)| read_call(item, &format!("{path}[{i}]")))
        .collect::<Result<Vec<_>, _>>()
        .map(Some)
}

fn read_call(value: Value, path: &str) -> Result<Value, ApiError> {
    let mut call = Fields::new(value, path)?;
    let id = call.required_string("id")?;
    let kind = call
        .string("type")?
        .unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        return Err(ApiError::parameter(
            format!("{path}.type"),
            format!(
                "'{path}.type' is '{}': only 'function' is supported",
                clip(&kind, 40)
            ),
        ));
    }
    let function_path = format!("{path}.function");
    let mut function = Fields::new(call.require("function")?, function_path.clone())?;
    // Streaming clients send back the index that the deltas carried.
    call.integer("index", 0..=i64::from(u32::MAX))?;
    call.finish()?;
    let name = function.required_string("name")?;
    check_name(&name, &format!("{function_path}.name"))?;
    let arguments = function.required_string("arguments")?;
    function.finish()?;
    Ok(serde_json::json!({
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }))
}
