//! Tests of the Pods that are built, of when their digests change, and that Pod Security `restricted` admits them.

use std::collections::BTreeMap;

use hearth_crds::{
    EndpointType, InferenceDeployment, InferencePlanSpec, Pinning, PlanInputs, PlanRole,
    ResidencyPolicy, TolerationSpec,
};
use k8s_openapi::api::core::v1::{Pod, Volume};
use serde_json::json;

use super::digest_tests::hashes;
use super::{
    Beside, DesiredPod, deployment_of_plan, inspect_pod, kept_spec, model_path, objects,
    plan_object, rank_pods,
};
use crate::names::{ANNOTATION_PLAN, ANNOTATION_SPEC};
use crate::observed::Settings;
use crate::plan_record::inputs_digest;
use crate::testing::samples::{context_of, deployment, deployment_of, plan, settings};

pub(super) fn pods_of(
    settings: &Settings,
    deployment: &InferenceDeployment,
    plan: &InferencePlanSpec,
) -> Vec<DesiredPod> {
    let context = context_of(settings, deployment);
    rank_pods(&context, plan)
}

#[test]
fn the_pods_of_the_demo() {
    let pods = pods_of(&settings(), &deployment(), &plan());
    insta::assert_yaml_snapshot!("gateway", pods[0].pod);
    insta::assert_yaml_snapshot!("prefill", pods[1].pod);
    insta::assert_yaml_snapshot!("decode_on_the_same_node", pods[2].pod);
}

#[test]
fn the_objects_of_the_demo() {
    let (settings, deployment) = (settings(), deployment());
    let context = context_of(&settings, &deployment);
    insta::assert_yaml_snapshot!("objects", objects(&context, &plan(), Beside::default()));
    let names = |settings: &Settings| -> Vec<String> {
        let context = context_of(settings, &deployment);
        let mut chunked = plan();
        chunked.ranks.remove(1);
        let objects = objects(&context, &chunked, Beside::default()).into_iter();
        objects.filter_map(|object| object.metadata.name).collect()
    };
    let open = Settings {
        network_policies: false,
        tracing: None,
        ..settings.clone()
    };
    assert_eq!(
        names(&settings),
        [
            "demo",
            "demo-gateway",
            "demo-decode",
            "demo-gateway",
            "demo-workers"
        ]
    );
    assert_eq!(names(&open), ["demo", "demo-gateway", "demo-decode"]);
}

#[test]
fn the_type_of_the_service_is_the_endpoint_s() {
    let settings = settings();
    for (endpoint_type, text) in [
        (EndpointType::ClusterIP, "ClusterIP"),
        (EndpointType::NodePort, "NodePort"),
        (EndpointType::LoadBalancer, "LoadBalancer"),
    ] {
        let mut deployment = deployment();
        deployment.spec.endpoint.type_ = endpoint_type;
        let context = context_of(&settings, &deployment);
        assert_eq!(
            objects(&context, &plan(), Beside::default())[0].data["spec"]["type"],
            text
        );
    }
}

#[test]
fn the_first_worker_of_a_node_answers_for_the_weights() {
    let pods = pods_of(&settings(), &deployment(), &plan());
    let held: Vec<u64> = pods.iter().map(|pod| pod.memory_bytes).collect();
    // KV cache, scratch, and the page tables of the mapped weights.
    let alone = 15_728_640 + 80_150_528 + 7_733_248 / 512;
    assert_eq!(
        held,
        [134_217_728, alone + 7_733_248, alone, alone + 7_733_248]
    );
}

#[test]
fn the_worker_that_maps_all_weights_answers_for_them_beside_one_that_streams_the_experts() {
    let mut plan = plan();
    let streaming = &mut plan.ranks[1];
    streaming.gpu_uuids = vec!["GPU-1".to_owned()];
    let residency = streaming.residency.as_mut().expect("weights");
    residency.policy = ResidencyPolicy::StreamLoading;
    residency.host_bytes = 4 << 20;
    let pods = pods_of(&settings(), &deployment(), &plan);
    // Scratch, and the page tables of the mapped experts; its KV cache is on the GPU.
    assert_eq!(pods[1].memory_bytes, 80_150_528 + (4 << 20) / 512);
    let alone = 15_728_640 + 80_150_528 + 7_733_248 / 512;
    assert_eq!(pods[2].memory_bytes, alone + 7_733_248);
}

#[test]
fn a_worker_with_a_limit_of_its_own_requests_its_window_over_prefetched_weights() {
    let window = 4 << 20;
    let held = |pinning: Pinning| -> Vec<u64> {
        let mut plan = plan();
        for rank in &mut plan.ranks[1..] {
            let residency = rank.residency.as_mut().expect("weights");
            residency.policy = ResidencyPolicy::MmapPrefetch;
            residency.budget_bytes = window;
            (rank.pinning, rank.cpus) = (pinning, vec![rank.index]);
        }
        let pods = pods_of(&settings(), &deployment(), &plan);
        pods[1..].iter().map(|pod| pod.memory_bytes).collect()
    };
    let alone = 15_728_640 + 80_150_528 + window / 512;
    assert_eq!(held(Pinning::Exclusive), [alone + window; 3]);
    // Without limits, all workers of a node read ahead into the memory that one of them requests.
    assert_eq!(
        held(Pinning::Shared),
        [alone + window, alone, alone + window]
    );
}

#[test]
fn a_rank_with_cpus_of_its_own_is_guaranteed() {
    let mut plan = plan();
    plan.ranks[2].pinning = Pinning::Exclusive;
    plan.ranks[2].cpus = vec![2, 3, 5];
    let pods = pods_of(&settings(), &deployment(), &plan);
    assert_eq!(pods[2].exclusive_cpus, [2, 3, 5]);
    let resources = resources(&pods[2].pod);
    assert_eq!(resources["requests"], resources["limits"]);
    assert_eq!(resources["limits"]["cpu"], "3");
    assert!(pods[1].exclusive_cpus.is_empty());
}

#[test]
fn weights_and_kv_on_a_gpu_take_no_memory_of_the_node() {
    let mut plan = plan();
    plan.ranks[1].gpu_uuids = vec!["GPU-1".to_owned()];
    let pods = pods_of(&settings(), &deployment(), &plan);
    let held: Vec<u64> = pods.iter().map(|pod| pod.memory_bytes).collect();
    // KV cache, scratch, and the page tables of the mapped weights.
    let alone = 15_728_640 + 80_150_528 + 7_733_248 / 512;
    // The decode worker beside it is now the first to map the weights there.
    assert_eq!(
        held,
        [
            134_217_728,
            80_150_528,
            alone + 7_733_248,
            alone + 7_733_248
        ]
    );
}

pub(super) fn resources(pod: &Pod) -> serde_json::Value {
    let pod = serde_json::to_value(pod).expect("JSON");
    pod["spec"]["containers"][0]["resources"].clone()
}

#[test]
fn names_fit_a_host_name() {
    let mut deployment = deployment();
    deployment.metadata.name = Some("a".repeat(40));
    let mut plan = plan();
    plan.ranks[1].name = "prefill-511".to_owned();
    for pod in pods_of(&settings(), &deployment, &plan) {
        assert!(pod.name.len() <= 63, "{}", pod.name);
    }
}

#[test]
fn a_rank_is_told_its_own_part_of_the_plan() {
    for pod in pods_of(&settings(), &deployment(), &plan()) {
        let annotations = pod.pod.metadata.annotations.expect("annotations");
        let told: InferencePlanSpec =
            serde_json::from_str(&annotations[ANNOTATION_PLAN]).expect("plan");
        assert_eq!(told.ranks.len(), 1);
        assert_eq!(told.ranks[0].name, pod.rank);
        let port = if pod.role == PlanRole::Gateway {
            8080
        } else {
            9400
        };
        assert_eq!(told.ranks[0].endpoint, Some(format!("[::]:{port}")));
        assert!(told.why.is_empty() && told.not_chosen.is_empty());
    }
}

#[test]
fn a_plan_remembers_the_spec_that_it_was_made_for() {
    let (settings, before) = (
        settings(),
        deployment_of(json!({"hostPath": {"path": "/models/old"}})),
    );
    let context = context_of(&settings, &before);
    let mut spec = plan();
    spec.inputs = Some(PlanInputs {
        digest: "abc".to_owned(),
        deployment_spec: kept_spec(&before.spec),
        ..PlanInputs::default()
    });
    let kept = plan_object(&context, spec);
    assert_eq!(kept.metadata.name.as_deref(), Some("demo-1"));
    assert_eq!(inputs_digest(&kept), "abc");

    let mut now = deployment_of(json!({"hostPath": {"path": "/models/new"}}));
    now.metadata.generation = Some(2);
    let then = deployment_of_plan(&now, &kept);
    assert_eq!(then.spec, before.spec);
    assert_eq!(then.metadata, now.metadata);
    assert_eq!(
        hashes(&settings, &then, &plan()),
        hashes(&settings, &before, &plan())
    );

    // A plan of an earlier version, with the spec in its annotation.
    let mut annotated = plan_object(&context, plan());
    let text = serde_json::to_string(&before.spec).expect("JSON");
    annotated.metadata.annotations = Some([(ANNOTATION_SPEC.to_owned(), text)].into());
    assert_eq!(deployment_of_plan(&now, &annotated).spec, before.spec);

    let silent = plan_object(&context, plan());
    assert_eq!(deployment_of_plan(&now, &silent).spec, now.spec);
}

#[test]
fn models_are_mounted_where_their_source_says() {
    let sha256 = "0123456789abcdef".repeat(4);
    let cases = [
        (
            json!({"builtin": {"name": "hearth-demo"}}),
            "/usr/share/hearth/models/hearth-demo",
            json!(null),
        ),
        (
            json!({"hostPath": {"path": "/models/x"}}),
            "/models/source",
            json!({"hostPath": {"path": "/models/x", "type": "Directory"}}),
        ),
        (
            json!({"persistentVolumeClaim": {"claimName": "c"}}),
            "/models/source",
            json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}}),
        ),
        (
            json!({"persistentVolumeClaim": {"claimName": "c", "path": "a/b/"}}),
            "/models/source/a/b",
            json!({"persistentVolumeClaim": {"claimName": "c", "readOnly": true}}),
        ),
        (
            json!({"http": {"url": "https://nas.lan/m.tar", "sha256": sha256}}),
            "/models/source",
            json!({"hostPath": {"path": "/var/lib/hearth/models/k3y", "type": "Directory"}}),
        ),
    ];
    let settings = settings();
    for (source, path, mut volume) in cases {
        let deployment = deployment_of(source.clone());
        let mut context = context_of(&settings, &deployment);
        context.model_key = source["http"].is_object().then_some("k3y");
        assert_eq!(model_path(&context, &deployment.spec.model.source), path);
        if !volume.is_null() {
            volume["name"] = json!("model");
        }
        let inspect = inspect_pod(&context, &deployment.spec.model.source, Some("a"));
        let ranks = rank_pods(&context, &plan()).into_iter().map(|pod| pod.pod);
        for pod in ranks.chain([inspect]) {
            let found = volumes(&pod).iter().find(|volume| volume.name == "model");
            assert_eq!(
                serde_json::to_value(found).expect("JSON"),
                volume,
                "{source}"
            );
            let pod = serde_json::to_value(&pod).expect("JSON");
            let mounts = pod["spec"]["containers"][0]["volumeMounts"]
                .as_array()
                .expect("mounts");
            for mount in mounts {
                assert_eq!(mount["readOnly"] == true, mount["name"] != "tmp", "{mount}");
            }
        }
    }
}

#[test]
fn an_inspect_pod_goes_where_the_model_is() {
    let settings = settings();
    let mut deployment = deployment_of(json!({"persistentVolumeClaim": {"claimName": "c"}}));
    deployment.spec.placement.node_selector =
        BTreeMap::from([("disk".to_owned(), "nvme".to_owned())]);
    let context = context_of(&settings, &deployment);
    let source = &deployment.spec.model.source;
    let anywhere = inspect_pod(&context, source, None);
    insta::assert_yaml_snapshot!("inspect", anywhere);
    let names: Vec<_> = [None, Some("a"), Some("b")]
        .map(|node| inspect_pod(&context, source, node).metadata.name)
        .into();
    assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
    assert_eq!(names[0], inspect_pod(&context, source, None).metadata.name);
}

#[test]
fn the_operator_alone_decides_about_a_lost_node_unless_the_spec_does() {
    let mut deployment = deployment();
    deployment.spec.placement.tolerations = vec![TolerationSpec {
        key: Some("node.kubernetes.io/unreachable".to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(30),
        ..TolerationSpec::default()
    }];
    let pods = pods_of(&settings(), &deployment, &plan());
    let spec = pods[0].pod.spec.as_ref().expect("spec");
    let tolerations: Vec<_> = spec
        .tolerations
        .iter()
        .flatten()
        .map(|t| (t.key.as_deref(), t.toleration_seconds))
        .collect();
    assert_eq!(
        tolerations,
        [
            (Some("node.kubernetes.io/unreachable"), Some(30)),
            (Some("node.kubernetes.io/not-ready"), None),
            (Some("example.net/agent-not-ready"), Some(300)),
        ]
    );
}

fn volumes(pod: &Pod) -> &[Volume] {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.volumes.as_deref())
        .unwrap_or_default()
}

/// Violations of Pod Security `restricted` (and the `baseline` within it) by a Pod; empty if it is admitted.
pub(super) fn restricted_violations(pod: &Pod) -> Vec<String> {
    const VOLUMES: [&str; 8] = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    let pod = serde_json::to_value(pod).expect("JSON");
    let spec = &pod["spec"];
    let mut violations = Vec::new();
    let mut forbid = |is_wrong: bool, what: &str| {
        if is_wrong {
            violations.push(what.to_owned());
        }
    };
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        forbid(spec[field] == true, field);
    }
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        let kinds = volume
            .as_object()
            .expect("volume")
            .keys()
            .filter(|key| *key != "name");
        for kind in kinds {
            forbid(!VOLUMES.contains(&kind.as_str()), &format!("volume {kind}"));
        }
    }
    let shared = &spec["securityContext"];
    forbid(!shared["sysctls"].is_null(), "sysctls");
    forbid(
        !spec["initContainers"].is_null(),
        "init containers are not looked at here",
    );
    for container in spec["containers"].as_array().expect("containers") {
        let own = &container["securityContext"];
        let either = |field: &str| {
            if own[field].is_null() {
                &shared[field]
            } else {
                &own[field]
            }
        };
        forbid(own["privileged"] == true, "privileged");
        forbid(
            own["allowPrivilegeEscalation"] != false,
            "allowPrivilegeEscalation",
        );
        forbid(
            own["capabilities"]["drop"] != json!(["ALL"]),
            "capabilities.drop",
        );
        forbid(!own["capabilities"]["add"].is_null(), "capabilities.add");
        forbid(either("runAsNonRoot") != true, "runAsNonRoot");
        forbid(either("runAsUser") == 0, "runAsUser");
        forbid(
            either("seccompProfile")["type"] != "RuntimeDefault",
            "seccompProfile",
        );
        forbid(!own["procMount"].is_null(), "procMount");
        forbid(!own["seLinuxOptions"].is_null(), "seLinuxOptions");
        for port in container["ports"].as_array().into_iter().flatten() {
            forbid(!port["hostPort"].is_null(), "hostPort");
        }
    }
    violations
}

#[test]
fn pods_are_restricted_but_for_directories_of_nodes() {
    let settings = settings();
    let sha256 = "0123456789abcdef".repeat(4);
    for (source, expected) in [
        (json!({"builtin": {"name": "hearth-demo"}}), vec![]),
        (json!({"persistentVolumeClaim": {"claimName": "c"}}), vec![]),
        (json!({"hostPath": {"path": "/m"}}), vec!["volume hostPath"]),
        (
            json!({"http": {"url": "https://h/m.tar", "sha256": sha256}}),
            vec!["volume hostPath"],
        ),
    ] {
        let deployment = deployment_of(source.clone());
        let mut context = context_of(&settings, &deployment);
        context.model_key = source["http"].is_object().then_some("k3y");
        let inspect = inspect_pod(&context, &deployment.spec.model.source, None);
        let ranks = rank_pods(&context, &plan()).into_iter().map(|pod| pod.pod);
        for pod in ranks.chain([inspect]) {
            assert_eq!(restricted_violations(&pod), expected, "{source}");
            let spec = pod.spec.expect("spec");
            assert_eq!(spec.automount_service_account_token, Some(false));
            assert_eq!(spec.service_account_name, None);
        }
    }
    // The rules themselves can fail.
    let mut open = pods_of(&settings, &deployment(), &plan()).remove(0).pod;
    let spec = open.spec.as_mut().expect("spec");
    spec.host_network = Some(true);
    spec.containers[0].security_context = None;
    spec.security_context = None;
    let violations = restricted_violations(&open);
    for rule in [
        "hostNetwork",
        "allowPrivilegeEscalation",
        "capabilities.drop",
        "runAsNonRoot",
        "seccompProfile",
    ] {
        assert!(
            violations.iter().any(|violation| violation == rule),
            "{rule} in {violations:?}"
        );
    }
}
