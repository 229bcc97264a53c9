//! Checks that the API server makes before CEL: unknown fields, missing fields, types, enums, lengths.
//!
//! It walks the same schema, so rules are written only once. Paths are those of the file (`spec.decode.maxBatch`).

use serde_json::{Map, Value};

use crate::error::FieldError;
use crate::meant;
use crate::offer::{Offer, join};

/// Members of every object that no schema lists.
const HEADER: [&str; 3] = ["apiVersion", "kind", "metadata"];
/// Members of `metadata` that people write.
const METADATA: [&str; 4] = ["annotations", "labels", "name", "namespace"];
/// Its other members, which the API server and its clients write (Kubernetes 1.34).
const METADATA_OF_SERVER: [&str; 11] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Returns an error for every place where `value`, a whole object, does not match `schema`. Remedies name only what is
/// in `offer`.
pub(crate) fn check(schema: &Value, value: &Value, offer: Offer) -> Vec<FieldError> {
    let mut walk = Walk {
        offer,
        errors: Vec::new(),
    };
    walk.value(schema, value, "");
    walk.errors
}

/// Returns the schema at a path such as `spec.model.adapters[0].name`.
pub(crate) fn schema_at<'s>(root: &'s Value, path: &str) -> &'s Value {
    path.split('.')
        .filter(|part| !part.is_empty())
        .fold(root, |schema, part| match part.split_once('[') {
            Some((name, _)) => &schema["properties"][name]["items"],
            None => &schema["properties"][part],
        })
}

/// Returns the value at a path such as `spec.model.adapters[0].name`.
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

struct Walk {
    offer: Offer,
    errors: Vec<FieldError>,
}

impl Walk {
    fn complain(&mut self, path: impl Into<String>, problem: impl Into<String>, remedy: String) {
        self.errors.push(FieldError::new(path, problem, remedy));
    }

    fn value(&mut self, schema: &Value, value: &Value, path: &str) {
        let type_ = schema["type"].as_str().unwrap_or_default();
        let expected = match (type_, value) {
            (_, Value::Null) => {
                let remedy = "write a value after the colon, or remove the line".to_owned();
                return self.complain(path, "has no value", remedy);
            }
            ("object", Value::Object(object)) => return self.object(schema, object, path),
            ("array", Value::Array(items)) => {
                self.limit(schema, "maxItems", (items.len(), "items"), value, path);
                for (i, item) in items.iter().enumerate() {
                    self.value(&schema["items"], item, &format!("{path}[{i}]"));
                }
                return;
            }
            ("string", Value::String(text)) => return self.text(schema, text, value, path),
            ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) | ("", _) => return,
            ("integer", Value::Number(number)) if number.is_i64() || number.is_u64() => return,
            ("object", _) => "write fields below it, indented by two spaces",
            ("array", _) => "write a list: one line a member, each beginning with \"- \"",
            // A string's rule has a more specific message than its type: `write an amount of memory …`.
            ("string", _) => schema["x-kubernetes-validations"][0]["message"].as_str().unwrap_or(
                "write a string; put it in quotes if it looks like a number or like yes, no, on, off",
            ),
            ("boolean", _) => "write true or false",
            ("integer", Value::String(text)) if text.parse::<i64>().is_ok() => {
                "write a whole number without quotes"
            }
            ("integer", _) => "write a whole number",
            (_, Value::String(text)) if text.parse::<f64>().is_ok() => {
                "write a number without quotes"
            }
            _ => "write a number",
        };
        let remedy = match self.offer.values(schema, path) {
            Some(words) if value.is_object() => {
                let key = path.rsplit('.').next().unwrap_or(path);
                let mut list = words.split(", ");
                // Other APIs write a choice as an object: `strategy: {type: Hybrid}`.
                let meant = value.as_object().and_then(|object| {
                    let mut texts = object.values().filter_map(Value::as_str);
                    texts.find(|text| list.clone().any(|word| word == *text))
                });
                let word = meant.or_else(|| list.next()).unwrap_or_default();
                format!("it takes one word, one of {words}: write {key}: {word}")
            }
            Some(words) => {
                let choice = one_of(&words);
                format!("{choice} (in quotes if it reads as a number or as on, off)")
            }
            None => meant::with_quantity(schema, Some(value), expected.to_owned()),
        };
        self.complain(path, FieldError::describe(Some(value)), remedy);
    }

    fn object(&mut self, schema: &Value, object: &Map<String, Value>, path: &str) {
        if let Some(required) = schema["required"].as_array() {
            for name in required
                .iter()
                .filter_map(Value::as_str)
                .filter(|name| !object.contains_key(*name))
            {
                let (property, path) = (&schema["properties"][name], join(path, name));
                let about = property["description"].as_str();
                let about = self
                    .offer
                    .narrow(about.unwrap_or("it is required"), property, &path);
                let remedy = format!("write it: {}", lower_first(&about));
                self.complain(path, "is missing", remedy);
            }
        }
        if schema["maxProperties"].is_number() {
            let value = Value::Object(object.clone());
            let size = (object.len(), "members");
            self.limit(schema, "maxProperties", size, &value, path);
        }
        let Some(properties) = schema["properties"].as_object() else {
            if schema["additionalProperties"].is_object() {
                for (name, value) in object {
                    self.value(&schema["additionalProperties"], value, &join(path, name));
                }
            }
            return;
        };
        for (name, value) in object {
            // The API server adds these three to every schema.
            if path.is_empty() && HEADER.contains(&name.as_str()) {
                if name == "metadata" {
                    self.metadata(value);
                }
                continue;
            }
            match properties.get(name) {
                Some(property) => self.value(property, value, &join(path, name)),
                None => self.unknown(properties, name, path),
            }
        }
    }

    /// Refuses members of `metadata` that no object has.
    fn metadata(&mut self, value: &Value) {
        let names = value.as_object().into_iter().flat_map(Map::keys);
        for name in names.map(String::as_str) {
            if !METADATA.contains(&name) && !METADATA_OF_SERVER.contains(&name) {
                let remedy = one_of_fields(&METADATA, name);
                self.complain(join("metadata", name), "is not a field of metadata", remedy);
            }
        }
    }

    fn text(&mut self, schema: &Value, text: &str, value: &Value, path: &str) {
        let members = schema["enum"].as_array();
        let is_member =
            |members: &Vec<Value>| members.iter().any(|member| member.as_str() == Some(text));
        if members.is_some_and(|members| !is_member(members))
            && let Some(words) = self.offer.values(schema, path)
        {
            let problem = FieldError::describe(Some(value));
            let known: Vec<&str> = words.split(", ").collect();
            let remedy = meant::with_name(&known, text, one_of(&words));
            self.complain(path, problem, remedy);
        }
        let size = (text.chars().count(), "characters");
        self.limit(schema, "maxLength", size, value, path);
    }

    /// Refuses a value with more items (or characters …) than the schema's `keyword` allows.
    fn limit(
        &mut self,
        schema: &Value,
        keyword: &str,
        (len, unit): (usize, &str),
        value: &Value,
        path: &str,
    ) {
        if let Some(max) = schema[keyword].as_u64()
            && len as u64 > max
        {
            let problem = FieldError::describe(Some(value));
            self.complain(path, problem, format!("write at most {max} {unit}"));
        }
    }

    fn unknown(&mut self, properties: &Map<String, Value>, name: &str, path: &str) {
        let (parent, header) = match path {
            "" => ("the file", &HEADER[..]),
            path => (path, &[][..]),
        };
        let fields = self.offer.fields(properties, path);
        let names: Vec<&str> = header.iter().copied().chain(fields).collect();
        let all: Vec<&str> = properties.keys().map(String::as_str).collect();
        let is_here = names.is_empty() || meant::closest(&names, name).is_some();
        let remedy = match meant::closest(&all, name).filter(|_| !is_here) {
            Some(meant) => {
                format!("did you mean {meant}? It is not available here: remove it")
            }
            None if names.is_empty() => format!("remove it: {path} applies only in a cluster"),
            None => one_of_fields(&names, name),
        };
        let problem = format!("is not a field of {parent}");
        self.complain(join(path, name), problem, remedy);
    }
}

/// Tells which fields there are, the one that `name` resembles first.
fn one_of_fields(fields: &[&str], name: &str) -> String {
    let all = format!("The fields are {}", fields.join(", "));
    meant::with_name(fields, name, all)
}

/// Tells which words may be written, of a list separated by commas.
fn one_of(words: &str) -> String {
    match words.contains(',') {
        true => format!("write one of {words}"),
        false => format!("write {words}"),
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

#[cfg(test)]
mod tests {
    use super::*;

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
