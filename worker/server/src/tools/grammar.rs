//! Grammars (llguidance's dialect of Lark) that make a model call tools in its own form.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{ToolFormat, deepseek, hermes, kimi};
use crate::schema::closed;
use crate::wire::{ResponseFormat, Tool, ToolChoice};

/// Token of a mark that is a single token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkToken {
    /// Its id.
    pub id: u32,
    /// Whether it is never text, so that a grammar's text cannot match it.
    pub is_special: bool,
}

/// Parts of a request with tools that determine its grammar.
pub struct GrammarInput<'a> {
    /// Form of the calls.
    pub format: ToolFormat,
    /// The request's tools.
    pub tools: &'a [Tool],
    /// Whether a tool must be called.
    pub choice: &'a ToolChoice,
    /// Whether more than one call is allowed.
    pub parallel: bool,
    /// Form of an answer that is not a call.
    pub response_format: &'a ResponseFormat,
    /// Looks up the token of a mark, if it is a single one.
    pub mark: &'a dyn Fn(&str) -> Option<MarkToken>,
}

/// Builds the grammar of the whole answer; `None` if the model is free: no call is required, no tool is `strict` and
/// the answer has no form.
pub fn tool_grammar(input: &GrammarInput<'_>) -> Option<String> {
    let tools: Vec<&Tool> = match input.choice {
        ToolChoice::None => return None,
        ToolChoice::Named(name) => input
            .tools
            .iter()
            .filter(|tool| tool.name == *name)
            .collect(),
        ToolChoice::Auto | ToolChoice::Required => input.tools.iter().collect(),
    };
    let is_auto = *input.choice == ToolChoice::Auto;
    let is_text = *input.response_format == ResponseFormat::Text;
    if is_auto && is_text && !tools.iter().any(|tool| tool.strict) {
        return None;
    }
    let form = Form::of(input.format);
    let parallel = input.parallel && !matches!(input.choice, ToolChoice::Named(_));
    let mut lark = String::from("%llguidance {}\n");
    lark.push_str(&start_rule(input, &form, is_auto, is_text));
    write_calls(&mut lark, input, &form, &tools, parallel, is_auto);
    Some(lark)
}

/// A part of one call's form.
enum Part {
    Mark(&'static str),
    /// Fixed text with `NAME` in place of the function's name.
    Text(&'static str),
    /// A number.
    Index,
    Arguments,
}

struct Form {
    /// Mark that begins the calls; `None` if they begin with text.
    open: Option<&'static str>,
    /// Whether every call begins with the opening mark, not only the first.
    opens_each: bool,
    close: Option<&'static str>,
    divider: &'static str,
    call: Vec<Part>,
}

impl Form {
    fn of(format: ToolFormat) -> Self {
        use Part::{Arguments, Index, Mark, Text};
        let deepseek = |call| Self {
            open: Some(deepseek::SECTION_BEGIN),
            opens_each: false,
            close: Some(deepseek::SECTION_END),
            divider: "",
            call,
        };
        match format {
            ToolFormat::DeepseekV3 => Self {
                divider: "\n",
                ..deepseek(vec![
                    Mark(deepseek::CALL_BEGIN),
                    Text("function"),
                    Mark(deepseek::SEPARATOR),
                    Text("NAME\n```json\n"),
                    Arguments,
                    Text(deepseek::FENCE_END),
                    Mark(deepseek::CALL_END),
                ])
            },
            ToolFormat::DeepseekV31 => deepseek(vec![
                Mark(deepseek::CALL_BEGIN),
                Text("NAME"),
                Mark(deepseek::SEPARATOR),
                Arguments,
                Mark(deepseek::CALL_END),
            ]),
            ToolFormat::KimiK2 => Self {
                open: Some(kimi::SECTION_BEGIN),
                opens_each: false,
                close: Some(kimi::SECTION_END),
                divider: "",
                call: vec![
                    Mark(kimi::CALL_BEGIN),
                    Text("functions.NAME:"),
                    Index,
                    Mark(kimi::ARGUMENTS_BEGIN),
                    Arguments,
                    Mark(kimi::CALL_END),
                ],
            },
            ToolFormat::Hermes => Self {
                open: Some(hermes::BEGIN),
                opens_each: true,
                close: None,
                divider: "\n",
                call: vec![
                    Text("\n{\"name\": \"NAME\", \"arguments\": "),
                    Arguments,
                    Text("}\n"),
                    Mark(hermes::END),
                ],
            },
            ToolFormat::Llama3 => Self {
                open: None,
                opens_each: false,
                close: None,
                divider: "; ",
                call: vec![
                    Text("{\"name\": \"NAME\", \"parameters\": "),
                    Arguments,
                    Text("}"),
                ],
            },
        }
    }
}

/// Builds `start`, and the rules of an answer without calls.
fn start_rule(input: &GrammarInput<'_>, form: &Form, is_auto: bool, is_text: bool) -> String {
    const TEXT: &str = "TEXT: /(.|\\n)*/\n";
    let schema = match input.response_format {
        ResponseFormat::JsonSchema(schema) => schema.clone(),
        _ => json!({"type": "object"}),
    };
    if !is_auto {
        return "start: open calls\n".to_owned() + &open_rule(input, form);
    }
    if !is_text {
        return format!(
            "start: open calls | answer\nanswer: {}\n",
            json_rule(&schema)
        ) + &open_rule(input, form);
    }
    match form.open {
        // An answer that begins like a call is a call.
        None => "start: calls | TEXT\nTEXT: /([^{](.|\\n)*)?/\nopen: \"\"\n".to_owned(),
        Some(mark) if (input.mark)(mark).is_some_and(|token| token.is_special) => {
            format!("start: TEXT | TEXT open calls\n{TEXT}") + &open_rule(input, form)
        }
        // A mark that is text would match TEXT too; with the lazy rule, a call begins where the mark ends.
        Some(mark) => {
            let head = format!("head[lazy]: TEXT {}\n", literal(mark));
            format!("start: TEXT | head calls\n{TEXT}{head}") + &open_rule(input, form)
        }
    }
}

fn open_rule(input: &GrammarInput<'_>, form: &Form) -> String {
    match form.open {
        Some(mark) => format!("open: {}\n", mark_term(input, mark)),
        None => "open: \"\"\n".to_owned(),
    }
}

fn write_calls(
    lark: &mut String,
    input: &GrammarInput<'_>,
    form: &Form,
    tools: &[&Tool],
    parallel: bool,
    is_auto: bool,
) {
    let opener = if form.opens_each { "open " } else { "" };
    let more = match (parallel, form.divider) {
        (false, _) => String::new(),
        (true, "") => format!(" ({opener}call)*"),
        (true, divider) => format!(" ({} {opener}call)*", literal(divider)),
    };
    let close = form
        .close
        .map(|mark| format!(" {}", mark_term(input, mark)))
        .unwrap_or_default();
    let alternatives: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let _ = writeln!(lark, "calls: call{more}{close}");
    let _ = writeln!(lark, "call: {}", alternatives.join(" | "));
    for (i, tool) in tools.iter().enumerate() {
        let terms: Vec<String> = form
            .call
            .iter()
            .map(|part| match part {
                Part::Mark(mark) => mark_term(input, mark),
                Part::Text(text) => literal(&text.replace("NAME", &tool.name)),
                Part::Index => "/[0-9]{1,3}/".to_owned(),
                Part::Arguments => format!("arguments_{i}"),
            })
            .collect();
        let _ = writeln!(lark, "call_{i}: {}", terms.join(" "));
        let any = json!({"type": "object"});
        let schema = if is_auto && !tool.strict {
            &any
        } else {
            &tool.parameters
        };
        let _ = writeln!(lark, "arguments_{i}: {}", json_rule(schema));
    }
}

fn mark_term(input: &GrammarInput<'_>, mark: &str) -> String {
    match (input.mark)(mark) {
        Some(token) => format!("<[{}]>", token.id),
        None => literal(mark),
    }
}

/// Builds a rule with white space as models were trained with it, so that none can run on for ever.
fn json_rule(schema: &Value) -> String {
    let mut schema = closed(schema);
    if let Some(members) = schema.as_object_mut() {
        members.insert(
            "x-guidance".to_owned(),
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
        );
    }
    format!("%json {schema}")
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
