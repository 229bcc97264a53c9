//! CPU and device settings of the test cluster's kubelets, which other cluster tests rely on.

use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, STRICT, toolbox_pod, wait_until};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// Prints the CPUs that it may run on, then waits.
const SHOW_CPUS: &str = "cat /proc/self/status; exec sleep 1000";

#[test]
fn kubelets_give_cpus_and_devices_away() {
    let options = Options {
        nodes: 1,
        static_policies: true,
        fake_dra: vec![1],
        ..Options::default()
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    cluster.import_toolbox();
    whole_cpus_are_exclusive(&cluster);
    a_claim_selects_a_gpu_by_its_uuid(&cluster);
}

/// Checks that a Guaranteed Pod with one CPU has it exclusively, and none is left for a second one.
fn whole_cpus_are_exclusive(cluster: &Cluster) {
    cluster.run_pod(&guaranteed("exclusive"));
    let exclusive = allowed_cpus(cluster, "exclusive");
    assert!(exclusive.parse::<usize>().is_ok(), "one CPU: {exclusive}");
    cluster.run_pod(&toolbox_pod("shared", SHOW_CPUS));
    let shared = allowed_cpus(cluster, "shared");
    let is_listed = shared.split(',').any(|cpu| cpu == exclusive);
    assert!(!is_listed, "{exclusive} is in the shared pool {shared}");
    cluster.apply(&guaranteed("second").to_string());
    wait_until("the second one is refused", PATIENCE, || {
        let pod = cluster.get("pod", STRICT, "second")?;
        let conditions = pod["status"]["conditions"].as_array()?.clone();
        let scheduled = conditions
            .iter()
            .find(|condition| condition["type"] == "PodScheduled")?;
        let why = scheduled["message"].as_str()?;
        why.contains("Insufficient cpu").then_some(())
    });
    for pod in ["second", "shared", "exclusive"] {
        cluster.kubectl(&["delete", "pod", "--namespace", STRICT, pod]);
    }
}

fn guaranteed(name: &str) -> Value {
    let mut pod = toolbox_pod(name, SHOW_CPUS);
    let amounts = json!({"cpu": "1", "memory": "64Mi"});
    pod["spec"]["containers"][0]["resources"] = json!({"limits": amounts, "requests": amounts});
    pod
}

fn allowed_cpus(cluster: &Cluster, pod: &str) -> String {
    wait_until("the Pod tells of its CPUs", PATIENCE, || {
        let log = cluster.pod_logs(STRICT, pod);
        let line = log
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(line.trim().to_owned())
    })
}

/// Claims the second of two GPUs, which would not be assigned by chance.
fn a_claim_selects_a_gpu_by_its_uuid(cluster: &Cluster) {
    let wanted = "GPU-fake-node-1-1";
    let selector = format!("device.attributes['gpu.nvidia.com'].uuid == '{wanted}'");
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "gpu", "namespace": STRICT},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "gpu.nvidia.com",
            "selectors": [{"cel": {"expression": selector}}],
        }}]}},
    });
    cluster.apply(&claim.to_string());
    let command =
        "echo $GPU_DEVICE_1 $NVIDIA_VISIBLE_DEVICES; [ -c /dev/nvidia1 ] && exec sleep 1000";
    let mut pod = toolbox_pod("claimant", command);
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "gpu"}]);
    pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    cluster.run_pod(&pod);
    let log = cluster.pod_logs(STRICT, "claimant");
    assert_eq!(log.trim(), format!("{wanted} void"));
    let claim = cluster.get("resourceclaim", STRICT, "gpu").expect("claim");
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    assert_eq!(result["device"], "gpu-1", "{claim:#}");
    cluster.kubectl(&["delete", "pod", "--namespace", STRICT, "claimant"]);
    wait_until("the device is free again", PATIENCE, || {
        let claim = cluster.get("resourceclaim", STRICT, "gpu")?;
        claim["status"]["allocation"].is_null().then_some(())
    });
}
