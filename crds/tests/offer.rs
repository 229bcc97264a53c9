//! Checks that suggestions in a refusal are accepted: nobody is sent from one refusal to the next.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use hearth_crds::{Target, crds, parse_deployment_for};
use serde_json::{Value, json};

const TARGETS: [Target; 2] = [Target::Machine, Target::Cluster];

/// Builds a deployment whose spec has `value` at `path` (`decode.kvCache.keyType`).
fn with(path: &str, value: &Value) -> String {
    let mut deployment = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "demo"},
        "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
    });
    let mut place = &mut deployment["spec"];
    for part in path.split('.') {
        place = &mut place[part];
    }
    *place = value.clone();
    deployment.to_string()
}

#[track_caller]
fn refusal(text: &str, target: Target) -> String {
    match parse_deployment_for(text, target) {
        Ok(_) => panic!("accepted: {text}"),
        Err(error) => error.to_string(),
    }
}

/// Collects every enum of the spec: its path and values.
fn enums(schema: &Value, path: &str, found: &mut Vec<(String, Vec<String>)>) {
    if let Some(values) = schema["enum"].as_array() {
        let words = values
            .iter()
            .map(|value| value.as_str().unwrap().to_owned());
        found.push((path.to_owned(), words.collect()));
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        enums(property, &path, found);
    }
}

#[test]
fn a_wrong_word_is_told_exactly_the_words_that_are_accepted() {
    let crd = serde_json::to_value(&crds()[0]).unwrap();
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let mut all = Vec::new();
    enums(spec, "", &mut all);
    assert!(all.len() >= 9, "{all:?}");
    for target in TARGETS {
        for (path, values) in &all {
            let accepted: Vec<&str> = values
                .iter()
                .map(String::as_str)
                .filter(|value| parse_deployment_for(&with(path, &json!(value)), target).is_ok())
                .collect();
            let choice = match accepted.as_slice() {
                [only] => format!("write {only}"),
                several => format!("write one of {}", several.join(", ")),
            };
            assert_eq!(
                refusal(&with(path, &json!("Nonsense")), target),
                format!("spec.{path} is \"Nonsense\"\n  {choice}"),
                "{target:?}"
            );
            assert_eq!(
                refusal(&with(path, &json!(7)), target),
                format!(
                    "spec.{path} is 7\n  {choice} (in quotes if it reads as a number or as on, off)"
                ),
                "{target:?}"
            );
        }
    }
    let here = |path: &str| refusal(&with(path, &json!("Nonsense")), Target::Machine);
    assert!(here("strategy").ends_with("write one of Auto, Hybrid, PipedRing"));
    assert!(
        here("prefill.mode")
            .ends_with("write one of Auto, Chunked, StreamLoading, DistributedStreamLoading")
    );
    assert!(here("decode.kvCache.keyType").ends_with("write one of BF16, F32"));
    assert!(here("endpoint.type").ends_with("write ClusterIP"));
}

#[test]
fn a_field_that_only_a_cluster_has_is_meant_and_not_offered() {
    let here = |path: &str, value| refusal(&with(path, &value), Target::Machine);
    assert_eq!(
        here("endpoint.annotation", json!({})),
        "spec.endpoint.annotation is not a field of spec.endpoint\n  did you mean annotations? It is not available here: remove it"
    );
    assert_eq!(
        here("podTemplate.priorityClasName", json!("a")),
        "spec.podTemplate.priorityClasName is not a field of spec.podTemplate\n  remove it: spec.podTemplate applies only in a cluster"
    );
}

#[test]
fn only_sources_that_are_accepted_are_offered() {
    let two = json!({"builtin": {"name": "hearth-demo"}, "hostPath": {"path": "/m"}});
    for (target, sources) in [
        (Target::Machine, "builtin, huggingFace, hostPath, http"),
        (
            Target::Cluster,
            "builtin, huggingFace, persistentVolumeClaim, hostPath, http",
        ),
    ] {
        for (source, begin) in [
            (
                &two,
                "spec.model.source sets builtin and hostPath\n  write exactly one of ",
            ),
            (
                &json!({}),
                "spec.model.source is empty\n  write exactly one of ",
            ),
        ] {
            let message = refusal(&with("model.source", source), target);
            assert!(
                message.starts_with(&format!("{begin}{sources}; for the model")),
                "{message}"
            );
        }
        assert_eq!(
            refusal(&with("model", &json!({})), target),
            format!(
                "spec.model.source is missing\n  write it: source of the model's files: exactly one of {sources}"
            )
        );
    }
}

#[test]
fn only_fields_that_are_obeyed_are_listed() {
    assert_eq!(
        refusal(&with("decode.kvCache.size", &json!("1Gi")), Target::Machine),
        "spec.decode.kvCache.size is not a field of spec.decode.kvCache\n  The fields are keyType, memory, valueType"
    );
    let message = refusal(&with("scale", &json!(1)), Target::Machine);
    assert!(message.contains("placement"), "{message}");
    assert!(!message.contains("autoscaling"), "{message}");
    let message = refusal(&with("scale", &json!(1)), Target::Cluster);
    assert!(
        message.contains("The fields are autoscaling, "),
        "{message}"
    );
    assert_eq!(
        refusal(&with("autoscaling.after", &json!("5m")), Target::Cluster),
        "spec.autoscaling.after is not a field of spec.autoscaling\n  The fields are holdTimeout, keep, preload, scaleToZeroAfter"
    );
    let message = refusal(&with("placement.numa2", &json!(1)), Target::Machine);
    assert!(
        message.ends_with("did you mean numa? The fields are numa, pinning"),
        "{message}"
    );
    let message = refusal(&with("placement.numa2", &json!(1)), Target::Cluster);
    assert!(
        message.ends_with("The fields are nodeSelector, numa, pinning, tolerations"),
        "{message}"
    );
}

#[test]
fn a_broken_rule_and_what_the_engine_lacks_come_together() {
    let message = refusal(
        &with(
            "decode",
            &json!({"replicas": 1, "minReplicas": 0, "maxReplicas": 2}),
        ),
        Target::Machine,
    );
    assert!(
        message.contains("write replicas alone: minReplicas and maxReplicas are deprecated"),
        "{message}"
    );
    assert!(
        message.contains("bounds are deprecated here: write spec.decode.replicas: 1"),
        "{message}"
    );
}
