//! Goes over all fields of plans, and of what a spec says of Pods: a change of one changes the digest of a Pod, or nothing in a Pod
//! is made of it, and it is listed here.

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{InferenceDeployment, InferencePlan, InferencePlanSpec};
use kube_core::CustomResourceExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::digest_tests::hashes;
use crate::testing::samples::{deployment, plan, settings};

/// Fields of a plan that no worker acts on: names and figures for people, what another field says already, and what is replaced
/// in the copy for a Pod.
const OF_NO_WORKER: &[&str] = &[
    "deployment",
    "generation",
    "inputs",
    "minVersion",
    "mixedNumerics",
    "model.kvBytesPerToken",
    "model.path",
    "model.source",
    "notChosen",
    "objectives",
    "predicted",
    "ranks.device",
    "ranks.deviceMemory",
    "ranks.endpoint",
    "ranks.index",
    "ranks.predicted",
    "why",
];

/// Parts of a spec from which Pods are made beside the plan. All others are inputs of plans.
const PARTS: &[&str] = &["endpoint", "placement", "podTemplate"];

/// Fields of these that concern Services, or the planner.
const OF_NO_POD: &[&str] = &[
    "endpoint.annotations",
    "endpoint.gateway",
    "endpoint.type",
    "placement.nodeSelector",
    "placement.numa",
    "placement.pinning",
    "placement.runtimeClassName",
];

/// Words of enums, and other texts that cannot be anything.
const WORDS: &[&str] = &[
    "7m",
    "Absorbed",
    "BF16",
    "Decode",
    "Direct",
    "Exclusive",
    "Exists",
    "F32",
    "MmapPrefetch",
    "NoExecute",
    "PipedRing",
    "Prefill",
    "SmallEp",
];

/// The plan of the samples with every field set that a worker acts on: its second rank has a GPU and peers, its third a ring.
fn full_plan() -> Value {
    let mut plan = serde_json::to_value(plan()).expect("JSON");
    plan["workerImage"] = json!("hearth/worker:1");
    plan["routing"]["togetherAfterQuietMs"] = json!(500);
    plan["routing"]["holdTimeoutMs"] = json!(500);
    let with = |value: &mut Value, more: Value| {
        let more: Map<String, Value> = serde_json::from_value(more).expect("fields");
        value.as_object_mut().expect("an object").extend(more);
    };
    with(
        &mut plan["ranks"][1],
        json!({
            "gpus": 1, "claimsGpus": true, "gpuUuids": ["GPU-1"], "gpuMemoryBytes": 1 << 30,
            "activations": "BF16", "mlaForm": "Expanded",
            "peers": {
                "head": "prefill-0", "place": 0, "ranks": 2, "experts": "Ep", "standsIn": true, "kv": "PassedOn",
            },
        }),
    );
    with(
        &mut plan["ranks"][1]["residency"],
        json!({
            "ringSlots": 4, "ringLengths": [{"promptTokens": 64, "slots": 8}], "streamsDense": true,
            "hostBytes": 1 << 20,
        }),
    );
    with(
        &mut plan["ranks"][2],
        json!({
            "virtualDevice": "virtual:memory=1Gi", "dualBatch": true, "idleChunkTokens": 512,
            "ring": {
                "head": "decode-0", "place": 0, "windows": [{"firstLayer": 0, "layers": 3}], "flightTokens": 128,
            },
        }),
    );
    with(
        &mut plan["ranks"][2]["residency"],
        json!({"readAheadBytes": 1 << 20, "hostBudgetBytes": 1 << 20, "cacheSlots": 4}),
    );
    plan["ranks"][3]["inPodOf"] = json!("decode-0");
    plan
}

/// The deployment of the samples with every field set of these parts that concerns Pods.
fn full_deployment() -> Value {
    let mut full = serde_json::to_value(deployment()).expect("JSON");
    full["spec"]["endpoint"] = json!({
        "apiKeysSecretRef": {"name": "keys"}, "keepAlive": "5m", "clientStall": "1m",
    });
    full["spec"]["placement"] = json!({
        "tolerations": [{
            "key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule", "tolerationSeconds": 5,
        }],
    });
    full["spec"]["podTemplate"] = json!({
        "labels": {"team": "x"}, "annotations": {"note": "x"}, "env": [{"name": "A", "value": "1"}],
        "caBundles": [{"configMap": "c", "key": "ca.crt"}, {"secret": "s", "key": "ca.crt"}],
        "runtimeClassName": "nvidia", "priorityClassName": "high",
        "resourceClaims": [
            {"name": "a", "resourceClaimName": "one"}, {"name": "b", "resourceClaimTemplateName": "two"},
        ],
    });
    full
}

/// Pointers to the values within a value, with the path of the field that each belongs to.
fn values(value: &Value, (pointer, path): (&str, &str), found: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                let (pointer, path) = (format!("{pointer}/{name}"), format!("{path}{dot}{name}"));
                values(value, (&pointer, &path), found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                values(item, (&format!("{pointer}/{index}"), path), found);
            }
        }
        _ => found.push((pointer.to_owned(), path.to_owned())),
    }
}

/// Paths of the fields of a schema.
fn fields(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    if let Some(items) = schema.get("items") {
        return fields(items, path, found);
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        found.insert(path.to_owned());
        return;
    };
    for (name, schema) in properties {
        let dot = if path.is_empty() { "" } else { "." };
        fields(schema, &format!("{path}{dot}{name}"), found);
    }
}

/// Paths of the fields of a kind's spec.
fn fields_of<K: CustomResourceExt>() -> BTreeSet<String> {
    let definition = serde_json::to_value(K::crd()).expect("JSON");
    let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let mut found = BTreeSet::new();
    fields(definition.pointer(spec).expect("a schema"), "", &mut found);
    found
}

/// The object with another value at a pointer.
fn changed<T: DeserializeOwned + Serialize>(full: &Value, pointer: &str) -> T {
    let others = match full.pointer(pointer).expect("a value") {
        Value::Bool(value) => vec![json!(!value)],
        Value::Number(value) if value.is_f64() => vec![json!(value.as_f64().map(|it| it + 1.0))],
        Value::Number(value) => vec![json!(value.as_i64().map(|it| it + 1))],
        Value::String(value) => {
            let longer = format!("{value}x");
            let words = WORDS.iter().copied();
            words.chain([&*longer]).rev().map(Value::from).collect()
        }
        other => panic!("{pointer} is {other}"),
    };
    let read = |value: Value| {
        let mut object = full.clone();
        *object.pointer_mut(pointer).expect("a value") = value;
        let object: T = serde_json::from_value(object).ok()?;
        let is_other = serde_json::to_value(&object).ok()? != *full;
        is_other.then_some(object)
    };
    let mut read = others.into_iter().filter_map(read);
    read.next().unwrap_or_else(|| panic!("no other {pointer}"))
}

/// Checks that a change of each of these fields changes digests, but for those that are listed.
fn check(reached: &BTreeMap<String, bool>, all: &BTreeSet<String>, listed: &[&str]) {
    let is_within = |path: &str, of: &str| {
        let rest = path.strip_prefix(of);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let is_listed = |path: &str| listed.iter().any(|of| is_within(path, of));
    for (path, reached) in reached {
        assert_eq!(*reached, !is_listed(path), "{path}");
    }
    for path in all.iter().filter(|path| !is_listed(path)) {
        let is_tried = reached.keys().any(|tried| is_within(tried, path));
        assert!(is_tried, "{path} is set nowhere in this test");
    }
}

#[test]
fn every_field_of_a_plan_that_a_worker_acts_on_is_in_a_digest() {
    let (settings, deployment, full) = (settings(), deployment(), full_plan());
    let hashes_of = |plan: &InferencePlanSpec| hashes(&settings, &deployment, plan);
    let before = hashes_of(&serde_json::from_value(full.clone()).expect("a plan"));
    let mut found = Vec::new();
    values(&full, ("", ""), &mut found);
    let mut reached: BTreeMap<String, bool> = BTreeMap::new();
    for (pointer, path) in found {
        let is_reached = hashes_of(&changed(&full, &pointer)) != before;
        *reached.entry(path).or_default() |= is_reached;
    }
    check(&reached, &fields_of::<InferencePlan>(), OF_NO_WORKER);
}

#[test]
fn every_field_of_a_spec_that_pods_are_made_of_is_in_a_digest() {
    let (settings, full) = (settings(), full_deployment());
    let plan: InferencePlanSpec = serde_json::from_value(full_plan()).expect("a plan");
    let hashes_of = |deployment: &InferenceDeployment| hashes(&settings, deployment, &plan);
    let before = hashes_of(&serde_json::from_value(full.clone()).expect("a deployment"));
    let mut reached: BTreeMap<String, bool> = BTreeMap::new();
    for part in PARTS {
        let mut found = Vec::new();
        let pointer = format!("/spec/{part}");
        let value = full.pointer(&pointer).expect("a part");
        values(value, (&pointer, part), &mut found);
        for (pointer, path) in found {
            let is_reached = hashes_of(&changed(&full, &pointer)) != before;
            *reached.entry(path).or_default() |= is_reached;
        }
    }
    let is_of_parts = |path: &String| PARTS.iter().any(|part| path.starts_with(part));
    let all = fields_of::<InferenceDeployment>();
    let all = all.into_iter().filter(is_of_parts).collect();
    check(&reached, &all, OF_NO_POD);
}
