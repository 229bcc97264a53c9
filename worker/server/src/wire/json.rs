//! JSON text to a value. A name that an object has twice is refused, where a plain reader would keep the last one and
//! drop the others in silence.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::fields::clip;
use crate::error::ApiError;

/// Longest path that is shown.
const PATH_CHARS: usize = 120;

/// Reads one JSON text.
///
/// # Errors
/// 400 with the position of what is no JSON, or with the path of what is given twice.
pub(super) fn read(text: &str) -> Result<Value, ApiError> {
    let twice = RefCell::new(None);
    let place = Place {
        path: &Path::Root,
        twice: &twice,
    };
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = place
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| match twice.into_inner() {
        Some(path) => ApiError::parameter(
            path.clone(),
            format!("'{path}' is given twice: give it once, since only one of them could count"),
        )
        .with_code("duplicate_parameter"),
        None => syntax(&error),
    })
}

fn syntax(error: &serde_json::Error) -> ApiError {
    // serde_json ends its own words with the position; it stands once, in front.
    let words = error.to_string();
    let words = words.split(" at line ").next().unwrap_or_default();
    ApiError::invalid(format!(
        "the request body is not JSON: line {}, column {}: {words}",
        error.line(),
        error.column()
    ))
    .with_code("invalid_json")
}

/// Where a value stands; made into text only for an error.
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

/// Reads the value at a path; the first path that comes twice is left in `twice`.
#[derive(Clone, Copy)]
struct Place<'p> {
    path: &'p Path<'p>,
    twice: &'p RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Place<'_> {
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
            match elements.next_element_seed(Place { path, ..self })? {
                Some(value) => array.push(value),
                None => return Ok(Value::Array(array)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            let path = &Path::Member(self.path, &name);
            if object.contains_key(&name) {
                *self.twice.borrow_mut() = Some(clip(&path.to_string(), PATH_CHARS));
                return Err(A::Error::custom("a member is given twice"));
            }
            let value = members.next_value_seed(Place { path, ..self })?;
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
        let deep = "[".repeat(200);
        assert!(
            read(&deep)
                .unwrap_err()
                .message
                .contains("recursion limit exceeded")
        );
    }
}
