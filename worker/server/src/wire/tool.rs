//! Tools that the model may call, and whether it must.

use serde_json::{Map, Value};

use super::fields::{Fields, show, wrong};
use crate::error::ApiError;

/// Maximum number of tools of one request.
const MAX_TOOLS: usize = 128;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name: letters, digits, `_`, `-` and `.`, at most 64.
    pub name: String,
    /// JSON schema of its arguments; an object without members if the request gives none.
    pub parameters: Value,
    /// Whether the arguments must follow the schema even if the model may choose not to call.
    pub strict: bool,
    /// The definition as the chat template shows it.
    pub definition: Value,
}

/// Whether the model calls a tool.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// The model answers; tools are not shown to it.
    None,
    /// The model decides by itself.
    Auto,
    /// The model calls at least one.
    Required,
    /// The model calls this one.
    Named(String),
}

/// Reads `tools` and `tool_choice`.
pub(super) fn read(fields: &mut Fields) -> Result<(Vec<Tool>, ToolChoice), ApiError> {
    let items = fields.array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(ApiError::parameter(
            "tools",
            format!(
                "'tools' has {} tools: at most {MAX_TOOLS} are accepted",
                items.len()
            ),
        ));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(items.len());
    for (i, item) in items.into_iter().enumerate() {
        let tool = read_tool(item, &format!("tools[{i}]"))?;
        if tools.iter().any(|other| other.name == tool.name) {
            return Err(ApiError::parameter(
                format!("tools[{i}].function.name"),
                format!("two tools are named '{}': names must differ", tool.name),
            ));
        }
        tools.push(tool);
    }
    let choice = read_choice(fields.take("tool_choice"), &tools)?;
    Ok((tools, choice))
}

fn read_tool(value: Value, path: &str) -> Result<Tool, ApiError> {
    let mut tool = Fields::new(value, path)?;
    let kind = tool.required_string("type")?;
    if kind != "function" {
        return Err(ApiError::parameter(
            format!("{path}.type"),
            format!(
                "'{path}.type' is '{}': only 'function' is supported",
                super::fields::clip(&kind, 40)
            ),
        ));
    }
    let function_path = format!("{path}.function");
    let mut function = Fields::new(tool.require("function")?, function_path.clone())?;
    tool.finish()?;
    let name = function.required_string("name")?;
    check_name(&name, &format!("{function_path}.name"))?;
    let description = function.string("description")?;
    let parameters = match function.take("parameters") {
        None => None,
        Some(value @ Value::Object(_)) => Some(value),
        Some(other) => {
            return Err(wrong(
                &format!("{function_path}.parameters"),
                &other,
                "a JSON schema (an object)",
            ));
        }
    };
    let strict = function.boolean("strict")?.unwrap_or(false);
    function.finish()?;

    // The template sees what the client wrote, in the order that models were trained with.
    let mut shown = Map::new();
    shown.insert("name".to_owned(), Value::String(name.clone()));
    if let Some(description) = description {
        shown.insert("description".to_owned(), Value::String(description));
    }
    if let Some(parameters) = &parameters {
        shown.insert("parameters".to_owned(), parameters.clone());
    }
    Ok(Tool {
        definition: serde_json::json!({"type": "function", "function": shown}),
        parameters: parameters
            .unwrap_or_else(|| serde_json::json!({"type": "object", "properties": {}})),
        name,
        strict,
    })
}

pub(super) fn check_name(name: &str, path: &str) -> Result<(), ApiError> {
    let is_good = !name.is_empty()
        && name.len() <= 64
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if is_good {
        return Ok(());
    }
    Err(ApiError::parameter(
        path,
        format!(
            "'{path}' is {}: it must be 1 to 64 letters, digits, '_', '-' or '.'",
            show(&Value::String(name.to_owned()))
        ),
    ))
}

fn read_choice(value: Option<Value>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    const MUST_BE: &str =
        "'none', 'auto', 'required' or {\"type\": \"function\", \"function\": {\"name\": …}}";
    let choice = match value {
        None if tools.is_empty() => return Ok(ToolChoice::None),
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(ToolChoice::None),
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(wrong("tool_choice", &Value::String(word), MUST_BE)),
        },
        Some(value @ Value::Object(_)) => ToolChoice::Named(read_named(value)?),
        Some(other) => return Err(wrong("tool_choice", &other, MUST_BE)),
    };
    match &choice {
        ToolChoice::Auto if tools.is_empty() => Ok(ToolChoice::None),
        _ if tools.is_empty() => Err(ApiError::parameter(
            "tool_choice",
            "'tool_choice' asks for a call, but 'tools' is empty or missing",
        )),
        ToolChoice::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
            Err(ApiError::parameter(
                "tool_choice.function.name",
                format!("'tool_choice' names '{name}', which is not among 'tools'"),
            ))
        }
        _ => Ok(choice),
    }
}

fn read_named(value: Value) -> Result<String, ApiError> {
    let mut choice = Fields::new(value, "tool_choice")?;
    let kind = choice.required_string("type")?;
    if kind != "function" {
        return Err(ApiError::parameter(
            "tool_choice.type",
            format!(
                "'tool_choice.type' is '{}': only 'function' is supported",
                super::fields::clip(&kind, 40)
            ),
        ));
    }
    let mut function = Fields::new(choice.require("function")?, "tool_choice.function")?;
    let name = function.required_string("name")?;
    function.finish()?;
    choice.finish()?;
    check_name(&name, "tool_choice.function.name")?;
    Ok(name)
}
