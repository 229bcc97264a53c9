//! What the API server checks before CEL: unknown fields, missing fields, types, enums, lengths.
//!
//! It walks the same schema, so the rules are written once. Paths are those of the file (`spec.decode.maxBatch`).

use serde_json::{Map, Value};

use crate::error::FieldError;

/// Members of every object, which no schema lists.
const HEADER: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Every place where `value` does not have the shape of `schema`. `path` is the value's own path, empty at the root.
pub(crate) fn check(schema: &Value, value: &Value, path: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    walk(schema, value, path, &mut errors);
    errors
}

/// The value at a path such as `spec.model.adapters[0].name`.
pub(crate) fn lookup<'v>(root: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.')
        .filter(|part| !part.is_empty())
        .try_fold(root, |value, part| {
            let (key, indices) = part.split_once('[').unwrap_or((part, ""));
            let value = if key.is_empty() {
                value
            } else {
                value.get(key)?
            };
            indices
                .split('[')
                .filter_map(|index| index.strip_suffix(']'))
                .try_fold(value, |value, index| {
                    value.get(index.parse::<usize>().ok()?)
                })
        })
}

fn walk(schema: &Value, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let type_ = schema["type"].as_str().unwrap_or_default();
    let expected = match (type_, value) {
        (_, Value::Null) => {
            errors.push(FieldError::new(
                path,
                "has no value",
                "write a value after the colon, or remove the line",
            ));
            return;
        }
        ("object", Value::Object(object)) => return walk_object(schema, object, path, errors),
        ("array", Value::Array(items)) => {
            limit(
                schema,
                "maxItems",
                items.len(),
                "items",
                value,
                path,
                errors,
            );
            for (i, item) in items.iter().enumerate() {
                walk(&schema["items"], item, &format!("{path}[{i}]"), errors);
            }
            return;
        }
        ("string", Value::String(text)) => return walk_string(schema, text, value, path, errors),
        ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) | ("", _) => return,
        ("integer", Value::Number(number)) if number.is_i64() || number.is_u64() => return,
        ("object", _) => "write fields below it, indented by two blanks",
        ("array", _) => "write a list: one line a member, each beginning with \"- \"",
        ("string", _) => {
            "write a text; put it in quotes if it looks like a number or like yes, no, on, off"
        }
        ("boolean", _) => "write true or false",
        ("integer", _) => "write a whole number without quotes",
        _ => "write a number without quotes",
    };
    let remedy = match enum_words(schema) {
        Some(words) => {
            format!("write one of {words} (in quotes if it reads as a number or as on, off)")
        }
        None => expected.to_owned(),
    };
    errors.push(FieldError::new(
        path,
        FieldError::describe(Some(value)),
        remedy,
    ));
}

fn walk_object(
    schema: &Value,
    object: &Map<String, Value>,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    if let Some(required) = schema["required"].as_array() {
        for name in required
            .iter()
            .filter_map(Value::as_str)
            .filter(|name| !object.contains_key(*name))
        {
            let about = schema["properties"][name]["description"]
                .as_str()
                .unwrap_or("it is required");
            errors.push(FieldError::new(
                join(path, name),
                "is missing",
                format!("write it: {}", lower_first(about)),
            ));
        }
    }
    if schema["maxProperties"].is_number() {
        limit(
            schema,
            "maxProperties",
            object.len(),
            "members",
            &Value::Object(object.clone()),
            path,
            errors,
        );
    }
    let Some(properties) = schema["properties"].as_object() else {
        if schema["additionalProperties"].is_object() {
            for (name, value) in object {
                walk(
                    &schema["additionalProperties"],
                    value,
                    &join(path, name),
                    errors,
                );
            }
        }
        return;
    };
    for (name, value) in object {
        // The API server adds these three to every schema.
        if path.is_empty() && HEADER.contains(&name.as_str()) {
            continue;
        }
        match properties.get(name) {
            Some(property) => walk(property, value, &join(path, name), errors),
            None => errors.push(unknown(properties, name, path)),
        }
    }
}

fn walk_string(
    schema: &Value,
    text: &str,
    value: &Value,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let members = schema["enum"].as_array();
    if let Some(words) = enum_words(schema)
        && members
            .is_some_and(|members| !members.iter().any(|member| member.as_str() == Some(text)))
    {
        errors.push(FieldError::new(
            path,
            FieldError::describe(Some(value)),
            format!("write one of {words}"),
        ));
    }
    limit(
        schema,
        "maxLength",
        text.chars().count(),
        "characters",
        value,
        path,
        errors,
    );
}

fn limit(
    schema: &Value,
    keyword: &str,
    len: usize,
    unit: &str,
    value: &Value,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    if let Some(max) = schema[keyword].as_u64()
        && len as u64 > max
    {
        let problem = FieldError::describe(Some(value));
        errors.push(FieldError::new(
            path,
            problem,
            format!("write at most {max} {unit}"),
        ));
    }
}

fn enum_words(schema: &Value) -> Option<String> {
    let words: Vec<&str> = schema["enum"]
        .as_array()?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    Some(words.join(", "))
}

fn unknown(properties: &Map<String, Value>, name: &str, path: &str) -> FieldError {
    let parent = if path.is_empty() {
        "the file".to_owned()
    } else {
        path.to_owned()
    };
    let header = if path.is_empty() { &HEADER[..] } else { &[] };
    let names: Vec<&str> = header
        .iter()
        .copied()
        .chain(properties.keys().map(String::as_str))
        .collect();
    let closest = names
        .iter()
        .map(|known| {
            (
                edit_distance(&known.to_lowercase(), &name.to_lowercase()),
                *known,
            )
        })
        .min()
        .filter(|(distance, known)| *distance <= 2.min(known.len() / 2));
    let hint = closest
        .map(|(_, known)| format!("did you mean {known}? "))
        .unwrap_or_default();
    FieldError::new(
        join(path, name),
        format!("is not a field of {parent}"),
        format!("{hint}The fields are {}", names.join(", ")),
    )
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else {
        return String::new();
    };
    first
        .to_lowercase()
        .chain(chars)
        .collect::<String>()
        .trim_end_matches('.')
        .to_owned()
}

/// Levenshtein distance over characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        assert_eq!(edit_distance("maxbatch", "maxbatch"), 0);
        assert_eq!(edit_distance("maxbach", "maxbatch"), 1);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }

    #[test]
    fn lookup_follows_fields_and_indices() {
        let root = serde_json::json!({ "spec": { "list": [{ "name": "a" }, { "name": "b" }] } });
        assert_eq!(
            lookup(&root, "spec.list[1].name").and_then(Value::as_str),
            Some("b")
        );
        assert_eq!(lookup(&root, "spec.list[2].name"), None);
        assert_eq!(lookup(&root, ""), Some(&root));
    }
}
