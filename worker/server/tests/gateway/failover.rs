//! **A dead worker loses nothing**: streams that move, wait and end, against ones that never broke.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hearth_transport::tonic::Status;
use serde_json::{Value, json};

use crate::support::{
    FakeWorker, Fault, Running, all, chat_body, chunks, eventually, gateway, streamed_text,
};

pub(crate) const PATH: &str = "/v1/chat/completions";

/// Returns the answer of a worker that stays alive.
pub(crate) async fn undisturbed(body: &Value) -> String {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    streamed_text(&chunks(&gateway.stream(PATH, body.clone()).await), 0)
}

pub(crate) fn body(tokens: u32) -> Value {
    chat_body(
        "tell me",
        json!({"seed": 7, "max_tokens": tokens, "stream": true}),
    )
}

pub(crate) fn slow(worker: &FakeWorker) {
    paced(worker, 5);
}

/// Makes a worker take this long for each token, and end no answer by itself.
pub(crate) fn paced(worker: &FakeWorker, token_ms: u64) {
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(token_ms);
    worker.behaviour.length.store(1000, Ordering::SeqCst);
}

/// Streams the body and returns its text; the stream must end well.
pub(crate) async fn stream(gateway: &Running, body: Value) -> String {
    streamed_text(&chunks(&gateway.stream(PATH, body).await), 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_workers_stream_goes_on_at_another_with_the_same_tokens() {
    let expected = undisturbed(&body(35)).await;
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    // Long enough that the stream is not over when its worker is killed, even on a busy machine.
    paced(&first, 100);
    paced(&second, 100);
    let gateway = gateway(&[&first, &second], |_| {}).await;
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .matches("\"state\":\"ready\"")
            .count()
            == 2
    })
    .await;
    let mut events = gateway.open(PATH, body(35)).await;
    let mut text = String::new();
    while text.len() < 10 {
        text += &events.next_text().await.unwrap();
    }
    let (busy, other) = if first.behaviour.open.load(Ordering::SeqCst) == 1 {
        (&first, &second)
    } else {
        (&second, &first)
    };
    slow(other);
    busy.kill();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    let replay = other.behaviour.last_call();
    assert!(
        replay.generated_tokens.len() >= 10,
        "what came is not asked for again"
    );
    assert_eq!(replay.max_tokens, 35);
    assert_eq!(replay.sampling, busy.behaviour.last_call().sampling);
    assert_eq!(gateway.metric("hearth_failovers_total", "gone").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_that_comes_back_goes_on_itself() {
    let expected = undisturbed(&body(30)).await;
    let worker = FakeWorker::start();
    slow(&worker);
    let gateway = gateway(&[&worker], |_| {}).await;
    // The stream survives two deaths, and a time without any worker.
    let mut events = gateway.open(PATH, body(30)).await;
    let mut text = events.next_text().await.unwrap();
    for _ in 0..2 {
        while !text.len().is_multiple_of(8) {
            text += &events.next_text().await.unwrap();
        }
        worker.kill();
        tokio::time::sleep(Duration::from_millis(300)).await;
        worker.revive();
        text += &events.next_text().await.unwrap();
    }
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_survive_a_death_together() {
    let worker = FakeWorker::start();
    // All are running at the same time, even on a busy machine.
    paced(&worker, 20);
    let gateway = gateway(&[&worker], |_| {}).await;
    let ask = |i: u64| {
        chat_body(
            &format!("tell me {i}"),
            json!({"seed": i, "max_tokens": 240, "stream": true}),
        )
    };
    let killer = async {
        eventually(|| async { worker.behaviour.open.load(Ordering::SeqCst) >= 12 }).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        worker.kill();
        worker.revive();
    };
    let (texts, ()) = tokio::join!(all((0..12).map(|i| stream(&gateway, ask(i)))), killer);
    let calm = FakeWorker::start();
    calm.behaviour.length.store(1000, Ordering::SeqCst);
    let quiet = crate::support::gateway(&[&calm], |_| {}).await;
    let expected = all((0..12).map(|i| stream(&quiet, ask(i)))).await;
    assert_eq!(texts, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_break_is_mended() {
    let expected = undisturbed(&body(40)).await;
    let faults = [
        Fault::Status(0, Status::unavailable("starting")),
        Fault::Status(0, Status::resource_exhausted("the queue is full")),
        Fault::Status(9, Status::unavailable("draining")),
        Fault::Status(9, Status::internal("NaN in layer 3")),
        Fault::Status(0, Status::failed_precondition("another model")),
        Fault::Status(9, Status::deadline_exceeded("prefill took too long")),
        Fault::Cut(9),
        Fault::Cut(0),
        Fault::Gap(9),
        Fault::NoEnd,
    ];
    for fault in faults {
        let worker = FakeWorker::start();
        worker.behaviour.fault(fault.clone());
        let gateway = gateway(&[&worker], |_| {}).await;
        assert_eq!(stream(&gateway, body(40)).await, expected, "{fault:?}");
        let calls = worker.behaviour.calls.lock().unwrap().len();
        assert_eq!(
            calls,
            if matches!(fault, Fault::NoEnd) { 1 } else { 2 },
            "{fault:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hangs_is_left() {
    let expected = undisturbed(&body(40)).await;
    let (hung, well) = (FakeWorker::start(), FakeWorker::start());
    hung.behaviour.fault(Fault::Hang(5));
    well.behaviour.is_deaf.store(true, Ordering::SeqCst);
    let gateway = gateway(&[&hung, &well], |config| {
        config.routing.hang_after = Duration::from_secs(2);
        config.routing.look_interval = Duration::from_millis(200);
    })
    .await;
    let mut events = gateway.open(PATH, body(40)).await;
    let mut text = events.next_text().await.unwrap();
    // The process is frozen, as under SIGSTOP: no probe is answered, no connection breaks.
    hung.behaviour.is_deaf.store(true, Ordering::SeqCst);
    well.behaviour.is_deaf.store(false, Ordering::SeqCst);
    let (found, stall) = until_hung(&gateway).await;
    assert!(
        (Duration::from_secs(1)..Duration::from_millis(3400) + stall).contains(&found),
        "it was found after {found:?}, of which this process stood still for {stall:?}"
    );
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    // The process resumes.
    hung.behaviour.is_deaf.store(false, Ordering::SeqCst);
    eventually(|| async { !gateway.get("/ready").await.1.contains("\"state\":\"hung\"") }).await;
}

/// Returns the time from now until a worker is found hung, and the longest that this process itself was kept waiting
/// meanwhile: the time between two of its checks.
async fn until_hung(gateway: &Running) -> (Duration, Duration) {
    let began = Instant::now();
    let (mut last, mut longest) = (began, Duration::ZERO);
    loop {
        let is_hung = gateway.get("/ready").await.1.contains("\"state\":\"hung\"");
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if is_hung {
            return (began.elapsed(), longest);
        }
        assert!(began.elapsed() < Duration::from_secs(30), "none is hung");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_answers_nothing_is_found_within_three_seconds() {
    let (hung, well) = (FakeWorker::start(), FakeWorker::start());
    let gateway = gateway(&[&hung, &well], |_| {}).await;
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .matches("\"state\":\"ready\"")
            .count()
            == 2
    })
    .await;
    hung.behaviour.is_deaf.store(true, Ordering::SeqCst);
    let (found, stall) = until_hung(&gateway).await;
    assert!(
        found <= Duration::from_millis(3500) + stall,
        "it was found after {found:?}, of which this process stood still for {stall:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_is_merely_long_is_no_hang() {
    let worker = FakeWorker::start();
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(3000);
    let gateway = gateway(&[&worker], |config| {
        config.routing.hang_after = Duration::from_millis(1500);
        config.routing.look_interval = Duration::from_millis(100);
    })
    .await;
    let (status, answer) = gateway.chat("say:a", json!({})).await;
    assert_eq!(
        (status, &answer["choices"][0]["message"]["content"]),
        (200, &json!("a"))
    );
    assert_eq!(worker.behaviour.calls.lock().unwrap().len(), 1);
    assert_eq!(gateway.metric("hearth_failovers_total", "").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_gives_tokens_is_none_that_hangs() {
    let worker = FakeWorker::start();
    paced(&worker, 15);
    let gateway = gateway(&[&worker], |config| {
        config.routing.hang_after = Duration::from_secs(2);
        config.routing.look_interval = Duration::from_millis(100);
    })
    .await;
    let mut events = gateway.open(PATH, body(400)).await;
    let mut text = events.next_text().await.unwrap();
    worker.behaviour.is_deaf.store(true, Ordering::SeqCst);
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text.len(), 400);
    assert_eq!(worker.behaviour.calls.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_that_hangs_is_not_waited_for() {
    let (decode, prefill) = (FakeWorker::start(), FakeWorker::start());
    // It waits for KV that does not arrive.
    decode.behaviour.fault(Fault::Hang(0));
    let gateway = gateway(&[&decode], |config| {
        config.prefill = vec![prefill.endpoint()];
        config.routing.chunked_below_tokens = 100;
        config.routing.hang_after = Duration::from_secs(2);
        config.routing.look_interval = Duration::from_millis(100);
    })
    .await;
    let ready = "\"prefill\":{\"ready\":1,\"of\":1}";
    eventually(|| async { gateway.get("/ready").await.1.contains(ready) }).await;
    let say = format!("{}say:here", "x".repeat(200));
    let hang = async {
        eventually(|| async { decode.behaviour.open.load(Ordering::SeqCst) == 1 }).await;
        prefill.behaviour.is_deaf.store(true, Ordering::SeqCst);
    };
    let ((status, answer), ()) = tokio::join!(gateway.chat(&say, json!({})), hang);
    assert_eq!(
        (status, &answer["choices"][0]["message"]["content"]),
        (200, &json!("here"))
    );
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_takes_no_more_calls_keeps_its_streams() {
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    slow(&first);
    slow(&second);
    let gateway = gateway(&[&first], |config| {
        config.decode.push(second.endpoint());
        config.routing.look_interval = Duration::from_millis(50);
    })
    .await;
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .matches("\"state\":\"ready\"")
            .count()
            == 2
    })
    .await;
    let mut events = gateway.open(PATH, body(200)).await;
    let mut text = events.next_text().await.unwrap();
    let is_first = first.behaviour.open.load(Ordering::SeqCst) == 1;
    let ending = if is_first { &first } else { &second };
    ending.behaviour.is_closed.store(true, Ordering::SeqCst);
    eventually(|| async { gateway.get("/ready").await.1.contains("\"state\":\"lost\"") }).await;
    assert_eq!(gateway.chat("say:new", json!({})).await.0, 200);
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text.len(), 200);
    assert_eq!(ending.behaviour.calls.lock().unwrap().len(), 1);
    assert_eq!(gateway.metric("hearth_failovers_total", "").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_breaks_every_worker_ends_in_an_error() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.routing.max_fruitless_attempts = 3
    })
    .await;
    for _ in 0..3 {
        worker
            .behaviour
            .fault(Fault::Status(0, Status::internal("NaN in layer 3")));
    }
    let (status, answer) = gateway.chat("x", json!({})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (502, &json!("workers_failed")),
        "{answer}"
    );
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("3 times") && message.contains("NaN in layer 3"),
        "{message}"
    );

    // Mid-stream, the error is the last event, and there is no [DONE].
    for _ in 0..4 {
        worker
            .behaviour
            .fault(Fault::Status(2, Status::internal("NaN in layer 3")));
        worker
            .behaviour
            .fault(Fault::Status(0, Status::internal("NaN in layer 3")));
        worker
            .behaviour
            .fault(Fault::Status(0, Status::internal("NaN in layer 3")));
    }
    let events = gateway.stream(PATH, body(30)).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "workers_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_numerics_are_waited_for_and_the_same_weights_demanded() {
    let expected = undisturbed(&body(40)).await;
    let (first, other_bits, same) = (
        FakeWorker::start(),
        FakeWorker::start(),
        FakeWorker::start(),
    );
    // Long enough that the stream is not over when the other one is seen, even on a busy machine.
    paced(&first, 100);
    slow(&same);
    other_bits.behaviour.description.lock().unwrap().numerics = "numerics-2".into();
    for worker in [&other_bits, &same] {
        worker.behaviour.description.lock().unwrap().max_batch = 1;
        worker.kill();
    }
    let gateway = gateway(&[&first, &other_bits, &same], |config| {
        config.routing.same_numerics_wait = Duration::from_secs(20);
    })
    .await;
    let mut events = gateway.open(PATH, body(40)).await;
    let mut text = events.next_text().await.unwrap();
    other_bits.revive();
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .matches("\"state\":\"ready\"")
            .count()
            == 2
    })
    .await;
    first.kill();
    tokio::time::sleep(Duration::from_millis(200)).await;
    same.revive();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    assert_eq!(other_bits.behaviour.calls.lock().unwrap().len(), 0);
    assert_eq!(same.behaviour.calls.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_numerics_are_taken_when_the_wait_is_over() {
    let (first, other_bits) = (FakeWorker::start(), FakeWorker::start());
    // As above.
    paced(&first, 100);
    slow(&other_bits);
    other_bits.behaviour.description.lock().unwrap().numerics = "numerics-2".into();
    other_bits.kill();
    let gateway = gateway(&[&first, &other_bits], |config| {
        config.routing.same_numerics_wait = Duration::from_millis(300);
    })
    .await;
    let mut events = gateway.open(PATH, body(40)).await;
    let mut text = events.next_text().await.unwrap();
    other_bits.revive();
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .matches("\"state\":\"ready\"")
            .count()
            == 2
    })
    .await;
    first.kill();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text.len(), 40);
    assert_eq!(other_bits.behaviour.calls.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_takes_its_work_with_it() {
    let worker = FakeWorker::start();
    slow(&worker);
    let gateway = gateway(&[&worker], |_| {}).await;
    // Mid-stream.
    let mut events = gateway.open(PATH, body(400)).await;
    events.next_text().await.unwrap();
    drop(events);
    eventually(|| async { worker.behaviour.cancelled.load(Ordering::SeqCst) == 1 }).await;
    // While a whole answer is being made.
    let request = gateway
        .http
        .post(format!("{}{PATH}", gateway.url))
        .json(&chat_body("go", json!({"max_tokens": 400})));
    let pending = tokio::spawn(request.send());
    eventually(|| async { worker.behaviour.open.load(Ordering::SeqCst) == 1 }).await;
    pending.abort();
    eventually(|| async { worker.behaviour.cancelled.load(Ordering::SeqCst) == 2 }).await;
    // Through a stop string, which the worker does not know of.
    gateway
        .chat("say:abcdefghijklmnopqrstuvwxyz", json!({"stop": "c"}))
        .await;
    eventually(|| async { worker.behaviour.cancelled.load(Ordering::SeqCst) == 3 }).await;
    eventually(|| async { gateway.metric("hearth_requests_running", "").await == 0.0 }).await;
    assert_eq!(
        gateway
            .metric("hearth_choices_finished_total", "cancelled")
            .await,
        2.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_worker_never_comes_back_ends_with_the_reason() {
    let worker = FakeWorker::start();
    slow(&worker);
    let gateway = gateway(&[&worker], |config| {
        config.routing.queue_timeout = Duration::from_millis(500);
    })
    .await;
    let request = gateway
        .http
        .post(format!("{}{PATH}", gateway.url))
        .json(&body(400))
        .send();
    let response = request.await.unwrap();
    assert_eq!(response.status(), 200);
    worker.kill();
    let began = Instant::now();
    let text = response.text().await.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "it waited too long"
    );
    assert!(
        text.contains("worker_lost") && text.contains("none took its place"),
        "{text}"
    );
}
