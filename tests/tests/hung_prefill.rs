//! A prefill worker that hangs with its connections open: no request waits for it for long.

use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, chat_body, chat_stream};
use rustix::process::Signal;
use serde_json::Value;

/// Longest wait for a worker that hangs: it is abandoned after 3 s of silence, and the gateway finds another.
const PATIENCE: Duration = Duration::from_secs(7);

/// Returns a prompt long enough for a prefill worker; prompts of different rooms share no prefix.
fn long_prompt(room: &str) -> Value {
    let text = format!("The {room} has a server and a laptop. ").repeat(120);
    chat_body("hearth-demo", &text, 32)
}

/// Asks, and returns the answer and how long it took.
async fn ask(up: &Up, room: &str) -> (Answer, Duration) {
    let began = Instant::now();
    let answer = chat_stream(&up.v1(), &long_prompt(room), |_, _| {}).await;
    (answer.expect("the answer comes"), began.elapsed())
}

#[tokio::test]
async fn a_stopped_prefill_worker_does_not_hang_a_request() {
    let up = Up::demo();
    let (_, undisturbed) = ask(&up, "office").await;
    up.signal("prefill-0", Signal::STOP);
    let (answer, took) = ask(&up, "lab").await;
    // The prompt is computed elsewhere after that, on a machine that other tests may keep busy.
    let longest = PATIENCE + 3 * undisturbed;
    assert!(took < longest, "it took {took:?} of {longest:?}");
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
    let (expected, _) = ask(&up, "lab").await;
    assert_eq!(answer, expected);
    println!("the answer came after {took:?}; an undisturbed one, after {undisturbed:?}");
}
