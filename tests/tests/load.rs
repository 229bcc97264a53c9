//! Many concurrent streams: none fails, memory is flat afterwards, and cancelled clients free their KV.
//!
//! `HEARTH_LOAD_SECONDS` sets the duration (default 20; the figure in docs/benchmarks.md is for 300).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hearth_tests::{Up, chat_body, chat_stream};
use serde_json::{Value, json};

const STREAMS: usize = 64;
/// Growth of a process between the warm state and the end that is not a leak: the tokenizer caches words, up to 10,000
/// per thread, and the allocator keeps pages. 22,400 cancelled streams with distinct words took 12 MB.
const SLACK_BYTES: u64 = 24 << 20;

fn seconds() -> u64 {
    std::env::var("HEARTH_LOAD_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20)
}

/// Returns a request with varying prompt and answer length, different for each number.
fn body(number: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(number * 7 % 23);
    let mut body = chat_body(
        "hearth-demo",
        &format!("{filler}What is Hearth? {number}"),
        4 + (number * 13 % 90) as u32,
    );
    body["temperature"] = json!(if number.is_multiple_of(3) { 0.0 } else { 1.2 });
    body["seed"] = json!(number);
    body["logprobs"] = json!(number.is_multiple_of(5));
    body
}

async fn metric(up: &Up, name: &str) -> f64 {
    let text = reqwest::get(format!("{}/metrics", up.metrics_base()))
        .await
        .expect("metrics")
        .text()
        .await
        .expect("text");
    let values: Vec<f64> = text
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(name))
        .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
        .collect();
    assert!(!values.is_empty(), "no metric {name} in\n{text}");
    values.iter().sum()
}

/// Returns the anonymous memory of a rank's process: mapped weights are shared and may be evicted.
fn anonymous_bytes(up: &Up, rank: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", up.pid(rank))).expect("status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .expect("RssAnon");
    line.trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .expect("number")
        * 1024
}

async fn run_streams(up: &Up, duration: Duration, first: usize) -> usize {
    let deadline = Instant::now() + duration;
    let next = Arc::new(AtomicUsize::new(first));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..STREAMS {
        let (v1, next) = (up.v1(), Arc::clone(&next));
        clients.spawn(async move {
            let mut done = 0;
            while Instant::now() < deadline {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let request = body(number);
                // Every eighth client leaves mid-stream.
                if number.is_multiple_of(8) {
                    let stream = chat_stream(&v1, &request, |_, _| {});
                    let _ = tokio::time::timeout(
                        Duration::from_millis(5 + (number % 200) as u64),
                        stream,
                    )
                    .await;
                    continue;
                }
                let answer = chat_stream(&v1, &request, |_, _| {}).await;
                let answer = answer.unwrap_or_else(|error| panic!("stream {number}: {error}"));
                assert!(
                    answer.completion_tokens > 0 && !answer.finish_reason.is_empty(),
                    "stream {number}: {answer:?}"
                );
                done += 1;
            }
            done
        });
    }
    let mut done = 0;
    while let Some(finished) = clients.join_next().await {
        done += finished.expect("no stream fails");
    }
    done
}

#[tokio::test]
async fn sixty_four_streams_leave_nothing_behind() {
    let up = Up::demo();
    let ranks = ["gateway-0", "prefill-0", "decode-0"];
    let seconds = seconds();
    run_streams(&up, Duration::from_secs(seconds / 4 + 3), 0).await;
    let before: Vec<u64> = ranks
        .iter()
        .map(|rank| anonymous_bytes(&up, rank))
        .collect();
    let done = run_streams(&up, Duration::from_secs(seconds), 1_000_000).await;
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        let running = metric(&up, "hearth_requests_running").await
            + metric(&up, "hearth_requests_queued").await;
        let blocks = metric(&up, "hearth_worker_kv_blocks_used").await;
        if running == 0.0 && blocks == 0.0 {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{running} requests and {blocks} KV blocks are left behind"
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let after: Vec<u64> = ranks
        .iter()
        .map(|rank| anonymous_bytes(&up, rank))
        .collect();
    println!(
        "{done} streams in {seconds} s; anonymous memory before and after: {before:?} {after:?}"
    );
    assert!(done >= STREAMS, "only {done} streams");
    for ((rank, before), after) in ranks.iter().zip(before).zip(after) {
        assert!(
            after <= before + SLACK_BYTES,
            "{rank} grew from {before} to {after} bytes"
        );
    }
    for process in up.status()["processes"]
        .as_array()
        .cloned()
        .unwrap_or_default()
    {
        assert_eq!(process["restarts"], 0, "{process}");
    }
}
