//! `generation_config.json`: the sampling settings recommended by the model's authors.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::FormatError;
use crate::error::without_bom;
use crate::file::{MAX_CONFIG_BYTES, read_file};

const FILE: &str = "generation_config.json";

/// Default sampling parameters; `None` if the file does not set them. A request's own values take precedence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end an answer, in addition to those in config.json; empty if none are named.
    pub eos_token_ids: Vec<u32>,
    /// `Some(false)` means greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    /// Temperature, 0 or more.
    pub temperature: Option<f32>,
    /// Nucleus sampling threshold, in (0, 1].
    pub top_p: Option<f32>,
    /// Number of most likely tokens to keep; `None` if the file says 0 or -1 (no limit).
    pub top_k: Option<u32>,
    /// Smallest probability, relative to the most likely token's.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens that already occurred; positive.
    pub repetition_penalty: Option<f32>,
    /// Largest number of tokens to generate.
    pub max_new_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Raw {
    eos_token_id: Option<Value>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    max_new_tokens: Option<u32>,
}

impl GenerationConfig {
    /// Reads `dir/generation_config.json`; `None` if the file does not exist.
    ///
    /// # Errors
    /// [`FormatError::Io`], [`FormatError::TooLarge`], [`FormatError::Malformed`] (not JSON, or a value of the wrong
    /// type or out of range).
    pub fn read(dir: &Path) -> Result<Option<Self>, FormatError> {
        let path = dir.join(FILE);
        let remedy = "make the file readable for this user.";
        match read_file(&path, MAX_CONFIG_BYTES, remedy) {
            Ok(json) => Self::parse(&json).map(Some),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Parses the content of a generation_config.json.
    ///
    /// # Errors
    /// [`FormatError::Malformed`].
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let raw: Raw = serde_json::from_slice(without_bom(json))
            .map_err(|e| bad(format!("is not valid: {e}")))?;
        let config = Self {
            eos_token_ids: eos_token_ids(raw.eos_token_id)?,
            do_sample: raw.do_sample,
            temperature: raw.temperature,
            top_p: raw.top_p,
            top_k: top_k(raw.top_k)?,
            min_p: raw.min_p,
            repetition_penalty: raw.repetition_penalty,
            max_new_tokens: raw.max_new_tokens,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), FormatError> {
        let ranges = [
            ("temperature", self.temperature, 0.0..=f32::MAX, "0 or more"),
            (
                "top_p",
                self.top_p,
                f32::MIN_POSITIVE..=1.0,
                "more than 0, at most 1",
            ),
            ("min_p", self.min_p, 0.0..=1.0, "between 0 and 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                f32::MIN_POSITIVE..=f32::MAX,
                "positive",
            ),
        ];
        for (field, value, range, want) in ranges {
            if let Some(value) = value.filter(|v| !range.contains(v)) {
                return Err(bad(format!("has {field} {value}; it must be {want}")));
            }
        }
        Ok(())
    }
}

fn top_k(value: Option<i64>) -> Result<Option<u32>, FormatError> {
    match value {
        None | Some(-1 | 0) => Ok(None),
        Some(k) => match u32::try_from(k) {
            Ok(k) => Ok(Some(k)),
            Err(_) => Err(bad(format!(
                "has top_k {k}; it must be 1 or more, or 0 for no limit"
            ))),
        },
    }
}

fn eos_token_ids(value: Option<Value>) -> Result<Vec<u32>, FormatError> {
    let ids = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(ids)) => ids,
        Some(id) => vec![id],
    };
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    ids.iter()
        .map(|v| {
            id(v).ok_or_else(|| {
                bad(format!(
                    "has eos_token_id {v}; it must be a token id or a list of them"
                ))
            })
        })
        .collect()
}

fn bad(problem: String) -> FormatError {
    FormatError::malformed(
        FILE,
        problem,
        "correct the value, or delete the file: it holds only defaults.",
    )
}
