//! Nodes that are drained, and nodes that are lost.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, condition, wait_until};
use hearth_tests::{Metrics, chat_body, chat_stream};
use serde_json::{Value, json};

use super::release::{PATIENCE, SYSTEM, deployment, infd, pods, wait_until_settled};
use super::streams::{self, Streams};

/// The decode worker's node is drained, as before a restart of it.
pub(super) fn drained_drops_nothing(cluster: &Cluster) {
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let node = pods(cluster, "demo", "decode")[0]["spec"]["nodeName"].clone();
    let node = node.as_str().expect("a node");
    drain(cluster, node);
    wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS);
    println!("{} answers while a node was drained", streams.finish());
    let still = |pod: &Value| pod["spec"]["nodeName"] == node;
    assert!(!pods(cluster, "demo", "").iter().any(still));
    cluster.kubectl(&["uncordon", node]);
}

/// Drains a node as its owner does before a restart of it.
pub(super) fn drain(cluster: &Cluster, node: &str) {
    let flags = [
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=180s",
    ];
    cluster.kubectl(&[&["drain", node][..], &flags].concat());
}

/// A node whose kubelet and Pods are suddenly gone.
pub(super) fn lost_is_left(cluster: &Cluster) {
    cluster.kubectl(&["delete", "infd", "--all"]);
    wait_until("the last Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
    let [stays, goes] = demo_off_the_operators_node(cluster);
    cluster.node_named(&goes).kill();
    wait_until_moved(cluster, &stays);
    a_new_connection_answers(cluster);
    let gone = |pod: &&Value| pod["spec"]["nodeName"] == goes;
    let left = pods(cluster, "demo", "");
    let is_asked = |pod: &Value| !pod["metadata"]["deletionTimestamp"].is_null();
    assert!(
        left.iter().filter(gone).all(is_asked),
        "Pods of the lost node are not asked to end: {left:#?}"
    );
    // Its kubelet is not waited for indefinitely.
    wait_until(
        "Pods of the lost node are gone",
        Duration::from_secs(150),
        || (!pods(cluster, "demo", "").iter().any(|pod| gone(&pod))).then_some(()),
    );
}

/// All kubelets are away for longer than the cluster waits for them, and for longer than work stays on such a node;
/// containers keep running. Nothing is ended, created or moved, and connected clients are answered all the time.
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
        held.check(cluster);
    }
    assert_eq!(plans(), 1);
    // One after the other: the first to return does not take over the others' work.
    for node in &nodes {
        cluster.node_named(node).start_kubelet_again();
        wait_until("the node is Ready again", Duration::from_secs(90), || {
            is_ready(&cluster.get("node", "", node)?).then_some(())
        });
        std::thread::sleep(Duration::from_secs(2));
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
    // New connections work again with Ready.
    a_new_connection_answers(cluster);
}

/// One kubelet is away next to a healthy node: its work stays for less than `nodes.moveAfter` (20 s); then successors
/// are created on the other node, and leftovers end when the node is back.
pub(super) fn one_away_moves_late_and_comes_back(cluster: &Cluster) {
    cluster.kubectl(&["delete", "infd", "--all"]);
    wait_until("the last Pods are gone", PATIENCE, || {
        pods(cluster, "demo", "").is_empty().then_some(())
    });
    let [stays, goes] = demo_off_the_operators_node(cluster);
    let before = identities(cluster);
    let reach = cluster.reach("default", "demo", 80);
    let held = Held::connect(reach.address());
    let is_ready = || {
        let nodes = cluster.list("nodes", "", "");
        let node = nodes.iter().find(|node| node["metadata"]["name"] == *goes);
        condition(node.expect("the node"), "Ready") == Some("True")
    };
    let wait_for = |what: &str, ready: bool| {
        wait_until(what, Duration::from_secs(90), || {
            (is_ready() == ready).then_some(())
        });
    };

    cluster.node_named(&goes).stop_kubelet();
    wait_for("the node is NotReady", false);
    std::thread::sleep(Duration::from_secs(3));
    cluster.node_named(&goes).start_kubelet_again();
    wait_for("the node is Ready again", true);
    wait_until_settled(cluster, "demo");
    assert_eq!(identities(cluster), before, "a blip moved something");

    cluster.node_named(&goes).stop_kubelet();
    wait_until_moved(cluster, &stays);
    // Connected clients are answered by the Pods on the node that is away.
    println!("{} answers over one connection", held.finish());
    a_new_connection_answers(cluster);
    cluster.node_named(&goes).start_kubelet_again();
    wait_until("what is left there has ended", PATIENCE, || {
        let left = pods(cluster, "demo", "");
        let is_left = |pod: &Value| pod["spec"]["nodeName"] == goes.as_str();
        (!left.iter().any(is_left)).then_some(())
    });
    wait_until_settled(cluster, "demo");
    a_new_connection_answers(cluster);
}

/// A NoExecute taint in `nodes.passingTaints` moves nothing before its 300 s are over; any other moves everything.
pub(super) fn taints_move_unless_they_pass(cluster: &Cluster) {
    let before = identities(cluster);
    let on = pods(cluster, "demo", "")[0]["spec"]["nodeName"].clone();
    let on = on.as_str().expect("a node");
    let other = other_than(on);
    let passing = "node.cilium.io/agent-not-ready";
    cluster.kubectl(&["taint", "node", on, &format!("{passing}=:NoExecute")]);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(identities(cluster), before);
    }
    cluster.kubectl(&["taint", "node", on, &format!("{passing}-")]);
    cluster.kubectl(&["taint", "node", on, "example.com/repair=:NoExecute"]);
    wait_until_moved(cluster, other);
    a_new_connection_answers(cluster);
    cluster.kubectl(&["taint", "node", on, "example.com/repair-"]);
}

fn other_than(node: &str) -> &'static str {
    if node == "node-1" { "node-2" } else { "node-1" }
}

/// Places the whole demo on the node without the operator: the test is of the work's move, not the operator's. Returns
/// the operator's node and the demo's.
fn demo_off_the_operators_node(cluster: &Cluster) -> [String; 2] {
    let operator = cluster.list("pods", SYSTEM, "app.kubernetes.io/component=operator");
    let stays = operator[0]["spec"]["nodeName"].as_str().expect("a node");
    let goes = other_than(stays);
    // A cordon keeps the plan off the other node; work that runs stays when it is lifted.
    cluster.kubectl(&["cordon", stays]);
    cluster.apply(&deployment("demo", json!({})).to_string());
    wait_until_settled(cluster, "demo");
    cluster.kubectl(&["uncordon", stays]);
    assert!(
        pods(cluster, "demo", "")
            .iter()
            .all(|pod| pod["spec"]["nodeName"] == goes)
    );
    [stays.to_owned(), goes.to_owned()]
}

/// Waits until all three of the demo's Pods have successors on this node that are ready.
fn wait_until_moved(cluster: &Cluster, node: &str) {
    wait_until("the work has moved", Duration::from_secs(120), || {
        let found = infd(cluster, "demo");
        let on_it = |pod: &&Value| pod["spec"]["nodeName"] == node;
        let moved = pods(cluster, "demo", "").iter().filter(on_it).count();
        (moved == 3 && condition(&found, "Ready") == Some("True")).then_some(())
    });
}

/// Checks a new connection; the Service's rules lag behind its endpoints.
pub(super) fn a_new_connection_answers(cluster: &Cluster) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let known = &streams::known()[0];
    let body = chat_body("hearth-demo", &known.question, 200);
    let reach = cluster.reach("default", "demo", 80);
    let answer = wait_until("the Service leads to a gateway", PATIENCE, || {
        let asked = runtime.block_on(chat_stream(&reach.v1(), &body, |_, _| {}));
        asked.ok()
    });
    assert_eq!(answer.text.trim(), known.answer);
}

/// Returns names and uids of the demo's Pods, and whether they were asked to end.
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

/// Longest time without a byte of an answer.
const SILENCE: Duration = Duration::from_secs(30);

/// A client that asks repeatedly over one connection.
struct Held {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Held {
    fn connect(address: &str) -> Self {
        let known = streams::known()[0].clone();
        let mut connection = TcpStream::connect(address).expect("a connection");
        connection.set_read_timeout(Some(SILENCE)).expect("a limit");
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

    /// Checks that nothing is amiss with the client's answers so far.
    ///
    /// # Panics
    /// With what the gateway says of its workers.
    fn check(&self, cluster: &Cluster) {
        if self.thread.is_finished() {
            let gateway = pods(cluster, "demo", "gateway").remove(0);
            let ip = gateway["status"]["podIP"].as_str().expect("an address");
            let metrics = Metrics::of(&format!("http://{ip}:9402"));
            panic!("the client has ended:\n{}", metrics.about("hearth_worker_"));
        }
    }

    /// Stops the client; returns the number of answers, all of which were complete and correct.
    fn finish(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the client")
    }
}

/// Reads one chunked answer up to its last chunk.
fn read_stream(connection: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while !answer.ends_with(b"0\r\n\r\n") {
        let count = connection.read(&mut buffer).unwrap_or_else(|error| {
            let began = String::from_utf8_lossy(&answer);
            panic!("no more of an answer after {SILENCE:?}: {error}; it began with {began:?}")
        });
        assert!(count > 0, "closed: {}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8(answer).expect("UTF-8")
}

/// Returns the text of a streamed answer.
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
