//! Chat templates: convert messages to the text format that the model was trained on.
//!
//! Templates are Jinja, written for transformers' environment: trimmed blocks, loop controls, Python's methods of
//! strings and maps, `raise_exception`, `strftime_now`, and a `tojson` that is Python's `json.dumps`.

mod python;

use std::io;
use std::path::Path;
use std::sync::Arc;

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Map;

use crate::FormatError;
use crate::file::{MAX_CONFIG_BYTES, read_file};

/// Instruction limit of one rendering: far more than a full context of short messages needs, and about a second.
const FUEL: u64 = 20_000_000;
const CONFIG_FILE: &str = "tokenizer_config.json";
const NAME: &str = "chat_template";

/// Clock read by `strftime_now`.
pub type Clock = Arc<dyn Fn() -> Zoned + Send + Sync>;

/// A model's compiled chat template.
#[derive(Clone)]
pub struct ChatTemplate {
    default: Option<Arc<Environment<'static>>>,
    /// Used instead of `default` when tools are given.
    tool_use: Option<Arc<Environment<'static>>>,
    /// `bos_token`, `eos_token` and similar variables.
    special_tokens: Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`; `None` if the model has neither.
    /// `strftime_now` returns the system time.
    ///
    /// # Errors
    /// [`FormatError::Io`], [`FormatError::Malformed`], [`FormatError::Template`] (does not compile).
    pub fn open(dir: &Path) -> Result<Option<Self>, FormatError> {
        Self::open_with_clock(dir, Arc::new(Zoned::now))
    }

    /// Same as [`ChatTemplate::open`], with the given clock.
    ///
    /// # Errors
    /// Same as [`ChatTemplate::open`].
    pub fn open_with_clock(dir: &Path, clock: Clock) -> Result<Option<Self>, FormatError> {
        let config = match read(&dir.join(CONFIG_FILE))? {
            Some(text) => parse_config(&text)?,
            None => Map::new(),
        };
        let mut sources = Sources::from_config(&config)?;
        if let Some(source) = read(&dir.join("chat_template.jinja"))? {
            sources.default = Some(source);
            sources.tool_use = read(&dir.join("additional_chat_templates/tool_use.jinja"))?;
        }
        if sources.default.is_none() && sources.tool_use.is_none() {
            return Ok(None);
        }
        let compile = |source: Option<String>| source.map(|s| compile(s, &clock)).transpose();
        Ok(Some(Self {
            default: compile(sources.default)?,
            tool_use: compile(sources.tool_use)?,
            special_tokens: special_tokens(&config),
        }))
    }

    /// Compiles a template from its source, without special tokens.
    ///
    /// # Errors
    /// [`FormatError::Template`].
    pub fn from_source(source: &str, clock: Clock) -> Result<Self, FormatError> {
        Ok(Self {
            default: Some(compile(source.to_owned(), &clock)?),
            tool_use: None,
            special_tokens: Map::new(),
        })
    }

    /// Renders the prompt for `messages`. `tools` are OpenAI tool objects; `extra` are additional template variables
    /// (such as `enable_thinking`), which cannot replace those that this function sets.
    ///
    /// # Errors
    /// [`FormatError::TemplateRefused`] if the template raises an exception, [`FormatError::Template`] if it fails
    /// or runs too long.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
        extra: &Map<String, serde_json::Value>,
    ) -> Result<String, FormatError> {
        let template = match tools {
            Some(_) => self.tool_use.as_ref().or(self.default.as_ref()),
            None => self.default.as_ref(),
        };
        let Some(environment) = template else {
            return Err(FormatError::TemplateRefused {
                message: "it is for requests with tools only".into(),
            });
        };
        let mut variables = self.special_tokens.clone();
        variables.extend(extra.clone());
        let own = [
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(Serde(tools))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        let context: Value = variables
            .into_iter()
            .map(|(name, value)| (name, Value::from(Serde(value))))
            .chain(own.map(|(name, value)| (name.to_owned(), value)))
            .collect::<std::collections::BTreeMap<_, _>>()
            .into();
        let template = environment.get_template(NAME).map_err(|e| failed(&e))?;
        template.render(context).map_err(|e| failed(&e))
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("tool_use", &self.tool_use.is_some())
            .field("special_tokens", &self.special_tokens)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Sources {
    default: Option<String>,
    tool_use: Option<String>,
}

impl Sources {
    /// Reads `chat_template`: a string, or a list of `{name, template}`.
    fn from_config(config: &Map<String, serde_json::Value>) -> Result<Self, FormatError> {
        let mut sources = Self::default();
        match config.get("chat_template") {
            None | Some(serde_json::Value::Null) => {}
            Some(serde_json::Value::String(source)) => sources.default = Some(source.clone()),
            Some(serde_json::Value::Array(named)) => {
                for entry in named {
                    let (Some(name), Some(source)) =
                        (entry["name"].as_str(), entry["template"].as_str())
                    else {
                        return Err(bad_config(
                            "has a chat_template with an entry that lacks name or template".into(),
                        ));
                    };
                    match name {
                        "default" => sources.default = Some(source.into()),
                        "tool_use" => sources.tool_use = Some(source.into()),
                        _ => {}
                    }
                }
            }
            Some(_) => {
                return Err(bad_config(
                    "has a chat_template that is neither a string nor a list".into(),
                ));
            }
        }
        Ok(sources)
    }
}

fn read(path: &Path) -> Result<Option<String>, FormatError> {
    let remedy = "make the file readable, or download it again.";
    let bytes = match read_file(path, MAX_CONFIG_BYTES, remedy) {
        Err(error) if error.is_not_found() => return Ok(None),
        other => other?,
    };
    let text = String::from_utf8(bytes).map_err(|e| {
        FormatError::io(path, io::Error::new(io::ErrorKind::InvalidData, e), remedy)
    })?;
    Ok(Some(text.trim_start_matches('\u{feff}').to_owned()))
}

fn parse_config(text: &str) -> Result<Map<String, serde_json::Value>, FormatError> {
    serde_json::from_str(text).map_err(|e| bad_config(format!("is not a valid JSON object: {e}")))
}

fn bad_config(problem: String) -> FormatError {
    FormatError::malformed(CONFIG_FILE, problem, "download the file again.")
}

/// Reads the `…_token` entries: each is a string or an object with `content`.
fn special_tokens(config: &Map<String, serde_json::Value>) -> Map<String, serde_json::Value> {
    let text = |value: &serde_json::Value| {
        value
            .as_str()
            .or(value["content"].as_str())
            .map(serde_json::Value::from)
    };
    let named = config.iter().filter(|(name, _)| name.ends_with("_token"));
    let mut tokens: Map<_, _> = named
        .filter_map(|(name, value)| Some((name.clone(), text(value)?)))
        .collect();
    if let Some(additional) = config
        .get("additional_special_tokens")
        .and_then(|v| v.as_array())
    {
        let additional = additional.iter().filter_map(text).collect();
        tokens.insert("additional_special_tokens".into(), additional);
    }
    tokens
}

fn compile(source: String, clock: &Clock) -> Result<Arc<Environment<'static>>, FormatError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.map_err(|e| failed(&e))?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", python::tojson);
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            let raised = Error::new(ErrorKind::InvalidOperation, "raise_exception");
            Err(raised.with_source(Raised(message)))
        },
    );
    let clock = Arc::clone(clock);
    environment.add_function(
        "strftime_now",
        move |format: String| -> Result<String, Error> {
            let text = jiff::fmt::strtime::format(&format, &clock());
            text.map_err(|e| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now({format:?}): {e}"),
                )
            })
        },
    );
    environment
        .add_template_owned(NAME, without_generation_marks(&source))
        .map_err(|e| FormatError::Template {
            problem: format!("does not compile: {}", describe(&e)),
        })?;
    Ok(Arc::new(environment))
}

/// Argument of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn failed(error: &Error) -> FormatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = cause {
        if let Some(Raised(message)) = e.downcast_ref() {
            return FormatError::TemplateRefused {
                message: message.clone(),
            };
        }
        cause = e.source();
    }
    FormatError::Template {
        problem: match error.kind() {
            ErrorKind::OutOfFuel => format!("took more than {FUEL} steps"),
            _ => format!("failed: {}", describe(error)),
        },
    }
}

fn describe(error: &Error) -> String {
    let detail = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line})"),
        None => detail,
    }
}

/// Replaces `{% generation %}`, which marks the assistant's words for training and renders as its content, by a
/// block that is always taken.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%-+} \t\r\n".contains(c));
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
