//! The chart's ValidatingAdmissionPolicies on a real API server: the host directories that a deployment may name, and the
//! users who may write plans.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{root, run, skipped};
use serde_json::{Value, json};

/// Longest wait for a policy, which takes effect within a second or two of its creation.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest wait for the garbage collector, which looks for new kinds every half minute.
const GC_PATIENCE: Duration = Duration::from_secs(120);

/// Renders the definitions and the policy with helm for these prefixes.
fn rendered(helm: &Path, prefixes: &str) -> String {
    let (code, stdout, stderr) = run(Command::new(helm)
        .args(["template", "hearth", "charts/hearth"])
        .args(["--namespace", "hearth-system", "--set-json"])
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

/// A cluster with the definitions, where all directories are allowed, and the helm that rendered them; says why there is none.
fn started() -> Option<(Cluster, PathBuf)> {
    let cluster = Cluster::start_or_skip(&Options::default())?;
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return None;
    };
    cluster.apply(&rendered(&helm, r#"["/"]"#));
    takes_effect(&cluster, "the root allows all", "/srv/old", true);
    Some((cluster, helm))
}

#[test]
fn directories_of_nodes_are_those_that_the_chart_allows() {
    let Some((cluster, helm)) = started() else {
        return;
    };
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

/// Checks that the API server itself refuses URLs that no client can ask, and says which one and what to write.
#[test]
fn a_url_that_cannot_be_asked_is_refused_when_it_is_applied() {
    let Some((cluster, _)) = started() else {
        return;
    };
    let with = |http: Value| {
        let mut object = deployment("probe", "/models/m");
        object["spec"]["model"]["source"] = json!({"http": http});
        verdict(&cluster, &object)
    };
    let sha256 = "a".repeat(64);
    let file = |url: &str| json!({"url": url, "sha256": sha256});
    let good = "https://ann:pw@[fd00::7]:8443/m/config.json?sig=1";
    assert_eq!(with(json!({"files": [file(good)]})), Ok(()));
    for url in [
        "ftp://nas/m/config.json",
        "https:///config.json",
        "https://nas:x/m/config.json",
        "https://[nas/m/config.json",
        "https://nas/a b/config.json",
        "https://nas/a\nb/config.json",
        "https://nas/%zz/config.json",
    ] {
        let refusal = with(json!({"files": [file(good), file(url)]})).expect_err(url);
        for words in ["spec.model.source.http.files[1].url", "write a URL such as"] {
            assert!(refusal.contains(words), "{url}: {refusal}");
        }
    }
    let archive = json!({"url": "https://nas:x/m.tar", "sha256": sha256});
    let refusal = with(archive).expect_err("an archive's");
    assert!(refusal.contains("spec.model.source.http.url") && refusal.contains("write a URL"));
}

/// Checks that the API server itself refuses what a template may not request.
#[test]
fn templates_take_nothing_that_plans_and_pod_security_do_not_count() {
    let Some((cluster, _)) = started() else {
        return;
    };
    let with = |template: &Value| {
        let mut object = deployment("probe", "/models/m");
        object["spec"]["podTemplate"] = template.clone();
        verdict(&cluster, &object)
    };
    let whole = json!({
        "labels": {"team": "search"},
        "annotations": {"prometheus.io/scrape": "true", "sidecar.istio.io/inject": "false"},
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
            json!({"annotations": {"k8s.v1.cni.cncf.io/networks": "open"}}),
            "past Hearth's NetworkPolicies",
        ),
        (
            json!({"labels": {"sidecar.istio.io/inject": "true"}}),
            "sidecar injectors",
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

const OPERATOR: &str = "system:serviceaccount:hearth-system:hearth-operator";
const MALLORY: &str = "mallory";
const ADMIN: &str = "ada";

/// Somebody who may write everything of hearth.dev, the operator's account with no more than that, and an administrator
/// by a role.
fn rights() -> Value {
    let group = "rbac.authorization.k8s.io";
    let subject = |name| json!({"kind": "User", "apiGroup": group, "name": name});
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": "all-of-hearth"},
        "rules": [{"apiGroups": ["hearth.dev"], "resources": ["*"], "verbs": ["*"]}],
    });
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "all-of-hearth"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "all-of-hearth"},
        "subjects": [subject(OPERATOR), subject(MALLORY)],
    });
    let admin = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "admin-by-role"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [subject(ADMIN)],
    });
    json!({"apiVersion": "v1", "kind": "List", "items": [role, binding, admin]})
}

fn plan(name: &str, owner: &Value) -> Value {
    json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferencePlan",
        "metadata": {
            "name": name, "namespace": "default", "labels": {"hearth.dev/deployment": "demo"},
            "ownerReferences": [{
                "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment", "name": "demo",
                "uid": owner, "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "generation": 1, "deployment": {"name": "demo", "namespace": "default"}, "strategy": "Hybrid",
            "model": {
                "servedName": "m", "path": "/models/m", "source": "hostPath /models/m", "architecture": "qwen3",
                "parameterCount": 1, "weightBytes": 1, "contextLength": 1, "layers": 1, "kvBytesPerToken": 1, "dtype": "BF16",
            },
            "ranks": [], "routing": {"chunkedBelowTokens": 32, "maxQueue": 256, "queueTimeoutMs": 120_000},
            "predicted": {"ttftMs": 71.0, "ttftPromptTokens": 512, "tpotMs": 0.5, "tokensPerSecond": 3065.25},
            "why": [], "notChosen": [],
        },
    })
}

/// Runs kubectl as a user, with an object's file where there is one.
fn run_as(
    cluster: &Cluster,
    user: &str,
    arguments: &[&str],
    object: Option<&Value>,
) -> Result<String, String> {
    let file = tempfile::NamedTempFile::new().expect("file");
    let mut all = vec!["--as", user];
    all.extend(arguments);
    if let Some(object) = object {
        std::fs::write(file.path(), object.to_string()).expect("object");
        all.extend(["--filename", file.path().to_str().expect("path")]);
    }
    cluster.try_kubectl(&all)
}

fn patch_as(
    cluster: &Cluster,
    user: &str,
    subresource: &[&str],
    patch: &Value,
) -> Result<String, String> {
    let patch = patch.to_string();
    let arguments = [
        "patch",
        "infp",
        "demo-1",
        "--type=merge",
        "--patch",
        patch.as_str(),
    ];
    run_as(cluster, user, &[&arguments, subresource].concat(), None)
}

#[test]
fn plans_are_written_by_the_operator_alone() {
    let options = Options {
        controllers: true,
        ..Options::default()
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let Some(helm) = cluster.find_tool("helm") else {
        skipped("helm is not built: run tests/cluster/build.sh, which needs Go");
        return;
    };
    cluster.apply(&rendered(&helm, r#"["/"]"#));
    cluster.apply(&rights().to_string());
    takes_effect(&cluster, "the definitions are there", "/models/m", true);
    let mallory_s = deployment("demo", "/models/m");
    wait_until("her rights count", PATIENCE, || {
        run_as(&cluster, MALLORY, &["create"], Some(&mallory_s)).ok()
    });
    let owner = cluster.get("infd", "default", "demo").expect("demo");
    let stray = plan("stray", &json!("00000000-0000-4000-8000-000000000000"));
    let plan = |name| plan(name, &owner["metadata"]["uid"]);
    wait_until("the policy counts", PATIENCE, || {
        let probe = ["create", "--dry-run=server"];
        run_as(&cluster, MALLORY, &probe, Some(&plan("probe"))).err()
    });

    for arguments in [&["create"][..], &["apply", "--server-side"]] {
        let refusal = run_as(&cluster, MALLORY, arguments, Some(&plan("forged")));
        let refusal = refusal.expect_err("a plan of somebody else's");
        for words in [
            "InferencePlan forged may not be created by mallory",
            "Change the InferenceDeployment instead",
        ] {
            assert!(refusal.contains(words), "{arguments:?}: {refusal}");
        }
    }
    assert!(cluster.get("infp", "default", "forged").is_none());
    run_as(&cluster, OPERATOR, &["create"], Some(&plan("demo-1"))).expect("the operator's");
    let status = |outcome: &str| json!({"status": {"outcome": outcome}});
    let of_status = ["--subresource=status"];
    patch_as(&cluster, OPERATOR, &of_status, &status("Serving")).expect("the operator's status");

    the_record_stays(&cluster, &status("Failed"));
    // Administrators could change the policy, too.
    let superuser = ["--as-group=system:masters", "--subresource=status"];
    patch_as(&cluster, "root", &superuser, &status("Failed")).expect("a superuser's");
    let by_role = patch_as(&cluster, ADMIN, &of_status, &status("Serving"));
    by_role.expect("an administrator's");
    // Before the collector knows plans, it would orphan none, and then delete them as strays.
    run_as(&cluster, OPERATOR, &["create"], Some(&stray)).expect("the operator's");
    wait_until("the garbage collector knows plans", GC_PATIENCE, || {
        let found = cluster.get("infp", "default", "stray");
        found.is_none().then_some(())
    });
    cluster.kubectl(&["delete", "infd", "demo", "--cascade=orphan", "--wait=false"]);
    wait_until("the garbage collector orphans it", GC_PATIENCE, || {
        let plan = cluster.get("infp", "default", "demo-1")?;
        plan["metadata"]["ownerReferences"].is_null().then_some(())
    });
    run_as(&cluster, MALLORY, &["delete", "infp", "demo-1"], None).expect("a deletion");
}

/// What a plan records stays, beside its spec, which its definition keeps from everybody; what others attach may change.
fn the_record_stays(cluster: &Cluster, status: &Value) {
    let before = cluster.get("infp", "default", "demo-1").expect("demo-1");
    let annotation = json!({"metadata": {"annotations": {"hearth.dev/spec": "{}"}}});
    let other = json!({"metadata": {"labels": {"hearth.dev/deployment": "other"}}});
    let none = json!({"metadata": {"labels": {"hearth.dev/deployment": null}}});
    let mut owners = before["metadata"]["ownerReferences"].clone();
    owners[0]["uid"] = json!("00000000-0000-4000-8000-000000000000");
    let of_status: &[&str] = &["--subresource=status"];
    for (patch, subresource) in [
        (annotation, &[][..]),
        (other, &[]),
        (none, &[]),
        (json!({"metadata": {"ownerReferences": owners}}), &[]),
        (status.clone(), of_status),
    ] {
        let refusal = patch_as(cluster, MALLORY, subresource, &patch);
        let refusal = refusal.expect_err(&patch.to_string());
        assert!(
            refusal.contains("InferencePlan demo-1 may not be changed by mallory"),
            "{patch}: {refusal}"
        );
    }
    for patch in [
        json!({"metadata": {"labels": {"team": "a"}}}),
        json!({"metadata": {"annotations": {"example.com/a": "b"}}}),
        json!({"metadata": {"finalizers": ["example.com/a"]}}),
        json!({"metadata": {"finalizers": null, "labels": {"team": null}}}),
    ] {
        let taken = patch_as(cluster, MALLORY, &[], &patch);
        assert!(taken.is_ok(), "{patch}: {taken:?}");
    }
    let after = cluster.get("infp", "default", "demo-1").expect("demo-1");
    assert_eq!(
        (&after["spec"], &after["status"]),
        (&before["spec"], &before["status"])
    );
}
