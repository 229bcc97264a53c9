//! The number of workers as autoscalers and `kubectl scale` change it.

use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, wait_until};
use hearth_tests::root;
use serde_json::{Value, json};

use crate::ledger::wait_until_gone;
use crate::release::{
    PATIENCE, deployment, infd, names, patch, pods, pool, prompts_read, said, wait_until_settled,
};
use crate::streams::{STREAMS, Streams};

/// Clients that ask without a pause: more than two decode workers answer at a time.
const CLIENTS: usize = 24;
/// Clients with long prompts: one prefill worker reads one at a time.
const LONG_PROMPT_CLIENTS: usize = 6;
/// Tokens from which a prefill worker reads a prompt: longer than any question.
const LONG_PROMPTS_FROM: u32 = 512;
/// Longest time until a pool is smaller: one minute in which the load counts, one in which fewer workers would have sufficed, and some
/// seconds.
const UNTIL_SMALLER: Duration = Duration::from_secs(150);

fn scaler(cluster: &Cluster) -> Option<Value> {
    cluster.get("inferencepoolscaler", "default", "demo-prefill")
}

/// Waits until the scaler reports that `count` workers exist and are desired, and the deployment runs them; returns
/// their Pods.
fn prefill_workers(cluster: &Cluster, count: usize) -> Vec<String> {
    wait_until(&format!("{count} prefill workers run"), PATIENCE, || {
        let status = scaler(cluster)?["status"].clone();
        let is_told = status["replicas"] == count && status["desiredReplicas"] == count;
        let running = names(&pods(cluster, "demo", "prefill"));
        (is_told && running.len() == count).then_some(())
    });
    wait_until_settled(cluster, "demo");
    names(&pods(cluster, "demo", "prefill"))
}

/// Moves a deployment without a scaler to one controlled by an autoscaler, and back.
pub(crate) fn of_prefill_workers(cluster: &Cluster) {
    let spec = json!({"prefill": {"replicas": 1}, "decode": {"replicas": 1, "maxBatch": 4}});
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    assert_eq!(scaler(cluster), None);
    let external = json!({"prefill": {"scaling": {"mode": "External", "maxReplicas": 2}}});
    patch(cluster, "demo", &external);
    let first = prefill_workers(cluster, 1);
    let decode = names(&pods(cluster, "demo", "decode"));

    cluster.kubectl(&["scale", "infps/demo-prefill", "--replicas=2"]);
    let two = prefill_workers(cluster, 2);
    assert!(
        first.iter().all(|pod| two.contains(pod)),
        "{first:?} {two:?}"
    );
    assert_eq!(names(&pods(cluster, "demo", "decode")), decode);
    assert_eq!(infd(cluster, "demo")["spec"]["prefill"]["replicas"], 1);
    what_autoscalers_may_ask_for(cluster, &two);
    a_deleted_scaler_comes_again(cluster, &two);

    cluster.kubectl(&["scale", "infps/demo-prefill", "--replicas=1"]);
    assert_eq!(prefill_workers(cluster, 1), first);
    an_autoscaler_uses_the_scaler(cluster);

    let own = json!({"prefill": {"scaling": {"mode": "Static", "maxReplicas": null}}});
    patch(cluster, "demo", &own);
    wait_until("the scaler goes with its mode", PATIENCE, || {
        scaler(cluster).is_none().then_some(())
    });
    wait_until_settled(cluster, "demo");
    assert_eq!(names(&pods(cluster, "demo", "prefill")), first);
    another_s_scaler_is_told(cluster);
}

fn what_autoscalers_may_ask_for(cluster: &Cluster, two: &[String]) {
    for number in ["0", "1000"] {
        let replicas = format!("--replicas={number}");
        let refusal = cluster
            .try_kubectl(&["scale", "infps/demo-prefill", &replicas])
            .expect_err(number);
        assert!(refusal.contains("write 1 to 64 workers"), "{refusal}");
    }
    // More than the deployment keeps is accepted, and both report the number kept.
    cluster.kubectl(&["scale", "infps/demo-prefill", "--replicas=40"]);
    let words = "40 prefill workers are requested, but spec.prefill.scaling.maxReplicas is 2";
    wait_until("the bound is told", PATIENCE, || {
        let (_, message) = said(&infd(cluster, "demo"), "Planned");
        message.contains(words).then_some(())
    });
    let there = scaler(cluster).expect("the scaler");
    assert_eq!(there["status"]["desiredReplicas"], 2, "{there:#}");
    assert_eq!(prefill_workers(cluster, 2), two);
    // An autoscaler cannot choose what it scales.
    let other = json!({"spec": {"deployment": "other"}}).to_string();
    let arguments = ["patch", "infps", "demo-prefill", "--type=merge", "--patch"];
    let refusal = cluster
        .try_kubectl(&[&arguments[..], &[&other]].concat())
        .expect_err("another deployment");
    assert!(refusal.contains("it cannot be changed"), "{refusal}");
    cluster.kubectl(&["scale", "infps/demo-prefill", "--replicas=2"]);
}

fn a_deleted_scaler_comes_again(cluster: &Cluster, two: &[String]) {
    let uid = |scaler: &Value| scaler["metadata"]["uid"].clone();
    let before = uid(&scaler(cluster).expect("the scaler"));
    cluster.kubectl(&["delete", "infps", "demo-prefill"]);
    let made = wait_until("another scaler is made", PATIENCE, || {
        scaler(cluster).filter(|scaler| uid(scaler) != before)
    });
    assert_eq!(made["spec"]["replicas"], 2, "{made:#}");
    assert_eq!(made["metadata"]["ownerReferences"][0]["name"], "demo");
    assert_eq!(prefill_workers(cluster, 2), two);
}

/// The cluster's own autoscaler, with a metric that is met in any case: a worker uses more than a MiB.
fn an_autoscaler_uses_the_scaler(cluster: &Cluster) {
    let path = root().join("manifests/examples/hpa-prefill.yaml");
    let text = std::fs::read_to_string(path).expect("hpa-prefill.yaml");
    let mut hpa: Value = serde_norway::from_str(&text).expect("YAML");
    let memory =
        json!({"name": "memory", "target": {"type": "AverageValue", "averageValue": "1Mi"}});
    hpa["spec"]["metrics"][0]["resource"] = memory;
    cluster.apply(&hpa.to_string());
    wait_until(
        "the autoscaler asks for more prefill workers",
        Duration::from_secs(150),
        || (scaler(cluster)?["spec"]["replicas"].as_u64()? > 1).then_some(()),
    );
    prefill_workers(cluster, 2);
    cluster.kubectl(&["delete", "hpa", "demo-prefill"]);
    cluster.kubectl(&["scale", "infps/demo-prefill", "--replicas=1"]);
    prefill_workers(cluster, 1);
}

/// A scaler with that name that the deployment does not own is ignored.
fn another_s_scaler_is_told(cluster: &Cluster) {
    let foreign = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "InferencePoolScaler",
        "metadata": {"name": "demo-prefill", "namespace": "default"},
        "spec": {"deployment": "demo", "pool": "Prefill", "replicas": 2},
    });
    cluster.apply(&foreign.to_string());
    let external = json!({"prefill": {"scaling": {"mode": "External"}}});
    patch(cluster, "demo", &external);
    let words = "InferencePoolScaler demo-prefill already that belongs to no deployment: delete it";
    wait_until("the other scaler is told", PATIENCE, || {
        let found = infd(cluster, "demo");
        let told = found["status"]["conditions"].to_string().contains(words);
        told.then_some(())
    });
    assert_eq!(pods(cluster, "demo", "prefill").len(), 1);
    cluster.kubectl(&["delete", "infps", "demo-prefill"]);
    prefill_workers(cluster, 1);
    cluster.kubectl(&["delete", "infd", "demo"]);
    wait_until("the scaler goes with its deployment", PATIENCE, || {
        scaler(cluster).is_none().then_some(())
    });
}

/// Hearth itself follows the load, up and down. What serves stays, the gateway with its streams in the first place.
pub(crate) fn by_the_load(cluster: &Cluster) {
    wait_until_gone(cluster);
    let scaling = json!({"mode": "Auto", "minReplicas": 1, "maxReplicas": 2});
    let spec = json!({
        "prefill": {"scaling": scaling, "chunkedBelowTokens": LONG_PROMPTS_FROM},
        "decode": {"scaling": scaling},
        "objectives": {"timeToFirstToken": "100ms"},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    let uids = || -> Vec<String> {
        let pods = pods(cluster, "demo", "");
        let uids = pods.iter().map(|pod| pod["metadata"]["uid"].to_string());
        uids.collect()
    };
    let before = uids();
    assert_eq!(before.len(), 3, "a gateway and a worker of each pool");
    let v1 = cluster.reach("default", "demo", 80).v1();
    let questions = Streams::start_many(&v1, CLIENTS);
    grows(&DECODE, cluster);
    questions.wait_for(STREAMS);
    println!("{} answers by one worker, then two", questions.finish());
    // The questions are short: nobody needs another prefill worker.
    assert_eq!(prompts_read(cluster).0, 0.0);
    assert_eq!(pods(cluster, "demo", "prefill").len(), 1);

    let prompts = Streams::start_long_prompts(&v1, LONG_PROMPT_CLIENTS);
    grows(&PREFILL, cluster);
    prompts.wait_for(LONG_PROMPT_CLIENTS);
    let answered = prompts.finish();
    let (by_prefill, _) = prompts_read(cluster);
    println!(
        "{answered} long prompts by one worker, then two, {by_prefill} of them by prefill workers"
    );
    assert!(
        by_prefill * 2.0 > answered as f64,
        "{by_prefill} of {answered}"
    );
    let grown = uids();
    assert!(
        before.iter().all(|uid| grown.contains(uid)),
        "{before:?} {grown:?}"
    );

    let calm = Instant::now();
    for pool in [&DECODE, &PREFILL] {
        follows(pool, cluster, 2, 1, UNTIL_SMALLER);
        println!(
            "one {} worker after {:.0?} of calm",
            pool.name,
            calm.elapsed()
        );
    }
    assert_eq!(uids(), before);
    cluster.kubectl(&["delete", "infd", "demo"]);
}

/// A pool that follows the load.
struct Pool {
    name: &'static str,
    /// Reason of the events that tell its number.
    scaled: &'static str,
}

const PREFILL: Pool = Pool {
    name: "prefill",
    scaled: "ScaledPrefill",
};
const DECODE: Pool = Pool {
    name: "decode",
    scaled: "ScaledDecode",
};

/// Waits until Hearth has made a pool of one worker one of two, for clients that go on asking.
fn grows(pool: &Pool, cluster: &Cluster) {
    let began = Instant::now();
    follows(pool, cluster, 1, 2, PATIENCE);
    println!(
        "two {} workers after {:.0?} of load",
        pool.name,
        began.elapsed()
    );
}

/// Waits until Hearth has changed the number of a pool's workers and runs as many; an event and the status say why.
fn follows(pool_of: &Pool, cluster: &Cluster, from: usize, to: usize, patience: Duration) {
    let Pool { name, scaled } = pool_of;
    let words = format!("{from} to {to} {name} workers: ");
    let event = wait_until(&words, patience, || {
        let events = cluster.list("events", "default", "");
        let scaled = events.iter().filter(|it| it["reason"] == *scaled);
        let mut messages = scaled.filter_map(|it| it["message"].as_str());
        let message = messages.find(|it| it.starts_with(&words))?;
        Some(message.to_owned())
    });
    println!("{event}");
    wait_until("as many workers run", PATIENCE, || {
        (pods(cluster, "demo", name).len() == to).then_some(())
    });
    let found = wait_until_settled(cluster, "demo");
    let found = pool(&found, name);
    assert_eq!(found["summary"], format!("{to}/{to}"), "{found:#}");
    let told = &found["autoscaling"];
    let (_, figures) = event.split_once(": ").expect("figures");
    assert_eq!(told["replicas"], to, "{told:#}");
    assert_eq!(told["reason"], format!("{from} to {to}: {figures}"));
}
