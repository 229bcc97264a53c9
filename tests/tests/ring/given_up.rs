//! Clients that leave in the middle of their prompts.

use std::cell::Cell;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Metrics, Rank, chat_body, chat_stream};
use serde_json::{Value, json};

use crate::harness::{AGAIN, Alone, PATIENCE, Ring, answers, answers_that_begin};

/// Others, who stream meanwhile.
const OTHERS: std::ops::Range<usize> = 0..8;
/// Parts of the prompt's time in the middle of each of which a client leaves.
const PROMPT_PARTS: u32 = 4;
/// Tokens that those who leave ask for: their answers never end by themselves.
const LEAVER_TOKENS: u32 = 256;
/// Rows of a flight: a chunk of a prompt is of many.
const FLIGHT_TOKENS: u32 = 16;

/// A long prompt of its own for each number: none is a prefix of what was computed before.
fn long(number: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(90);
    let question = format!("{number}. {filler}What is Hearth?");
    chat_body("hearth-demo", &question, 8)
}

/// The answer to a long prompt, and when it began.
async fn ask_long(gateway: &Rank, number: usize) -> (Answer, Duration) {
    let (asked, first) = (Instant::now(), Cell::new(Duration::ZERO));
    let v1 = format!("{}/v1", gateway.base());
    let each = |pieces, _: &str| {
        if pieces == 1 {
            first.set(asked.elapsed());
        }
    };
    let answer = chat_stream(&v1, &long(number), each).await;
    let answer = answer.unwrap_or_else(|error| panic!("{number}: {error:#}"));
    (answer, first.get())
}

/// Asks for a long answer, and leaves so long after a worker has begun with the prompt, or with the first piece of the answer: returns
/// whether that was in the middle of the prompt.
async fn leaves(gateway: &Rank, number: usize, after: Duration) -> bool {
    let metrics = || Metrics::of(&gateway.metrics_base());
    let begun = || metrics().count("hearth_prompt_tokens_total");
    let cancelled = || {
        let values = metrics().values("hearth_choices_finished_total", &["\"cancelled\""]);
        values.iter().sum::<f64>()
    };
    let (begun_before, cancelled_before) = (begun(), cancelled());
    let has_text = Cell::new(false);
    let v1 = format!("{}/v1", gateway.base());
    let mut body = long(number);
    body["max_tokens"] = json!(LEAVER_TOKENS);
    body["ignore_eos"] = json!(true);
    let asked = chat_stream(&v1, &body, |_, _| has_text.set(true));
    let leave = async {
        wait_for("the prompt is begun", || begun() > begun_before).await;
        let begun_at = Instant::now();
        while begun_at.elapsed() < after && !has_text.get() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        biased;
        () = leave => {}
        answer = asked => panic!("{number} has ended: {answer:?}"),
    }
    wait_for("it is cancelled", || cancelled() > cancelled_before).await;
    !has_text.get()
}

async fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The same while others stream, whose answers it returns, too.
async fn leaves_others(gateway: &Rank, number: usize, after: Duration) -> (Vec<Answer>, bool) {
    let (begins, mut all_begun) = tokio::sync::mpsc::unbounded_channel();
    let have_ended = Cell::new(false);
    let others = async {
        let answers = answers_that_begin(gateway, OTHERS, |number| {
            // After the last one nobody listens.
            let _ = begins.send(number);
        });
        let answers = answers.await;
        have_ended.set(true);
        answers
    };
    let left = async {
        for _ in OTHERS {
            all_begun.recv().await;
        }
        let left = leaves(gateway, number, after).await;
        left && !have_ended.get()
    };
    tokio::join!(others, left)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_in_mid_prompt_cost_nobody_else_a_token() {
    let (want, want_of_others) = {
        let alone = Alone::start(|_| {});
        let mut want = Vec::new();
        for number in 0..2 + 2 * PROMPT_PARTS as usize {
            want.push(ask_long(&alone.gateway, number).await.0);
        }
        (want, answers(&alone.gateway, OTHERS).await)
    };
    let flights = |plan: &mut Value| {
        for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
            rank["ring"]["flightTokens"] = json!(FLIGHT_TOKENS);
        }
    };
    let mut ring = Ring::start_with(flights, &[]);
    let gateway = &ring.gateway;
    // The first question finds a cold machine.
    let mut prompt = Duration::ZERO;
    for (number, want) in want.iter().enumerate().take(2) {
        let (answer, first) = ask_long(gateway, number).await;
        assert_eq!(answer, *want);
        prompt = first;
    }
    let mut number = 1;
    for is_among_others in [false, true] {
        let mut in_prompt = 0;
        for part in 0..PROMPT_PARTS {
            number += 1;
            let after = prompt * (2 * part + 1) / (2 * PROMPT_PARTS);
            let left = match is_among_others {
                false => leaves(gateway, number, after).await,
                true => {
                    let (got, left) = leaves_others(gateway, number, after).await;
                    assert_eq!(got, want_of_others);
                    left
                }
            };
            in_prompt += u32::from(left);
            // The cache keeps what was computed of the prompt before.
            assert_eq!(ask_long(gateway, number).await.0, want[number], "{number}");
        }
        println!("{in_prompt} of {PROMPT_PARTS} clients left in the prompt's {prompt:.2?}");
        assert!(in_prompt > 0, "nobody left while a prompt was read");
    }
    for member in &mut ring.members {
        assert!(!member.has_ended(), "{}", member.name);
    }
    assert!(
        !ring.members[0].output().contains(AGAIN),
        "a member was lost"
    );
}
