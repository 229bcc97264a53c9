//! Every field of a spec is obeyed by `hearth up`, or refused there: nothing is ignored.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use hearth_crds::{Target, parse_deployment_for};
use serde_json::{Value, json};

/// Fields that `hearth up` obeys, whatever value admission lets through.
const OBEYED: [&str; 29] = [
    "decode.dualBatch",
    "decode.expertCache",
    "decode.kvCache.keyType",
    "decode.kvCache.memory",
    "decode.kvCache.valueType",
    "decode.maxBatch",
    "decode.replicas",
    "model.activations",
    "model.contextLength",
    "model.quantization",
    "model.servedName",
    "model.source.builtin.name",
    "model.source.hostPath.path",
    "model.source.huggingFace.repo",
    "model.source.huggingFace.revision",
    "model.source.huggingFace.tokenSecretRef.name",
    "model.source.http.files",
    "model.source.http.secretRef.name",
    "model.source.http.sha256",
    "model.source.http.url",
    "objectives.timePerOutputToken",
    "objectives.timeToFirstToken",
    "placement.numa",
    "placement.pinning",
    "prefill.chunkedBelowTokens",
    "prefill.mode",
    "prefill.quietWindow",
    "prefill.replicas",
    "strategy",
];

/// A value of each field that only a cluster obeys.
fn cluster_only() -> Vec<(&'static str, Value)> {
    let external = json!({"mode": "External", "minReplicas": 1, "maxReplicas": 2});
    vec![
        ("decode.scaling", external.clone()),
        ("prefill.scaling", external),
        ("endpoint.annotations", json!({"a": "b"})),
        ("endpoint.apiKeysSecretRef", json!({"name": "keys"})),
        ("endpoint.clientStall", json!("30s")),
        ("endpoint.keepAlive", json!("30s")),
        ("endpoint.type", json!("NodePort")),
        ("gateway.replicas", json!(2)),
        (
            "model.source",
            json!({"persistentVolumeClaim": {"claimName": "a", "path": "b"}}),
        ),
        ("placement.nodeSelector", json!({"a": "b"})),
        ("placement.runtimeClassName", json!("nvidia")),
        (
            "placement.tolerations",
            json!([{"key": "a", "operator": "Exists"}]),
        ),
        ("podTemplate.annotations", json!({"example.com/a": "b"})),
        (
            "podTemplate.caBundles",
            json!([{"configMap": "a", "key": "ca.crt"}]),
        ),
        (
            "podTemplate.env",
            json!([{"name": "TZ", "value": "Europe/Berlin"}]),
        ),
        ("podTemplate.labels", json!({"example.com/a": "b"})),
        ("podTemplate.priorityClassName", json!("high")),
        (
            "podTemplate.resourceClaims",
            json!([{"name": "a", "resourceClaimTemplateName": "a"}]),
        ),
        ("podTemplate.runtimeClassName", json!("nvidia")),
        ("prefill.gpusPerWorker", json!(2)),
        ("priority", json!(5)),
        ("rollout.progressDeadline", json!("5m")),
        ("suspend", json!(true)),
    ]
}

/// A value of each field that nothing obeys yet.
fn refused_anywhere() -> Vec<(&'static str, Value)> {
    vec![
        ("autoscaling.holdTimeout", json!("5m")),
        ("autoscaling.keep", json!(true)),
        ("autoscaling.preload", json!(true)),
        ("autoscaling.scaleDownStabilization", json!("5m")),
        ("autoscaling.scaleToZeroAfter", json!("5m")),
        ("decode.kvCache.spill", json!({"path": "/a", "size": "1Gi"})),
        ("decode.maxReplicas", json!(2)),
        ("decode.minReplicas", json!(2)),
        ("endpoint.gateway", json!({"name": "a", "namespace": "b"})),
        (
            "model.adapters",
            json!([{"name": "a", "source": {"hostPath": {"path": "/a"}}}]),
        ),
        ("prefill.maxReplicas", json!(2)),
        ("prefill.minReplicas", json!(2)),
    ]
}

#[test]
fn one_machine_obeys_or_refuses_every_field() {
    let mut met: BTreeSet<String> = OBEYED.into_iter().map(str::to_owned).collect();
    let rejected = |path: &str, value: &Value, target| {
        let error = parse_deployment_for(&with(path, value), target).err();
        error.map(|error| error.to_string())
    };
    for (path, value) in cluster_only() {
        let error = rejected(path, &value, Target::Machine);
        let error = error.unwrap_or_else(|| panic!("hearth up ignores spec.{path}"));
        assert!(error.contains(&format!("spec.{path}")), "{error}");
        assert_eq!(rejected(path, &value, Target::Cluster), None, "{path}");
        leaves_of(&value, path, &mut met);
    }
    for (path, value) in refused_anywhere() {
        for target in [Target::Machine, Target::Cluster] {
            let error = rejected(path, &value, target);
            let error = error.unwrap_or_else(|| panic!("spec.{path} is ignored"));
            assert!(error.contains(&format!("spec.{path}")), "{error}");
        }
        leaves_of(&value, path, &mut met);
    }
    let mut fields = BTreeSet::new();
    fields_of(&spec_schema(), "", &mut fields);
    assert!(fields.len() > 50, "{fields:?}");
    assert_eq!(
        met, fields,
        "fields without a line above, or lines without a field"
    );
}

/// A deployment with `value` at a path of its spec.
fn with(path: &str, value: &Value) -> String {
    let mut object = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "demo"},
        "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
    });
    let place = path
        .split('.')
        .fold(&mut object["spec"], |node, part| &mut node[part]);
    *place = value.clone();
    object.to_string()
}

fn spec_schema() -> Value {
    let crds = hearth_crds::crds();
    let deployments = crds
        .iter()
        .find(|crd| crd.spec.names.kind == "InferenceDeployment");
    let schema = serde_json::to_value(&deployments.unwrap().spec.versions[0].schema).unwrap();
    schema["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Paths of the fields that have none below them; a map and a list are one field.
fn fields_of(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    match schema["properties"].as_object() {
        None => {
            found.insert(path.to_owned());
        }
        Some(properties) => {
            for (name, schema) in properties {
                let separator = if path.is_empty() { "" } else { "." };
                fields_of(schema, &format!("{path}{separator}{name}"), found);
            }
        }
    }
}

/// The fields of the schema that a value at `path` sets.
fn leaves_of(value: &Value, path: &str, met: &mut BTreeSet<String>) {
    let schema = spec_schema();
    let here = path
        .split('.')
        .fold(&schema, |node, part| &node["properties"][part]);
    match (value.as_object(), here["properties"].is_object()) {
        (Some(members), true) => {
            for (name, value) in members {
                leaves_of(value, &format!("{path}.{name}"), met);
            }
        }
        _ => {
            met.insert(path.to_owned());
        }
    }
}
