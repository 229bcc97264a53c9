//! The served model as the gateway sees it: vocabulary and limits, no weights.

use std::path::Path;
use std::sync::Arc;

use hearth_formats::{
    ChatTemplate, Encoded, FormatError, GenerationConfig, MAX_CONFIG_BYTES, ModelConfig, Tokenizer,
    read_file,
};
use serde_json::{Map, Value};

use crate::api::Work;
use crate::config::{GatewayConfig, GatewayError};
use crate::error::ApiError;
use crate::tools::{MarkToken, ToolFormat, has_word};
use crate::wire::{GenerationOptions, Message, Prompt, Role};
use hearth_transport::v1::{LogitBias, Sampling};

/// Maximum size of a text that is tokenised in a moment.
const QUICK_BYTES: usize = 64 << 10;

/// Tokenizer, template, defaults and limits of the served model.
pub(crate) struct ServedModel {
    /// Name that requests give.
    pub(crate) name: String,
    /// Text to tokens and back.
    pub(crate) tokenizer: Tokenizer,
    /// Vocabulary size, padding included.
    pub(crate) vocab_size: u32,
    /// Maximum tokens of prompt and answer together.
    pub(crate) context_length: u32,
    /// Format of tool calls.
    pub(crate) tool_format: ToolFormat,
    /// Whether the chat template shows tools to the model.
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

    /// Encodes a conversation into tokens, ready for the answer.
    ///
    /// # Errors
    /// 400 when the model has no chat template, its template refuses the messages, or they are too long.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        extra: &Map<String, Value>,
        room: &Room<'_>,
    ) -> Result<Vec<u32>, ApiError> {
        let Some(template) = &self.template else {
            return Err(ApiError::invalid(format!(
                "model '{}' has no chat template: use /v1/completions, or add chat_template.jinja to the model",
                self.name
            ))
            .with_code("no_chat_template"));
        };
        // Each message is at least one token, and templates keep its text verbatim, except surrounding whitespace.
        let of_texts = messages.iter().map(|message| self.least_tokens(message));
        room.check(of_texts.sum::<usize>().max(messages.len()))?;
        let values: Vec<Value> = messages
            .iter()
            .map(|message| self.for_template(message))
            .collect();
        room.work.go_on()?;
        let text = template
            .render(&values, tools, true, extra)
            .map_err(|error| match error {
                FormatError::TemplateRefused { .. } => {
                    ApiError::parameter("messages", one_line(&error)).with_code("template_refused")
                }
                // A template fails on unexpected messages or arguments more often than through its own fault.
                _ => ApiError::parameter("messages", one_line(&error)).with_code("template_failed"),
            })?;
        drop(values);
        self.encode(&text, false, room)
    }

    /// Encodes a prompt into tokens.
    ///
    /// # Errors
    /// 400 for an empty prompt, one that is too long, or a token that the model does not have.
    pub(crate) fn encode_prompt(
        &self,
        prompt: &Prompt,
        room: &Room<'_>,
    ) -> Result<Vec<u32>, ApiError> {
        let tokens = match prompt {
            Prompt::Text(text) => self.encode(text, true, room)?,
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

    /// Returns a request's sampling parameters: its own values, else generation_config.json's, else OpenAI's defaults.
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
        // 0 means "off" on the wire to the workers; an empty nucleus is its most probable token.
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

    /// Returns the bound on generated tokens for a prompt: the request's, else the model's default, and never more
    /// than the context holds, since it is an upper bound.
    ///
    /// # Errors
    /// 400 with the numbers if the prompt leaves no room.
    pub(crate) fn max_tokens(
        &self,
        asked: Option<u32>,
        prompt_tokens: usize,
        room: &Room<'_>,
    ) -> Result<u32, ApiError> {
        let context = room.context_length;
        let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        if prompt_tokens >= context {
            return Err(room.too_long(&prompt_tokens.to_string(), prompt_tokens as usize));
        }
        let left = context - prompt_tokens;
        Ok(asked
            .or(self.defaults.max_new_tokens)
            .unwrap_or(left)
            .clamp(1, left))
    }

    /// Returns the token of a mark of the tool format, if it is a single token.
    pub(crate) fn mark(&self, mark: &str) -> Option<MarkToken> {
        let id = self.tokenizer.token_id(mark)?;
        Some(MarkToken {
            id,
            is_special: self.tokenizer.is_special(id),
        })
    }

    /// Returns the least number of tokens that a long message has, without rendering the template; 0 for short
    /// messages, and for the model's own, of which some templates leave out parts.
    fn least_tokens(&self, message: &Message) -> usize {
        let content = message.template_value["content"].as_str();
        let text = content.unwrap_or_default().trim();
        match message.role {
            Role::Assistant => 0,
            _ if text.len() <= QUICK_BYTES => 0,
            _ => self.tokenizer.least_tokens(text),
        }
    }

    fn encode(&self, text: &str, add_special: bool, room: &Room<'_>) -> Result<Vec<u32>, ApiError> {
        // A shorter text is tokenised, so that the error can give its length.
        if text.len() > QUICK_BYTES {
            room.check(self.tokenizer.least_tokens(text))?;
        }
        let limit = room.counted_tokens();
        let go_on = |tokens| tokens < limit && room.work.is_wanted();
        let encoded = self.tokenizer.encode_while(text, add_special, &go_on);
        match encoded.map_err(|error| ApiError::parameter(room.param, one_line(&error)))? {
            Encoded::Whole(tokens) => Ok(tokens),
            Encoded::Stopped { tokens } => {
                room.work.go_on()?;
                Err(room.too_long(&format!("at least {tokens}"), tokens))
            }
        }
    }

    /// Returns the message for the template, with the arguments of earlier calls in the form that it expects.
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

/// Limit that a prompt must fit into, and the work of preparing it.
pub(crate) struct Room<'a> {
    /// Maximum tokens of prompt and answer together.
    pub(crate) context_length: u32,
    /// The parameter that holds the prompt.
    pub(crate) param: &'a str,
    /// The preparation, which stops when the client has left.
    pub(crate) work: &'a Work,
}

impl Room<'_> {
    /// Refuses a prompt that is known to be too long before it is tokenised.
    ///
    /// # Errors
    /// 400 with the numbers.
    pub(crate) fn check(&self, least_tokens: usize) -> Result<(), ApiError> {
        if least_tokens < self.context_length as usize {
            return Ok(());
        }
        Err(self.too_long(&format!("at least {least_tokens}"), least_tokens))
    }

    /// Number of tokens up to which a prompt is counted; how much longer it is would not help the client.
    fn counted_tokens(&self) -> usize {
        (self.context_length as usize).saturating_mul(2)
    }

    fn too_long(&self, shown: &str, tokens: usize) -> ApiError {
        let context = self.context_length;
        let excess = tokens.saturating_sub(context as usize) + 1;
        ApiError::parameter(
            self.param,
            format!(
                "the model's context is {context} tokens, and the prompt has {shown}: shorten it by {excess} or more"
            ),
        )
        .with_code("context_length_exceeded")
    }
}

/// Returns the text of the chat template, to detect what it was written for. Files that cannot be read count as
/// absent: [`ChatTemplate::open`] has reported them.
fn template_source(dir: &Path) -> Option<String> {
    let read = |name: &str| {
        let bytes = read_file(&dir.join(name), MAX_CONFIG_BYTES, "").ok()?;
        String::from_utf8(bytes).ok()
    };
    if let Some(text) = read("chat_template.jinja") {
        let tool_use = read("additional_chat_templates/tool_use.jinja");
        return Some(text + &tool_use.unwrap_or_default());
    }
    let config: Value = serde_json::from_str(&read("tokenizer_config.json")?).ok()?;
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
