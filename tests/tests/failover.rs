//! A dead worker loses nothing: after a kill -9 in mid-stream, the stream continues with the tokens that it would have
//! had.

use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, chat_body, chat_stream};
use rustix::process::Signal;
use serde_json::{Value, json};

const QUESTION: &str = "What is Hearth?";
/// Tokens of a stream that is long enough to be interrupted.
const LONG: u32 = 400;

fn greedy() -> Value {
    chat_body("hearth-demo", QUESTION, LONG)
}

/// Returns a sampled request that never ends before `LONG`: the end-of-text token is banned.
fn seeded(seed: u64) -> Value {
    let mut body = chat_body("hearth-demo", QUESTION, LONG);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(seed);
    body["logit_bias"] = json!({"1": -100});
    body
}

/// Runs `body` and kills `victims` one after another, each after the given number of text pieces.
async fn with_kills(up: &Up, body: &Value, victims: &[(&str, usize)]) -> (Answer, usize) {
    let mut killed = 0;
    let answer = chat_stream(&up.v1(), body, |pieces, _| {
        if let Some((rank, _)) = victims.get(killed).filter(|(_, after)| pieces >= *after) {
            up.signal(rank, Signal::KILL);
            killed += 1;
        }
    })
    .await
    .expect("the stream survives");
    (answer, killed)
}

#[tokio::test]
async fn a_killed_decode_worker_costs_no_token_of_a_greedy_stream() {
    let up = Up::demo();
    let expected = chat_stream(&up.v1(), &greedy(), |_, _| {})
        .await
        .expect("undisturbed");
    assert!(
        expected.tokens.len() > 8,
        "too short to be disturbed: {expected:?}"
    );
    let (answer, killed) = with_kills(&up, &greedy(), &[("decode-0", 3)]).await;
    assert_eq!(killed, 1, "the stream ended before the kill");
    assert_eq!(answer, expected);
    restarted_once(&up, "decode-0").await;
}

#[tokio::test]
async fn a_killed_decode_worker_costs_no_token_of_a_seeded_stream_even_twice() {
    let up = Up::demo();
    let body = seeded(7);
    let expected = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("undisturbed");
    assert_eq!(expected.completion_tokens, u64::from(LONG));
    let (answer, killed) = with_kills(&up, &body, &[("decode-0", 5), ("decode-0", 60)]).await;
    assert_eq!(killed, 2);
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn a_killed_prefill_worker_costs_nothing_of_running_and_following_streams() {
    let up = Up::demo();
    let body = seeded(11);
    let expected = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("undisturbed");
    let (answer, killed) = with_kills(&up, &body, &[("prefill-0", 2)]).await;
    assert_eq!(killed, 1);
    assert_eq!(answer, expected);
    // Immediately, while the prefill worker may still be starting.
    up.signal("decode-0", Signal::KILL);
    let after = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("held until the workers are back");
    assert_eq!(after, expected);
}

/// Returns prompts near the context length, no two with a common prefix.
fn long_prompts() -> Vec<Value> {
    let filler = "Say more about the KV cache and the ring. ".repeat(110);
    (0..6)
        .map(|number| chat_body("hearth-demo", &format!("{number}. {QUESTION} {filler}"), 40))
        .collect()
}

/// Sends all requests at once.
fn ask_all(up: &Up) -> tokio::task::JoinSet<(usize, Answer)> {
    let mut requests = tokio::task::JoinSet::new();
    for (number, body) in long_prompts().into_iter().enumerate() {
        let v1 = up.v1();
        requests.spawn(async move {
            let answer = chat_stream(&v1, &body, |_, _| {}).await;
            (number, answer.expect("the request survives"))
        });
    }
    requests
}

async fn in_order(requests: tokio::task::JoinSet<(usize, Answer)>) -> Vec<Answer> {
    let mut answers = requests.join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_killed_while_it_computes_costs_nothing() {
    let expected = {
        let up = Up::demo();
        in_order(ask_all(&up)).await
    };
    // Another deployment: with a cached prefix the prefill worker would have nothing to compute.
    let up = Up::demo();
    assert!(up.metrics().count("hearth_failovers_total") == 0.0);
    let requests = ask_all(&up);
    let metrics = up.wait_for("the prefill worker computes", |metrics| {
        metrics.of_role("hearth_worker_running", "prefill") > 0.0
            && metrics.of_role("hearth_worker_requests", "prefill") > 0.0
    });
    up.signal("prefill-0", Signal::KILL);
    let reading = metrics.of_role("hearth_worker_requests", "prefill");
    println!("{reading} prompts were with the prefill worker when it was killed");
    assert_eq!(in_order(requests).await, expected);
    assert!(up.metrics().count("hearth_failovers_total") >= 1.0);
    restarted_once(&up, "prefill-0").await;
    assert_eq!(restarts(&up, "decode-0"), 0);
}

/// Waits until a rank has been restarted once: answers do not wait for its return.
async fn restarted_once(up: &Up, rank: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while restarts(up, rank) != 1 {
        assert!(Instant::now() < deadline, "{:#}", up.status());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn restarts(up: &Up, rank: &str) -> u64 {
    let status = up.status();
    let processes = status["processes"].as_array().cloned().unwrap_or_default();
    processes
        .iter()
        .find(|process| process["rank"] == rank)
        .and_then(|process| process["restarts"].as_u64())
        .unwrap_or_default()
}
