//! From an earlier release to this one and back, on an API server alone: by `make test` on the cluster's own version, by
//! `make test-oldest` on the oldest that the chart allows, which checks a status whole even where the change left the fault alone.

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
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    let mut releases: Vec<PathBuf> = std::fs::read_dir(root().join("tests/releases"))
        .expect("releases")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    releases.sort();
    assert!(!releases.is_empty());
    for release in releases {
        from_release_and_back(&cluster, &helm, &release);
    }
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
    // And forth again: what a rollback left is what an upgrade finds.
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

/// Runs helm to its end; nobody starts the Pods here, so it waits for none.
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

/// Whether the API server has the schemas of the definitions in a directory, and has taken them up.
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

/// Whether `found` says all that `wanted` says; the API server adds defaults of its own.
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

    /// All that it said is said still; new fields may have defaults.
    fn assert_unchanged(&self, cluster: &Cluster, when: &str) {
        let found = self.get(cluster);
        let found = found.unwrap_or_else(|| panic!("{} is gone {when}", self.name));
        for part in ["spec", "status"] {
            let (found, wanted) = (&found[part], &self.object[part]);
            assert!(
                wanted.is_null() || covers(found, wanted),
                "{} {when}: {found:#}\ninstead of {wanted:#}",
                self.name
            );
        }
    }

    /// Each write has the whole object checked, its status too.
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

/// The rules of the API are in force on this version too, with their words.
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
        let taken = cluster.try_apply(&text);
        assert!(taken.is_ok(), "{}: {taken:?}", file.display());
        cluster.kubectl(&["delete", "--filename", file.to_str().expect("a path")]);
    }
}
