//! Workers that end for want of requests, and start again with the next one, or when an autoscaler says so.

use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, condition, wait_until};
use hearth_tests::{Metrics, chat_body, chat_stream};
use serde_json::{Value, json};

use super::ledger::{RESERVE_MILLIS, leave, occupy_all_but, wait_until_gone};
use super::plugin;
use super::release::{PATIENCE, deployment, infd, patch, pods, said, wait_until_settled};
use super::streams::{self, Known};

/// Requests that come at once while there is no worker.
const HELD: usize = 8;

pub(super) fn workers_end_and_start_again(cluster: &Cluster) {
    let spec = json!({
        "decode": {"scaling": {"mode": "Auto", "minReplicas": 0, "maxReplicas": 1}},
        "autoscaling": {"scaleToZeroAfter": "10s"},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    let gateways = pods(cluster, "demo", "gateway");
    let v1 = cluster.reach("default", "demo", 80).v1();
    for time in ["first", "second"] {
        wait_until_at_zero(cluster);
        let first_token = all_are_answered(&v1);
        println!("{time} token from zero after {first_token:.2?}");
        tell_parts(cluster);
    }
    wait_until_at_zero(cluster);
    plugin::loads_and_unloads(cluster);
    let plans = cluster.list("inferenceplans", "default", "");
    assert_eq!(plans.len(), 1, "{plans:#?}");
    let uid = |pod: &Value| pod["metadata"]["uid"].clone();
    let now = pods(cluster, "demo", "gateway");
    assert_eq!(uid(&now[0]), uid(&gateways[0]), "the gateway stays");
    // Something arrives without a pause for longer than the idle time: nothing ends.
    let streams = streams::Streams::start(&v1);
    std::thread::sleep(Duration::from_secs(20));
    println!("{} answers without a pause", streams.finish());
    assert_eq!(said(&infd(cluster, "demo"), "Ready").0, "Serving");
    cluster.kubectl(&["delete", "infd", "demo"]);
}

/// Somebody sets the scale to zero and back, as an autoscaler does, while requests come without a pause.
pub(super) fn an_autoscaler_ends_and_starts_workers(cluster: &Cluster) {
    wait_until_gone(cluster);
    let scaling = json!({"mode": "External", "minReplicas": 0, "maxReplicas": 2});
    let spec = json!({"decode": {"replicas": 1, "scaling": scaling}});
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    let gateway = pods(cluster, "demo", "gateway").remove(0);
    let address = gateway["status"]["podIP"].as_str().expect("an address");
    let metrics = format!("http://{address}:9402");
    let v1 = cluster.reach("default", "demo", 80).v1();
    for replicas in [1, 2] {
        let streams = streams::Streams::start(&v1);
        streams.wait_for(streams::STREAMS);
        cluster.kubectl(&["scale", "infd/demo", "--replicas=0"]);
        wait_until_at_zero(cluster);
        let (_, message) = said(&infd(cluster, "demo"), "Ready");
        assert!(
            message.contains("its autoscaler asks for no workers"),
            "{message}"
        );
        // An autoscaler sees that somebody waits, and nobody else starts anything.
        Metrics::wait_for(&metrics, "all are held", |metrics| {
            metrics.sum("hearth_choices_unanswered", &[]) == streams::STREAMS as f64
        });
        assert_eq!(served(&v1), ["hearth-demo"]);
        let scale = cluster.kubectl(&["get", "infd/demo", "--subresource=scale", "--output=json"]);
        let scale: Value = serde_json::from_str(&scale).expect("JSON");
        assert_eq!(scale["status"]["replicas"], 0, "{scale:#}");
        assert_eq!(pods(cluster, "demo", "").len(), 1);
        let number = format!("--replicas={replicas}");
        cluster.kubectl(&["scale", "infd/demo", &number]);
        streams.wait_for(2 * streams::STREAMS);
        wait_until_settled(cluster, "demo");
        assert_eq!(pods(cluster, "demo", "decode").len(), replicas);
        println!("{} answers through zero", streams.finish());
        // Another number is another plan, with the same gateway.
        let now = pods(cluster, "demo", "gateway");
        assert_eq!(now[0]["metadata"]["uid"], gateway["metadata"]["uid"]);
    }
    // What the deployment does not let an autoscaler do, the API server refuses.
    let own = json!({"decode": {"scaling": {"minReplicas": 1}}});
    patch(cluster, "demo", &own);
    let refusal = cluster.try_kubectl(&["scale", "infd/demo", "--replicas=0"]);
    let refusal = refusal.expect_err("no workers");
    assert!(
        refusal.contains("0 takes scaling: {mode: External, minReplicas: 0}"),
        "{refusal}"
    );
    cluster.kubectl(&["delete", "infd", "demo"]);
}

/// Names of the models that an endpoint lists.
fn served(v1: &str) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("runtime");
    let listed = runtime.block_on(async {
        let answer = reqwest::get(format!("{v1}/models")).await?;
        answer.text().await
    });
    let listed = listed.unwrap_or_else(|error| panic!("{error}"));
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let models = listed["data"].as_array().expect("models").iter();
    models
        .map(|model| model["id"].as_str().expect("a name").to_owned())
        .collect()
}

/// Two deployments on a node that holds the workers of one: each takes the other's place when it is asked something.
pub(super) fn two_deployments_take_turns_on_one_node(cluster: &Cluster) {
    const NODE: &str = "node-1";
    wait_until_gone(cluster);
    // Two gateways and one decode worker.
    occupy_all_but(cluster, NODE, 3 * 200 + RESERVE_MILLIS);
    let spec = json!({
        "prefill": {"mode": "Chunked"},
        "decode": {"scaling": {"mode": "Auto", "minReplicas": 0, "maxReplicas": 1}},
        "placement": {"nodeSelector": {"kubernetes.io/hostname": NODE}},
    });
    cluster.apply(&deployment("one", spec.clone()).to_string());
    wait_until_settled(cluster, "one");
    cluster.apply(&deployment("two", spec).to_string());
    let why = wait_until("the second says for whom it waits", PATIENCE, || {
        let (_, message) = said(&infd(cluster, "two"), "Planned");
        message.contains("it waits until one").then_some(message)
    });
    println!("{why}");
    wait_until_settled(cluster, "two");
    let has_workers = |name: &str| !pods(cluster, name, "decode").is_empty();
    assert!(!has_workers("one"));
    let message = said(&infd(cluster, "one"), "Ready").1;
    assert!(message.contains("their place is for two"), "{message}");
    for (name, other) in [("one", "two"), ("two", "one")] {
        let v1 = cluster.reach("default", name, 80).v1();
        let first_token = all_are_answered(&v1);
        println!("first token of {name} after {first_token:.2?}, in the place of {other}");
        wait_until_settled(cluster, name);
        assert!(!has_workers(other), "there is room for one");
    }
    for event in cluster.list("events", "default", "") {
        assert_ne!(event["reason"], "FailedScheduling", "{event:#}");
    }
    cluster.kubectl(&["delete", "infd", "one", "two"]);
    leave(cluster, NODE);
    wait_until_gone(cluster);
}

fn wait_until_at_zero(cluster: &Cluster) {
    wait_until("only the gateway runs", PATIENCE, || {
        let found = infd(cluster, "demo");
        let is_ready = condition(&found, "Ready") == Some("True");
        let is_at_zero = said(&found, "Progressing").0 == "ScaledToZero";
        let is_told = found["status"]["scaleToZero"]["atZero"] == true;
        let running = pods(cluster, "demo", "");
        (is_ready && is_at_zero && is_told && running.len() == 1).then_some(())
    });
}

/// Asks several questions at once; returns the time to the first token of all.
pub(super) fn all_are_answered(v1: &str) -> Duration {
    let known = streams::known();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("runtime");
    runtime.block_on(async {
        let began = Instant::now();
        let ask = async |known: &Known| {
            let body = chat_body("hearth-demo", &known.question, 200);
            let mut first = None;
            let got = chat_stream(v1, &body, |_, _| {
                first.get_or_insert_with(|| began.elapsed());
            });
            let got = got.await.unwrap_or_else(|error| panic!("{error:#}"));
            assert_eq!(got.text.trim(), known.answer, "{}", known.question);
            first.expect("a token")
        };
        let asked = known.iter().take(HELD).map(ask);
        let times = futures::future::join_all(asked).await;
        times.into_iter().min().expect("answers")
    })
}

/// Prints when the decode worker's Pod was created, started and became ready, as Kubernetes says, in whole seconds.
fn tell_parts(cluster: &Cluster) {
    let pod = &pods(cluster, "demo", "decode")[0];
    let ready = pod["status"]["conditions"].as_array();
    let ready = ready.and_then(|all| all.iter().find(|it| it["type"] == "Ready"));
    println!(
        "created {}, container started {}, ready {}",
        pod["metadata"]["creationTimestamp"],
        pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"],
        ready.map_or(&Value::Null, |ready| &ready["lastTransitionTime"]),
    );
}
