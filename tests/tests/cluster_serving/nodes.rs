//! Nodes that are emptied, and nodes that are lost.

use std::time::Duration;

use hearth_tests::cluster::{Cluster, condition, wait_until};
use hearth_tests::{chat_body, chat_stream};
use serde_json::{Value, json};

use super::release::{PATIENCE, SYSTEM, deployment, infd, pods, wait_until_settled};
use super::streams::{self, Streams};

/// The node with the decode worker is emptied as before a restart of it.
pub(super) fn drained_drops_nothing(cluster: &Cluster) {
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let node = pods(cluster, "demo", "decode")[0]["spec"]["nodeName"].clone();
    let node = node.as_str().expect("a node");
    let flags = [
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=120s",
    ];
    cluster.kubectl(&[&["drain", node][..], &flags].concat());
    wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS);
    println!("{} answers while a node was drained", streams.finish());
    let still = |pod: &Value| pod["spec"]["nodeName"] == node;
    assert!(!pods(cluster, "demo", "").iter().any(still));
    cluster.kubectl(&["uncordon", node]);
}

/// A node whose kubelet and Pods are gone at once.
pub(super) fn lost_is_left(cluster: &Cluster) {
    cluster.kubectl(&["delete", "infd", "--all"]);
    wait_until("the last Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
    // The operator on the node that stays: what is tested is the work, not its own move.
    let operator = cluster.list("pods", SYSTEM, "app.kubernetes.io/component=operator");
    let stays = operator[0]["spec"]["nodeName"]
        .as_str()
        .expect("a node")
        .to_owned();
    let goes = if stays == "node-1" {
        "node-2"
    } else {
        "node-1"
    };
    // A cordon keeps the plan off the other node, and what runs stays when it is lifted.
    cluster.kubectl(&["cordon", &stays]);
    cluster.apply(&deployment("demo", json!({})).to_string());
    wait_until_settled(cluster, "demo");
    cluster.kubectl(&["uncordon", &stays]);
    assert!(
        pods(cluster, "demo", "")
            .iter()
            .all(|pod| pod["spec"]["nodeName"] == goes)
    );
    cluster.node_named(goes).kill();
    wait_until("the work has moved", Duration::from_secs(120), || {
        let found = infd(cluster, "demo");
        let on_other = |pod: &Value| pod["spec"]["nodeName"] == stays.as_str();
        let moved = pods(cluster, "demo", "")
            .iter()
            .filter(|pod| on_other(pod))
            .count();
        (moved == 3 && condition(&found, "Ready") == Some("True")).then_some(())
    });
    let known = &streams::known()[0];
    let reach = cluster.reach("default", "demo", 80);
    let body = chat_body("hearth-demo", &known.question, 200);
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    // The Service's rules follow its endpoints a moment later.
    let answer = wait_until("the Service leads to the new gateway", PATIENCE, || {
        let asked = runtime.block_on(chat_stream(&reach.v1(), &body, |_, _| {}));
        asked.ok()
    });
    assert_eq!(answer.text.trim(), known.answer);
    let gone = |pod: &Value| pod["spec"]["nodeName"] == goes;
    assert!(
        !pods(cluster, "demo", "").iter().any(gone),
        "Pods of the lost node are still listed"
    );
}
