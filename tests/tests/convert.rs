//! `hearth convert`: objects with field names of an earlier version, in a file and on an API server, before `helm
//! upgrade`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{hearth, root, run, skipped};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(30);

fn deployment(name: &str, spec: &Value) -> Value {
    let mut object = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
    });
    for (field, value) in spec.as_object().expect("an object") {
        object["spec"][field] = value.clone();
    }
    object
}

/// Returns a spec with every field that moved.
fn old_spec() -> Value {
    json!({"placement": {"runtimeClassName": "nvidia", "numa": "Compact"}, "decode": {"replicas": 2}})
}

#[test]
fn a_file_is_printed_in_todays_words() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("old.yaml");
    let range = json!({"decode": {"minReplicas": 1, "maxReplicas": 4}});
    let text = format!(
        "{}\n---\nkind: Service\nmetadata: {{name: other}}\n---\n{}\n",
        deployment("old", &old_spec()),
        deployment("range", &range)
    );
    std::fs::write(&file, &text).expect("a file");
    let (code, stdout, stderr) = run(hearth().args(["convert", "-f"]).arg(&file));
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("2 fields need a decision"), "{stderr}");
    let said = "default/old: spec.placement.runtimeClassName → spec.podTemplate.runtimeClassName";
    assert!(stderr.contains(said), "{stderr}");
    assert!(
        stderr.contains("default/range: needs a decision: spec.decode.maxReplicas is 4"),
        "{stderr}"
    );
    let documents: Vec<Value> = stdout
        .split("---\n")
        .map(|text| serde_norway::from_str(text).expect("YAML"))
        .collect();
    assert_eq!(documents.len(), 3, "{stdout}");
    let new = &documents[0]["spec"];
    assert_eq!(new["podTemplate"]["runtimeClassName"], "nvidia");
    assert_eq!(new["placement"], json!({"numa": "Compact"}));
    assert_eq!(
        new["decode"],
        json!({"replicas": 2}),
        "no default was written"
    );
    assert_eq!(documents[1]["kind"], "Service");
    assert_eq!(documents[2], deployment("range", &range));

    // As `kubectl get infd -o yaml` prints them.
    let list =
        json!({"apiVersion": "v1", "kind": "List", "items": [deployment("old", &old_spec())]});
    std::fs::write(&file, list.to_string()).expect("a file");
    let (code, stdout, stderr) = run(hearth().args(["convert", "-f"]).arg(&file));
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains(said), "{stderr}");
    let list: Value = serde_norway::from_str(&stdout).expect("YAML");
    assert_eq!(list["items"][0], documents[0]);

    let unreadable = deployment("old", &json!({"decode": {"replicas": "two"}}));
    std::fs::write(&file, unreadable.to_string()).expect("a file");
    let (code, _, stderr) = run(hearth().args(["convert", "-f"]).arg(&file));
    assert_eq!(code, 1, "{stderr}");
    let words = "default/old cannot be read: spec.decode.replicas is \"two\"";
    assert!(stderr.contains(words), "{stderr}");

    // A file that needs no change is printed unchanged, including comments.
    let demo = root().join("manifests/examples/demo.yaml");
    let (code, stdout, stderr) = run(hearth().args(["convert", "-f"]).arg(&demo));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(stdout, std::fs::read_to_string(&demo).expect("demo.yaml"));
}

#[test]
fn a_cluster_is_converted_before_an_upgrade_and_helm_keeps_its_definitions() {
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    let old = root().join("tests/releases/0.1.0-2026-11-22/hearth");
    installed(&cluster, &helm, "install", &old);
    let stored = deployment("old", &old_spec());
    wait_until("the old definition is served", PATIENCE, || {
        cluster.try_apply(&stored.to_string()).ok()
    });
    let new = json!({"decode": {"replicas": 1}});
    cluster.apply(&deployment("plain", &new).to_string());
    let pools = json!({"decode": {"desired": 2, "ready": 1, "summary": "1/2"}});
    let old_status = written_status(&cluster, &json!({ "pools": pools }));
    assert_eq!(old_status["pools"]["decode"], pools["decode"]);
    let spec = || cluster.get("infd", "default", "old").expect("it is there")["spec"].clone();
    let before = spec();
    assert_eq!(before["placement"]["runtimeClassName"], "nvidia");

    let convert = |arguments: &[&str]| {
        let (code, said) = convert(&cluster, arguments);
        assert_eq!(code, 0, "{said}");
        said
    };
    let moves = "spec.placement.runtimeClassName → spec.podTemplate.runtimeClassName";
    let said = convert(&["--dry-run"]);
    assert!(
        said.contains(&format!("default/old: would change {moves}")),
        "{said}"
    );
    assert_eq!(spec(), before);
    let said = convert(&[]);
    assert!(said.contains(&format!("default/old: {moves}")), "{said}");
    assert!(!said.contains("plain"), "{said}");
    let mut wanted = before.clone();
    wanted["placement"]
        .as_object_mut()
        .expect("an object")
        .remove("runtimeClassName");
    wanted["podTemplate"] = json!({"runtimeClassName": "nvidia"});
    assert_eq!(spec(), wanted);
    let said = convert(&[]);
    assert!(
        said.contains("no InferenceDeployment has a deprecated field"),
        "{said}"
    );

    installed(&cluster, &helm, "upgrade", &root().join("charts/hearth"));
    assert_eq!(spec(), wanted);
    let pools = json!([{
        "name": "decode", "role": "Decode", "desired": 2, "replicas": 2, "ready": 1, "updated": 2, "summary": "1/2",
    }]);
    let new_status = written_status(&cluster, &json!({ "poolStatuses": pools }));
    assert_eq!(new_status, json!({ "poolStatuses": pools }));
    // The user who applied the old manifest applies a converted one, then changes it, without conflicts.
    for class in ["nvidia", "nvidia-legacy"] {
        let manifest = json!({
            "placement": {"numa": "Compact"}, "decode": {"replicas": 2}, "podTemplate": {"runtimeClassName": class},
        });
        applied(&cluster, &deployment("old", &manifest));
        assert_eq!(spec()["podTemplate"]["runtimeClassName"], class);
    }
    installed(&cluster, &helm, "uninstall", Path::new(""));
}

#[test]
fn an_object_that_may_not_be_written_keeps_no_other_from_being_converted() {
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    let old = root().join("tests/releases/0.1.0-2026-11-22/hearth");
    installed(&cluster, &helm, "install", &old);
    for name in ["frozen", "old"] {
        let stored = deployment(name, &old_spec()).to_string();
        wait_until("the old definition is served", PATIENCE, || {
            cluster.try_apply(&stored).ok()
        });
    }
    cluster.apply(&frozen().to_string());
    let change = json!({"spec": {"decode": {"maxBatch": 3}}}).to_string();
    let trial = [
        "patch",
        "infd",
        "frozen",
        "--dry-run=server",
        "--type=merge",
    ];
    wait_until("the policy counts", PATIENCE, || {
        let trial = [&trial[..], &["--patch", &change]].concat();
        cluster.try_kubectl(&trial).err()
    });

    let (code, said) = convert(&cluster, &[]);
    assert_eq!(code, 1, "{said}");
    for words in [
        "default/frozen cannot be converted",
        "the house says no",
        "converted 1; run helm upgrade now",
        "1 InferenceDeployments could not be converted",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let spec = |name| cluster.get("infd", "default", name).expect("it is there")["spec"].clone();
    assert_eq!(spec("old")["podTemplate"]["runtimeClassName"], "nvidia");
    assert_eq!(spec("frozen")["placement"]["runtimeClassName"], "nvidia");
}

/// A policy that lets nobody change the deployment `frozen`.
fn frozen() -> Value {
    let api = "admissionregistration.k8s.io/v1";
    let policy = json!({
        "apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "frozen"},
        "spec": {
            "matchConstraints": {"resourceRules": [{
                "apiGroups": ["hearth.dev"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["inferencedeployments"],
            }]},
            "validations": [{"expression": "object.metadata.name != 'frozen'", "message": "the house says no"}],
        },
    });
    let binding = json!({
        "apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": "frozen"},
        "spec": {"policyName": "frozen", "validationActions": ["Deny"]},
    });
    json!({"apiVersion": "v1", "kind": "List", "items": [policy, binding]})
}

/// Runs `hearth convert` on the cluster; returns its exit status and what it said.
fn convert(cluster: &Cluster, arguments: &[&str]) -> (i32, String) {
    let mut command = hearth();
    command
        .arg("convert")
        .args(arguments)
        .env("KUBECONFIG", cluster.kubeconfig());
    let (code, _, said) = run(&mut command);
    (code, said)
}

/// Writes a part of the status of the deployment `old`, and reads all of it.
fn written_status(cluster: &Cluster, status: &Value) -> Value {
    let patch = json!({ "status": status }).to_string();
    let verb = ["patch", "infd", "old", "--subresource=status"];
    cluster.kubectl(&[&verb[..], &["--type=merge", "--patch", &patch]].concat());
    let object = cluster.get("infd", "default", "old").expect("it is there");
    object["status"].clone()
}

/// Runs helm to completion; nothing starts the Pods here, so it does not wait for them.
fn installed(cluster: &Cluster, helm: &Path, verb: &str, chart: &Path) {
    let mut command = Command::new(helm);
    command.args([verb, "hearth", "--namespace", "hearth-system"]);
    if verb != "uninstall" {
        command.arg(chart);
    }
    if verb == "install" {
        command.arg("--create-namespace");
    }
    command.arg("--kubeconfig").arg(cluster.kubeconfig());
    let (code, stdout, stderr) = run(&mut command);
    assert_eq!(code, 0, "helm {verb}\n{stdout}\n{stderr}");
}

/// Applies server-side without forcing conflicts.
fn applied(cluster: &Cluster, object: &Value) {
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), object.to_string()).expect("object");
    let path = file.path().to_str().expect("a path");
    cluster.kubectl(&["apply", "--server-side", "--filename", path]);
}
