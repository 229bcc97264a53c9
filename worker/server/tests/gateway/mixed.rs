//! Prompts and answers computed by different devices: a stream that moves remembers which computed what.

use std::time::Duration;

use hearth_transport::tonic::Status;
use serde_json::{Value, json};

use crate::failover::{PATH, paced, slow, stream};
use crate::support::{FakeWorker, Fault, Running, chat_body, eventually, gateway};

const OTHER: &str = "numerics-2";

/// A prompt long enough for a prefill worker, and an answer that can be disturbed.
fn long_body() -> Value {
    chat_body(
        &"x".repeat(200),
        json!({"seed": 7, "max_tokens": 60, "stream": true}),
    )
}

fn reader() -> FakeWorker {
    let reader = FakeWorker::dormant();
    reader.behaviour.description.lock().unwrap().numerics = OTHER.into();
    reader
}

/// Starts a gateway with one worker of each kind; `wait` is the time to wait for the same numerics.
async fn pair(decode: &FakeWorker, reader: &FakeWorker, wait: Duration) -> Running {
    gateway(&[decode], |config| {
        config.prefill = vec![reader.endpoint()];
        config.routing.chunked_below_tokens = 100;
        config.routing.same_numerics_wait = wait;
    })
    .await
}

async fn until_prefill(gateway: &Running, ready: u32) {
    eventually(|| async { gateway.ready().await["prefill"]["ready"] == ready }).await;
}

/// Makes its streams last three seconds: a gateway probes its workers once a second.
fn lasting(decode: &FakeWorker) {
    slow(decode);
    *decode.behaviour.pace.lock().unwrap() = Duration::from_millis(50);
}

/// Readers of the prompt, one per call: endpoint and numerics.
fn readers(decode: &FakeWorker) -> Vec<(String, String)> {
    let calls = decode.behaviour.calls.lock().unwrap();
    let of = |(call, _): &(hearth_transport::v1::GenerateRequest, _)| {
        (call.prefill_endpoint.clone(), call.prompt_numerics.clone())
    };
    calls.iter().map(of).collect()
}

async fn changed_numerics(gateway: &Running) -> bool {
    let count = gateway.metric("hearth_failovers_changed_numerics_total", "");
    count.await == 1.0
}

/// Returns the answer of an undisturbed pair.
async fn undisturbed() -> String {
    let (decode, reader) = (FakeWorker::start(), reader());
    lasting(&decode);
    reader.revive();
    let gateway = pair(&decode, &reader, Duration::from_secs(20)).await;
    until_prefill(&gateway, 1).await;
    stream(&gateway, long_body()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_read_again_by_what_read_it_first() {
    let expected = undisturbed().await;
    let (decode, reader) = (FakeWorker::start(), reader());
    lasting(&decode);
    reader.revive();
    let gateway = pair(&decode, &reader, Duration::from_secs(20)).await;
    until_prefill(&gateway, 1).await;
    let mut events = gateway.open(PATH, long_body()).await;
    let mut text = events.next_text().await.unwrap();
    // The decode worker comes back before the other one, and the stream waits for both.
    reader.kill();
    until_prefill(&gateway, 0).await;
    decode.kill();
    decode.revive();
    eventually(|| async { gateway.ready().await["decode"]["ready"] == 1 }).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(readers(&decode).len(), 1, "it went on without the reader");
    reader.revive();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    let by_reader = (reader.endpoint().to_string(), OTHER.to_owned());
    assert!(readers(&decode).len() >= 2);
    assert!(readers(&decode).iter().all(|call| *call == by_reader));
    assert!(!changed_numerics(&gateway).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_was_chunked_stays_so() {
    let (decode, reader) = (FakeWorker::start(), reader());
    lasting(&decode);
    let gateway = pair(&decode, &reader, Duration::from_secs(20)).await;
    let mut events = gateway.open(PATH, long_body()).await;
    let mut text = events.next_text().await.unwrap();
    reader.revive();
    until_prefill(&gateway, 1).await;
    decode.kill();
    decode.revive();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text.len(), 60);
    let alone = (String::new(), "numerics-1".to_owned());
    assert!(readers(&decode).len() >= 2);
    assert!(readers(&decode).iter().all(|call| *call == alone));
    // KV of other numerics does not make a prompt shorter for the decode worker itself.
    let long = "y".repeat(300);
    gateway.chat(&long, json!({"max_tokens": 3})).await;
    assert_eq!(decode.behaviour.last_call().prompt_numerics, OTHER);
    gateway.chat(&long, json!({"max_tokens": 3})).await;
    assert_eq!(decode.behaviour.last_call().prompt_numerics, OTHER);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_does_not_come_back_is_done_without_and_that_is_told() {
    let (decode, reader) = (FakeWorker::start(), reader());
    lasting(&decode);
    reader.revive();
    let gateway = pair(&decode, &reader, Duration::from_millis(300)).await;
    until_prefill(&gateway, 1).await;
    let mut events = gateway.open(PATH, long_body()).await;
    let mut text = events.next_text().await.unwrap();
    reader.kill();
    until_prefill(&gateway, 0).await;
    assert!(!changed_numerics(&gateway).await);
    decode.kill();
    decode.revive();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text.len(), 60);
    let last = decode.behaviour.last_call();
    assert_eq!(last.prefill_endpoint, "");
    assert_eq!(last.prompt_numerics, "numerics-1");
    assert!(!last.generated_tokens.is_empty());
    assert!(changed_numerics(&gateway).await);
}

/// Numerics change with what a worker of others gives, not with the question whether it would.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_others_refused_goes_on_with_its_own_numerics() {
    let body = || crate::failover::body(120);
    let calm = FakeWorker::start();
    paced(&calm, 0);
    let expected = stream(&gateway(&[&calm], |_| {}).await, body()).await;
    let (own, other) = (FakeWorker::start(), reader());
    lasting(&own);
    let gateway = gateway(&[&own, &other], |config| {
        config.routing.look_interval = Duration::from_secs(3600);
        config.routing.same_numerics_wait = Duration::from_millis(300);
    })
    .await;
    let mut events = gateway.open(PATH, body()).await;
    let mut text = events.next_text().await.unwrap();
    other.revive();
    eventually(|| async { gateway.ready().await["decode"]["ready"] == 2 }).await;
    // It begins to drain before the next look at it.
    other.behaviour.stats.lock().unwrap().draining = true;
    let refusal = Fault::Status(0, Status::unavailable("draining"));
    other.behaviour.fault(refusal);
    own.kill();
    let refused = || async { other.behaviour.calls.lock().unwrap().len() == 1 };
    eventually(refused).await;
    own.revive();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    assert!(refused().await, "it was asked again");
    assert!(!changed_numerics(&gateway).await);
}

/// The first chunk has told of the reader. A hand-over that fails again and again is done without, and that is counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_fingerprint_that_no_longer_holds_is_told() {
    let (decode, reader) = (FakeWorker::start(), reader());
    reader.revive();
    let gateway = pair(&decode, &reader, Duration::from_secs(20)).await;
    until_prefill(&gateway, 1).await;
    for _ in 0..2 {
        let fault = Fault::Status(0, Status::internal("no KV came"));
        decode.behaviour.fault(fault);
    }
    assert!(!stream(&gateway, long_body()).await.is_empty());
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    assert!(!changed_numerics(&gateway).await, "nothing was told");
    until_prefill(&gateway, 1).await;
    for _ in 0..2 {
        decode.behaviour.fault(Fault::Cut(0));
    }
    let second = chat_body(&"y".repeat(200), json!({"seed": 7, "stream": true}));
    assert!(!stream(&gateway, second).await.is_empty());
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    assert!(changed_numerics(&gateway).await);
}
