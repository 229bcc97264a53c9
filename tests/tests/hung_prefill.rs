//! A prefill worker that hangs with its connections open: no request waits for it for long.

use std::time::{Duration, Instant};

use hearth_tests::{Up, chat_body, chat_stream};
use rustix::process::Signal;
use serde_json::Value;

/// Longest wait: a worker is abandoned after 3 s of silence; moving the prompt and computing it elsewhere come on top.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns a prompt long enough for a prefill worker.
fn long_prompt() -> Value {
    let text = "The lab has a server and a laptop. ".repeat(120);
    chat_body("hearth-demo", &text, 32)
}

#[tokio::test]
async fn a_stopped_prefill_worker_does_not_hang_a_request() {
    let up = Up::demo();
    up.signal("prefill-0", Signal::STOP);
    let began = Instant::now();
    let answer = chat_stream(&up.v1(), &long_prompt(), |_, _| {})
        .await
        .expect("the answer comes");
    let took = began.elapsed();
    assert!(took < PATIENCE, "it took {took:?}");
    assert_eq!(
        up.status()["processes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|process| process["restarts"] != 0)
            .count(),
        0,
        "the worker was ended, so this shows nothing"
    );
    assert!(
        up.metrics().count("hearth_failovers_total") > 0.0,
        "the request never was at the prefill worker"
    );
    up.signal("prefill-0", Signal::CONT);
    let expected = chat_stream(&up.v1(), &long_prompt(), |_, _| {})
        .await
        .expect("undisturbed");
    assert_eq!(answer, expected);
    println!("the answer came after {took:?}");
}
