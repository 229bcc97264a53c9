//! Errors about fields: the field, what is wrong with it, and what to write instead.

use std::fmt;

/// A field of a spec that cannot be accepted.
///
/// Displays as two lines, the second indented by two spaces:
///
/// ```text
/// spec.decode.maxBatch is 0
///   at least 1 stream must be able to decode; the default is 6
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// JSON path from the root of the file, such as `spec.decode.maxBatch` or `spec.model.adapters[0].name`.
    pub field: String,
    /// The problem, with the value: `is 0`, `is missing`, `sets builtin and hostPath`.
    pub problem: String,
    /// The remedy: what to write instead, and why.
    pub remedy: String,
}

impl FieldError {
    /// Creates an error about `field`.
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

    /// Describes the JSON value of a field: scalars as written, objects by the keys they set.
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
            Some(Value::Array(items)) => format!("is a list of {}", counted(items.len(), "item")),
            // A URL's password or signature must not end up in logs and status.
            Some(Value::String(text))
                if text.contains("://") && crate::shown_url(text) != *text =>
            {
                Self::describe(Some(&Value::String(crate::shown_url(text))))
            }
            Some(Value::String(text)) if text.chars().count() > 80 => {
                let head: String = text.chars().take(60).collect();
                format!("is {head:?}… ({} characters)", text.chars().count())
            }
            Some(scalar) => format!("is {scalar}"),
        }
    }
}

/// `1 item`, `2 items`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}

/// Combines an error and its innermost cause into one message: what happened, why, and the remedy on further lines. A
/// cause that the message already contains is not repeated.
pub fn sentence(message: &str, cause: &str) -> String {
    if message.contains(cause) {
        return message.to_owned();
    }
    match message.split_once('\n') {
        Some((what, remedy)) => format!("{what}: {cause}\n{remedy}"),
        None => format!("{message}: {cause}"),
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}\n  {}", self.field, self.problem, self.remedy)
    }
}

impl std::error::Error for FieldError {}

#[cfg(test)]
mod tests {
    use super::sentence;

    #[test]
    fn the_cause_stands_behind_what_happened() {
        assert_eq!(
            sentence("a.yaml cannot be read\n  name another", "no such file"),
            "a.yaml cannot be read: no such file\n  name another"
        );
        assert_eq!(sentence("it broke", "no power"), "it broke: no power");
        assert_eq!(
            sentence("no power: it broke", "no power"),
            "no power: it broke"
        );
    }
}
