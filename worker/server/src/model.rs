//! The served model as the gateway sees it: words and limits, no weights.

use std::path::Path;
use std::sync::Arc;

use hearth_formats::{ChatTemplate, FormatError, GenerationConfig, ModelConfig, Tokenizer};
use serde_json::{Map, Value};

use crate::config::{GatewayConfig, GatewayError};
use crate::error::ApiError;
use crate::tools::{MarkToken, ToolFormat, has_word};
use crate::wire::{GenerationOptions, Message, Prompt};
use hearth_transport::v1::{LogitBias, Sampling};

/// What is known of the served model.
pub(crate) struct ServedModel {
    /// The name that requests give.
    pub(crate) name: String,
    /// Text to tokens and back.
    pub(crate) tokenizer: Tokenizer,
    /// Tokens of the model, padding included.
    pub(crate) vocab_size: u32,
    /// Tokens of prompt and answer together.
    pub(crate) context_length: u32,
    /// How tool calls are written.
    pub(crate) tool_format: ToolFormat,
    /// The chat template shows tools to the model.
    pub(crate) shows_tools: bool,
    /// Tokens that end an answer.
    pub(crate) stop_tokens: Arc<[u32]>,
    template: Option<ChatTemplate>,
    defaults: GenerationConfig,
}

impl ServedModel {
    /// Reads the model's directory.
    ///
    /// # Errors
    /// [`GatewayError::Format`] for files that are missing or wrong, [`GatewayError::ContextTooLong`].
    pub(crate) fn open(config: &GatewayConfig) -> Result<Self, GatewayError> {
        let dir = config.model_dir.as_path();
        let model = ModelConfig::read(dir)?;
        let tokenizer = Tokenizer::open(dir)?;
        tokenizer.check_vocab(&model)?;
        let template = ChatTemplate::open(dir)?;
        let source = template_source(dir);
        let defaults = GenerationConfig::read(dir)?.unwrap_or_default();
        let limit = model.max_position_embeddings as u32;
        let context_length = match config.context_length {
            Some(asked) if asked > limit => {
                return Err(GatewayError::ContextTooLong { asked, limit });
            }
            Some(asked) => asked,
            None => limit,
        };
        let mut stop_tokens = model.eos_token_ids.clone();
        stop_tokens.extend(&defaults.eos_token_ids);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        Ok(Self {
            name: config.served_name.clone(),
            vocab_size: model.vocab_size as u32,
            context_length,
            tool_format: config.tool_format.unwrap_or_else(|| {
                ToolFormat::detect(source.as_deref(), model.architecture, &model.model_type)
            }),
            shows_tools: source
                .as_deref()
                .is_some_and(|text| has_word(text, "tools")),
            stop_tokens: stop_tokens.into(),
            tokenizer,
            template,
            defaults,
        })
    }

    /// The tokens of a conversation, ready for the answer.
    ///
    /// # Errors
    /// 400 when the model has no chat template or its template refuses the messages.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::invalid(format!(
                "model '{}' has no chat template: use /v1/completions, or add chat_template.jinja to the model",
                self.name
            ))
            .with_code("no_chat_template"));
        };
        let values: Vec<Value> = messages
            .iter()
            .map(|message| self.for_template(message))
            .collect();
        let text = template
            .render(&values, tools, true, extra)
            .map_err(|error| match error {
                FormatError::TemplateRefused { .. } => {
                    ApiError::parameter("messages", one_line(&error)).with_code("template_refused")
                }
                // A template fails on what it did not expect of messages or arguments more often than by itself.
                _ => ApiError::parameter("messages", one_line(&error)).with_code("template_failed"),
            })?;
        self.encode(&text, false, "messages")
    }

    /// The tokens of a prompt.
    ///
    /// # Errors
    /// 400 for an empty prompt or a token that the model does not have.
    pub(crate) fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        let tokens = match prompt {
            Prompt::Text(text) => self.encode(text, true, "prompt")?,
            Prompt::Tokens(tokens) => tokens.clone(),
        };
        if let Some(token) = tokens.iter().find(|token| **token >= self.vocab_size) {
            return Err(ApiError::parameter(
                "prompt",
                format!(
                    "'prompt' has token {token}: the model's tokens are 0 to {}",
                    self.vocab_size - 1
                ),
            ));
        }
        if tokens.is_empty() {
            return Err(ApiError::parameter(
                "prompt",
                "'prompt' is empty: give at least one token to go on from",
            ));
        }
        Ok(tokens)
    }

    /// The sampling of a request: its own values, else generation_config.json's, else OpenAI's defaults.
    ///
    /// `do_sample: false` there makes greedy the default; any of `temperature`, `top_p`, `top_k` and `min_p` in the
    /// request asks for sampling.
    ///
    /// # Errors
    /// 400 for a bias on a token that the model does not have.
    pub(crate) fn sampling(
        &self,
        options: &GenerationOptions,
        seed: u64,
    ) -> Result<Sampling, ApiError> {
        let defaults = &self.defaults;
        if let Some((token, _)) = options
            .logit_bias
            .iter()
            .find(|(token, _)| *token >= self.vocab_size)
        {
            return Err(ApiError::parameter(
                format!("logit_bias.{token}"),
                format!(
                    "'logit_bias' has token {token}: the model's tokens are 0 to {}",
                    self.vocab_size - 1
                ),
            ));
        }
        let asks_to_sample =
            options.top_p.is_some() || options.top_k.is_some() || options.min_p.is_some();
        let temperature = match (options.temperature, defaults.do_sample) {
            (Some(temperature), _) => temperature,
            (None, Some(false)) if !asks_to_sample => 0.0,
            (None, _) => defaults.temperature.unwrap_or(1.0),
        };
        // 0 means "off" on the wire to the workers; the nucleus of nothing is its most probable token.
        let top_p = options
            .top_p
            .or(defaults.top_p)
            .unwrap_or(1.0)
            .max(f32::MIN_POSITIVE);
        Ok(Sampling {
            temperature,
            top_p,
            top_k: options.top_k.or(defaults.top_k).unwrap_or(0),
            min_p: options.min_p.or(defaults.min_p).unwrap_or(0.0),
            frequency_penalty: options.frequency_penalty.unwrap_or(0.0),
            presence_penalty: options.presence_penalty.unwrap_or(0.0),
            repetition_penalty: options
                .repetition_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(1.0),
            seed,
            logit_bias: options
                .logit_bias
                .iter()
                .map(|(token, bias)| LogitBias {
                    token: *token,
                    bias: *bias,
                })
                .collect(),
        })
    }

    /// The bound on generated tokens for a prompt: the request's, else the model's default, and never more than
    /// the context holds, since it is an upper bound.
    ///
    /// # Errors
    /// 400 with the numbers when the prompt leaves no room.
    pub(crate) fn max_tokens(
        &self,
        asked: Option<u32>,
        prompt_tokens: usize,
        context_length: u32,
        param: &str,
    ) -> Result<u32, ApiError> {
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        if prompt_tokens >= context_length {
            return Err(ApiError::parameter(
                param,
                format!(
                    "the model's context is {context_length} tokens, and the prompt has {prompt_tokens}: shorten it by {} or more",
                    prompt_tokens - context_length + 1
                ),
            )
            .with_code("context_length_exceeded"));
        }
        let room = context_length - prompt_tokens;
        Ok(asked
            .or(self.defaults.max_new_tokens)
            .unwrap_or(room)
            .clamp(1, room))
    }

    /// How a mark of the tool format is tokenised, when it is one token.
    pub(crate) fn mark(&self, mark: &str) -> Option<MarkToken> {
        let id = self.tokenizer.token_id(mark)?;
        Some(MarkToken {
            id,
            is_special: self.tokenizer.is_special(id),
        })
    }

    fn encode(&self, text: &str, add_special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
        self.tokenizer
            .encode(text, add_special)
            .map_err(|error| ApiError::parameter(param, one_line(&error)))
    }

    /// Arguments of earlier calls as the template wants them.
    fn for_template(&self, message: &Message) -> Value {
        let mut value = message.template_value.clone();
        if !self.tool_format.arguments_as_object() {
            return value;
        }
        let calls = value.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(parsed) = arguments
                    .as_str()
                    .and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok())
            {
                *arguments = Value::Object(parsed);
            }
        }
        value
    }
}

/// The text of the chat template, to see what it was written for. What cannot be read is absent:
/// [`ChatTemplate::open`] has reported it.
fn template_source(dir: &Path) -> Option<String> {
    if let Ok(text) = std::fs::read_to_string(dir.join("chat_template.jinja")) {
        let tool_use =
            std::fs::read_to_string(dir.join("additional_chat_templates/tool_use.jinja"));
        return Some(text + &tool_use.unwrap_or_default());
    }
    let text = std::fs::read_to_string(dir.join("tokenizer_config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    match config.get("chat_template")? {
        Value::String(text) => Some(text.clone()),
        Value::Array(named) => Some(
            named
                .iter()
                .filter_map(|entry| entry["template"].as_str())
                .collect::<Vec<_>>()
                .join("\n"),
        ),
        _ => None,
    }
}

fn one_line(error: &FormatError) -> String {
    let text = error.to_string();
    text.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}
