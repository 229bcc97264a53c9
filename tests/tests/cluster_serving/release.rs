//! Hearth as users install it, and its state as `kubectl` shows it.

use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Images, condition, wait_until};
use hearth_tests::{Metrics, root, run};
use serde_json::{Value, json};

/// Longest wait for anything that a cluster does by itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// Namespace of the release.
pub(crate) const SYSTEM: &str = "hearth-system";

/// Runs helm to completion.
fn helm(cluster: &Cluster, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = run(Command::new(cluster.tool("helm"))
        .args(arguments)
        .args(["--namespace", SYSTEM])
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig())
        .current_dir(root()));
    assert_eq!(code, 0, "helm {arguments:?}\n{stdout}\n{stderr}");
    stdout
}

/// Installs the chart with `replicas` operators, and waits until all nodes are measured.
pub(crate) fn install(cluster: &Cluster, images: &Images, replicas: u32) {
    install_with(cluster, images, replicas, &[]);
}

/// Installs the chart with additional values, each `A=B`.
pub(crate) fn install_with(cluster: &Cluster, images: &Images, replicas: u32, more: &[&str]) {
    let registry = images.operator.0.trim_end_matches("/hearth");
    let values = [
        format!("image.registry={registry}"),
        format!("image.tag={}", images.operator.1),
        format!("operator.replicas={replicas}"),
    ];
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    install_chart(cluster, "charts/hearth", &[&values, more].concat());
}

/// Installs a chart, a directory or packed, with additional values, each `A=B`, and waits until all nodes are measured.
pub(crate) fn install_chart(cluster: &Cluster, chart: &str, more: &[&str]) {
    let values = [
        "image.pullPolicy=IfNotPresent",
        "crds.keep=false",
        // Models of the tests are here, on a disk that may be full.
        "hostPath.allowedPrefixes={/models,/var/tmp}",
        "agent.diskReservePercent=0",
        // Tests check that unused models are removed, without waiting a day.
        "agent.keepModels=0",
        // All servers of the tests have private addresses.
        "agent.fetch.privatePatienceSeconds=5",
        // Longest time that a node may be away in the tests: longer than other waits.
        "nodes.forgetAfter=100s",
    ];
    let mut arguments = vec!["install", "hearth", chart, "--create-namespace"];
    for value in values.iter().chain(more) {
        arguments.extend(["--set", value]);
    }
    helm(cluster, &arguments);
    let nodes = cluster.list("nodes", "", "").len();
    wait_until("all nodes are measured", PATIENCE, || {
        let profiles = cluster.try_kubectl(&["get", "nodeprofiles", "--output=name"]);
        (profiles.ok()?.lines().count() == nodes).then_some(())
    });
}

/// Changes values of the release, `A=B,C=D`, and waits until its operators run with them.
pub(crate) fn upgrade(cluster: &Cluster, values: &str) {
    let arguments = [
        "upgrade",
        "hearth",
        "charts/hearth",
        "--reuse-values",
        "--wait",
    ];
    helm(cluster, &[&arguments[..], &["--set", values]].concat());
}

/// Goes back to a revision of the release, and waits until its operators run.
pub(crate) fn roll_back(cluster: &Cluster, revision: &str) {
    helm(cluster, &["rollback", "hearth", revision, "--wait"]);
}

/// Runs the chart's own tests.
pub(crate) fn helm_test(cluster: &Cluster) {
    helm(cluster, &["test", "hearth"]);
}

/// Uninstalls the release.
pub(crate) fn uninstall(cluster: &Cluster) {
    helm(cluster, &["uninstall", "hearth", "--wait"]);
}

/// Returns an InferenceDeployment with this spec, by default with the demo's model.
pub(crate) fn deployment(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    if spec["model"].is_null() {
        spec["model"] = json!({"source": {"builtin": {"name": "hearth-demo"}}});
    }
    json!({
        "apiVersion": "hearth.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    })
}

/// Returns the deployment as it is now.
pub(crate) fn infd(cluster: &Cluster, name: &str) -> Value {
    let found = cluster.get("inferencedeployment", "default", name);
    found.unwrap_or_else(|| panic!("no InferenceDeployment {name}"))
}

/// Returns the status of a deployment's pool.
pub(crate) fn pool<'a>(deployment: &'a Value, name: &str) -> &'a Value {
    let pools = deployment["status"]["poolStatuses"].as_array();
    let found = pools.and_then(|pools| pools.iter().find(|pool| pool["name"] == name));
    found.unwrap_or_else(|| panic!("no pool {name}: {deployment:#}"))
}

/// Changes the spec by a merge patch.
pub(crate) fn patch(cluster: &Cluster, name: &str, spec: &Value) {
    let patch = json!({ "spec": spec }).to_string();
    let target = format!("inferencedeployment/{name}");
    cluster.kubectl(&["patch", &target, "--type=merge", "--patch", &patch]);
}

/// Waits until the current spec runs completely: Ready, with nothing in progress.
pub(crate) fn wait_until_settled(cluster: &Cluster, name: &str) -> Value {
    wait_until(&format!("{name} runs as asked"), PATIENCE, || {
        settled(cluster, name)
    })
}

/// Prompts that prefill and decode workers of the deployment `demo` have read, by its only gateway.
pub(crate) fn prompts_read(cluster: &Cluster) -> (f64, f64) {
    let gateway = pods(cluster, "demo", "gateway").remove(0);
    let address = gateway["status"]["podIP"].as_str().expect("an address");
    let metrics = Metrics::of(&format!("http://{address}:9402"));
    let by = |role: &str| metrics.sum("hearth_prompts_read_total", &[&format!("role=\"{role}\"")]);
    (by("prefill"), by("decode"))
}

/// Returns the deployment if its spec runs completely.
pub(crate) fn settled(cluster: &Cluster, name: &str) -> Option<Value> {
    let found = infd(cluster, name);
    let is_current = found["status"]["observedGeneration"] == found["metadata"]["generation"];
    let is_true = |kind| condition(&found, kind) == Some("True");
    let is_ready = is_true("Ready") && is_true("Planned") && is_true("ModelReady");
    let is_quiet = condition(&found, "Progressing") == Some("False");
    (is_current && is_ready && is_quiet).then_some(found)
}

/// Returns the Pods of a deployment, of all roles or one, without those that have ended and are only waiting for
/// removal.
pub(crate) fn pods(cluster: &Cluster, name: &str, role: &str) -> Vec<Value> {
    let mut selector = format!("hearth.dev/deployment={name}");
    if !role.is_empty() {
        selector += &format!(",hearth.dev/role={role}");
    }
    let mut pods = cluster.list("pods", "default", &selector);
    pods.retain(|pod| pod["status"]["phase"] != "Succeeded" && pod["status"]["phase"] != "Failed");
    pods
}

/// Returns the names of Pods.
pub(crate) fn names(pods: &[Value]) -> Vec<String> {
    let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
    pods.iter().filter_map(name).collect()
}

/// Returns reason and message of a condition.
pub(crate) fn said(found: &Value, kind: &str) -> (String, String) {
    let conditions = found["status"]["conditions"].as_array();
    let condition = conditions
        .into_iter()
        .flatten()
        .find(|condition| condition["type"] == kind);
    let text = |field: &str| {
        let value = condition.map_or(&Value::Null, |condition| &condition[field]);
        value.as_str().unwrap_or_default().to_owned()
    };
    (text("reason"), text("message"))
}
