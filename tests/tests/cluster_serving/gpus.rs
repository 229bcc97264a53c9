//! Fake GPUs: none is held for nothing, and a worker that cannot open its own reports it.

use hearth_tests::cluster::{Cluster, STRICT, condition, toolbox_pod, wait_until};
use serde_json::{Value, json};

use super::release::{PATIENCE, deployment, infd, pods, said};

/// A device plugin offers them, but no agent can see them.
pub(super) fn are_not_held_for_nothing(cluster: &Cluster) {
    let spec = json!({"prefill": {"gpusPerWorker": 2}});
    cluster.apply(&deployment("demo", spec).to_string());
    let (reason, message) = wait_until("GPUs that nobody knows are refused", PATIENCE, || {
        let found = infd(cluster, "demo");
        (condition(&found, "Planned") == Some("False")).then(|| said(&found, "Planned"))
    });
    assert_eq!(reason, "NoUsableGpu", "{message}");
    for words in [
        "offers are not in its profile",
        "agent.runtimeClassName",
        "gpusPerWorker: 0",
    ] {
        assert!(message.contains(words), "no {words:?} in: {message}");
    }
    assert!(pods(cluster, "demo", "").is_empty());
    cluster.kubectl(&["delete", "infd", "demo"]);
}

/// The profile shows a GPU and the device plugin hands it out, but there is no driver to open it with.
pub(super) fn that_cannot_be_opened_are_told(cluster: &Cluster) {
    let gpu = json!({"uuid": "GPU-fake", "name": "fake", "memoryBytes": 24_u64 << 30, "freeBytes": 24_u64 << 30,
        "computeCapability": {"major": 8, "minor": 9}, "pcieGbps": 31.5, "readGbps": 300.0, "bf16Gflops": 100_000.0});
    let patch = json!({"status": {"gpus": [gpu]}}).to_string();
    // Agents overwrite this with what they see when they look again: the plan is made before.
    let message = wait_until("the worker says what it lacks", 2 * PATIENCE, || {
        let planned = cluster.get("inferencedeployment", "default", "demo");
        if planned.is_none_or(|found| condition(&found, "Planned") != Some("True")) {
            cluster.kubectl(&[
                "patch",
                "nodeprofile",
                "node-2",
                "--subresource=status",
                "--type=merge",
                "--patch",
                &patch,
            ]);
            let spec = json!({"prefill": {"gpusPerWorker": 1}});
            cluster.apply(&deployment("demo", spec).to_string());
            return None;
        }
        let (reason, message) = said(&infd(cluster, "demo"), "PrefillReady");
        (reason == "Crashed").then_some(message)
    });
    assert!(message.contains("NVIDIA driver"), "{message}");
    let prefill = &pods(cluster, "demo", "prefill")[0];
    let limits = &prefill["spec"]["containers"][0]["resources"]["limits"];
    assert_eq!(limits["nvidia.com/gpu"], "1", "{limits}");
    assert_eq!(condition(&infd(cluster, "demo"), "Ready"), Some("False"));
    show_no_gpus(cluster, "node-2");
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
}

/// There is a GPU less than workers: two of them are one Pod with one container, which gets one GPU and runs both.
pub(super) fn are_shared_in_one_pod(cluster: &Cluster) {
    let spec = json!({
        "prefill": {"mode": "StreamLoading", "replicas": 2},
        "decode": {"dualBatch": "On", "maxBatch": 4},
    });
    plan_with_profile(cluster, "node-2", &[("GPU-a", 24), ("GPU-b", 24)], spec);
    let plan = cluster.get("inferenceplan", "default", "demo-1");
    let plan = plan.expect("a plan");
    let ranks = plan["spec"]["ranks"].as_array().expect("ranks");
    let held = ranks.iter().filter(|rank| rank["gpuUuids"].is_array());
    let held: Vec<_> = held
        .map(|rank| (&rank["name"], &rank["gpus"], &rank["inPodOf"]))
        .collect();
    let (one, none) = (json!(1), Value::Null);
    let (first, second, decode) = (json!("prefill-0"), json!("prefill-1"), json!("decode-0"));
    assert_eq!(
        held,
        [
            (&first, &none, &decode),
            (&second, &one, &none),
            (&decode, &one, &none)
        ]
    );
    let pod = wait_until("the Pod of both", PATIENCE, || {
        pods(cluster, "demo", "decode").pop()
    });
    let container = &pod["spec"]["containers"][0];
    assert_eq!(
        container["resources"]["limits"]["nvidia.com/gpu"], "1",
        "{container:#}"
    );
    assert_eq!(container["args"][0], "supervise", "{container:#}");
    assert_eq!(pods(cluster, "demo", "prefill").len(), 1);
    // Both start there, and what one of them lacks is told.
    wait_until("a worker says what it lacks", 2 * PATIENCE, || {
        let (_, message) = said(&infd(cluster, "demo"), "DecodeReady");
        message.contains("NVIDIA driver").then_some(())
    });
    show_no_gpus(cluster, "node-2");
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
}

/// Another user has claimed the larger of two GPUs: the plan names the other one, and the worker's claim gets exactly
/// that.
pub(super) fn are_claimed_by_uuid(cluster: &Cluster) {
    let slices = cluster.list("resourceslices", "", "");
    let devices = slices[0]["spec"]["devices"].as_array().expect("devices");
    let uuid = |n: usize| {
        let uuid = devices[n]["attributes"]["uuid"]["string"].as_str();
        uuid.expect("a UUID").to_owned()
    };
    let (theirs, ours) = (uuid(0), uuid(1));
    let expression = format!("device.attributes['gpu.nvidia.com'].uuid == '{theirs}'");
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "theirs", "namespace": STRICT},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": expression}}]}}]}},
    });
    cluster.apply(&claim.to_string());
    let mut pod = toolbox_pod("theirs", "sleep infinity");
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "theirs"}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    cluster.run_pod(&pod);

    let spec = json!({"prefill": {"gpusPerWorker": 1}});
    plan_with_profile(cluster, "node-1", &[(&theirs, 48), (&ours, 24)], spec);
    let plan = cluster.get("inferenceplan", "default", "demo-1");
    let plan = plan.expect("a plan");
    let ranks = plan["spec"]["ranks"].as_array().expect("ranks");
    let on_gpus: Vec<&Value> = ranks
        .iter()
        .filter(|rank| rank["gpuUuids"].is_array())
        .collect();
    assert_eq!(on_gpus.len(), 1, "{plan:#}");
    assert_eq!(on_gpus[0]["gpuUuids"], json!([ours]), "{plan:#}");
    let device = wait_until("the worker's claim has a GPU", PATIENCE, || {
        let claims = cluster.list("resourceclaims", "default", "hearth.dev/deployment=demo");
        let results = &claims.first()?["status"]["allocation"]["devices"]["results"];
        Some(results.get(0)?["device"].clone())
    });
    assert_eq!(device, devices[1]["name"]);
    let prefill = &pods(cluster, "demo", "prefill")[0];
    let limits = &prefill["spec"]["containers"][0]["resources"]["limits"];
    assert!(
        limits.is_null(),
        "nothing is asked of a device plugin: {limits}"
    );
    show_no_gpus(cluster, "node-1");
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until("its claim is gone with its Pods", PATIENCE, || {
        let claims = cluster.list("resourceclaims", "default", "");
        claims.is_empty().then_some(())
    });
    cluster.kubectl(&[
        "delete",
        "pod/theirs",
        "resourceclaim/theirs",
        "--namespace",
        STRICT,
    ]);
}

/// Makes a plan for the demo of this spec with a GPU while a node's profile shows these GPUs, by UUID and GiB. The node's agent
/// overwrites this with what it sees at its next look, within a minute: the plan is made before.
fn plan_with_profile(cluster: &Cluster, node: &str, gpus: &[(&str, u64)], mut spec: Value) {
    let gpu = |(uuid, gib): &(&str, u64)| {
        json!({"uuid": uuid, "name": "fake", "memoryBytes": gib << 30, "freeBytes": gib << 30,
            "computeCapability": {"major": 8, "minor": 9}, "pcieGbps": 31.5, "readGbps": 300.0,
            "bf16Gflops": 100_000.0})
    };
    let gpus: Vec<Value> = gpus.iter().map(gpu).collect();
    let patch = json!({"status": {"gpus": gpus}}).to_string();
    spec["placement"] = json!({"nodeSelector": {"kubernetes.io/hostname": node}});
    wait_until("a plan with a GPU", PATIENCE, || {
        cluster.kubectl(&[
            "patch",
            "nodeprofile",
            node,
            "--subresource=status",
            "--type=merge",
            "--patch",
            &patch,
        ]);
        cluster.apply(&deployment("demo", spec.clone()).to_string());
        let found = infd(cluster, "demo");
        (condition(&found, "Planned") == Some("True")).then_some(())
    });
}

/// Restores the profile to what the agent sees: later plans must not wait for GPUs that cannot be opened.
fn show_no_gpus(cluster: &Cluster, node: &str) {
    let patch = json!({"status": {"gpus": null}}).to_string();
    cluster.kubectl(&[
        "patch",
        "nodeprofile",
        node,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &patch,
    ]);
}
