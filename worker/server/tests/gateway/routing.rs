//! Choice of workers: requests that wait for one, a full queue, a drain, prefill workers, known prefixes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hearth_server::GatewayConfig;
use hearth_transport::tonic::Status;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::failover::{PATH, body, paced, slow, undisturbed};
use crate::support::{
    FakeWorker, Fault, MODEL, Running, all, chat_body, eventually, gateway, unready_gateway,
};

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

/// A worker takes several at once when it comes: which of them it gets first is not left to chance.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_comes_to_a_worker_in_the_order_of_its_arrival() {
    const HELD: u64 = 12;
    for round in 0..10 {
        let worker = FakeWorker::dormant();
        let gateway = unready_gateway(&[&worker], |_| {}).await;
        let queued = async || gateway.metric("hearth_requests_queued", "").await;
        let arrivals = (1..=HELD).map(|number| {
            let gateway = &gateway;
            async move {
                eventually(|| async { queued().await == (number - 1) as f64 }).await;
                gateway.chat("x", json!({"max_tokens": number})).await.0
            }
        });
        let start = async {
            eventually(|| async { queued().await == HELD as f64 }).await;
            worker.revive();
        };
        let (statuses, ()) = tokio::join!(all(arrivals), start);
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
        let calls = worker.behaviour.calls.lock().unwrap();
        let order = calls.iter().map(|(call, _)| u64::from(call.max_tokens));
        let order: Vec<u64> = order.collect();
        assert_eq!(order, Vec::from_iter(1..=HELD), "round {round}");
    }
}

/// The queue holds 16 for each of the two workers. Those of the slow one leave it too, and wait on their way.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_slow_to_accept_does_not_hold_up_what_is_held_for_another() {
    const EACH: usize = 16;
    let (slow, other) = (FakeWorker::dormant(), FakeWorker::dormant());
    // The answers of the other one outlast the test's patience: it has no slot twice.
    *other.behaviour.pace.lock().unwrap() = Duration::from_millis(100);
    let gateway = unready_gateway(&[&slow, &other], |config| {
        config.routing.hang_after = Duration::from_secs(60);
    })
    .await;
    let queued = async || gateway.metric("hearth_requests_queued", "").await;
    let asked = (0..2 * EACH).map(|_| gateway.chat("x", json!({"max_tokens": 30})));
    let (accepts, waits) = std::sync::mpsc::channel::<()>();
    let start = async {
        eventually(|| async { queued().await == (2 * EACH) as f64 }).await;
        let behaviour = slow.behaviour.clone();
        let (stands, is_slow) = tokio::sync::oneshot::channel();
        // Its only thread waits for this one with its first call.
        std::thread::spawn(move || {
            let _calls = behaviour.calls.lock();
            let _ = stands.send(());
            let _ = waits.recv();
        });
        is_slow.await.unwrap();
        slow.revive();
        eventually(|| async { queued().await < (2 * EACH) as f64 }).await;
        other.revive();
        let calls = || other.behaviour.calls.lock().unwrap().len();
        let all_come = eventually(|| async { calls() == EACH });
        let in_time = timeout(Duration::from_secs(2), all_come).await;
        assert!(in_time.is_ok(), "{} of {EACH} have come", calls());
        assert_eq!(queued().await, 0.0);
        drop(accepts);
    };
    let (answers, ()) = tokio::join!(all(asked), start);
    assert!(answers.iter().all(|(status, _)| *status == 200));
    assert_eq!(slow.behaviour.calls.lock().unwrap().len(), EACH);
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

/// Starts a gateway with one slow worker, which computes one choice at a time and has none waiting.
async fn with_one_place(adjust: impl FnOnce(&mut GatewayConfig)) -> (FakeWorker, Running) {
    let worker = FakeWorker::start();
    slow(&worker);
    worker.behaviour.description.lock().unwrap().max_batch = 1;
    let gateway = gateway(&[&worker], |config| {
        config.routing.ahead_per_worker = Some(0);
        adjust(config);
    })
    .await;
    (worker, gateway)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_a_429() {
    let (worker, gateway) = with_one_place(|config| {
        config.routing.max_queue = 1;
        config.routing.queue_timeout = Duration::from_secs(2);
    })
    .await;
    // Much longer than a place in the queue is kept.
    paced(&worker, 50);
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

/// More may wait where workers compute more at a time, and fewer once they have left.
#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_as_long_as_the_workers_that_are_there_can_bear() {
    let (worker, gateway) = with_one_place(|config| {
        config.routing.max_queue = 1;
        config.routing.queued_per_slot = 2;
        config.routing.queue_timeout = Duration::from_secs(2);
    })
    .await;
    // Much longer than all of it.
    paced(&worker, 50);
    let mut running = gateway.open(PATH, body(400)).await;
    running.next_text().await.unwrap();
    for (may, waits) in [(2, "queue_timeout"), (1, "workers_starting")] {
        let answers = all((0..3).map(|_| gateway.chat("next", json!({})))).await;
        let codes = answers.iter().map(|(_, answer)| &answer["error"]["code"]);
        let (waited, refused): (Vec<_>, Vec<_>) = codes.partition(|code| *code == waits);
        assert_eq!((waited.len(), refused.len()), (may, 3 - may), "{answers:?}");
        assert!(refused.into_iter().all(|code| code == "queue_full"));
        let words = format!("{may} requests wait, {may} may");
        assert!(
            format!("{answers:?}").contains(&words),
            "{words}: {answers:?}"
        );
        gateway.pool.set_members(&[]).unwrap();
    }
}

/// A request with many choices that has begun gets them all, however full the queue is and however long they wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_no_request_in_its_middle() {
    const CHOICES: usize = 12;
    const OTHERS: usize = 3;
    let (_worker, gateway) = with_one_place(|config| {
        config.routing.max_queue = 1;
        config.routing.queue_timeout = Duration::from_millis(20);
    })
    .await;
    let has_ended = AtomicBool::new(false);
    let many = async {
        let extra = json!({"n": CHOICES, "max_tokens": 10});
        let answer = timeout(Duration::from_secs(60), gateway.chat("many", extra)).await;
        has_ended.store(true, Ordering::SeqCst);
        answer.expect("an answer within a minute")
    };
    // Enough others to fill the queue all the time, which refuses them.
    let refused = AtomicUsize::new(0);
    let others = all((0..OTHERS).map(|_| async {
        eventually(|| async { gateway.metric("hearth_requests_running", "").await >= 1.0 }).await;
        while !has_ended.load(Ordering::SeqCst) {
            let (status, answer) = gateway.chat("other", json!({"max_tokens": 10})).await;
            assert!([200, 429].contains(&status), "{answer}");
            refused.fetch_add(usize::from(status == 429), Ordering::SeqCst);
        }
    }));
    let ((status, answer), _) = tokio::join!(many, others);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"].as_array().unwrap().len(), CHOICES);
    assert!(
        refused.load(Ordering::SeqCst) > 0,
        "the queue was never full"
    );
}

/// A later choice that gets no worker ends its request by the request's own deadline, and not sooner.
#[tokio::test(flavor = "multi_thread")]
async fn later_choices_wait_until_the_requests_own_deadline() {
    let (_worker, gateway) = with_one_place(|config| {
        config.routing.queue_timeout = Duration::from_millis(50);
        config.limits.request_timeout = Duration::from_millis(600);
    })
    .await;
    let began = Instant::now();
    let (status, answer) = gateway
        .chat("many", json!({"n": 64, "max_tokens": 10}))
        .await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (504, &json!("request_timeout")),
        "{answer}"
    );
    assert!(began.elapsed() >= Duration::from_millis(600));
}

/// A later choice for which no worker is left at all does not wait for as long as the whole request may take.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_choice_for_which_no_worker_is_left_ends_its_request() {
    let (_worker, gateway) = with_one_place(|config| {
        config.routing.queue_timeout = Duration::from_millis(500);
    })
    .await;
    let began = Instant::now();
    let many = gateway.chat("many", json!({"n": 3, "max_tokens": 100}));
    let leave = async {
        eventually(|| async { gateway.metric("hearth_requests_running", "").await == 1.0 }).await;
        gateway.pool.set_members(&[]).unwrap();
    };
    let (answer, ()) = tokio::join!(timeout(Duration::from_secs(20), many), leave);
    let (status, answer) = answer.expect("an answer when nobody is left");
    assert_eq!(
        (status, &answer["error"]["code"]),
        (503, &json!("workers_starting")),
        "{answer}"
    );
    assert!(began.elapsed() >= Duration::from_millis(500), "{answer}");
}

/// A request with many prompts counts as one in the queue until it is admitted.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_takes_one_place_in_the_queue_whatever_it_asks_for() {
    const PROMPTS: usize = 6;
    let worker = FakeWorker::start();
    slow(&worker);
    let gateway = gateway(&[&worker], |config| {
        config.routing.ahead_per_worker = Some(0);
        config.routing.max_queue = 2;
    })
    .await;
    let batch = worker.behaviour.description.lock().unwrap().max_batch as usize;
    let mut busy = Vec::new();
    for _ in 0..batch {
        let mut events = gateway.open(PATH, body(400)).await;
        events.next_text().await.unwrap();
        busy.push(events);
    }
    let prompts: Vec<String> = (0..PROMPTS).map(|i| format!("say:prompt {i}")).collect();
    let request = json!({"model": MODEL, "prompt": prompts, "max_tokens": 4});
    let asked = || gateway.post("/v1/completions", request.clone());
    let watch = async {
        let queued = || async { gateway.metric("hearth_requests_queued", "").await };
        eventually(|| async { queued().await >= 2.0 }).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let waiting = queued().await;
        drop(busy);
        waiting
    };
    let (first, second, waiting) = tokio::join!(asked(), asked(), watch);
    assert_eq!(waiting, 2.0);
    for (status, answer) in [first, second] {
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"].as_array().unwrap().len(), PROMPTS);
    }
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
    let late = reqwest::Client::new();
    eventually(|| async {
        let request = late.post(format!("{}{PATH}", gateway.url)).json(&body(1));
        request.send().await.unwrap().status() == 503
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
    let took = begun.elapsed();
    let last: Value = serde_json::from_str(&last.unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down");
    assert!(took < Duration::from_secs(3), "{took:?}");
    // The default grace is twice as long.
    let ended = timeout(Duration::from_secs(15), gateway.ended()).await;
    ended.expect("it ends by its own grace").unwrap();
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
    // A prompt that the decode worker has seen is not prefilled elsewhere.
    gateway.chat(&long, json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    // A prefill worker that fails is skipped.
    decode.behaviour.fault(Fault::Status(
        0,
        Status::unavailable("the prefill worker is gone"),
    ));
    prefill.kill();
    let (status, _) = gateway.chat(&"y".repeat(200), json!({})).await;
    assert_eq!(status, 200);
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    // A prefill worker with another KV layout is never asked.
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
