//! The chart's ValidatingAdmissionPolicy on a real API server: the host directories that a deployment may name.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{root, run, skipped};
use serde_json::{Value, json};

/// Longest wait for a policy, which takes effect within a second or two of its creation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Renders the definitions and the policy with helm for these prefixes.
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

/// Whether the API server would accept the object; its message if not.
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

/// Checks that an object applied under other rules can still be scaled, labelled and given a status; its path can only
/// change to an allowed one.
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

/// Checks that the API server itself refuses what a template may not request.
#[test]
fn templates_take_nothing_that_plans_and_pod_security_do_not_count() {
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    cluster.apply(&rendered(&helm, r#"["/"]"#));
    takes_effect(&cluster, "the definitions are there", "/models/m", true);
    let with = |template: &Value| {
        let mut object = deployment("probe", "/models/m");
        object["spec"]["podTemplate"] = template.clone();
        verdict(&cluster, &object)
    };
    let whole = json!({
        "labels": {"team": "search"},
        "annotations": {"prometheus.io/scrape": "true"},
        "env": [{"name": "RUST_LOG", "value": "debug"}],
        "caBundles": [{"configMap": "house", "key": "ca.crt"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "batch",
        "resourceClaims": [{"name": "nic", "resourceClaimName": "shared"}],
    });
    assert_eq!(with(&whole), Ok(()));
    for (template, words) in refused_templates() {
        let refusal = with(&template).expect_err(&template.to_string());
        assert!(refusal.contains(words), "{template}: {refusal}");
    }
    let mut both = deployment("probe", "/models/m");
    both["spec"]["podTemplate"] = json!({"runtimeClassName": "a"});
    both["spec"]["placement"] = json!({"runtimeClassName": "a"});
    let refusal = verdict(&cluster, &both).expect_err("two names of one thing");
    assert!(
        refusal.contains("write podTemplate.runtimeClassName alone"),
        "{refusal}"
    );
}

/// Returns Pod templates, each with words of its refusal.
fn refused_templates() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({"labels": {"hearth.dev/role": "gateway"}}),
            "Hearth's and the cluster's own",
        ),
        (
            json!({"annotations": {"container.apparmor.security.beta.kubernetes.io/decode": "unconfined"}}),
            "the cluster's own",
        ),
        (
            json!({"annotations": {"devices.nri.io/container.decode": "/dev/mem"}}),
            "container runtimes",
        ),
        (
            json!({"annotations": {"io.kubernetes.cri-o.Devices": "/dev/mem"}}),
            "with a prefix",
        ),
        (
            json!({"env": [{"name": "LD_PRELOAD", "value": "/tmp/x.so"}]}),
            "write another name",
        ),
        (
            json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}),
            "write another name",
        ),
        (
            json!({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
            "Duplicate",
        ),
        (
            json!({"priorityClassName": "system-node-critical"}),
            "the cluster's own",
        ),
        (
            json!({"resourceClaims": [{"name": "gpus", "resourceClaimName": "a"}]}),
            "Hearth's own claim",
        ),
        (
            json!({"caBundles": [{"secret": "a", "configMap": "b", "key": "c"}]}),
            "exactly one of",
        ),
        (
            json!({"securityContext": {"privileged": true}}),
            "unknown field",
        ),
    ]
}
