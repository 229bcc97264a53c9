//! Two deployments that need the same GPU, which is given to one container alone.

use std::time::{Duration, Instant};

use hearth_tests::Metrics;
use hearth_tests::cluster::{Cluster, wait_until};
use serde_json::{Value, json};

use super::plugin;
use super::release::{PATIENCE, deployment, infd, pods, said, wait_until_settled};
use super::streams::{self, Streams};
use super::zero::all_are_answered;

const NODE: &str = "node-2";
/// Time without a request after which workers end for a lower priority, too.
const IDLE: Duration = Duration::from_secs(10);

/// `low` has the GPU while `high`, whose priority is higher, is idle. What arrives for one while the other has it is held, and answered
/// with the same tokens as ever.
pub(super) fn a_gpu_goes_by_priority_and_idleness(cluster: &Cluster) {
    let gateway = |name: &str| cluster.reach("default", name, 80).v1();
    cluster.apply(&on_the_gpu("low", 0).to_string());
    wait_until_settled(cluster, "low");
    assert_eq!(holders(cluster), ["low"]);
    let low = Streams::start(&gateway("low"));
    low.wait_for(streams::STREAMS);

    // Busy workers end for a higher priority, and drain before.
    cluster.apply(&on_the_gpu("high", 10).to_string());
    wait_until("it says for whom it waits", PATIENCE, || {
        let (_, message) = said(&infd(cluster, "high"), "Planned");
        message.contains("it waits until low").then_some(())
    });
    wait_until_settled(cluster, "high");
    assert_eq!(holders(cluster), ["high"]);
    let address = pods(cluster, "low", "gateway")[0]["status"]["podIP"].clone();
    let metrics = format!("http://{}:9402", address.as_str().expect("an address"));
    Metrics::wait_for(&metrics, "all are held", |metrics| {
        metrics.sum("hearth_choices_unanswered", &[]) == streams::STREAMS as f64
    });

    // They do not end for a lower one that waits, as long as they have requests.
    let high = Streams::start(&gateway("high"));
    high.wait_for(1);
    let answered = low.right();
    let began = Instant::now();
    while began.elapsed() < IDLE + Duration::from_secs(2) {
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(holders(cluster), ["high"]);
    }
    let (_, message) = said(&infd(cluster, "low"), "Degraded");
    assert!(message.contains("it waits until high"), "{message}");
    println!("{} answers of high", high.finish());
    assert_eq!(low.right(), answered);

    // They do once they are idle, and come back with the next request.
    low.wait_for(streams::STREAMS);
    assert_eq!(holders(cluster), ["low"]);
    println!("{} answers of low", low.finish());
    let first_token = all_are_answered(&gateway("high"));
    println!("first token of high after {first_token:.2?}, in the place of low");
    assert_eq!(holders(cluster), ["high"]);
    nobody_was_given_what_another_had(cluster);
}

/// Both of its workers compute on the node's only GPU, and end when it has no requests.
fn on_the_gpu(name: &str, priority: i32) -> Value {
    let spec = json!({
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 512},
        "priority": priority,
        "prefill": {"mode": "StreamLoading", "chunkedBelowTokens": 0},
        "decode": {
            "maxBatch": 4, "dualBatch": "On",
            "scaling": {"mode": "Auto", "minReplicas": 0, "maxReplicas": 1},
        },
        "placement": {"nodeSelector": {"kubernetes.io/hostname": NODE}},
    });
    deployment(name, spec)
}

/// The deployments that hold the GPU, as the ledger has it.
fn holders(cluster: &Cluster) -> Vec<String> {
    let node = plugin::ledger_of(cluster, NODE);
    let held = node["held"].as_array().expect("held").iter();
    let held: Vec<&Value> = held.filter(|it| it["gpus"] != 0).collect();
    let gpus: u64 = held.iter().filter_map(|it| it["gpus"].as_u64()).sum();
    assert_eq!((gpus, &node["free"]["gpus"]), (1, &json!(0)), "{node:#}");
    let name = |held: &&Value| held["deployment"].as_str().map(str::to_owned);
    held.iter().filter_map(name).collect()
}

/// No Pod has waited for the scheduler, or was refused by the kubelet, for want of the GPU.
fn nobody_was_given_what_another_had(cluster: &Cluster) {
    for event in cluster.list("events", "default", "") {
        let pod = event["involvedObject"]["name"].as_str().unwrap_or_default();
        let is_theirs = pod.starts_with("low-") || pod.starts_with("high-");
        let reason = event["reason"].as_str().unwrap_or_default();
        let is_want = ["FailedScheduling", "UnexpectedAdmissionError"].contains(&reason);
        assert!(!(is_theirs && is_want), "{event:#}");
    }
}
