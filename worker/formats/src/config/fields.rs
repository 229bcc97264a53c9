//! Typed access to the fields of a JSON object; errors name the field, its value and a remedy.

use serde_json::{Map, Value};

use crate::FormatError;
use crate::error::thousands;

pub(super) const MAX_LAYERS: usize = 4096;
pub(super) const MAX_WIDTH: usize = 1 << 20;
pub(super) const MAX_VOCABULARY: usize = 1 << 24;
pub(super) const MAX_HEADS: usize = 1 << 14;
pub(super) const MAX_HEAD_DIM: usize = 1 << 14;
pub(super) const MAX_EXPERTS: usize = 1 << 16;
/// Positions are u32, and half of their range exceeds any model's context.
pub(super) const MAX_POSITIONS: usize = 1 << 31;

const DOWNLOAD_AGAIN: &str = "the file is damaged or not of this architecture; download it again.";

/// A JSON object and its path.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(super) fn root(object: &'a Map<String, Value>) -> Self {
        Self {
            object,
            path: String::new(),
        }
    }

    /// Returns a nested object; `None` if absent or null.
    pub(super) fn nested(&self, field: &str) -> Result<Option<Fields<'a>>, FormatError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Fields {
                object,
                path: format!("{}{field}.", self.path),
            })),
            Some(other) => Err(self.wrong_type(field, other, "an object")),
        }
    }

    pub(super) fn error(
        &self,
        field: &str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> FormatError {
        FormatError::Config {
            field: format!("{}{field}", self.path),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Returns the value of a field; null counts as absent, as in transformers.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    /// Whether the field is present, even if it is null.
    pub(super) fn is_written(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.object.is_empty()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    /// Reads a dimension or count between 1 and `limit`.
    pub(super) fn size(&self, field: &str, limit: usize) -> Result<usize, FormatError> {
        self.optional_size(field, limit)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn size_or(
        &self,
        field: &str,
        limit: usize,
        default: usize,
    ) -> Result<usize, FormatError> {
        Ok(self.optional_size(field, limit)?.unwrap_or(default))
    }

    pub(super) fn optional_size(
        &self,
        field: &str,
        limit: usize,
    ) -> Result<Option<usize>, FormatError> {
        let Some(size) = self.optional_count(field, limit)? else {
            return Ok(None);
        };
        if size == 0 {
            return Err(self.error(
                field,
                "is 0",
                format!("it must be at least 1. {DOWNLOAD_AGAIN}"),
            ));
        }
        Ok(Some(size))
    }

    /// Same as [`Fields::optional_size`], but allows 0.
    pub(super) fn optional_count(
        &self,
        field: &str,
        limit: usize,
    ) -> Result<Option<usize>, FormatError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(n) if n <= limit as u64 => Ok(Some(n as usize)),
            Some(n) => Err(self.error(
                field,
                format!("is {}, more than {}", thousands(n), thousands(limit as u64)),
                "no such model is known; check the file.",
            )),
            None => Err(self.wrong_type(field, value, "a whole number, 0 or more")),
        }
    }

    pub(super) fn bool_or(&self, field: &str, default: bool) -> Result<bool, FormatError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.wrong_type(field, other, "true or false")),
        }
    }

    pub(super) fn string(&self, field: &str) -> Result<&'a str, FormatError> {
        self.optional_string(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn optional_string(&self, field: &str) -> Result<Option<&'a str>, FormatError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong_type(field, other, "a string")),
        }
    }

    pub(super) fn float(&self, field: &str) -> Result<f32, FormatError> {
        self.optional_float(field)?
            .ok_or_else(|| self.missing(field))
    }

    pub(super) fn float_or(&self, field: &str, default: f32) -> Result<f32, FormatError> {
        Ok(self.optional_float(field)?.unwrap_or(default))
    }

    pub(super) fn optional_float(&self, field: &str) -> Result<Option<f32>, FormatError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        let number = value.as_f64().map(|n| n as f32).filter(|n| n.is_finite());
        match number {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong_type(field, value, "a number")),
        }
    }

    /// Reads a token id or a list of them; empty if absent.
    pub(super) fn token_ids(&self, field: &str) -> Result<Vec<u32>, FormatError> {
        let one = |value: &Value| {
            let id = value.as_u64().and_then(|n| u32::try_from(n).ok());
            id.ok_or_else(|| self.wrong_type(field, value, "a token id or a list of them"))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    pub(super) fn sizes(&self, field: &str) -> Result<Option<Vec<usize>>, FormatError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        let sizes = value.as_array().and_then(|list| {
            list.iter()
                .map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
                .collect()
        });
        match sizes {
            Some(sizes) => Ok(Some(sizes)),
            None => Err(self.wrong_type(field, value, "a list of whole numbers")),
        }
    }

    /// Rejects every value except those given; the field may be absent.
    pub(super) fn expect_or_absent(
        &self,
        field: &str,
        allowed: &[&str],
    ) -> Result<(), FormatError> {
        match self.optional_string(field)? {
            Some(value) if !allowed.contains(&value) => Err(self.error(
                field,
                format!("is {value:?}, which is not supported"),
                format!("supported: {}", allowed.join(", ")),
            )),
            _ => Ok(()),
        }
    }

    /// Rejects `true`.
    pub(super) fn refuse_flag(&self, field: &str, remedy: &str) -> Result<(), FormatError> {
        if self.bool_or(field, false)? {
            return Err(self.error(field, "is true, which is not supported", remedy));
        }
        Ok(())
    }

    pub(super) fn missing(&self, field: &str) -> FormatError {
        self.error(field, "is missing", DOWNLOAD_AGAIN)
    }

    fn wrong_type(&self, field: &str, value: &Value, want: &str) -> FormatError {
        let mut shown = value.to_string();
        if shown.chars().count() > 60 {
            shown = shown.chars().take(57).collect::<String>() + "...";
        }
        self.error(field, format!("is {shown}, not {want}"), DOWNLOAD_AGAIN)
    }
}
