//! Digests of objects, and checks whether an object is already in its desired state.

use hearth_controller_core::names::FIELD_MANAGER;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Digest that distinguishes contents.
pub(crate) type Digest = [u8; 16];

/// Metadata fields that only the API server writes.
const SERVER_SIDE: [&str; 9] = [
    "resourceVersion",
    "uid",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
    "generateName",
];

/// The digest of an object in the cluster, without its status and fields that change on their own.
pub(crate) fn of_live(object: &Value) -> Digest {
    let mut hash = Sha256::new();
    if let Value::Object(fields) = object {
        let mut names: Vec<&String> = fields.keys().collect();
        names.sort();
        for name in names {
            match (name.as_str(), &fields[name]) {
                // List items lack apiVersion and kind, watch events have them.
                ("status" | "apiVersion" | "kind", _) => {}
                ("metadata", Value::Object(metadata)) => {
                    let mut keys: Vec<&String> = metadata
                        .keys()
                        .filter(|key| !SERVER_SIDE.contains(&key.as_str()))
                        .collect();
                    keys.sort();
                    for key in keys {
                        feed_text(&mut hash, key);
                        feed(&mut hash, &metadata[key]);
                    }
                }
                (_, value) => {
                    feed_text(&mut hash, name);
                    feed(&mut hash, value);
                }
            }
        }
    }
    short(hash)
}

/// The digest of any JSON value, independent of key order.
pub(crate) fn of_value(value: &Value) -> Digest {
    let mut hash = Sha256::new();
    feed(&mut hash, value);
    short(hash)
}

/// Whether `live` has everything in `desired`. Additions by others and defaults filled in by the API server are not
/// differences; nor are empty lists and maps that are missing.
pub(crate) fn is_within(desired: &Value, live: &Value) -> bool {
    match (desired, live) {
        (Value::Object(desired), Value::Object(live)) => desired.iter().all(|(key, value)| {
            let there = live.get(key).unwrap_or(&Value::Null);
            is_within(value, there)
        }),
        (Value::Array(desired), Value::Array(live)) => {
            desired.len() == live.len()
                && desired
                    .iter()
                    .zip(live)
                    .all(|(desired, live)| is_within(desired, live))
        }
        (Value::Null, _) => true,
        (Value::Object(desired), Value::Null) => desired.values().all(|v| is_within(v, live)),
        (Value::Array(desired), Value::Null) => desired.is_empty(),
        (desired, live) => desired == live,
    }
}

/// Whether we once applied an annotation to `live` that `desired` no longer has. The API server removes it when
/// the object is applied again; annotations of others stay.
pub(crate) fn has_dropped_annotation(desired: &Value, live: &Value) -> bool {
    let entries = live["metadata"]["managedFields"].as_array();
    let ours = entries.into_iter().flatten().filter(|entry| {
        entry["manager"].as_str() == Some(FIELD_MANAGER)
            && entry["operation"].as_str() == Some("Apply")
    });
    let wanted = &desired["metadata"]["annotations"];
    ours.filter_map(|entry| entry["fieldsV1"]["f:metadata"]["f:annotations"].as_object())
        .flat_map(|fields| fields.keys())
        .filter_map(|field| field.strip_prefix("f:"))
        .any(|key| wanted.get(key).is_none())
}

fn short(hash: Sha256) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(&hash.finalize()[..16]);
    digest
}

fn feed(hash: &mut Sha256, value: &Value) {
    match value {
        Value::Object(fields) => {
            hash.update(b"{");
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort();
            for name in names {
                feed_text(hash, name);
                feed(hash, &fields[name]);
            }
            hash.update(b"}");
        }
        Value::Array(items) => {
            hash.update(b"[");
            items.iter().for_each(|item| feed(hash, item));
            hash.update(b"]");
        }
        Value::String(text) => feed_text(hash, text),
        Value::Null => hash.update(b"n"),
        Value::Bool(true) => hash.update(b"t"),
        Value::Bool(false) => hash.update(b"f"),
        Value::Number(number) => {
            hash.update(b"#");
            feed_text(hash, &number.to_string());
        }
    }
}

/// Feeds the length first, so that no two sequences of strings produce the same input.
fn feed_text(hash: &mut Sha256, text: &str) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn defaults_and_additions_are_no_difference() {
        let desired = json!({
            "metadata": {"name": "demo", "labels": {"a": "b"}},
            "spec": {"ports": [{"port": 80}], "selector": {"x": "y"}, "ingress": []},
        });
        let live = json!({
            "metadata": {"name": "demo", "labels": {"a": "b", "other": "c"}, "uid": "1"},
            "spec": {"ports": [{"port": 80, "protocol": "TCP", "nodePort": 30123}], "selector": {"x": "y"},
                     "clusterIP": "10.0.0.1"},
            "status": {},
        });
        assert!(is_within(&desired, &live));
    }

    #[test]
    fn another_value_a_missing_one_and_a_longer_list_are_differences() {
        let desired = json!({"spec": {"ports": [{"port": 80}], "type": "ClusterIP"}});
        for live in [
            json!({"spec": {"ports": [{"port": 81}], "type": "ClusterIP"}}),
            json!({"spec": {"ports": [{"port": 80}]}}),
            json!({"spec": {"ports": [{"port": 80}, {"port": 90}], "type": "ClusterIP"}}),
        ] {
            assert!(!is_within(&desired, &live), "{live}");
        }
    }

    #[test]
    fn an_annotation_that_we_applied_and_want_no_more_is_a_difference() {
        let live = |manager: &str, operation: &str| {
            json!({"metadata": {
                "annotations": {"a": "1", "theirs": "2"},
                "managedFields": [
                    {"manager": manager, "operation": operation,
                     "fieldsV1": {"f:metadata": {"f:annotations": {"f:a": {}}, "f:labels": {"f:b": {}}}}},
                    {"manager": "cloud", "operation": "Update",
                     "fieldsV1": {"f:metadata": {"f:annotations": {".": {}, "f:theirs": {}}}}},
                ],
            }})
        };
        let with = json!({"metadata": {"annotations": {"a": "1"}}});
        let without = json!({"metadata": {}});
        assert!(!has_dropped_annotation(&with, &live("hearth", "Apply")));
        assert!(has_dropped_annotation(&without, &live("hearth", "Apply")));
        assert!(!has_dropped_annotation(&without, &live("hearth", "Update")));
        assert!(!has_dropped_annotation(&without, &live("kubectl", "Apply")));
        assert!(!has_dropped_annotation(&without, &json!({"metadata": {}})));
    }

    #[test]
    fn the_live_digest_sees_drift_and_not_what_the_server_counts() {
        let live = |version: &str, port: u32| {
            json!({"apiVersion": "v1", "kind": "Service",
                   "metadata": {"name": "demo", "resourceVersion": version, "managedFields": [{"manager": version}]},
                   "spec": {"ports": [{"port": port}]}, "status": {"loadBalancer": {}}})
        };
        assert_eq!(of_live(&live("1", 80)), of_live(&live("2", 80)));
        assert_ne!(of_live(&live("1", 80)), of_live(&live("1", 81)));
        let mut item = live("1", 80);
        let fields = item.as_object_mut().unwrap();
        fields.remove("kind");
        fields.remove("apiVersion");
        assert_eq!(of_live(&item), of_live(&live("1", 80)));
    }

    #[test]
    fn the_order_of_keys_is_no_difference_and_that_of_items_is() {
        let (a, b) = (json!({"x": 1, "y": 2}), json!({"y": 2, "x": 1}));
        assert_eq!(of_value(&a), of_value(&b));
        assert_ne!(of_value(&json!([1, 2])), of_value(&json!([2, 1])));
        assert_ne!(of_value(&json!(["ab", "c"])), of_value(&json!(["a", "bc"])));
    }
}
