//! Options common to chat and text completions: sampling, limits, streaming.

use serde_json::Value;

use super::fields::{Fields, show, whole, wrong};
use super::{MAX_CHOICES, MAX_STOP_BYTES, MAX_STOPS};
use crate::error::ApiError;

/// Generation options. `None` leaves the choice to the model's generation_config.json, then to OpenAI's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationOptions {
    /// Whether to answer as server-sent events.
    pub stream: bool,
    /// Whether to end the stream with a chunk that carries the usage.
    pub include_usage: bool,
    /// Choices for each prompt.
    pub n: u32,
    /// Upper bound on generated tokens.
    pub max_tokens: Option<u32>,
    /// Sampling temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus probability; 1 is off.
    pub top_p: Option<f32>,
    /// Number of most probable tokens kept; 0 is off.
    pub top_k: Option<u32>,
    /// Minimum probability relative to the best token; 0 is off.
    pub min_p: Option<f32>,
    /// Penalty by how often a token was generated.
    pub frequency_penalty: Option<f32>,
    /// Penalty by whether a token was generated.
    pub presence_penalty: Option<f32>,
    /// Divides the logit of tokens seen in prompt or answer; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Token ids and the biases added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed, which makes the answer repeatable.
    pub seed: Option<u64>,
    /// Strings that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether to continue to `max_tokens` past the model's own end token (for load tests).
    pub ignore_eos: bool,
}

/// Reads the shared members; `max_tokens` is left to the caller, since its names differ.
pub(super) fn read(fields: &mut Fields) -> Result<GenerationOptions, ApiError> {
    refuse_stateful(fields)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    Ok(GenerationOptions {
        stream,
        include_usage: read_stream_options(fields, stream)?,
        n: fields
            .integer("n", 1..=i64::from(MAX_CHOICES))?
            .unwrap_or(1) as u32,
        max_tokens: None,
        temperature: fields.number("temperature", 0.0..=2.0)?,
        top_p: fields.number("top_p", 0.0..=1.0)?,
        // Other servers write "off" as -1.
        top_k: fields
            .integer("top_k", -1..=i64::from(u32::MAX))?
            .map(|k| k.max(0) as u32),
        min_p: fields.number("min_p", 0.0..=1.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01..=10.0)?,
        logit_bias: read_logit_bias(fields)?,
        seed: read_seed(fields)?,
        stop: read_stop(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
    })
}

/// Reads a bound on generated tokens under one of its names. It may be any number: no answer exceeds the context.
pub(super) fn read_max_tokens(
    fields: &mut Fields,
    name: &'static str,
) -> Result<Option<u32>, ApiError> {
    let Some(value) = fields.take(name) else {
        return Ok(None);
    };
    // A number beyond 64 bits is read as floating point; `as` takes the nearest value that fits.
    let whole = value
        .as_f64()
        .filter(|bound| *bound >= 1.0 && bound.fract() == 0.0);
    match whole {
        Some(bound) => Ok(Some(bound as u32)),
        None => Err(wrong(
            &fields.path_of(name),
            &value,
            "a whole number of at least 1",
        )),
    }
}

fn read_stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(false);
    };
    if !stream {
        return Err(ApiError::parameter(
            "stream_options",
            "'stream_options' is only allowed together with 'stream': true",
        ));
    }
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.refuse(
        "include_obfuscation",
        |value| value == &Value::Bool(false),
        "streams carry no padding; leave it out",
    )?;
    options.finish()?;
    Ok(include_usage)
}

/// Handles members of both endpoints that have no effect here, or that this server does not support.
fn refuse_stateful(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(name)?;
    }
    if let Some(value) = fields.take("metadata") {
        let is_text_map = value
            .as_object()
            .is_some_and(|map| map.values().all(Value::is_string));
        if !is_text_map {
            return Err(wrong("metadata", &value, "an object of strings"));
        }
    }
    fields.refuse(
        "service_tier",
        |value| value == "auto" || value == "default",
        "there is one tier; send 'auto' or leave it out",
    )?;
    fields.refuse(
        "store",
        |value| value == &Value::Bool(false),
        "answers are not kept; send false or leave it out",
    )
}

fn read_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else {
        return Ok(None);
    };
    // Clients may send a signed number; its bits are the seed.
    let seed = value
        .as_u64()
        .or_else(|| whole(&value).map(|seed| seed as u64));
    match seed {
        Some(seed) => Ok(Some(seed)),
        None => Err(wrong("seed", &value, "a whole number of at most 64 bits")),
    }
}

fn read_stop(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(items)) => {
            if items.len() > MAX_STOPS {
                return Err(ApiError::parameter(
                    "stop",
                    format!(
                        "'stop' has {} strings: at most {MAX_STOPS} are accepted",
                        items.len()
                    ),
                ));
            }
            items
                .into_iter()
                .enumerate()
                .map(|(i, item)| match item {
                    Value::String(stop) => Ok(stop),
                    other => Err(wrong(&format!("stop[{i}]"), &other, "a string")),
                })
                .collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong("stop", &other, "a string or an array of strings")),
    };
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::parameter(
            "stop",
            "'stop' has an empty string: it would end every answer at once",
        ));
    }
    if let Some(stop) = stops.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        return Err(ApiError::parameter(
            "stop",
            format!(
                "'stop' has a string of {} bytes: at most {MAX_STOP_BYTES} are accepted",
                stop.len()
            ),
        ));
    }
    Ok(stops)
}

fn read_logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(value) = fields.take("logit_bias") else {
        return Ok(Vec::new());
    };
    let Value::Object(map) = value else {
        return Err(wrong("logit_bias", &value, "an object of token id to bias"));
    };
    let mut biases = Vec::with_capacity(map.len());
    for (name, value) in map {
        let path = format!("logit_bias.{}", super::fields::clip(&name, 20));
        let Ok(token) = name.parse::<u32>() else {
            return Err(ApiError::parameter(
                path.clone(),
                format!("'{path}': {} is not a token id", show(&Value::String(name))),
            ));
        };
        match value
            .as_f64()
            .filter(|bias| (-100.0..=100.0).contains(bias))
        {
            Some(bias) => biases.push((token, bias as f32)),
            None => return Err(wrong(&path, &value, "a number from -100 to 100")),
        }
    }
    biases.sort_unstable_by_key(|(token, _)| *token);
    if let Some(twice) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let path = format!("logit_bias.{}", twice[0].0);
        return Err(ApiError::parameter(
            path.clone(),
            format!("'{path}' is given twice: give each token once"),
        ));
    }
    Ok(biases)
}
