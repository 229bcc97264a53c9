//! Tests of what a Pod takes from `spec.podTemplate`, and what it does not.

use hearth_crds::{InferenceDeployment, PodTemplateSpec};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::digest_tests::hashes;
use super::tests::{pods_of, restricted_violations};
use super::{Beside, inspect_pod, objects};
use crate::testing::samples::{context_of, deployment, plan, settings};

fn with_template(template: Value) -> InferenceDeployment {
    let mut deployment = deployment();
    deployment.spec.pod_template = serde_json::from_value(template).expect("a template");
    deployment
}

fn whole() -> InferenceDeployment {
    with_template(json!({
        "labels": {"team": "search", "app.kubernetes.io/name": "mine", "hearth.dev/role": "mine"},
        "annotations": {"prometheus.io/scrape": "true", "hearth.dev/plan": "mine"},
        "env": [{"name": "RUST_LOG", "value": "debug"}],
        "caBundles": [{"configMap": "house", "key": "ca.crt"}, {"secret": "lab", "key": "root.pem"}],
        "runtimeClassName": "nvidia-cdi",
        "priorityClassName": "batch",
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "rdma"}],
    }))
}

fn value(pod: &Pod) -> Value {
    serde_json::to_value(pod).expect("JSON")
}

#[test]
fn every_pod_has_the_template_and_workers_alone_its_claims() {
    let (settings, deployment) = (settings(), whole());
    let context = context_of(&settings, &deployment);
    let inspect = inspect_pod(&context, &deployment.spec.model.source, None);
    let ranks = pods_of(&settings, &deployment, &plan());
    let pods = ranks.into_iter().map(|pod| pod.pod).chain([inspect]);
    let mut claims = Vec::new();
    for pod in pods {
        assert_eq!(restricted_violations(&pod), [""; 0]);
        let pod = value(&pod);
        let (metadata, spec) = (&pod["metadata"], &pod["spec"]);
        assert_eq!(metadata["labels"]["team"], "search");
        assert_eq!(metadata["annotations"]["prometheus.io/scrape"], "true");
        // Admission rejects these; the Pod's own values would take precedence anyway.
        assert_eq!(metadata["labels"]["app.kubernetes.io/name"], "hearth");
        assert_ne!(metadata["labels"]["hearth.dev/role"], "mine");
        if metadata["labels"]["hearth.dev/role"] != "inspect" {
            assert_ne!(metadata["annotations"]["hearth.dev/plan"], "mine");
        }
        assert_eq!(spec["priorityClassName"], "batch");
        assert!(spec["runtimeClassName"].is_null(), "it holds no GPU");
        let container = &spec["containers"][0];
        assert_eq!(
            container["env"],
            json!([
                {"name": "RUST_LOG", "value": "debug"},
                {"name": "SSL_CERT_DIR", "value": "/etc/hearth/authorities:/etc/ssl/certs"},
            ])
        );
        let mounts = container["volumeMounts"].as_array().expect("mounts");
        let mount = mounts.iter().find(|it| it["name"] == "authorities");
        assert_eq!(
            mount.expect("the authorities"),
            &json!({"name": "authorities", "mountPath": "/etc/hearth/authorities", "readOnly": true})
        );
        let volumes = spec["volumes"].as_array().expect("volumes");
        let volume = volumes.iter().find(|it| it["name"] == "authorities");
        assert_eq!(
            volume.expect("the volume")["projected"]["sources"],
            json!([
                {"configMap": {"name": "house", "items": [{"key": "ca.crt", "path": "0.pem"}]}},
                {"secret": {"name": "lab", "items": [{"key": "root.pem", "path": "1.pem"}]}},
            ])
        );
        claims.push((
            spec["resourceClaims"].clone(),
            container["resources"]["claims"].clone(),
        ));
    }
    let none = (Value::Null, Value::Null);
    let nic = (
        json!([{"name": "nic", "resourceClaimTemplateName": "rdma"}]),
        json!([{"name": "nic"}]),
    );
    assert_eq!(claims, [none.clone(), nic.clone(), nic.clone(), nic, none]);
}

#[test]
fn claims_of_the_template_stand_beside_those_of_gpus() {
    let mut plan = plan();
    let rank = &mut plan.ranks[1];
    (rank.gpus, rank.claims_gpus) = (1, true);
    rank.gpu_uuids = vec!["GPU-1".to_owned()];
    let pods = pods_of(&settings(), &whole(), &plan);
    let pod = value(&pods[1].pod);
    let names = |claims: &Value| -> Vec<Value> {
        let claims = claims.as_array().expect("claims").iter();
        claims.map(|claim| claim["name"].clone()).collect()
    };
    assert_eq!(names(&pod["spec"]["resourceClaims"]), ["gpus", "nic"]);
    let container = &pod["spec"]["containers"][0];
    assert_eq!(names(&container["resources"]["claims"]), ["gpus", "nic"]);
    assert_eq!(pod["spec"]["runtimeClassName"], "nvidia-cdi");
}

#[test]
fn each_member_is_in_the_digests_of_the_pods_that_have_it() {
    let (settings, plan) = (settings(), plan());
    let before = hashes(&settings, &deployment(), &plan);
    assert_eq!(before, hashes(&settings, &with_template(json!({})), &plan));
    const ALL: &[usize] = &[0, 1, 2, 3];
    const WORKERS: &[usize] = &[1, 2, 3];
    for (template, reached) in [
        (json!({"labels": {"team": "a"}}), ALL),
        (json!({"annotations": {"example.com/a": "b"}}), ALL),
        (json!({"env": [{"name": "TZ", "value": "UTC"}]}), ALL),
        (json!({"caBundles": [{"configMap": "a", "key": "b"}]}), ALL),
        (json!({"priorityClassName": "batch"}), ALL),
        (json!({"runtimeClassName": "nvidia"}), &[]),
        (
            json!({"resourceClaims": [{"name": "nic", "resourceClaimName": "a"}]}),
            WORKERS,
        ),
    ] {
        let after = hashes(&settings, &with_template(template.clone()), &plan);
        let differing = (0..before.len()).filter(|&n| before[n] != after[n]);
        assert_eq!(differing.collect::<Vec<_>>(), reached, "{template}");
    }
    let digest = |template: Value| hashes(&settings, &with_template(template), &plan)[1].clone();
    let distinct = [
        digest(json!({"caBundles": [{"configMap": "a", "key": "b"}]})),
        digest(json!({"caBundles": [{"secret": "a", "key": "b"}]})),
        digest(json!({"resourceClaims": [{"name": "nic", "resourceClaimName": "a"}]})),
        digest(json!({"resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "a"}]})),
        digest(json!({"labels": {"a": "b"}})),
        digest(json!({"annotations": {"a": "b"}})),
        digest(json!({"env": [{"name": "a", "value": "b"}]})),
    ];
    let set: std::collections::BTreeSet<&String> = distinct.iter().collect();
    assert_eq!(set.len(), distinct.len(), "{distinct:?}");
}

/// A worker that holds GPUs is not replaced because its runtime class moves to another field.
#[test]
fn the_deprecated_runtime_class_makes_the_same_pods() {
    let mut plan = plan();
    plan.ranks[1].gpus = 1;
    let mut old = deployment();
    old.spec.placement.runtime_class_name = Some("nvidia".to_owned());
    let mut translated = deployment();
    translated.spec = old.spec.translated();
    let new = with_template(json!({"runtimeClassName": "nvidia"}));
    let (settings, bare) = (settings(), deployment());
    assert_eq!(translated.spec, new.spec);
    let hashes = |deployment: &InferenceDeployment| hashes(&settings, deployment, &plan);
    // The same digest as when `placement` had it.
    assert_eq!(hashes(&new)[1], "a4bdf0f7");
    assert_ne!(hashes(&new)[1], hashes(&bare)[1]);
    assert_eq!(hashes(&new)[2..], hashes(&bare)[2..]);
}

#[test]
fn the_service_has_the_annotations_of_the_endpoint() {
    let settings = settings();
    let mut deployment = deployment();
    let annotations = |deployment: &InferenceDeployment| {
        let context = context_of(&settings, deployment);
        let objects = objects(&context, &plan(), Beside::default());
        let others = objects[1..].iter();
        assert!(others.clone().all(|it| it.metadata.annotations.is_none()));
        objects[0].metadata.annotations.clone()
    };
    assert_eq!(annotations(&deployment), None);
    let key = "external-dns.alpha.kubernetes.io/hostname";
    deployment.spec.endpoint.annotations = [(key.to_owned(), "llm.example.com".to_owned())].into();
    let written = annotations(&deployment).expect("annotations");
    assert_eq!(written[key], "llm.example.com");
    // It does not affect the gateway.
    assert_eq!(
        hashes(&settings, &deployment, &plan()),
        hashes(&settings, &with_template(json!({})), &plan())
    );
    assert_eq!(deployment.spec.pod_template, PodTemplateSpec::default());
}
