//! Upgrade from an earlier release to this one and rollback, on an API server alone: by `make test` on the cluster's
//! own version, by `make test-oldest` on the oldest that the chart supports, which validates all of a status even if a
//! change left the invalid part alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{root, run, skipped};
use serde::Deserialize;
use serde_json::{Value, json};

const SYSTEM: &str = "hearth-system";
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn an_upgrade_keeps_old_objects_and_a_rollback_gives_them_back() {
    let Some((cluster, helm)) = cluster_and_helm() else {
        return;
    };
    for release in releases() {
        from_release_and_back(&cluster, &helm, &release);
    }
}

fn cluster_and_helm() -> Option<(Cluster, PathBuf)> {
    let cluster = Cluster::start_or_skip(&Options::default())?;
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return None;
    };
    Some((cluster, helm))
}

fn releases() -> Vec<PathBuf> {
    let mut releases: Vec<PathBuf> = std::fs::read_dir(root().join("tests/releases"))
        .expect("releases")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    releases.sort();
    assert!(!releases.is_empty());
    releases
}

/// Returns values that earlier versions accepted when they were applied, and later refused: two objects that have each
/// of them.
fn refused_now() -> [Value; 2] {
    let object = |name: &str, spec: Value| {
        json!({
            "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": name, "namespace": "default"}, "spec": spec,
        })
    };
    let spill = json!({"path": "/var/kv", "size": "64Gi"});
    let adapters = json!([{"name": "poems", "source": {"huggingFace": {"repo": "a/poems"}}}]);
    [
        object(
            "refused",
            json!({
                "model": {"source": {"huggingFace": {"repo": "Qwen/Qwen3-30B-A3B"}}, "quantization": "W4A8", "adapters": adapters},
                "strategy": "Interleaved",
                "prefill": {"minReplicas": 0, "maxReplicas": 2},
                "decode": {
                    "minReplicas": 1, "maxReplicas": 4,
                    "kvCache": {"keyType": "Int8", "valueType": "FP8", "spill": spill},
                },
                "autoscaling": {"scaleToZeroAfter": "15m", "scaleDownStabilization": "5m"},
                "endpoint": {"gateway": {"name": "public", "namespace": "infra"}},
            }),
        ),
        object(
            "refused-too",
            json!({
                "model": {"source": {"builtin": {"name": "nosuch"}}, "quantization": "W8A8"},
                "strategy": "Interleaved",
                "decode": {"kvCache": {"keyType": "FP8", "valueType": "Int8"}},
            }),
        ),
    ]
}

/// Fields of [`refused_now`], and a few words of each refusal.
const REFUSALS: [(&str, &str); 13] = [
    (
        "spec.model.source.builtin.name",
        "the models that come with Hearth are: hearth-demo",
    ),
    ("spec.model.quantization", "write Native"),
    ("spec.model.adapters", "does not run LoRA adapters"),
    ("spec.strategy", "write Auto, Hybrid or PipedRing"),
    ("spec.prefill.minReplicas", "write spec.prefill.replicas"),
    ("spec.prefill.maxReplicas", "write spec.prefill.replicas"),
    ("spec.decode.minReplicas", "write spec.decode.replicas"),
    ("spec.decode.maxReplicas", "write spec.decode.replicas"),
    ("spec.decode.kvCache.keyType", "BF16 or F32"),
    ("spec.decode.kvCache.valueType", "BF16 or F32"),
    ("spec.decode.kvCache.spill", "remove spill"),
    (
        "spec.autoscaling.scaleDownStabilization",
        "remove scaleDownStabilization",
    ),
    ("spec.endpoint.gateway", "does not attach routes"),
];

#[test]
fn an_old_object_with_a_value_that_is_refused_now_stays_writable() {
    for release in releases() {
        let Some((cluster, helm)) = cluster_and_helm() else {
            return;
        };
        let old = release.join("hearth");
        let old = old.to_str().expect("a path");
        install(&cluster, &helm, &["install", "hearth", old]);
        let objects = refused_now();
        for object in &objects {
            let name = object["metadata"]["name"].as_str().expect("a name");
            cluster.apply(&object.to_string());
            let status = json!({
                "observedGeneration": 1,
                "pools": {"decode": {"desired": 1, "ready": 0, "summary": "0/1"}},
                "predicted": {"timeToFirstToken": "1.4s", "timePerOutputToken": "41ms"},
                "selector": "hearth.dev/role=decode",
            });
            apply_status(&cluster, name, &status);
            let stored = cluster.get("infd", "default", name).expect("it is stored");
            assert_eq!(stored["status"]["pools"]["decode"]["summary"], "0/1");
        }

        install(&cluster, &helm, &["upgrade", "hearth", "charts/hearth"]);
        wait_until("this version's definitions are served", PATIENCE, || {
            is_served(&cluster, &root().join("crds/yaml")).then_some(())
        });
        let mut said = String::new();
        for object in &objects {
            said += &refusal_of_a_new_one(&cluster, object);
            assert_refused_value_stays_writable(&cluster, object);
        }
        for (field, words) in REFUSALS {
            let mut lines = said.lines();
            let is_said =
                lines.any(|line| line.contains(&format!("{field}: ")) && line.contains(words));
            assert!(is_said, "{field}, {words}: {said}");
        }
    }
}

/// Writes a status as the operator does.
fn apply_status(cluster: &Cluster, name: &str, status: &Value) {
    let file = tempfile::NamedTempFile::new().expect("file");
    let object = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "default"}, "status": status,
    });
    std::fs::write(file.path(), object.to_string()).expect("object");
    cluster.kubectl(&[
        "apply",
        "--server-side",
        "--subresource=status",
        "--field-manager=hearth",
        "--force-conflicts",
        "--filename",
        file.path().to_str().expect("path"),
    ]);
}

/// Returns the refusal of the same object under another name.
fn refusal_of_a_new_one(cluster: &Cluster, object: &Value) -> String {
    let mut new = object.clone();
    new["metadata"]["name"] = json!("new");
    let refused = cluster.try_apply(&new.to_string());
    refused.expect_err("a new object with values that are refused was taken")
}

fn assert_refused_value_stays_writable(cluster: &Cluster, object: &Value) {
    let name = object["metadata"]["name"].as_str().expect("a name");
    let patch = |patch: Value| {
        let patch = patch.to_string();
        cluster.try_kubectl(&["patch", "infd", name, "--type=merge", "--patch", &patch])
    };
    let labelled = patch(json!({"metadata": {"labels": {"a": "b"}}}));
    assert!(labelled.is_ok(), "a label: {labelled:?}");
    // Next to refused values in the same objects, too.
    let edited = patch(json!({"spec": {
        "model": {"servedName": "other"}, "prefill": {"gpusPerWorker": 1},
        "decode": {"maxBatch": 3, "kvCache": {"memory": "1Gi"}}, "endpoint": {"keepAlive": "3m"},
    }}));
    assert!(edited.is_ok(), "unrelated edits: {edited:?}");
    let applied = cluster.try_apply(&object.to_string());
    assert!(applied.is_ok(), "its manifest again: {applied:?}");

    let decode = json!({
        "name": "decode", "role": "Decode", "desired": 1, "replicas": 1, "ready": 1, "updated": 1, "summary": "1/1",
    });
    let status = json!({
        "observedGeneration": 2, "poolStatuses": [decode], "selector": "hearth.dev/role=decode", "replicas": 1,
        "predicted": {"timeToFirstTokenMilliseconds": 1400.0, "timePerOutputTokenMilliseconds": 41.0},
    });
    apply_status(cluster, name, &status);
    let found = cluster.get("infd", "default", name).expect("still there");
    assert!(covers(&found["status"], &status), "{found:#}");
    assert!(found["status"].get("pools").is_none(), "{found:#}");
    assert!(covers(&found["spec"], &object["spec"]), "{found:#}");

    // One of the two is another one in each object.
    let worse =
        patch(json!({"spec": {"decode": {"kvCache": {"keyType": "Int8", "valueType": "Int8"}}}}));
    assert!(worse.is_err(), "another refused value: {worse:?}");
    let better = patch(json!({"spec": {"strategy": "Hybrid"}}));
    assert!(better.is_ok(), "a value that is obeyed: {better:?}");
}

fn from_release_and_back(cluster: &Cluster, helm: &Path, release: &Path) {
    let old = release.join("hearth");
    let old = old.to_str().expect("a path");
    install(cluster, helm, &["install", "hearth", old]);
    let stored: Vec<Stored> = objects(&release.join("objects.yaml"))
        .iter()
        .map(|object| Stored::create(cluster, object))
        .collect();

    install(cluster, helm, &["upgrade", "hearth", "charts/hearth"]);
    wait_until("this version's definitions are served", PATIENCE, || {
        is_served(cluster, &root().join("crds/yaml")).then_some(())
    });
    for object in &stored {
        object.assert_unchanged(cluster, "after the upgrade");
        object.assert_writable(cluster, "upgraded");
    }
    assert_rules_hold(cluster);

    install(cluster, helm, &["rollback", "hearth", "1"]);
    wait_until("the old definitions are served again", PATIENCE, || {
        is_served(cluster, &release.join("hearth/files/crds")).then_some(())
    });
    for object in &stored {
        object.assert_writable(cluster, "rolled-back");
    }
    // And upgrade again: an upgrade finds what a rollback left.
    install(cluster, helm, &["upgrade", "hearth", "charts/hearth"]);
    install(cluster, helm, &["uninstall", "hearth"]);
    for object in &stored {
        assert!(object.get(cluster).is_some(), "{} is gone", object.name);
        object.delete(cluster);
    }
    let definitions = cluster.kubectl(&["get", "crd", "--output=name"]);
    for definition in definitions.lines().filter(|name| name.contains("hearth")) {
        cluster.kubectl(&["delete", definition]);
    }
}

/// Runs helm to completion; nothing starts the Pods here, so it does not wait for them.
fn install(cluster: &Cluster, helm: &Path, arguments: &[&str]) {
    let creates = (arguments[0] == "install").then_some("--create-namespace");
    let (code, stdout, stderr) = run(Command::new(helm)
        .args(arguments)
        .args(creates)
        .args(["--namespace", SYSTEM])
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig())
        .current_dir(root()));
    assert_eq!(code, 0, "helm {arguments:?}\n{stdout}\n{stderr}");
}

fn objects(file: &Path) -> Vec<Value> {
    let text =
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_norway::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).expect("YAML"))
        .collect()
}

/// Whether the API server has the schemas of the definitions in a directory and serves them.
fn is_served(cluster: &Cluster, directory: &Path) -> bool {
    let files = std::fs::read_dir(directory).expect("definitions");
    files.flatten().all(|file| {
        let wanted = &objects(&file.path())[0];
        let name = wanted["metadata"]["name"].as_str().expect("a name");
        let Some(found) = cluster.get("crd", "", name) else {
            return false;
        };
        let conditions = found["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let holds = |kind: &str| {
            let is_it = |condition: &&Value| condition["type"] == kind;
            conditions
                .iter()
                .find(is_it)
                .is_some_and(|c| c["status"] == "True")
        };
        let schema = |crd: &Value| crd["spec"]["versions"][0]["schema"].clone();
        holds("Established")
            && !holds("NonStructuralSchema")
            && covers(&schema(&found), &schema(wanted))
    })
}

/// Whether `found` contains everything in `wanted`; the API server adds its own defaults.
fn covers(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => wanted
            .iter()
            .all(|(key, value)| found.get(key).is_some_and(|found| covers(found, value))),
        (Value::Array(found), Value::Array(wanted)) => {
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(f, w)| covers(f, w))
        }
        // 1008.0 comes back as 1008.
        (Value::Number(found), Value::Number(wanted)) => found.as_f64() == wanted.as_f64(),
        _ => found == wanted,
    }
}

/// An object of the old release, as the API server stored it.
struct Stored {
    kind: &'static str,
    namespace: String,
    name: String,
    object: Value,
}

impl Stored {
    fn create(cluster: &Cluster, object: &Value) -> Self {
        let kind = match object["kind"].as_str() {
            Some("InferenceDeployment") => "inferencedeployment",
            Some("InferencePlan") => "inferenceplan",
            Some("NodeProfile") => "nodeprofile",
            other => panic!("{other:?} is no kind of ours"),
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut stored = Self {
            kind,
            namespace: text(&object["metadata"]["namespace"]),
            name: text(&object["metadata"]["name"]),
            object: Value::Null,
        };
        cluster.apply(&object.to_string());
        if object["status"].is_object() {
            stored
                .patch(cluster, &json!({"status": object["status"]}), true)
                .unwrap_or_else(|error| panic!("the old status: {error}"));
        }
        stored.object = stored.get(cluster).expect("it was just made");
        for part in ["spec", "status"] {
            let (found, wanted) = (&stored.object[part], &object[part]);
            assert!(
                covers(found, wanted) || wanted.is_null(),
                "the old definitions drop a part of {kind} {}: {found:#} of {wanted:#}",
                stored.name
            );
        }
        stored
    }

    fn get(&self, cluster: &Cluster) -> Option<Value> {
        cluster.get(self.kind, &self.namespace, &self.name)
    }

    fn delete(&self, cluster: &Cluster) {
        cluster.kubectl(&self.within(&["delete", self.kind, &self.name]));
    }

    fn within<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        match self.namespace.as_str() {
            "" => arguments.to_vec(),
            namespace => [arguments, &["--namespace", namespace]].concat(),
        }
    }

    fn patch(&self, cluster: &Cluster, patch: &Value, is_status: bool) -> Result<String, String> {
        let text = patch.to_string();
        let mut arguments = vec!["patch", self.kind, &self.name, "--type=merge", "-p", &text];
        arguments.extend(is_status.then_some("--subresource=status"));
        cluster.try_kubectl(&self.within(&arguments))
    }

    /// Asserts that all its fields are unchanged; new fields may have defaults. Renamed status fields are gone until
    /// the operator next writes the status.
    fn assert_unchanged(&self, cluster: &Cluster, when: &str) {
        let found = self.get(cluster);
        let found = found.unwrap_or_else(|| panic!("{} is gone {when}", self.name));
        let mut object = self.object.clone();
        if let Some(status) = object["status"].as_object_mut() {
            status.remove("pools");
            for latencies in ["predicted", "measured"] {
                if let Some(latencies) = status.get_mut(latencies).and_then(Value::as_object_mut) {
                    latencies.remove("timeToFirstToken");
                    latencies.remove("timePerOutputToken");
                }
            }
        }
        for part in ["spec", "status"] {
            let (found, wanted) = (&found[part], &object[part]);
            assert!(
                wanted.is_null() || covers(found, wanted),
                "{} {when}: {found:#}\ninstead of {wanted:#}",
                self.name
            );
        }
    }

    /// Asserts that it can be written: each write validates the whole object, including its status.
    fn assert_writable(&self, cluster: &Cluster, label: &str) {
        let metadata = json!({"metadata": {"labels": {"tests.hearth.dev/release": label}}});
        let written = self.patch(cluster, &metadata, false);
        assert!(written.is_ok(), "{} {label}: {written:?}", self.name);
        if self.kind != "inferencedeployment" {
            return;
        }
        let mut status = self.object["status"].clone();
        status["endpointUrl"] = json!(format!("http://{label}.example/v1"));
        let written = self.patch(cluster, &json!({"status": status}), true);
        assert!(
            written.is_ok(),
            "status of {} {label}: {written:?}",
            self.name
        );
        let found = self.get(cluster).expect("still there");
        assert_eq!(
            found["status"]["endpointUrl"], status["endpointUrl"],
            "{label}"
        );
    }
}

/// Checks that the API's rules are enforced on this version too, with their messages.
fn assert_rules_hold(cluster: &Cluster) {
    let wrong = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "wrong", "namespace": "default"},
        "spec": {
            "model": {"source": {"builtin": {"name": "hearth-demo"}, "hostPath": {"path": "/models/x"}}},
            "decode": {"maxBatch": 0},
        },
    });
    let refused = cluster.try_apply(&wrong.to_string());
    let said = refused.expect_err("two sources were taken");
    for words in ["exactly one of", "spec.decode"] {
        assert!(said.contains(words), "{said}");
    }
    let examples = std::fs::read_dir(root().join("manifests/examples")).expect("examples");
    for file in examples.flatten().map(|entry| entry.path()) {
        let text = std::fs::read_to_string(&file).expect("an example");
        if text.contains("\napiVersion: keda.sh/") {
            println!("{}: left out, as KEDA is not installed", file.display());
            continue;
        }
        let taken = cluster.try_apply(&text);
        assert!(taken.is_ok(), "{}: {taken:?}", file.display());
        cluster.kubectl(&["delete", "--filename", file.to_str().expect("a path")]);
    }
}
