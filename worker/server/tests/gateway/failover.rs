//! **A dead worker loses nothing**: streams that move, wait and end, against ones that never broke.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hearth_transport::tonic::Status;
use serde_json::{Value, json};

use crate::support::{
    FakeWorker, Fault, Running, all, chat_body, chunks, eventually, gateway, streamed_text,
    unready_gateway,
};

const PATH: &str = "/v1/chat/completions";

/// The answer of a worker that lives.
async fn undisturbed(body: &Value) -> String {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    streamed_text(&chunks(&gateway.stream(PATH, body.clone()).await), 0)
}

fn body(tokens: u32) -> Value {
    chat_body(
        "tell me",
        json!({"seed": 7, "max_tokens": tokens, "stream": true}),
    )
}

fn slow(worker: &FakeWorker) {
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(5);
    worker.behaviour.length.store(1000, Ordering::SeqCst);
}

/// Streams the body and gives its text; the stream must end well.
async fn stream(gateway: &Running, body: Value) -> String {
    streamed_text(&chunks(&gateway.stream(PATH, body).await), 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_workers_stream_goes_on_at_another_with_the_same_tokens() {
    let expected = undisturbed(&body(35)).await;
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    slow(&first);
    slow(&second);
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
    // The stream is kept through two deaths, and while nobody listens.
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
    slow(&worker);
    let gateway = gateway(&[&worker], |_| {}).await;
    let ask = |i: u64| {
        chat_body(
            &format!("tell me {i}"),
            json!({"seed": i, "max_tokens": 120, "stream": true}),
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
        config.routing.look_timeout = Duration::from_millis(200);
        config.routing.look_interval = Duration::from_millis(200);
    })
    .await;
    let mut events = gateway.open(PATH, body(40)).await;
    let mut text = events.next_text().await.unwrap();
    // The process stands still, as under SIGSTOP: no look is answered, no connection breaks.
    hung.behaviour.is_deaf.store(true, Ordering::SeqCst);
    well.behaviour.is_deaf.store(false, Ordering::SeqCst);
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
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

    // In mid-stream the error is the last event, and there is no [DONE].
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
    slow(&first);
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
    slow(&first);
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
    // In mid-stream.
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
    // By a stop string, which the worker does not know of.
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
async fn requests_are_held_while_workers_start() {
    let worker = FakeWorker::dormant();
    let gateway = unready_gateway(&[&worker], |_| {}).await;
    let (status, ready) = gateway.get("/ready").await;
    assert_eq!(status, 503);
    assert!(
        ready.contains("\"decode\":{\"ready\":0,\"of\":1}"),
        "{ready}"
    );
    let answer = async { gateway.chat("say:patience", json!({})).await };
    let start = async {
        eventually(|| async { gateway.metric("hearth_requests_queued", "").await == 1.0 }).await;
        worker.revive();
    };
    let ((status, answer), ()) = tokio::join!(answer, start);
    assert_eq!(
        (status, &answer["choices"][0]["message"]["content"]),
        (200, &json!("patience"))
    );
    assert_eq!(gateway.metric("hearth_requests_queued", "").await, 0.0);
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

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_does_not_start_in_time_is_a_503() {
    let worker = FakeWorker::dormant();
    let gateway = unready_gateway(&[&worker], |config| {
        config.routing.queue_timeout = Duration::from_millis(200);
    })
    .await;
    let response = gateway
        .http
        .post(format!("{}{PATH}", gateway.url))
        .json(&chat_body("x", json!({"stream": true})))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "5");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "workers_starting");
    assert_eq!(answer["error"]["type"], "server_error");
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("none of 1 decode workers is ready")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_a_429() {
    let worker = FakeWorker::start();
    slow(&worker);
    worker.behaviour.description.lock().unwrap().max_batch = 1;
    let gateway = gateway(&[&worker], |config| {
        config.routing.ahead_per_worker = Some(0);
        config.routing.max_queue = 1;
        config.routing.queue_timeout = Duration::from_millis(400);
    })
    .await;
    let mut running = gateway.open(PATH, body(400)).await;
    running.next_text().await.unwrap();
    let waiting = gateway.chat("second", json!({}));
    let third = async {
        eventually(|| async { gateway.metric("hearth_requests_queued", "").await == 1.0 }).await;
        let url = format!("{}{PATH}", gateway.url);
        let response = gateway
            .http
            .post(url)
            .json(&chat_body("third", json!({})))
            .send()
            .await
            .unwrap();
        assert_eq!(response.headers()["retry-after"], "2");
        (
            response.status().as_u16(),
            response.json::<Value>().await.unwrap(),
        )
    };
    let ((second_status, second), (third_status, third)) = tokio::join!(waiting, third);
    assert_eq!(
        (third_status, &third["error"]["code"]),
        (429, &json!("queue_full")),
        "{third}"
    );
    assert_eq!(third["error"]["type"], "rate_limit_error");
    assert!(
        third["error"]["message"]
            .as_str()
            .unwrap()
            .contains("1 requests wait, 1 may"),
        "{third}"
    );
    assert_eq!(
        (second_status, &second["error"]["code"]),
        (429, &json!("queue_timeout")),
        "{second}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_takes_too_long_is_ended_with_the_count() {
    let worker = FakeWorker::start();
    slow(&worker);
    let gateway = gateway(&[&worker], |config| {
        config.limits.request_timeout = Duration::from_millis(300)
    })
    .await;
    let (status, answer) = gateway.chat("go", json!({"max_tokens": 400})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (504, &json!("request_timeout")),
        "{answer}"
    );
    let events = gateway.stream(PATH, body(400)).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "request_timeout");
    eventually(|| async { worker.behaviour.cancelled.load(Ordering::SeqCst) == 2 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_streams_and_takes_no_new_ones() {
    let expected = undisturbed(&body(40)).await;
    let worker = FakeWorker::start();
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(10);
    let mut gateway = gateway(&[&worker], |_| {}).await;
    let mut events = gateway.open(PATH, body(40)).await;
    let mut text = events.next_text().await.unwrap();
    gateway.shut_down();
    eventually(|| async {
        tokio::net::TcpStream::connect(gateway.address)
            .await
            .is_err()
    })
    .await;
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    assert_eq!(text, expected);
    gateway.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_by_its_grace() {
    let worker = FakeWorker::start();
    slow(&worker);
    let mut gateway = gateway(&[&worker], |config| {
        config.limits.drain_grace = Duration::from_millis(200)
    })
    .await;
    let mut events = gateway.open(PATH, body(400)).await;
    events.next_text().await.unwrap();
    let begun = Instant::now();
    gateway.shut_down();
    let mut last = None;
    while let Some(event) = events.next().await {
        last = Some(event);
    }
    let last: Value = serde_json::from_str(&last.unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down");
    gateway.ended().await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3));
    eventually(|| async { worker.behaviour.cancelled.load(Ordering::SeqCst) == 1 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_prompts_go_to_a_prefill_worker_that_fits() {
    let (decode, prefill) = (FakeWorker::start(), FakeWorker::start());
    let adjust = |config: &mut hearth_server::GatewayConfig| {
        config.prefill = vec![prefill.endpoint()];
        config.routing.chunked_below_tokens = 100;
    };
    let gateway = gateway(&[&decode], adjust).await;
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .contains("\"prefill\":{\"ready\":1")
    })
    .await;
    let endpoint = prefill.endpoint().to_string();
    gateway.chat("short", json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    let long = "x".repeat(200);
    gateway.chat(&long, json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, endpoint);
    // What the decode worker has seen is not prefilled elsewhere.
    gateway.chat(&long, json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    // A prefill worker that fails is passed by.
    decode.behaviour.fault(Fault::Status(
        0,
        Status::unavailable("the prefill worker is gone"),
    ));
    prefill.kill();
    let (status, _) = gateway.chat(&"y".repeat(200), json!({})).await;
    assert_eq!(status, 200);
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    // One with another layout of KV is never asked.
    prefill.behaviour.description.lock().unwrap().kv_layout = "layout-2".into();
    prefill.revive();
    eventually(|| async {
        gateway
            .get("/ready")
            .await
            .1
            .contains("\"prefill\":{\"ready\":1")
    })
    .await;
    gateway.chat(&"z".repeat(200), json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_of_another_model_are_not_asked() {
    let (ours, other) = (FakeWorker::start(), FakeWorker::start());
    other
        .behaviour
        .description
        .lock()
        .unwrap()
        .model_fingerprint = "weights-2".into();
    let gateway = gateway(&[&other, &ours], |config| {
        config.routing.model_fingerprint = Some("weights-1".into());
    })
    .await;
    for _ in 0..4 {
        assert_eq!(gateway.chat("say:x", json!({})).await.0, 200);
    }
    assert_eq!(other.behaviour.calls.lock().unwrap().len(), 0);
    assert!(
        gateway
            .get("/ready")
            .await
            .1
            .contains("serves another model")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_returns_to_the_worker_that_knows_it() {
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
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
    let start = "a long beginning, ".repeat(6);
    for turn in 0..6 {
        gateway
            .chat(&format!("{start}{turn}"), json!({"max_tokens": 5}))
            .await;
    }
    let calls = [&first, &second].map(|worker| worker.behaviour.calls.lock().unwrap().len());
    assert!(calls == [6, 0] || calls == [0, 6], "{calls:?}");
    for turn in 0..6 {
        gateway
            .chat(&format!("short {turn}"), json!({"max_tokens": 5}))
            .await;
    }
    let calls = [&first, &second].map(|worker| worker.behaviour.calls.lock().unwrap().len());
    assert!(calls.iter().all(|calls| *calls >= 3), "{calls:?}");
}
