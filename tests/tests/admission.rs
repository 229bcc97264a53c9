//! The chart's ValidatingAdmissionPolicy on a real API server: which directories of nodes a deployment may name.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{root, run, skipped};
use serde_json::{Value, json};

/// A policy takes effect within a second or two of its making.
const PATIENCE: Duration = Duration::from_secs(30);

/// What helm renders of the definitions and the policy for these values.
fn rendered(helm: &Path, prefixes: &str) -> String {
    let (code, stdout, stderr) = run(Command::new(helm)
        .args(["template", "hearth", "charts/hearth", "--set-json"])
        .arg(format!("hostPath.allowedPrefixes={prefixes}"))
        .args(["--show-only", "templates/crds.yaml"])
        .args(["--show-only", "templates/admission.yaml"])
        .current_dir(root()));
    assert_eq!(code, 0, "{stderr}");
    stdout
}

fn deployment(name: &str, path: &str) -> Value {
    json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"source": {"hostPath": {"path": path}}}},
    })
}

/// Whether the API server would take the object; with its words where it would not.
fn verdict(cluster: &Cluster, object: &Value) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), object.to_string()).expect("object");
    let path = file.path().to_str().expect("path");
    let arguments = ["create", "--dry-run=server", "--filename", path];
    cluster.try_kubectl(&arguments).map(|_| ())
}

fn takes_effect(cluster: &Cluster, what: &str, path: &str, is_allowed: bool) {
    wait_until(what, PATIENCE, || {
        let now = verdict(cluster, &deployment("probe", path)).is_ok();
        (now == is_allowed).then_some(())
    });
}

#[test]
fn directories_of_nodes_are_those_that_the_chart_allows() {
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    cluster.apply(&rendered(&helm, r#"["/"]"#));
    takes_effect(&cluster, "the root allows all", "/srv/old", true);
    cluster.apply(&deployment("old", "/srv/old").to_string());
    cluster.apply(&rendered(
        &helm,
        r#"["/models/", "/srv/it's \"b\"", "/var/lib/hearth/models"]"#,
    ));
    takes_effect(&cluster, "the policy counts", "/etc/kubernetes", false);

    let key = "0123456789abcdef0123456789abcdef";
    let store = "/var/lib/hearth/models";
    for path in [
        "/models",
        "/models/",
        "//models/./qwen3//a",
        "/srv/it's \"b\"/m",
        &format!("{store}/mine"),
        &format!("/models/{key}"),
        &format!("/models{store}/{key}"),
    ] {
        let outcome = verdict(&cluster, &deployment("probe", path));
        assert_eq!(outcome, Ok(()), "{path}");
    }
    for path in [
        "/",
        "/etc",
        "/modelsandmore",
        "/./etc",
        "/srv",
        "/var/lib/hearth",
        &format!("{store}/{key}"),
        &format!("/var//lib/./hearth/models/{key}/"),
        &format!("{store}/.unpack-{key}"),
    ] {
        let refusal = verdict(&cluster, &deployment("probe", path)).expect_err(path);
        for words in [
            "hostPath.path is",
            path,
            "put the model below /models",
            "allowedPrefixes",
        ] {
            assert!(refusal.contains(words), "{path}: {refusal}");
        }
    }
    let mut adapter = deployment("probe", "/models/m");
    adapter["spec"]["model"]["adapters"] =
        json!([{"name": "a", "source": {"hostPath": {"path": "/etc"}}}]);
    assert!(verdict(&cluster, &adapter).is_err());
    the_old_object_keeps_its_path(&cluster);

    cluster.apply(&rendered(&helm, "[]"));
    takes_effect(&cluster, "an empty list allows none", "/models/m", false);
    let builtin = json!({"builtin": {"name": "hearth-demo"}});
    let mut demo = deployment("probe", "/models/m");
    demo["spec"]["model"]["source"] = builtin;
    assert_eq!(verdict(&cluster, &demo), Ok(()));
}

/// What was applied under other rules is scaled, labelled and told its status as before; its path only changes to one
/// that is allowed.
fn the_old_object_keeps_its_path(cluster: &Cluster) {
    let changed = |patch: &Value| {
        let patch = patch.to_string();
        let arguments = ["patch", "infd", "old", "--type=merge", "--patch", &patch];
        cluster.try_kubectl(&arguments)
    };
    let source = |path: &str| json!({"spec": {"model": {"source": {"hostPath": {"path": path}}}}});
    changed(&json!({"metadata": {"labels": {"a": "b"}}})).expect("a label");
    changed(&json!({"spec": {"decode": {"maxBatch": 3}}})).expect("another field");
    cluster.kubectl(&["scale", "infd/old", "--replicas=2"]);
    let status = json!({"status": {"endpointUrl": "http://old.default.svc/v1"}}).to_string();
    let arguments = [
        "patch",
        "infd",
        "old",
        "--type=merge",
        "--subresource=status",
        "--patch",
    ];
    cluster.kubectl(&[&arguments[..], &[&status]].concat());
    changed(&source("/srv/other")).expect_err("another path");
    changed(&source("/models/new")).expect("an allowed path");
    changed(&source("/srv/old")).expect_err("there is no way back");
}
