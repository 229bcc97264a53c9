//! Objects without the fields that differ between runs.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Metadata fields that differ between runs.
const METADATA: [&str; 4] = [
    "resourceVersion",
    "uid",
    "creationTimestamp",
    "managedFields",
];
/// Annotations that hold digests over uids, or serial numbers.
const NOTES: [&str; 3] = [
    "hearth.dev/rank-hash",
    "hearth.dev/form",
    "hearth.dev/certificate",
];
/// Annotation with a time, which a gateway has whose routes have changed since it was created: that depends on who was ready first.
const ROUTED: &str = "hearth.dev/routed";
/// Annotation that holds a plan as JSON, in which a prediction that was read and written again may differ in its last
/// digit.
const PLAN: &str = "hearth.dev/plan";

/// Writes the objects of a namespace as text, ordered by kind and name. Values that differ between runs are removed or
/// replaced: uids, times, versions, addresses, digests over uids, the contents of Secrets, and the namespace's name.
pub(super) fn normal(namespace: &str, objects: Vec<Value>) -> String {
    let mut replaced = replacements(&objects);
    replaced.insert(namespace.to_owned(), "NAMESPACE".to_owned());
    let mut texts: Vec<String> = objects
        .into_iter()
        .map(|object| {
            let object = plain(object);
            let text = serde_json::to_string_pretty(&object).unwrap_or_default();
            // Longest first: a deployment's name is part of its Pods' names.
            let mut pairs: Vec<(&String, &String)> = replaced.iter().collect();
            pairs.sort_by_key(|(from, _)| std::cmp::Reverse(from.len()));
            pairs
                .into_iter()
                .fold(text, |text, (from, to)| text.replace(from, to))
        })
        .collect();
    texts.sort();
    texts.join("\n")
}

/// Returns replacements for Pods' names and addresses that do not differ between runs.
fn replacements(objects: &[Value]) -> BTreeMap<String, String> {
    let mut replaced = BTreeMap::new();
    for object in objects.iter().filter(|object| object["kind"] == "pods") {
        let metadata = &object["metadata"];
        let rank = &metadata["labels"]["hearth.dev/rank"];
        let rank = rank.as_str().unwrap_or("inspect");
        let hash = metadata["annotations"]["hearth.dev/rank-hash"].as_str();
        if let (Some(name), Some(hash)) = (metadata["name"].as_str(), hash) {
            replaced.insert(name.to_owned(), name.replace(hash, "HASH"));
        }
        if let Some(address) = object["status"]["podIP"].as_str() {
            replaced.insert(address.to_owned(), format!("ADDRESS-OF-{rank}"));
        }
    }
    for object in objects {
        if let Some(uid) = object["metadata"]["uid"].as_str() {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            let kind = object["kind"].as_str().unwrap_or_default();
            replaced.insert(uid.to_owned(), format!("UID-OF-{kind}/{name}"));
        }
    }
    replaced
}

fn plain(mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for field in METADATA {
            metadata.remove(field);
        }
        if let Some(notes) = metadata
            .get_mut("annotations")
            .and_then(Value::as_object_mut)
        {
            if let Some(plan) = notes.get_mut(PLAN) {
                *plan = without_predictions(plan.as_str().unwrap_or_default());
            }
            notes.remove(ROUTED);
            for note in NOTES {
                if let Some(value) = notes.get_mut(note) {
                    *value = json!("PRESENT");
                }
            }
        }
    }
    match object["kind"].as_str() {
        Some("secrets") => {
            // Keys and certificates are generated anew; only their presence counts.
            for part in ["/data", "/metadata/annotations"] {
                if let Some(values) = object.pointer_mut(part).and_then(Value::as_object_mut) {
                    values
                        .values_mut()
                        .for_each(|value| *value = json!("PRESENT"));
                }
            }
        }
        Some("services") => {
            if let Some(spec) = object["spec"].as_object_mut() {
                spec.remove("clusterIP");
                spec.remove("clusterIPs");
            }
        }
        _ => {}
    }
    without_times(&mut object);
    object
}

fn without_predictions(plan: &str) -> Value {
    let mut plan: Value = serde_json::from_str(plan).unwrap_or_default();
    plan["predicted"] = json!("PRESENT");
    for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
        rank["predicted"] = json!("PRESENT");
    }
    plan
}

fn without_times(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| name != "lastTransitionTime" && name != "startTime");
            fields.values_mut().for_each(without_times);
        }
        Value::Array(items) => items.iter_mut().for_each(without_times),
        _ => {}
    }
}
