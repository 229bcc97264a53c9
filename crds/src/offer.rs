//! Values and fields that a message may suggest. Suggesting one that the target refuses helps nobody, so each is tried
//! against its own rules and with [`unsupported`] in a spec that sets little else; there is no second list of what the
//! engine supports.

use kube::core::cel::Validator;
use serde_json::{Map, Value, json};

use crate::InferenceDeploymentSpec;
use crate::capability::{BUILTIN_MODELS, Target, unsupported};
use crate::rules;

/// Sample texts, one of which every string field accepts: free text, an amount of memory, or a duration.
const TEXTS: [&str; 2] = ["1Mi", "1s"];
/// Prefix of a list of members in a rule's message or a description.
const LIST: &str = "exactly one of ";

/// Values and fields accepted at one target, or by the API alone for `None`.
#[derive(Clone, Copy)]
pub(crate) struct Offer(Option<Target>);

impl Offer {
    /// Returns the offer at `target`.
    pub(crate) fn at(target: Option<Target>) -> Self {
        Self(target)
    }

    /// Returns the enum values accepted at `path` as a comma-separated list; `None` if the schema has no enum.
    pub(crate) fn values(self, schema: &Value, path: &str) -> Option<String> {
        let values = schema["enum"].as_array()?;
        let words: Vec<&str> = values
            .iter()
            .filter(|value| self.takes(schema, path, value))
            .filter_map(Value::as_str)
            .collect();
        Some(words.join(", "))
    }

    /// Returns the accepted, non-deprecated fields of the object at `path`.
    pub(crate) fn fields<'s>(
        self,
        properties: &'s Map<String, Value>,
        path: &str,
    ) -> impl Iterator<Item = &'s str> {
        properties
            .iter()
            .filter(|(_, schema)| !is_deprecated(schema))
            .filter(move |(name, schema)| self.has_use(schema, &join(path, name)))
            .map(|(name, _)| name.as_str())
    }

    /// Returns `text` with its list `exactly one of a, b, c` reduced to the accepted fields of the object at `path`.
    pub(crate) fn narrow(self, text: &str, schema: &Value, path: &str) -> String {
        let cut_down = || {
            let properties = schema["properties"].as_object()?;
            let start = text.find(LIST)? + LIST.len();
            let length = text[start..].find([';', '.']).unwrap_or(text.len() - start);
            let named: Vec<&str> = text[start..start + length].split(", ").collect();
            let accepted: Vec<&str> = self.fields(properties, path).collect();
            let kept: Vec<&str> = named
                .iter()
                .copied()
                .filter(|name| accepted.contains(name))
                .collect();
            let are_fields = named.iter().all(|name| properties.contains_key(*name));
            (are_fields && !kept.is_empty()).then(|| {
                let (head, tail) = (&text[..start], &text[start + length..]);
                format!("{head}{}{tail}", kept.join(", "))
            })
        };
        cut_down().unwrap_or_else(|| text.to_owned())
    }

    /// Whether any value at `path` is accepted.
    fn has_use(self, schema: &Value, path: &str) -> bool {
        if let Some(values) = schema["enum"].as_array() {
            return values.iter().any(|value| self.takes(schema, path, value));
        }
        if has_rule(schema, &[rules::NEVER, rules::NO_ITEMS]) {
            return false;
        }
        match schema["properties"].as_object() {
            Some(members) if schema["required"].as_array().is_none_or(Vec::is_empty) => {
                members.is_empty() || self.fields(members, path).next().is_some()
            }
            _ => TEXTS
                .iter()
                .all(|text| self.accepts(path, &sample(schema, text))),
        }
    }

    /// Whether an enum value is accepted at `path`: by its own rules, and at the target.
    fn takes(self, schema: &Value, path: &str, value: &Value) -> bool {
        Validator::new().validate(schema, value, None).is_ok() && self.accepts(path, value)
    }

    /// Whether the target accepts `value` at `path`. A value that cannot be tried counts as accepted.
    fn accepts(self, path: &str, value: &Value) -> bool {
        let (Some(target), Some(inner)) = (self.0, path.strip_prefix("spec.")) else {
            return true;
        };
        if inner.contains('[') {
            return true;
        }
        surroundings().into_iter().any(|mut spec| {
            let mut member = &mut spec;
            for part in inner.split('.') {
                member = &mut member[part];
            }
            *member = value.clone();
            let Ok(spec) = serde_json::from_value::<InferenceDeploymentSpec>(spec) else {
                return true;
            };
            unsupported(&spec, target)
                .iter()
                .all(|error| error.field != path)
        })
    }
}

/// Specs in which a value is tried: most are accepted or refused in any, and some count only where workers may end for want of
/// requests.
fn surroundings() -> [Value; 2] {
    let least = json!({"model": {"source": {"builtin": {"name": BUILTIN_MODELS[0]}}}});
    let mut rests = least.clone();
    rests["decode"] = json!({"scaling": {"mode": "Auto", "minReplicas": 0}});
    [least, rests]
}

/// Whether a field has one of `rules`.
fn has_rule(schema: &Value, rules: &[&str]) -> bool {
    let found = schema["x-kubernetes-validations"].as_array();
    let mut found = found.into_iter().flatten();
    found.any(|rule| rule["rule"].as_str().is_some_and(|r| rules.contains(&r)))
}

/// Whether a field's description says that it is deprecated.
fn is_deprecated(schema: &Value) -> bool {
    let description = schema["description"].as_str();
    description.is_some_and(|text| text.starts_with("Deprecated:"))
}

/// Returns the smallest value that fits a schema, with `text` for every string.
fn sample(schema: &Value, text: &str) -> Value {
    match schema["type"].as_str().unwrap_or_default() {
        "object" => {
            let mut object = Map::new();
            let required = schema["required"].as_array();
            for name in required.into_iter().flatten().filter_map(Value::as_str) {
                object.insert(name.to_owned(), sample(&schema["properties"][name], text));
            }
            if schema["additionalProperties"].is_object() {
                let member = sample(&schema["additionalProperties"], text);
                object.insert(text.to_owned(), member);
            }
            Value::Object(object)
        }
        "array" => json!([sample(&schema["items"], text)]),
        "integer" | "number" => json!(1),
        "boolean" => json!(true),
        _ => json!(text),
    }
}

/// Returns the path of a member.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}
