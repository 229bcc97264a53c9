//! Shared nodes: plans leave other Pods and other deployments what they request.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, STRICT, condition, toolbox_pod, wait_until};
use serde_json::{Value, json};

use super::release::{self, PATIENCE, deployment, infd, pods, said, wait_until_settled};
use super::streams::{self, Streams};

/// CPU of each node that the chart's `ledger.reserve` keeps free, in millicores.
pub(super) const RESERVE_MILLIS: u64 = 100;

/// The demo with exclusive cores, on nodes with two CPUs where system Pods and agents request some.
pub(super) fn exclusive_runs_with_the_default_chart(cluster: &Cluster) {
    let spec = json!({"placement": {"pinning": "Exclusive"}, "prefill": {"mode": "Chunked"}});
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    let decode = &pods(cluster, "demo", "decode")[0];
    let resources = &decode["spec"]["containers"][0]["resources"];
    assert_eq!(resources["requests"], resources["limits"], "{resources:#}");
    assert_eq!(decode["status"]["qosClass"], "Guaranteed", "{decode:#}");
    let whole = resources["requests"]["cpu"].as_str().expect("CPU");
    assert!(whole.parse::<u32>().is_ok_and(|cpus| cpus > 0), "{whole}");
    let gateway = &pods(cluster, "demo", "gateway")[0];
    assert_eq!(gateway["status"]["qosClass"], "Burstable", "{gateway:#}");
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until_gone(cluster);

    // More workers than there are cores to give away on both nodes together.
    let spec = json!({"placement": {"pinning": "Exclusive"}, "decode": {"replicas": 8}});
    cluster.apply(&deployment("greedy", spec).to_string());
    let (reason, message) = wait_until("too many workers are refused", PATIENCE, || {
        let found = infd(cluster, "greedy");
        (condition(&found, "Planned") == Some("False")).then(|| said(&found, "Planned"))
    });
    assert_eq!(reason, "TooFewCores", "{message}");
    for words in [
        "m CPU other Pods request ",
        "m are kept free",
        "lower spec.decode.replicas to ",
    ] {
        assert!(message.contains(words), "no {words:?} in: {message}");
    }
    cluster.kubectl(&["delete", "infd", "greedy"]);
    wait_until_gone(cluster);
}

/// Two deployments and a foreign Pod on one node: nothing is planned where no room is left.
pub(super) fn two_deployments_and_a_foreign_pod_share_the_nodes(cluster: &Cluster) {
    // A gateway with a decode worker fits in the rest of the node; a whole deployment does not.
    occupy_all_but(cluster, "node-1", 600);
    for name in ["one", "two"] {
        cluster.apply(&deployment(name, json!({})).to_string());
    }
    for name in ["one", "two"] {
        wait_until_settled(cluster, name);
    }
    assert_that_all_fit(cluster);
    // A third finds no room, reports why with numbers, and comes up by itself once there is some.
    let spec = json!({"decode": {"replicas": 3}, "placement": {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}});
    cluster.apply(&deployment("three", spec).to_string());
    let message = wait_until("a third is refused", PATIENCE, || {
        let (reason, message) = said(&infd(cluster, "three"), "Planned");
        (reason == "InsufficientCpu").then_some(message)
    });
    assert!(message.contains("other Pods request"), "{message}");
    cluster.kubectl(&["delete", "infd", "one", "two"]);
    leave(cluster, "node-1");
    wait_until_settled(cluster, "three");
    cluster.kubectl(&["delete", "infd", "three"]);
    wait_until_gone(cluster);
}

/// The same on one node, which has room for both but for no further worker.
pub(super) fn two_deployments_and_a_foreign_pod_run_on_one_node(cluster: &Cluster) {
    const NODE: &str = "node-1";
    let whole = json!({"placement": {"nodeSelector": {"kubernetes.io/hostname": NODE}}});
    // A gateway and two workers each, with two threads each.
    occupy_all_but(cluster, NODE, 2 * 3 * 200 + RESERVE_MILLIS);
    for name in ["one", "two"] {
        cluster.apply(&deployment(name, whole.clone()).to_string());
    }
    for name in ["one", "two"] {
        wait_until_settled(cluster, name);
    }
    let occupier = cluster.get("pod", STRICT, &format!("occupier-{NODE}"));
    let mut neighbours: Vec<Value> = occupier.into_iter().collect();
    for name in ["one", "two"] {
        let pods = pods(cluster, name, "");
        assert_eq!(pods.len(), 3, "{pods:#?}");
        neighbours.extend(pods);
    }
    for pod in &neighbours {
        assert_eq!(pod["spec"]["nodeName"], NODE, "{pod:#}");
        assert_eq!(condition(pod, "Ready"), Some("True"), "{pod:#}");
    }
    assert_eq!(neighbours.len(), 7);
    assert_that_all_fit(cluster);
    for name in ["one", "two"] {
        let streams = Streams::start(&cluster.reach("default", name, 80).v1());
        streams.wait_for(streams::STREAMS);
        println!("{} answers of {name} on {NODE}", streams.finish());
    }
    cluster.kubectl(&["delete", "infd", "one", "two"]);
    leave(cluster, NODE);
    wait_until_gone(cluster);
}

/// Asserts that no node has more requests than it can serve, and that no Pod of a deployment ever waited for room.
fn assert_that_all_fit(cluster: &Cluster) {
    for (node, requested) in requested(cluster) {
        let found = cluster.get("node", "", &node).expect("a node");
        let allocatable = millis(&found["status"]["allocatable"]["cpu"]);
        assert!(
            requested <= allocatable,
            "{requested}m of {allocatable}m on {node}"
        );
        println!("{node}: {requested}m of {allocatable}m requested");
    }
    for event in cluster.list("events", "default", "") {
        assert_ne!(event["reason"], "FailedScheduling", "{event:#}");
    }
}

/// Without access to foreign Pods the scheduler refuses the plan: it moves, and reports what it knows.
pub(super) fn what_the_scheduler_refuses_moves(cluster: &Cluster) {
    release::upgrade(cluster, "ledger.allPods=false");
    let demo = deployment("demo", json!({})).to_string();
    // On whichever node was measured as faster.
    cluster.apply(&demo);
    wait_until_settled(cluster, "demo");
    let decode = &pods(cluster, "demo", "decode")[0];
    let taken = decode["spec"]["nodeName"].as_str().expect("a node");
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until_gone(cluster);
    occupy_all_but(cluster, taken, 50);
    cluster.apply(&demo);
    let what = format!("{taken} is left out");
    let message = wait_until(&what, Duration::from_secs(120), || {
        let (_, message) = said(&infd(cluster, "demo"), "Planned");
        message.contains(&what).then_some(message)
    });
    for words in [
        "the scheduler refused",
        "Insufficient cpu",
        "requests of other Pods are not seen",
    ] {
        assert!(message.contains(words), "no {words:?} in: {message}");
    }
    wait_until_settled(cluster, "demo");
    let is_away = |pod: &Value| pod["spec"]["nodeName"] != taken;
    assert!(pods(cluster, "demo", "").iter().all(is_away));
    cluster.kubectl(&["delete", "infd", "demo"]);
    leave(cluster, taken);
    wait_until_gone(cluster);
    release::upgrade(cluster, "ledger.allPods=true");
}

/// The chart's value requires access to all Pods, and a user revokes that right: the operator instead plans with the
/// reserve that it is configured to leave free, and says so. The release cannot be used after this.
pub(super) fn a_right_that_was_taken_away_is_told(cluster: &Cluster) {
    let role = cluster.get("clusterrole", "", "hearth-operator");
    let mut role = role.expect("the operator's ClusterRole");
    let rules = role["rules"].as_array_mut().expect("rules");
    let is_about_pods = |rule: &Value| rule["resources"] == json!(["pods"]);
    assert!(rules.iter().any(is_about_pods), "{rules:#?}");
    rules.retain(|rule| !is_about_pods(rule));
    let rules = json!({ "rules": rules }).to_string();
    let target = "clusterrole/hearth-operator";
    cluster.kubectl(&["patch", target, "--type=merge", "--patch", &rules]);
    // Its existing watches would keep working for some minutes.
    let selector = "--selector=app.kubernetes.io/component=operator";
    cluster.kubectl(&["delete", "pods", selector, "--namespace", release::SYSTEM]);
    cluster.apply(&deployment("demo", json!({})).to_string());
    let found = wait_until_settled(cluster, "demo");
    let (reason, message) = said(&found, "Planned");
    assert_eq!(reason, "Planned", "{message}");
    for words in [
        "requests of other Pods are not seen",
        "the operator may not watch the Pods of the cluster",
        "500m CPU",
    ] {
        assert!(message.contains(words), "no {words:?} in: {message}");
    }
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until_gone(cluster);
}

/// Creates a foreign Pod that requests all but `left_millis` of a node's CPU, and uses none.
pub(super) fn occupy_all_but(cluster: &Cluster, node: &str, left_millis: u64) {
    let found = cluster.get("node", "", node).expect("a node");
    let allocatable = millis(&found["status"]["allocatable"]["cpu"]);
    let before = requested(cluster).get(node).copied().unwrap_or(0);
    let cpu_millis = allocatable - before - left_millis;
    let mut pod = toolbox_pod(&format!("occupier-{node}"), "sleep infinity");
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod["spec"]["containers"][0]["resources"] =
        json!({"requests": {"cpu": format!("{cpu_millis}m")}});
    cluster.run_pod(&pod);
}

/// Removes the Pod.
pub(super) fn leave(cluster: &Cluster, node: &str) {
    let pod = format!("occupier-{node}");
    cluster.kubectl(&["delete", "pod", &pod, "--namespace", STRICT]);
}

pub(super) fn wait_until_gone(cluster: &Cluster) {
    wait_until("the last Pods are gone", PATIENCE, || {
        let left = cluster.list("pods", "default", "hearth.dev/deployment");
        left.is_empty().then_some(())
    });
}

/// Returns the CPU that containers of all Pods that have not ended request on each node, in millicores.
fn requested(cluster: &Cluster) -> BTreeMap<String, u64> {
    let all = cluster.kubectl(&["get", "pods", "--all-namespaces", "--output=json"]);
    let all: Value = serde_json::from_str(&all).expect("JSON");
    let mut sums = BTreeMap::new();
    for pod in all["items"].as_array().expect("items") {
        let has_ended =
            ["Succeeded", "Failed"].contains(&pod["status"]["phase"].as_str().unwrap_or_default());
        let Some(node) = pod["spec"]["nodeName"].as_str().filter(|_| !has_ended) else {
            continue;
        };
        let containers = pod["spec"]["containers"].as_array().expect("containers");
        let sum: u64 = containers
            .iter()
            .map(|container| millis(&container["resources"]["requests"]["cpu"]))
            .sum();
        *sums.entry(node.to_owned()).or_default() += sum;
    }
    sums
}

pub(super) fn millis(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap_or("0");
    match text.strip_suffix('m') {
        Some(millis) => millis.parse().expect("a number"),
        None => text.parse::<u64>().expect("a number") * 1000,
    }
}
