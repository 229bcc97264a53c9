//! Parses JSON text into a value. A name that occurs twice in an object is refused, where a plain parser would
//! silently keep only the last one.

use std::cell::{Cell, RefCell};
use std::fmt;

use http::StatusCode;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::fields::clip;
use crate::error::{ApiError, ErrorType};

/// Maximum number of characters of a path that are shown.
const PATH_CHARS: usize = 120;

/// Maximum memory for the values of one text, besides their strings: many small ones take a hundred times what they
/// take as text.
const VALUES_BYTES: usize = 32 << 20;
/// Approximate bytes of an element of an array, of a member of an object, and of an object itself.
const ELEMENT_BYTES: usize = 80;
const MEMBER_BYTES: usize = 160;
const OBJECT_BYTES: usize = 160;

/// Reads one JSON text.
///
/// # Errors
/// 400 with the position of what is not JSON, or with the path of a name that occurs twice; 413 for too many values.
pub(super) fn read(text: &str) -> Result<Value, ApiError> {
    let twice = RefCell::new(None);
    let left_bytes = Cell::new(Some(VALUES_BYTES));
    let place = ValueSeed {
        path: &Path::Root,
        twice: &twice,
        left_bytes: &left_bytes,
    };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = place
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| match twice.into_inner() {
        _ if left_bytes.get().is_none() => too_many(&error),
        Some(path) => ApiError::parameter(
            path.clone(),
            format!("'{path}' is given twice: give it once, since only one of them could count"),
        )
        .with_code("duplicate_parameter"),
        None => syntax(text, &error),
    })
}

fn too_many(error: &serde_json::Error) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        ErrorType::InvalidRequest,
        format!(
            "the request body has too many values, at line {}, column {}: {} MiB of memory are taken for them, about {} elements of arrays or {} objects of two members. Send fewer",
            error.line(),
            error.column(),
            VALUES_BYTES >> 20,
            VALUES_BYTES / ELEMENT_BYTES,
            VALUES_BYTES / (ELEMENT_BYTES + OBJECT_BYTES + 2 * MEMBER_BYTES),
        ),
    )
    .with_code("too_many_values")
}

fn syntax(text: &str, error: &serde_json::Error) -> ApiError {
    // serde_json ends its message with the position; here it is given once, in front.
    let words = error.to_string();
    let mut words = words
        .split(" at line ")
        .next()
        .unwrap_or_default()
        .to_owned();
    if let Some(half) = half_a_pair(text, error) {
        words = format!(
            "{half} is half of a surrogate pair and stands for no character by itself: write both halves, or the character in UTF-8"
        );
    }
    ApiError::invalid(format!(
        "the request body is not JSON: line {}, column {}: {words}",
        error.line(),
        error.column()
    ))
    .with_code("invalid_json")
}

/// Finds the escape at which parsing ended, if it is a surrogate without its other half: `\ud83d`.
fn half_a_pair<'t>(text: &'t str, error: &serde_json::Error) -> Option<&'t str> {
    const ESCAPE_BYTES: usize = 6;
    let line = text.split('\n').nth(error.line().checked_sub(1)?)?;
    let end = error.column().min(line.len());
    // The error is reported at the end of the escape, or of the one after it.
    let start = end.saturating_sub(2 * ESCAPE_BYTES + 1);
    let mut escapes = (start..end).filter_map(|at| line.get(at..at + ESCAPE_BYTES));
    let is_surrogate = |escape: &&str| {
        let code = escape
            .strip_prefix("\\u")
            .map(|hex| u16::from_str_radix(hex, 16));
        matches!(code, Some(Ok(0xd800..=0xdfff)))
    };
    escapes.find(is_surrogate)
}

/// Path of a value; rendered as text only for an error.
enum Path<'p> {
    Root,
    Member(&'p Path<'p>, &'p str),
    Element(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Member(Self::Root, name) => f.write_str(name),
            Self::Member(parent, name) => write!(f, "{parent}.{name}"),
            Self::Element(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// Reads the value at a path; leaves the first path that occurs twice in `twice`.
#[derive(Clone, Copy)]
struct ValueSeed<'p> {
    path: &'p Path<'p>,
    twice: &'p RefCell<Option<String>>,
    /// Memory left; `None` once it is spent.
    left_bytes: &'p Cell<Option<usize>>,
}

impl ValueSeed<'_> {
    /// Accounts for the memory of a value.
    fn spend<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self
            .left_bytes
            .get()
            .and_then(|left| left.checked_sub(bytes));
        self.left_bytes.set(left);
        match left {
            Some(_) => Ok(()),
            None => Err(E::custom("too many values")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        loop {
            let path = &Path::Element(self.path, array.len());
            self.spend(ELEMENT_BYTES)?;
            match elements.next_element_seed(ValueSeed { path, ..self })? {
                Some(value) => array.push(value),
                None => return Ok(Value::Array(array)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        self.spend(OBJECT_BYTES)?;
        while let Some(name) = members.next_key::<String>()? {
            let path = &Path::Member(self.path, &name);
            self.spend(MEMBER_BYTES)?;
            if object.contains_key(&name) {
                *self.twice.borrow_mut() = Some(clip(&path.to_string(), PATH_CHARS));
                return Err(A::Error::custom("a member is given twice"));
            }
            let value = members.next_value_seed(ValueSeed { path, ..self })?;
            object.insert(name, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_plain_reader_reads() {
        for text in [
            r#"{"b": [1, -2, 0.5, 1e300, 18446744073709551615], "a": {"x": null, "y": true, "z": "é\n"}}"#,
            "[]",
            "\"text\"",
            " 7 ",
        ] {
            let plain: Value = serde_json::from_str(text).unwrap();
            assert_eq!(read(text).unwrap(), plain, "{text}");
            assert_eq!(read(text).unwrap().to_string(), plain.to_string());
        }
    }

    #[test]
    fn a_member_that_comes_twice_is_named_wherever_it_is() {
        for (text, path) in [
            (r#"{"model": "a", "n": 1, "model": "b"}"#, "model"),
            (r#"{"a": 1, "a": 1}"#, "a"),
            (
                r#"{"messages": [{"role": "user"}, {"content": "x", "role": "user", "content": "y"}]}"#,
                "messages[1].content",
            ),
            (
                r#"{"tools": [{"function": {"parameters": {"properties": {"x": {}, "x": {}}}}}]}"#,
                "tools[0].function.parameters.properties.x",
            ),
            (r#"[[{"a": 1, "a": 2}]]"#, "[0][0].a"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{text}");
            assert_eq!(
                error.message,
                format!(
                    "'{path}' is given twice: give it once, since only one of them could count"
                )
            );
            assert_eq!(error.code.as_deref(), Some("duplicate_parameter"));
        }
        assert!(read(r#"{"a": {"x": 1}, "b": {"x": 2}}"#).is_ok());
    }

    #[test]
    fn more_values_than_memory_is_taken_for_are_refused() {
        let many = format!("[{}0]", "0,".repeat(400_000));
        assert!(read(&many).is_ok());
        for text in [
            format!("[{}0]", "0,".repeat(4 << 20)),
            format!("[{}0]", "{\"a\":0},".repeat(900_000)),
            format!("[{}0]", "[],".repeat(2_000_000)),
        ] {
            let error = read(&text).unwrap_err();
            assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
            assert_eq!(error.code.as_deref(), Some("too_many_values"));
        }
    }

    #[test]
    fn what_is_no_json_is_told_with_its_place() {
        for (text, words) in [
            ("{\"a\": 1,}", "line 1, column 9: trailing comma"),
            ("{\"a\": 1} x", "line 1, column 10: trailing characters"),
            ("{\n\"a\": }", "line 2, column 6: expected value"),
            ("{\"a\": 1e999}", "number out of range"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message.contains(words), "{}", error.message);
            assert_eq!(error.code.as_deref(), Some("invalid_json"));
        }
        for (text, words) in [
            (r#"{"a": "x\ud83d"}"#, r"line 1, column 15: \ud83d is half"),
            (
                r#"{"a": "x\ud83d y"}"#,
                r"\ud83d is half of a surrogate pair",
            ),
            (r#"{"a": "\ud83d\n"}"#, r"\ud83d is half"),
            (r#"{"a": "\uD83D\u0041"}"#, r"\uD83D is half"),
            (r#"{"a": "\ude00x"}"#, r"\ude00 is half"),
            (r#"["\u00e9", "\ud83d\ude00", "\uDE00"]"#, r"\uDE00 is half"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message.contains(words), "{text}: {}", error.message);
        }
        let deep = "[".repeat(200);
        assert!(
            read(&deep)
                .unwrap_err()
                .message
                .contains("recursion limit exceeded")
        );
    }
}
