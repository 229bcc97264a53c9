//! A ring over both nodes, for what neither of them holds: it loses no token when members are killed or replaced.

use hearth_tests::cluster::{Cluster, wait_until};
use serde_json::json;

use super::OPTIONS;
use super::release::{self, PATIENCE, deployment, names, patch, pods, wait_until_settled};
use super::streams::{self, Streams};
use super::virtual_devices::{plan_of, rank};

#[test]
fn rings_lose_no_token_when_members_die_or_are_replaced() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    wait_for_links(&cluster);
    let spec = json!({
        "strategy": "PipedRing",
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512},
        // Where KV is bound to NUMA nodes, all of it is touched, and there is no machine behind each node.
        "placement": {"numa": "Any"},
        "decode": {"maxBatch": 8, "kvCache": {"memory": more_than_a_node_has(&cluster)}},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    let plan = plan_of(&cluster, &wait_until_settled(&cluster, "demo"));
    assert_eq!(plan["strategy"], "PipedRing", "{plan:#}");
    let why = plan["why"].to_string();
    assert!(!why.contains("links were not measured"), "{plan:#}");
    let (head, stage) = (rank(&plan, "Decode"), rank(&plan, "Stage"));
    assert_ne!(head["node"], stage["node"], "{plan:#}");

    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(2 * streams::STREAMS);
    for role in ["stage", "decode", "stage"] {
        let member = names(&pods(&cluster, "demo", role)).remove(0);
        assert!(cluster.kill_pod_processes("default", &member) > 0);
        streams.wait_for(streams::STREAMS);
    }
    // Its successor has another address.
    let member = names(&pods(&cluster, "demo", "stage")).remove(0);
    cluster.kubectl(&["delete", "pod", &member, "--wait=false"]);
    streams.wait_for(2 * streams::STREAMS);
    println!("{} answers around four members that end", streams.finish());

    let before = members(&cluster);
    let streams = Streams::start(&cluster.reach("default", "demo", 80).v1());
    streams.wait_for(streams::STREAMS / 2);
    patch(&cluster, "demo", &json!({"decode": {"maxBatch": 4}}));
    wait_until_settled(&cluster, "demo");
    streams.wait_for(streams::STREAMS);
    println!("{} answers around a rollout", streams.finish());
    let after = members(&cluster);
    assert_eq!(after.len(), before.len());
    assert!(
        after.iter().all(|name| !before.contains(name)),
        "{before:?}, {after:?}"
    );
}

fn members(cluster: &Cluster) -> Vec<String> {
    let of = |role| names(&pods(cluster, "demo", role));
    [of("decode"), of("stage")].concat()
}

/// Waits until each node's agent has measured the link to the other node, and checks what it says.
fn wait_for_links(cluster: &Cluster) {
    for (node, peer) in [("node-1", "node-2"), ("node-2", "node-1")] {
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

/// KV, as a quantity, that takes more memory than any node has free, and less than both together.
fn more_than_a_node_has(cluster: &Cluster) -> String {
    let free = |node: &str| {
        let profile = cluster.get("nodeprofile", "", node).expect("a profile");
        let bytes = &profile["status"]["memory"]["availableBytes"];
        bytes.as_u64().expect("bytes")
    };
    let most = u64::max(free("node-1"), free("node-2"));
    format!("{}Mi", (most + most / 8) >> 20)
}
