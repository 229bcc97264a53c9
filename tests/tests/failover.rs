//! A dead worker loses nothing: kill -9 in mid-stream, and the stream goes on with the tokens it would have had.

use hearth_tests::{Answer, Up, chat_body, chat_stream};
use rustix::process::Signal;
use serde_json::{Value, json};

const QUESTION: &str = "What is Hearth?";
/// Tokens of a stream that is long enough to be disturbed.
const LONG: u32 = 400;

fn greedy() -> Value {
    chat_body("hearth-demo", QUESTION, LONG)
}

/// Sampled, and never at an end before `LONG`: the end-of-text token is banned.
fn seeded(seed: u64) -> Value {
    let mut body = chat_body("hearth-demo", QUESTION, LONG);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(seed);
    body["logit_bias"] = json!({"1": -100});
    body
}

/// Runs `body` and kills `victims` one after another, each after so many pieces of text.
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
    assert_eq!(restarts(&up, "decode-0"), 1);
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
    // At once, while the prefill worker may still be starting.
    up.signal("decode-0", Signal::KILL);
    let after = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("held until the workers are back");
    assert_eq!(after, expected);
}

#[tokio::test]
async fn a_prefill_worker_killed_while_it_computes_costs_nothing() {
    let up = Up::demo();
    let long_question = format!(
        "{QUESTION} {}",
        "Say more about the KV cache and the ring. ".repeat(90)
    );
    let mut body = chat_body("hearth-demo", &long_question, 40);
    body["logprobs"] = json!(true);
    let expected = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("undisturbed");
    // Another first line, so that no cached prefix makes the second run short.
    let mut again = chat_body("hearth-demo", &format!("Now. {long_question}"), 40);
    again["logprobs"] = json!(true);
    let undisturbed = chat_stream(&up.v1(), &again, |_, _| {})
        .await
        .expect("undisturbed");
    assert_ne!(expected.tokens, Vec::<String>::new());

    let up = Up::demo();
    let pid = up.pid("prefill-0");
    let v1 = up.v1();
    let request = tokio::spawn(async move { chat_stream(&v1, &again, |_, _| {}).await });
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    assert_eq!(up.pid("prefill-0"), pid);
    up.signal("prefill-0", Signal::KILL);
    let answer = request.await.expect("task").expect("the request survives");
    assert_eq!(answer, undisturbed);
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
