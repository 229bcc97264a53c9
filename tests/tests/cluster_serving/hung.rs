//! A hung worker: its connections are open, but nothing comes from it.

use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, condition, wait_until};
use hearth_tests::{Metrics, chat_body, chat_stream};
use rustix::process::Signal;

use super::release::{infd, names, pods, pool, said, wait_until_settled};
use super::streams::{self, Streams};

/// Longest time for detection: a gateway takes 3 s, if the machine permits.
const FOUND: Duration = Duration::from_secs(10);
/// Longest time for the report: the kubelet needs three failed probes of 2 s each; then the operator asks the gateway.
const SAID: Duration = Duration::from_secs(20);

/// One of two decode workers is stopped during streams. The gateway finds it hung and moves its streams, the
/// deployment's status says so, and when the worker continues everything is as before.
pub(super) fn is_said_and_left(cluster: &Cluster) {
    let decode = pods(cluster, "demo", "decode");
    assert_eq!(decode.len(), 2, "{:?}", names(&decode));
    let hung = names(&decode).remove(0);
    let rank = decode[0]["metadata"]["labels"]["hearth.dev/rank"].clone();
    let rank = rank.as_str().expect("a rank");
    let ip = decode[0]["status"]["podIP"].as_str().expect("an address");
    let label = format!("address=\"{ip}:9400\"");
    let gateway = pods(cluster, "demo", "gateway").remove(0);
    let gateway = gateway["status"]["podIP"].as_str().expect("an address");
    let gateway = format!("http://{gateway}:9402");
    let of_hung =
        |metrics: &Metrics, name: &str| metrics.values(name, &[&label]).iter().sum::<f64>();

    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    Metrics::wait_for(&gateway, "the worker has streams", |metrics| {
        of_hung(metrics, "hearth_worker_requests") > 0.0
    });
    let stopped = Stopped::new(cluster, &hung);
    let began = Instant::now();
    wait_until("the gateway finds the worker hung", FOUND, || {
        (of_hung(&Metrics::of(&gateway), "hearth_worker_hung") == 1.0).then_some(())
    });
    let found = began.elapsed();
    let status = wait_until("the status says hung", SAID, || {
        let status = infd(cluster, "demo");
        (said(&status, "DecodeReady").0 == "Hung").then_some(status)
    });
    println!(
        "found hung after {found:.1?}, said after {:.1?}",
        began.elapsed()
    );
    assert_eq!(condition(&status, "DecodeReady"), Some("False"));
    let (reason, message) = said(&status, "Degraded");
    assert_eq!(reason, "Hung", "{status:#}");
    assert!(message.contains(rank), "{message}");
    assert_eq!(pool(&status, "decode")["summary"], "1/2");
    assert_eq!(condition(&status, "Ready"), Some("True"), "{status:#}");
    // Streams continued, and so do new ones.
    streams.wait_for(2 * streams::STREAMS);
    assert_eq!(
        of_hung(&Metrics::of(&gateway), "hearth_worker_requests"),
        0.0
    );
    let told = cluster.kubectl(&["describe", "infd", "demo"]);
    assert!(told.contains(&format!("{rank} hangs on ")), "{told}");

    drop(stopped);
    wait_until_settled(cluster, "demo");
    println!("{} answers around a worker that hung", streams.finish());
    let after = cluster.get("pod", "default", &hung).expect("the Pod");
    let restarts = &after["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(*restarts, 0, "it was ended meanwhile: {after:#}");
    // It accepts streams again.
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let known = &streams::known()[0];
    let answer = runtime.block_on(chat_stream(
        &reach.v1(),
        &chat_body("hearth-demo", &known.question, 200),
        |_, _| {},
    ));
    assert_eq!(answer.expect("an answer").text.trim(), known.answer);
    Metrics::wait_for(&gateway, "the worker is ready again", |metrics| {
        of_hung(metrics, "hearth_worker_ready") == 1.0
    });
}

/// A Pod whose processes are stopped until it is dropped.
struct Stopped<'a> {
    cluster: &'a Cluster,
    pod: &'a str,
}

impl<'a> Stopped<'a> {
    fn new(cluster: &'a Cluster, pod: &'a str) -> Self {
        let count = cluster.signal_pod_processes("default", pod, Signal::STOP);
        assert!(count > 0, "{pod} has no process");
        Self { cluster, pod }
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.cluster
            .signal_pod_processes("default", self.pod, Signal::CONT);
    }
}
