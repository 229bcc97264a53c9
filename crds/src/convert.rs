//! Conversion of stored specs to current field names, as a patch that loses nothing.

use serde_json::{Map, Value, json};

use crate::deployment::InferenceDeploymentSpec;

/// A change that renames fields of an object's spec to their current names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversion {
    /// The change as a JSON merge patch of the spec.
    pub patch: Map<String, Value>,
    /// Fields that are removed, such as `spec.placement.runtimeClassName`.
    pub removed: Vec<String>,
    /// Fields that replace them.
    pub added: Vec<String>,
}

impl Conversion {
    /// Returns the change that moves deprecated fields of `spec` that are still obeyed to their current names.
    ///
    /// A deprecated field that is refused (`minReplicas` and `maxReplicas`, which asked Hearth to scale a pool) stays:
    /// only its author knows what to write instead.
    ///
    /// # Errors
    /// When a spec cannot be written as JSON.
    pub fn of(spec: &InferenceDeploymentSpec) -> serde_json::Result<Self> {
        let mut new = spec.clone().translated();
        let (prefill, decode) = (&spec.prefill, &spec.decode);
        if prefill.min_replicas.or(prefill.max_replicas).is_some() {
            new.prefill = prefill.clone();
        }
        if decode.min_replicas.or(decode.max_replicas).is_some() {
            new.decode = decode.clone();
        }
        // Of two different values its author has to choose one.
        let name = &spec.pod_template.runtime_class_name;
        if name.is_some() && *name != spec.placement.runtime_class_name {
            new.placement = spec.placement.clone();
        }
        let mut conversion = Self::default();
        let (old, new) = (serde_json::to_value(spec)?, serde_json::to_value(&new)?);
        conversion.patch = conversion.difference(&old, &new, "spec");
        Ok(conversion)
    }

    /// Whether the spec already uses current names.
    pub fn is_empty(&self) -> bool {
        self.patch.is_empty()
    }

    /// Returns the patch between two objects at `path`, recording removed and added fields.
    fn difference(&mut self, old: &Value, new: &Value, path: &str) -> Map<String, Value> {
        let empty = Map::new();
        let old = old.as_object().unwrap_or(&empty);
        let new = new.as_object().unwrap_or(&empty);
        let mut patch = Map::new();
        for (name, value) in old.iter().filter(|(name, _)| !new.contains_key(*name)) {
            leaves(value, &format!("{path}.{name}"), &mut self.removed);
            patch.insert(name.clone(), Value::Null);
        }
        for (name, value) in new {
            let path = format!("{path}.{name}");
            let before = old.get(name);
            if before == Some(value) {
                continue;
            }
            let change = match before {
                Some(before) if before.is_object() && value.is_object() => {
                    Value::Object(self.difference(before, value, &path))
                }
                _ => {
                    leaves(value, &path, &mut self.added);
                    value.clone()
                }
            };
            patch.insert(name.clone(), change);
        }
        patch
    }

    /// Returns an object's `metadata.managedFields` after the change: a manager that owned a removed field owns the
    /// added ones, so that its next server-side apply of a converted manifest has no conflict.
    pub fn managed_fields(&self, entries: &[Value]) -> Vec<Value> {
        let mut entries = entries.to_vec();
        for entry in &mut entries {
            let fields = &mut entry["fieldsV1"];
            let mut had_one = false;
            for path in &self.removed {
                had_one |= disown(fields, &keys(path));
            }
            if had_one {
                for path in &self.added {
                    own(fields, &keys(path));
                }
            }
        }
        entries
    }
}

/// Collects the paths of a value's leaves.
fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value.as_object() {
        Some(members) if !members.is_empty() => {
            for (name, member) in members {
                leaves(member, &format!("{path}.{name}"), found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

/// Returns the path `spec.decode` as `managedFields` write it: `f:spec`, `f:decode`.
fn keys(path: &str) -> Vec<String> {
    path.split('.').map(|part| format!("f:{part}")).collect()
}

/// Adds a field to a field set.
fn own(fields: &mut Value, path: &[String]) {
    let Some((key, rest)) = path.split_first() else {
        return;
    };
    if !fields.is_object() {
        *fields = json!({});
    }
    if fields.get(key).is_none() {
        fields[key] = json!({});
    }
    own(&mut fields[key], rest);
}

/// Removes a field from a field set, along with parents that this empties. Returns whether it was there.
fn disown(fields: &mut Value, path: &[String]) -> bool {
    let (Some((key, rest)), Some(members)) = (path.split_first(), fields.as_object_mut()) else {
        return false;
    };
    if rest.is_empty() {
        return members.remove(key).is_some();
    }
    let Some(member) = members.get_mut(key) else {
        return false;
    };
    let was_there = disown(member, rest);
    // An empty set would mean that the whole object is owned.
    if was_there && member.as_object().is_some_and(Map::is_empty) {
        members.remove(key);
    }
    was_there
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversion(spec: &Value) -> Conversion {
        let mut whole = json!({"model": {"source": {"builtin": {"name": "hearth-demo"}}}});
        for (name, value) in spec.as_object().expect("an object") {
            whole[name] = value.clone();
        }
        let spec: InferenceDeploymentSpec = serde_json::from_value(whole).expect("a spec");
        Conversion::of(&spec).expect("a conversion")
    }

    #[test]
    fn todays_words_need_no_change() {
        let new = json!({"podTemplate": {"runtimeClassName": "nvidia"}, "decode": {"replicas": 2}});
        assert_eq!(conversion(&new), Conversion::default());
    }

    #[test]
    fn a_field_that_moved_is_moved_and_nothing_else() {
        let old = json!({"placement": {"runtimeClassName": "nvidia", "numa": "Compact"}});
        let found = conversion(&old);
        assert_eq!(
            Value::Object(found.patch),
            json!({"placement": {"runtimeClassName": null}, "podTemplate": {"runtimeClassName": "nvidia"}})
        );
        assert_eq!(found.removed, ["spec.placement.runtimeClassName"]);
        assert_eq!(found.added, ["spec.podTemplate.runtimeClassName"]);
    }

    #[test]
    fn of_two_values_that_differ_neither_is_dropped() {
        let both = |old: &str| json!({"placement": {"runtimeClassName": old}, "podTemplate": {"runtimeClassName": "nvidia"}});
        assert!(conversion(&both("nvidia-legacy")).is_empty());
        let same = conversion(&both("nvidia"));
        assert_eq!(same.removed, ["spec.placement.runtimeClassName"]);
        assert!(same.added.is_empty());
    }

    #[test]
    fn a_range_is_left_to_its_author() {
        let range = json!({"minReplicas": 1, "maxReplicas": 4});
        let old = json!({"decode": range, "prefill": range});
        assert!(conversion(&old).is_empty());
    }

    #[test]
    fn whoever_had_the_old_field_has_the_new_one() {
        let found = conversion(&json!({
            "placement": {"runtimeClassName": "nvidia"}, "podTemplate": {"labels": {"a": "b"}},
        }));
        let entry = |manager: &str, fields: Value| json!({"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": fields}});
        let labels = json!({"f:a": {}});
        let before = [
            entry(
                "ada",
                json!({"f:placement": {"f:runtimeClassName": {}}, "f:podTemplate": {"f:labels": labels}}),
            ),
            entry("ben", json!({"f:decode": {"f:replicas": {}}})),
        ];
        let after = [
            entry(
                "ada",
                json!({"f:podTemplate": {"f:labels": labels, "f:runtimeClassName": {}}}),
            ),
            before[1].clone(),
        ];
        assert_eq!(found.managed_fields(&before), after);
    }
}
