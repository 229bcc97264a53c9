//! One shape for every complaint about a field: which field, what is wrong with it, what to write instead.

use std::fmt;

/// A field of a spec that cannot be accepted.
///
/// Displays as two lines, the second indented by two blanks:
///
/// ```text
/// spec.decode.maxBatch is 0
///   at least 1 stream must be able to decode; the default is 6
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// JSON path from the root of the file, such as `spec.decode.maxBatch` or `spec.model.adapters[0].name`.
    pub field: String,
    /// What is wrong with it, with the value: `is 0`, `is missing`, `sets builtin and hostPath`.
    pub problem: String,
    /// What to write instead, and why.
    pub remedy: String,
}

impl FieldError {
    /// A complaint about `field`.
    pub fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// The words for a JSON value at a field: scalars are quoted as they stand, objects name the keys that they set.
    pub fn describe(value: Option<&serde_json::Value>) -> String {
        use serde_json::Value;
        match value {
            None | Some(Value::Null) => "is missing".to_owned(),
            Some(Value::Object(map)) if map.is_empty() => "is empty".to_owned(),
            Some(Value::Object(map)) => {
                let keys: Vec<&str> = map.keys().map(String::as_str).collect();
                match keys.split_last() {
                    Some((last, rest)) if !rest.is_empty() => {
                        format!("sets {} and {last}", rest.join(", "))
                    }
                    _ => format!("sets {}", keys.join(", ")),
                }
            }
            Some(Value::Array(items)) => format!("has {} items", items.len()),
            Some(Value::String(text)) if text.chars().count() > 80 => {
                let head: String = text.chars().take(60).collect();
                format!("is {head:?}… ({} characters)", text.chars().count())
            }
            Some(scalar) => format!("is {scalar}"),
        }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}\n  {}", self.field, self.problem, self.remedy)
    }
}

impl std::error::Error for FieldError {}
