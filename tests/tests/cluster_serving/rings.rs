//! A ring over three nodes, for what no two of them hold: it loses no token when members are killed or replaced, or when a
//! member's node is drained, and leaves a node that is lost.

use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Options, condition, toolbox_pod, wait_until};
use serde_json::{Value, json};

use super::OPTIONS;
use super::nodes::{a_new_connection_answers, drain};
use super::release::{self, PATIENCE, deployment, names, patch, pods, said, wait_until_settled};
use super::streams::{self, Streams};
use super::virtual_devices::plan_of;

/// The first one has the most memory: of four layers it holds at least two.
const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
/// Memory that others request on the other two, as a share of a node's.
const TAKEN: f64 = 0.45;
/// KV, in memory of a node, of which the nodes hold two, one and one layer.
const KV_OF_THREE: f64 = 1.8;
/// The same of which they hold three, one and one layer.
const KV_OF_TWO: f64 = 1.2;

#[test]
fn rings_lose_no_token_when_members_die_are_replaced_or_leave_their_node() {
    let options = Options {
        nodes: NODES.len(),
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let images = cluster.import_hearth();
    // On the one node that is not lost below.
    let operator = format!(
        r"operator.nodeSelector.kubernetes\.io/hostname={}",
        NODES[0]
    );
    release::install_with(&cluster, &images, 1, &[&operator]);
    let node_bytes = least_free_bytes(&cluster);
    cluster.import_toolbox();
    for node in &NODES[1..] {
        take_memory(&cluster, node, node_bytes * TAKEN);
    }
    wait_for_links(&cluster);
    let spec = json!({
        "strategy": "PipedRing",
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512},
        // Where KV is bound to NUMA nodes, all of it is touched, and there is no machine behind each node.
        "placement": {"numa": "Any"},
        "decode": {"maxBatch": 8, "kvCache": {"memory": mebibytes(node_bytes * KV_OF_THREE)}},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    let plan = plan_of(&cluster, &wait_until_settled(&cluster, "demo"));
    assert_eq!(plan["strategy"], "PipedRing", "{plan:#}");
    let why = plan["why"].to_string();
    assert!(!why.contains("links were not measured"), "{plan:#}");
    assert_eq!(nodes_of(&plan), NODES, "{plan:#}");
    wait_until_whole(&cluster, &plan);
    members_die(&cluster);
    wait_until_whole(&cluster, &plan);
    members_are_replaced(&cluster);
    let drained = a_members_node_is_drained(&cluster, node_bytes);
    a_members_node_is_lost(&cluster, drained);
}

fn members_die(cluster: &Cluster) {
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(2 * streams::STREAMS);
    let stages = names(&pods(cluster, "demo", "stage"));
    let head = names(&pods(cluster, "demo", "decode"));
    for member in [&stages[0], &head[0], &stages[1]] {
        assert!(cluster.kill_pod_processes("default", member) > 0);
        streams.wait_for(streams::STREAMS);
    }
    // Its successor has another address, and does not wait for the end of a grace period.
    cluster.kubectl(&["delete", "pod", &stages[0], "--timeout=60s"]);
    streams.wait_for(2 * streams::STREAMS);
    println!("{} answers around four members that end", streams.finish());
}

fn members_are_replaced(cluster: &Cluster) {
    let before = members(cluster);
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    patch(cluster, "demo", &json!({"decode": {"maxBatch": 4}}));
    wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS);
    println!("{} answers around a rollout", streams.finish());
    let after = members(cluster);
    assert_eq!(after.len(), before.len());
    assert!(
        after.iter().all(|name| !before.contains(name)),
        "{before:?}, {after:?}"
    );
}

/// While no two nodes hold the model, the drain waits and the ring answers; once two do, the ring leaves the node, which is returned.
fn a_members_node_is_drained(cluster: &Cluster, node_bytes: f64) -> &'static str {
    let stages = pods(cluster, "demo", "stage");
    let mut nodes = stages
        .iter()
        .filter_map(|pod| pod["spec"]["nodeName"].as_str());
    let node = nodes.find_map(|node| NODES[1..].iter().find(|other| **other == node));
    let node = *node.expect("a node");
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS);
    std::thread::scope(|scope| {
        let drain = scope.spawn(|| drain(cluster, node));
        wait_until(
            "the status names what the drain waits for",
            PATIENCE,
            || {
                let (reason, message) = said(&release::infd(cluster, "demo"), "Degraded");
                (reason == "NodeCordoned" && message.contains(node)).then_some(())
            },
        );
        streams.wait_for(streams::STREAMS);
        assert!(!drain.is_finished());
        let memory = mebibytes(node_bytes * KV_OF_TWO);
        patch(
            cluster,
            "demo",
            &json!({"decode": {"kvCache": {"memory": memory}}}),
        );
        drain.join().expect("a drained node");
    });
    let plan = plan_of(cluster, &wait_until_settled(cluster, "demo"));
    let others: Vec<_> = NODES.into_iter().filter(|other| *other != node).collect();
    assert_eq!(nodes_of(&plan), others, "{plan:#}");
    wait_until_whole(cluster, &plan);
    streams.wait_for(streams::STREAMS);
    println!("{} answers around a drained node", streams.finish());
    let is_there = |pod: &Value| pod["spec"]["nodeName"] == node;
    assert!(!pods(cluster, "demo", "").iter().any(is_there));
    node
}

/// A member's node is suddenly gone: the status says so before Kubernetes notices, and a ring of those that are left is planned, here
/// with the node that was drained and is back. Streams go on with it, unless the node had the head, and with it the gateway, whose
/// clients would have to ask again.
fn a_members_node_is_lost(cluster: &Cluster, back: &str) {
    cluster.kubectl(&["uncordon", back]);
    let lost = NODES[1..].iter().find(|node| **node != back);
    let lost = *lost.expect("a node");
    // With a head goes the gateway on its node, which would name a member.
    let head_is_lost = pods(cluster, "demo", "decode")[0]["spec"]["nodeName"] == lost;
    let streams =
        (!head_is_lost).then(|| Streams::start(&cluster.reach("default", "demo", 80).v1()));
    if let Some(streams) = &streams {
        streams.wait_for(streams::STREAMS);
    }
    let gone = Instant::now();
    cluster.node_named(lost).kill();
    match head_is_lost {
        true => println!("{lost} had the head and the gateway"),
        false => a_member_is_lost_to_its_head(cluster, lost),
    }
    let left: Vec<_> = NODES.into_iter().filter(|node| *node != lost).collect();
    let wait = "a ring of the nodes that are left";
    let plan = wait_until(wait, Duration::from_secs(150), || {
        let plan = plan_of(cluster, &release::infd(cluster, "demo"));
        (nodes_of(&plan) == left).then_some(plan)
    });
    wait_until_whole(cluster, &plan);
    println!("{wait} is whole after {:.1?}", gone.elapsed());
    a_new_connection_answers(cluster);
    let streams =
        streams.unwrap_or_else(|| Streams::start(&cluster.reach("default", "demo", 80).v1()));
    streams.wait_for(streams::STREAMS);
    println!("{} answers around a lost node", streams.finish());
}

/// Waits until the status says that the member on a node that is gone is lost: to its head, before Kubernetes notices, which takes
/// 9 to 12 s here.
fn a_member_is_lost_to_its_head(cluster: &Cluster, node: &str) {
    let begin = Instant::now();
    let found = wait_until("Ready names the lost node", Duration::from_secs(60), || {
        let found = release::infd(cluster, "demo");
        let is_false = condition(&found, "Ready") == Some("False");
        (is_false && said(&found, "Ready").1.contains(node)).then_some(found)
    });
    let (reason, message) = said(&found, "Ready");
    println!("without {node}, after {:.1?}: {message}", begin.elapsed());
    let its = cluster.get("node", "", node).expect("a node");
    if condition(&its, "Ready") != Some("True") {
        println!("Kubernetes noticed as soon: {reason}");
        assert!(["LostToGroup", "NodeLost"].contains(&&*reason), "{message}");
        return;
    }
    assert_eq!(reason, "LostToGroup", "{message}");
    let members = found["status"]["groups"][0]["members"].as_array();
    let member = members.and_then(|members| members.iter().find(|member| member["node"] == node));
    let member = member.unwrap_or_else(|| panic!("{:#}", found["status"]["groups"]));
    assert_eq!(member["state"], "Lost", "{member:#}");
    assert_eq!(member["reason"], "LostToGroup", "{member:#}");
}

/// Names of the nodes of a plan's ring, sorted.
fn nodes_of(plan: &Value) -> Vec<&str> {
    let ranks = plan["ranks"].as_array().expect("ranks");
    let mut nodes: Vec<_> = ranks
        .iter()
        .filter(|rank| rank["role"] == "Decode" || rank["role"] == "Stage")
        .filter_map(|rank| rank["node"].as_str())
        .collect();
    nodes.sort_unstable();
    nodes
}

/// Waits until the status lists all members as ready, each with its layers, says what they got, and that answers come.
fn wait_until_whole(cluster: &Cluster, plan: &Value) {
    wait_until("the ring is whole and placed", PATIENCE, || {
        let deployment = cluster.get("infd", "default", "demo")?;
        let group = &deployment["status"]["groups"][0];
        let members = group["members"].as_array()?;
        let is_whole = members.iter().all(|member| {
            member["state"] == "Ready" && member["layers"].is_string() && member["pod"].is_string()
        });
        let is_its = group["plan"] == plan["generation"]
            && group["summary"] == format!("{0}/{0}", members.len());
        let holds = |what: &str| condition(&deployment, what) == Some("True");
        (is_whole && is_its && holds("Placed") && holds("Ready")).then_some(())
    });
}

fn members(cluster: &Cluster) -> Vec<String> {
    let of = |role| names(&pods(cluster, "demo", role));
    [of("decode"), of("stage")].concat()
}

/// Waits until each node's agent has measured the links to the other nodes, and checks what it says.
fn wait_for_links(cluster: &Cluster) {
    let pairs = NODES.map(|node| NODES.map(|peer| (node, peer)));
    for (node, peer) in pairs.into_iter().flatten().filter(|(a, b)| a != b) {
        let what = format!("{node} has a link to {peer}");
        let link = wait_until(&what, PATIENCE, || {
            let profile = cluster.get("nodeprofile", "", node)?;
            let links = profile["status"]["links"].as_array()?.clone();
            links.into_iter().find(|link| link["peer"] == peer)
        });
        for rate in ["gbps", "rttUs"] {
            // JSON has no number that is not finite.
            let value = link[rate].as_f64().unwrap_or(0.0);
            assert!(value > 0.0, "{rate} of {link}");
        }
        println!("{what}: {link}");
    }
}

/// The least memory that a node has free.
fn least_free_bytes(cluster: &Cluster) -> f64 {
    let free = NODES.map(|node| {
        let profile = cluster.get("nodeprofile", "", node).expect("a profile");
        let bytes = &profile["status"]["memory"]["availableBytes"];
        bytes.as_f64().expect("bytes")
    });
    free.into_iter().fold(f64::INFINITY, f64::min)
}

/// A Pod of somebody else that requests memory of a node.
fn take_memory(cluster: &Cluster, node: &str, bytes: f64) {
    let mut pod = toolbox_pod(&format!("other-{node}"), "sleep infinity");
    pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": mebibytes(bytes)}});
    cluster.run_pod(&pod);
}

fn mebibytes(bytes: f64) -> String {
    format!("{}Mi", (bytes / f64::from(1 << 20)) as u64)
}
