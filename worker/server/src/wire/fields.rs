//! Reader of a JSON object by name, so that nothing in it is silently ignored.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Members of one JSON object that have not been read yet. A member that is `null` counts as absent, as client
/// libraries send it. [`Fields::finish`] refuses members that were not read.
#[derive(Debug)]
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    /// Takes the members of `value`, which must be an object. `path` is empty for the request itself.
    pub(crate) fn new(value: Value, path: impl Into<String>) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self {
                path,
                map,
                known: Vec::new(),
            }),
            other if path.is_empty() => Err(ApiError::invalid(format!(
                "the request body is {}: it must be a JSON object",
                kind_of(&other)
            ))
            .with_code("invalid_json")),
            other => Err(wrong(&path, &other, "an object")),
        }
    }

    /// Path of a member, for messages and `param`.
    pub(crate) fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// Takes a member; `null` counts as absent.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        // `swap_remove` is O(1); the order of what is left does not matter here.
        self.map.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Takes a required member.
    pub(crate) fn require(&mut self, name: &'static str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| {
            let path = self.path_of(name);
            ApiError::parameter(path.clone(), format!("'{path}' is missing"))
                .with_code("missing_required_parameter")
        })
    }

    /// Takes a boolean.
    pub(crate) fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(&self.path_of(name), &other, "true or false")),
        }
    }

    /// Takes a string.
    pub(crate) fn string(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(&self.path_of(name), &other, "a string")),
        }
    }

    /// Takes a required string.
    pub(crate) fn required_string(&mut self, name: &'static str) -> Result<String, ApiError> {
        match self.require(name)? {
            Value::String(value) => Ok(value),
            other => Err(wrong(&self.path_of(name), &other, "a string")),
        }
    }

    /// Takes a number within `range`.
    pub(crate) fn number(
        &mut self,
        name: &'static str,
        range: std::ops::RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let words = format!("a number from {} to {}", range.start(), range.end());
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(wrong(&self.path_of(name), &value, &words)),
        }
    }

    /// Takes a whole number within `range`. `5.0` is taken as 5, as JSON has one kind of number.
    pub(crate) fn integer(
        &mut self,
        name: &'static str,
        range: std::ops::RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let words = if *range.end() >= i64::from(u32::MAX) {
            format!("a whole number of at least {}", range.start())
        } else {
            format!("a whole number from {} to {}", range.start(), range.end())
        };
        match whole(&value).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(&self.path_of(name), &value, &words)),
        }
    }

    /// Takes an object's members.
    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<Fields>, ApiError> {
        let path = self.path_of(name);
        self.take(name)
            .map(|value| Fields::new(value, path))
            .transpose()
    }

    /// Takes an array's elements.
    pub(crate) fn array(&mut self, name: &'static str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.path_of(name), &other, "an array")),
        }
    }

    /// Refuses an OpenAI API parameter that Hearth does not have, unless its value asks for nothing.
    pub(crate) fn refuse(
        &mut self,
        name: &'static str,
        asks_nothing: impl Fn(&Value) -> bool,
        reason: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !asks_nothing(&value) => {
                let path = self.path_of(name);
                Err(ApiError::parameter(
                    path.clone(),
                    format!("'{path}' is not supported: {reason}"),
                )
                .with_code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what is left by its name, with the nearest known name.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        let Some(name) = self.map.keys().next() else {
            return Ok(());
        };
        let path = self.path_of(name);
        let nearest = self
            .known
            .iter()
            .map(|known| (distance(name, known), *known))
            .min()
            .filter(|(distance, _)| *distance <= 2);
        let shown = clip(&path, 80);
        let message = match nearest {
            Some((_, known)) => format!(
                "unknown parameter '{shown}': did you mean '{}'?",
                self.path_of(known)
            ),
            None => format!("unknown parameter '{shown}': remove it, Hearth has no such parameter"),
        };
        Err(ApiError::parameter(shown, message).with_code("unknown_parameter"))
    }
}

/// Returns a 400 that names the member, its value and what it must be.
pub(crate) fn wrong(path: &str, value: &Value, must_be: &str) -> ApiError {
    ApiError::parameter(
        path,
        format!("'{path}' is {}: it must be {must_be}", show(value)),
    )
}

/// Formats a value for a message: short, with its kind if the text alone does not show it.
pub(crate) fn show(value: &Value) -> String {
    match value {
        Value::String(_) | Value::Number(_) | Value::Bool(_) | Value::Null => {
            clip(&value.to_string(), 60)
        }
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// Returns the first `limit` characters, with an ellipsis if some are left out.
pub(crate) fn clip(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Reads a whole number, even if it is written as `5.0`.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() < 9.0e15)
            .map(|number| number as i64)
    })
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Levenshtein distance, cut off for long names, which have no near neighbour anyway.
fn distance(left: &str, right: &str) -> usize {
    let (left, right): (Vec<char>, Vec<char>) =
        (left.chars().take(40).collect(), right.chars().collect());
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let next = (diagonal + usize::from(a != b))
                .min(row[j] + 1)
                .min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[right.len()]
}
