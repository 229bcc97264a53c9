//! A client that leaves while its prompt is being read frees the worker's CPUs at once, not at the end of the chunk.

use std::time::{Duration, Instant};

use hearth_tests::{Metrics, Rank, Ranks, chat_body, chat_stream, cpu_time};
use serde_json::{Value, json};

/// CPU time that a worker may still spend on a client after the gateway has noticed that it left.
const FREE_WITHIN: Duration = Duration::from_millis(250);
/// Returns the CPU time once it has not grown for half a second.
async fn settled(rank: &Rank) -> Duration {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "it computes on and on");
        let before = cpu_time(rank.pid());
        tokio::time::sleep(Duration::from_millis(500)).await;
        let after = cpu_time(rank.pid());
        if after - before <= Duration::from_millis(10) {
            return after;
        }
    }
}

/// Returns the worker's CPU time when the gateway notices that a client has left while the worker reads its prompt.
async fn cpu_time_at_leaving(worker: &Rank, gateway: &Rank, body: Value) -> Duration {
    let before = cpu_time(worker.pid());
    let v1 = format!("{}/v1", gateway.base());
    let client = tokio::spawn(async move { chat_stream(&v1, &body, |_, _| {}).await });
    let patience = Instant::now() + Duration::from_secs(30);
    while cpu_time(worker.pid()) - before < Duration::from_millis(100) {
        assert!(Instant::now() < patience, "the prompt is never read");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    client.abort();
    // The delay until the gateway notices depends on the other load on this machine's CPUs.
    let told = "the gateway asks nothing of the worker";
    Metrics::wait_for(&gateway.metrics_base(), told, |metrics| {
        metrics.values("hearth_worker_requests", &[]) == [0.0]
    });
    cpu_time(worker.pid())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_the_cpu_within_a_quarter_of_a_second() {
    let mut ranks = Ranks::of_demo();
    // The reference kernels on one thread simulate a slow machine, and the whole prompt is one chunk.
    ranks.edit(|plan| {
        for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
            rank["chunkTokens"] = json!(1024);
            rank["threads"] = json!(1);
            rank["pinning"] = json!("None");
        }
    });
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    let slow = ["--isa".to_owned(), "scalar".to_owned()];
    let worker = ranks.start("decode", "decode-0", &slow);
    ranks.route_to(&[&worker]);
    Metrics::wait_for(&gateway.metrics_base(), "the worker is ready", |metrics| {
        metrics.values("hearth_worker_ready", &[]) == [1.0]
    });
    let v1 = format!("{}/v1", gateway.base());
    let prompt = |number: u32| {
        let text = format!(
            "{number}. {}",
            "The lab has a server and a laptop. ".repeat(46)
        );
        chat_body("hearth-demo", &text, 1)
    };

    let before = settled(&worker).await;
    let answer = chat_stream(&v1, &prompt(1), |_, _| {}).await;
    answer.expect("the answer comes");
    let whole = settled(&worker).await - before;
    assert!(
        whole > 4 * FREE_WITHIN,
        "a whole prompt took {whole:?} only: this would show nothing"
    );

    // On a busy machine the gateway may notice when hardly anything is left to save.
    let mut tries = 0;
    let (at_leaving, left) = loop {
        tries += 1;
        let before = settled(&worker).await;
        let at_leaving = cpu_time_at_leaving(&worker, &gateway, prompt(1 + tries)).await;
        let left = whole.saturating_sub(at_leaving - before);
        if left > FREE_WITHIN {
            break (at_leaving, left);
        }
        assert!(
            tries < 5,
            "{left:?} of the prompt's {whole:?} were left when the gateway had heard of it: this would show nothing"
        );
    };
    let after = settled(&worker).await - at_leaving;
    println!(
        "{after:?} of CPU time after the client had left; the whole prompt takes {whole:?}, {left:?} were left"
    );
    assert!(after <= FREE_WITHIN, "{after:?} of {whole:?}");
}
