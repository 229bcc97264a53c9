//! Nodes that are emptied, and nodes that are lost.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
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
    let gone = |pod: &&Value| pod["spec"]["nodeName"] == goes;
    let left = pods(cluster, "demo", "");
    let is_asked = |pod: &Value| !pod["metadata"]["deletionTimestamp"].is_null();
    assert!(
        left.iter().filter(gone).all(is_asked),
        "Pods of the lost node are not asked to end: {left:#?}"
    );
    // Nobody waits for its kubelet for ever.
    wait_until(
        "Pods of the lost node are gone",
        Duration::from_secs(150),
        || (!pods(cluster, "demo", "").iter().any(|pod| gone(&pod))).then_some(()),
    );
}

/// All kubelets are away for longer than the cluster waits for them, and for longer than work stays on a node that is
/// away; containers go on. Nothing is ended, made or moved, and whoever is connected is answered all the time.
pub(super) fn away_end_nothing(cluster: &Cluster) {
    cluster.apply(&deployment("demo", json!({})).to_string());
    wait_until_settled(cluster, "demo");
    let before = identities(cluster);
    let plans = || cluster.list("inferenceplans", "default", "").len();
    assert_eq!(plans(), 1);
    let reach = cluster.reach("default", "demo", 80);
    let held = Held::connect(reach.address());
    let nodes = cluster.list("nodes", "", "");
    let nodes: Vec<&str> = nodes
        .iter()
        .filter_map(|node| node["metadata"]["name"].as_str())
        .collect();
    for node in &nodes {
        cluster.node_named(node).stop_kubelet();
    }
    let is_ready = |node: &Value| condition(node, "Ready") == Some("True");
    wait_until("all nodes are NotReady", Duration::from_secs(90), || {
        (!cluster.list("nodes", "", "").iter().any(is_ready)).then_some(())
    });
    for _ in 0..35 {
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(identities(cluster), before);
    }
    assert_eq!(plans(), 1);
    for node in &nodes {
        cluster.node_named(node).start_kubelet_again();
    }
    wait_until_settled(cluster, "demo");
    let answers = held.finish();
    println!("{answers} answers over one connection while all kubelets were away");
    assert!(answers > 30, "{answers}");
    assert_eq!(identities(cluster), before);
    let restarted: Vec<_> = pods(cluster, "demo", "")
        .iter()
        .map(|pod| pod["status"]["containerStatuses"][0]["restartCount"].clone())
        .collect();
    assert!(restarted.iter().all(|count| *count == 0), "{restarted:?}");
    // New connections come back with Ready.
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let known = &streams::known()[0];
    let body = chat_body("hearth-demo", &known.question, 200);
    let answer = wait_until("the Service leads to the gateway again", PATIENCE, || {
        runtime
            .block_on(chat_stream(&reach.v1(), &body, |_, _| {}))
            .ok()
    });
    assert_eq!(answer.text.trim(), known.answer);
}

/// Names and uids of the demo's Pods, with whether they were asked to end.
fn identities(cluster: &Cluster) -> Vec<(String, String, bool)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pods = pods(cluster, "demo", "");
    let identity = |pod: &Value| {
        let metadata = &pod["metadata"];
        let is_asked = !metadata["deletionTimestamp"].is_null();
        (text(&metadata["name"]), text(&metadata["uid"]), is_asked)
    };
    let mut identities: Vec<_> = pods.iter().map(identity).collect();
    identities.sort();
    identities
}

/// A client that asks over one connection, again and again.
struct Held {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Held {
    fn connect(address: &str) -> Self {
        let known = streams::known()[0].clone();
        let mut connection = TcpStream::connect(address).expect("a connection");
        let patience = Some(Duration::from_secs(30));
        connection.set_read_timeout(patience).expect("a limit");
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let address = address.to_owned();
        let thread = std::thread::spawn(move || {
            let mut answers = 0;
            while !is_over.load(Ordering::Relaxed) {
                let body = chat_body("hearth-demo", &known.question, 200).to_string();
                let head = format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n\
                     content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                connection
                    .write_all(head.as_bytes())
                    .expect("an open connection");
                connection
                    .write_all(body.as_bytes())
                    .expect("an open connection");
                let answer = read_stream(&mut connection);
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                assert_eq!(content(&answer).trim(), known.answer);
                answers += 1;
                std::thread::sleep(Duration::from_millis(500));
            }
            answers
        });
        Self { stop, thread }
    }

    /// How many answers came; every one was whole and right.
    fn finish(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the client")
    }
}

/// One answer in chunks, to its last one.
fn read_stream(connection: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while !answer.ends_with(b"0\r\n\r\n") {
        let count = connection.read(&mut buffer).expect("an open connection");
        assert!(count > 0, "closed: {}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8(answer).expect("UTF-8")
}

/// The text of a streamed answer.
fn content(answer: &str) -> String {
    let events = answer.split("data: ").skip(1);
    let deltas = events.filter_map(|event| {
        let json = event.split("\n\n").next()?;
        let event: Value = serde_json::from_str(json).ok()?;
        event["choices"][0]["delta"]["content"]
            .as_str()
            .map(str::to_owned)
    });
    deltas.collect()
}
