//! Workers that join and leave while the gateway runs.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hearth_server::router::{Role, WorkerRoute};
use serde_json::{Value, json};

use crate::failover::{PATH, body, slow, stream};
use crate::support::{
    Events, FakeWorker, Running, chat_body, eventually, gateway, unready_gateway,
};

fn route(name: &str, worker: &FakeWorker) -> WorkerRoute {
    WorkerRoute {
        name: name.to_owned(),
        role: Role::Decode,
        endpoint: worker.endpoint(),
    }
}

impl Running {
    fn set_members(&self, workers: &[&FakeWorker]) {
        let routes: Vec<WorkerRoute> = workers
            .iter()
            .map(|worker| route("decode-0", worker))
            .collect();
        self.pool.set_members(&routes).unwrap();
    }

    pub(crate) async fn ready(&self) -> Value {
        serde_json::from_str(&self.get("/ready").await.1).unwrap()
    }

    async fn is_ready(&self, workers: usize) -> bool {
        self.ready().await["decode"]["ready"] == workers
    }
}

/// Starts a gateway whose workers are set later.
async fn empty_gateway() -> Running {
    unready_gateway(&[], |config| config.has_changing_members = true).await
}

/// Starts a gateway with two slow workers; returns one stream, the worker that has it, and the other.
async fn with_a_stream<'a>(
    first: &'a FakeWorker,
    second: &'a FakeWorker,
    tokens: u32,
) -> (Running, Events, &'a FakeWorker, &'a FakeWorker) {
    slow(first);
    slow(second);
    let gateway = empty_gateway().await;
    gateway.set_members(&[first, second]);
    eventually(|| gateway.is_ready(2)).await;
    let mut events = gateway.open(PATH, body(tokens)).await;
    events.next_text().await.unwrap();
    let (busy, other) = match first.behaviour.open.load(Ordering::SeqCst) {
        1 => (first, second),
        _ => (second, first),
    };
    (gateway, events, busy, other)
}

/// Returns the answer of a worker that stays.
async fn undisturbed(tokens: u32) -> String {
    let worker = FakeWorker::start();
    worker.behaviour.length.store(1000, Ordering::SeqCst);
    let gateway = gateway(&[&worker], |_| {}).await;
    stream(&gateway, body(tokens)).await
}

/// Returns the rest of the text.
async fn rest(events: &mut Events) -> String {
    let mut text = String::new();
    while let Some(more) = events.next_text().await {
        text += &more;
    }
    text
}

fn calls(worker: &FakeWorker) -> usize {
    worker.behaviour.calls.lock().unwrap().len()
}

/// Number of connections of this process to a worker's port.
fn connections(worker: &FakeWorker) -> usize {
    let port = format!(":{:04X}", worker.endpoint().port());
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let established = |line: &&str| {
        let mut fields = line.split_whitespace().skip(2);
        fields.next().is_some_and(|remote| remote.ends_with(&port)) && fields.next() == Some("01")
    };
    sockets.lines().filter(established).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_without_workers_holds_requests_until_one_joins() {
    let gateway = empty_gateway().await;
    assert_eq!(gateway.get("/health").await.0, 200);
    let ready = gateway.ready().await;
    assert_eq!(ready["ready"], false);
    assert_eq!(ready["decode"], json!({"ready": 0, "of": 0}));
    assert_eq!(ready["workers"], json!([]));
    let worker = FakeWorker::start();
    let answer = gateway.chat("say:patience", json!({}));
    let join = async {
        eventually(|| async { gateway.metric("hearth_requests_queued", "").await == 1.0 }).await;
        let began = Instant::now();
        gateway.set_members(&[&worker]);
        began
    };
    let ((status, answer), began) = tokio::join!(answer, join);
    assert_eq!(
        (status, &answer["choices"][0]["message"]["content"]),
        (200, &json!("patience"))
    );
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "it was not noticed at once"
    );
    let ready = gateway.ready().await;
    assert_eq!(ready["decode"], json!({"ready": 1, "of": 1}));
    assert_eq!(
        ready["workers"][0]["address"],
        worker.endpoint().to_string()
    );
    // Naming it again changes nothing.
    gateway.set_members(&[&worker, &worker]);
    assert_eq!(
        gateway.ready().await["decode"],
        json!({"ready": 1, "of": 1})
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_to_which_no_worker_comes_says_so_in_time() {
    let gateway = unready_gateway(&[], |config| {
        config.has_changing_members = true;
        config.routing.queue_timeout = Duration::from_millis(300);
    })
    .await;
    let request = gateway.http.post(format!("{}{PATH}", gateway.url));
    let response = request
        .json(&chat_body("x", json!({})))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "5");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "workers_starting");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("no decode worker has joined"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_without_workers_is_told_at_once_and_held_for_longer_than_a_slot_is_waited_for()
 {
    let worker = FakeWorker::start();
    let gateway = unready_gateway(&[], |config| {
        config.has_changing_members = true;
        config.routing.queue_timeout = Duration::from_millis(100);
        config.routing.hold_timeout = Some(Duration::from_secs(60));
    })
    .await;
    let url = format!("{}/watch", gateway.metrics_url);
    let mut watch = gateway.http.get(url).send().await.unwrap();
    assert_eq!(watch.status(), 200);
    let mut pushed = async |name: &str| {
        let mut text = String::new();
        while !text.ends_with("# EOF\n") {
            let chunk = watch.chunk().await.unwrap().expect("it does not end");
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().unwrap().trim().parse::<f64>().unwrap()
    };
    assert!(pushed("hearth_idle_seconds ").await >= 0.0);
    let began = Instant::now();
    let (told, answer) = tokio::join!(
        async {
            let told = pushed("hearth_choices_unanswered ").await;
            assert_eq!(gateway.metric("hearth_idle_seconds", "").await, 0.0);
            // Longer than the queue's own bound.
            tokio::time::sleep(Duration::from_millis(500)).await;
            gateway.set_members(&[&worker]);
            told
        },
        gateway.chat("say:awake", json!({})),
    );
    assert_eq!((told, answer.0), (1.0, 200));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(pushed("hearth_choices_unanswered ").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_keeps_its_stream_and_gets_no_other() {
    let expected = undisturbed(300).await;
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    let (gateway, mut events, busy, other) = with_a_stream(&first, &second, 300).await;
    assert!(connections(busy) > 0);
    gateway.set_members(&[other]);
    let ready = gateway.ready().await;
    assert_eq!(ready["decode"], json!({"ready": 1, "of": 1}));
    let workers = ready["workers"].as_array().unwrap();
    let leaving = workers.iter().find(|worker| worker["state"] == "leaving");
    assert_eq!(leaving.unwrap()["address"], busy.endpoint().to_string());
    let address = |worker: &FakeWorker| format!("address=\"{}\"", worker.endpoint());
    assert_eq!(
        gateway.metric("hearth_worker_ready", &address(busy)).await,
        0.0
    );
    assert_eq!(
        gateway
            .metric("hearth_worker_requests", &address(busy))
            .await,
        1.0
    );
    for _ in 0..20 {
        assert_eq!(gateway.chat("say:new", json!({})).await.0, 200);
    }
    assert_eq!((calls(busy), calls(other)), (1, 20));
    let text = rest(&mut events).await;
    assert!(expected.ends_with(&text) && text.len() > 200, "{text}");
    assert_eq!(gateway.metric("hearth_failovers_total", "").await, 0.0);
    // Nothing of it is left.
    eventually(|| async { connections(busy) == 0 }).await;
    assert_eq!(
        gateway.ready().await["workers"].as_array().unwrap().len(),
        1
    );
    let metrics = gateway.metrics().await;
    assert!(!metrics.contains(&address(busy)), "{metrics}");
    assert!(connections(other) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_that_leaves_is_gone_at_once() {
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    let gateway = empty_gateway().await;
    gateway.set_members(&[&first, &second]);
    eventually(|| gateway.is_ready(2)).await;
    gateway.set_members(&[&second]);
    assert_eq!(
        gateway.ready().await["workers"].as_array().unwrap().len(),
        1
    );
    eventually(|| async { connections(&first) == 0 }).await;
    gateway.set_members(&[]);
    let ready = gateway.ready().await;
    assert_eq!(
        (&ready["ready"], &ready["workers"]),
        (&json!(false), &json!([]))
    );
    // It may come back.
    gateway.set_members(&[&first]);
    eventually(|| gateway.is_ready(1)).await;
    assert_eq!(gateway.chat("say:again", json!({})).await.0, 200);
    assert_eq!(calls(&first), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_left_and_comes_back_with_its_stream_is_a_member_again() {
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    let (gateway, mut events, busy, other) = with_a_stream(&first, &second, 300).await;
    gateway.set_members(&[other]);
    assert_eq!(gateway.ready().await["decode"]["of"], 1);
    gateway.set_members(&[other, busy]);
    assert_eq!(
        gateway.ready().await["decode"],
        json!({"ready": 2, "of": 2})
    );
    rest(&mut events).await;
    for _ in 0..6 {
        assert_eq!(gateway.chat("say:new", json!({})).await.0, 200);
    }
    assert!(calls(busy) > 1 && calls(other) > 0, "both are asked again");
    assert_eq!(gateway.ready().await["decode"]["of"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_worker_left_and_died_moves_to_a_member() {
    let expected = undisturbed(200).await;
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    let (gateway, mut events, busy, other) = with_a_stream(&first, &second, 200).await;
    gateway.set_members(&[other]);
    let mut text = events.next_text().await.unwrap();
    busy.kill();
    text += &rest(&mut events).await;
    assert!(expected.ends_with(&text) && text.len() > 100, "{text}");
    assert_eq!(calls(other), 1);
    assert_eq!(gateway.metric("hearth_failovers_total", "gone").await, 1.0);
    assert_eq!(
        gateway.ready().await["workers"].as_array().unwrap().len(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_waits_for_a_worker_that_joins_in_the_place_of_a_dead_one() {
    let expected = undisturbed(200).await;
    let (first, second) = (FakeWorker::start(), FakeWorker::start());
    slow(&first);
    slow(&second);
    let gateway = empty_gateway().await;
    gateway.set_members(&[&first]);
    eventually(|| gateway.is_ready(1)).await;
    let mut events = gateway.open(PATH, body(200)).await;
    let mut text = events.next_text().await.unwrap();
    first.kill();
    gateway.set_members(&[]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    gateway.set_members(&[&second]);
    text += &rest(&mut events).await;
    assert!(expected.ends_with(&text) && text.len() > 150, "{text}");
    assert!(calls(&second) == 1 && connections(&first) == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_has_not_told_its_numerics_may_be_the_one_to_wait_for() {
    let expected = undisturbed(200).await;
    let (first, other_bits, same) = (
        FakeWorker::start(),
        FakeWorker::start(),
        FakeWorker::dormant(),
    );
    slow(&first);
    slow(&same);
    other_bits.behaviour.description.lock().unwrap().numerics = "numerics-2".into();
    let gateway = empty_gateway().await;
    gateway.set_members(&[&first]);
    eventually(|| gateway.is_ready(1)).await;
    let mut events = gateway.open(PATH, body(200)).await;
    let mut text = events.next_text().await.unwrap();
    gateway.set_members(&[&first, &other_bits]);
    eventually(|| gateway.is_ready(2)).await;
    gateway.set_members(&[&other_bits, &same]);
    first.kill();
    tokio::time::sleep(Duration::from_millis(300)).await;
    same.revive();
    text += &rest(&mut events).await;
    assert!(expected.ends_with(&text) && text.len() > 150, "{text}");
    assert_eq!((calls(&other_bits), calls(&same)), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_another_model_is_shown_and_never_asked() {
    let (other, ours) = (FakeWorker::start(), FakeWorker::start());
    other
        .behaviour
        .description
        .lock()
        .unwrap()
        .model_fingerprint = "weights-2".into();
    let gateway = unready_gateway(&[], |config| {
        config.has_changing_members = true;
        config.routing.model_fingerprint = Some("weights-1".into());
    })
    .await;
    gateway.set_members(&[&other]);
    eventually(|| async { gateway.ready().await["workers"][0]["state"] == "serves another model" })
        .await;
    assert_eq!(
        gateway.ready().await["decode"],
        json!({"ready": 0, "of": 1})
    );
    let join = async {
        eventually(|| async { gateway.metric("hearth_requests_queued", "").await == 1.0 }).await;
        gateway.set_members(&[&other, &ours]);
    };
    let ((status, _), ()) = tokio::join!(gateway.chat("say:x", json!({})), join);
    assert_eq!((status, calls(&other), calls(&ours)), (200, 0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_of_one_name_are_two_series() {
    let (old, new) = (FakeWorker::start(), FakeWorker::start());
    for worker in [&old, &new] {
        worker.behaviour.description.lock().unwrap().name = "decode-0".into();
    }
    let gateway = empty_gateway().await;
    gateway.set_members(&[&old, &new]);
    eventually(|| gateway.is_ready(2)).await;
    let metrics = gateway.metrics().await;
    let mut series: Vec<&str> = metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(series, _)| series)
        .collect();
    let all = series.len();
    series.sort_unstable();
    series.dedup();
    assert_eq!(series.len(), all, "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_that_left_is_not_named_to_decode_workers() {
    let (decode, prefill) = (FakeWorker::start(), FakeWorker::start());
    let gateway = gateway(&[&decode], |config| {
        config.prefill = vec![prefill.endpoint()];
        config.routing.chunked_below_tokens = 100;
    })
    .await;
    eventually(|| async { gateway.ready().await["prefill"]["ready"] == 1 }).await;
    gateway.chat(&"x".repeat(200), json!({})).await;
    let endpoint = prefill.endpoint().to_string();
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, endpoint);
    gateway.set_members(&[&decode]);
    assert_eq!(
        gateway.ready().await["prefill"],
        json!({"ready": 0, "of": 0})
    );
    gateway.chat(&"y".repeat(200), json!({})).await;
    assert_eq!(decode.behaviour.last_call().prefill_endpoint, "");
    eventually(|| async { connections(&prefill) == 0 }).await;
    // The decode worker was not mistaken for another.
    assert_eq!(stream(&gateway, body(40)).await.len(), 40);
}

/// The gateway does not call them: their head says what they got.
#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_group_are_shown_as_their_head_tells_of_them() {
    let head = FakeWorker::start();
    let gateway = gateway(&[&head], |_| {}).await;
    let labels = r#"worker="stage-0",address="10.0.0.9:9400",role="stage",cpus="5""#;
    let told = gateway.metric("hearth_worker_placement_info", labels).await;
    assert!((told - 1.0).abs() < f64::EPSILON);
}

/// Requests go to it and wait there: they are not refused, and nobody is told that they are answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_waits_for_a_member_of_its_group_is_not_ready_and_takes_requests() {
    let head = FakeWorker::start();
    let gateway = gateway(&[&head], |_| {}).await;
    eventually(|| gateway.is_ready(1)).await;
    let waits_for = |member: &str| {
        let description = head.behaviour.description.lock();
        description.unwrap().waits_for = member.to_owned();
    };
    waits_for("stage-0");
    eventually(|| async { gateway.get("/ready").await.0 == 503 }).await;
    let ready = gateway.ready().await;
    assert_eq!(ready["decode"], json!({"ready": 0, "of": 1}));
    assert_eq!(ready["workers"][0]["waits_for"], "stage-0");
    let label = r#"waits_for="stage-0""#;
    let told = gateway.metric("hearth_worker_placement_info", label).await;
    assert!((told - 1.0).abs() < f64::EPSILON);
    assert_eq!(gateway.chat("say:waited", json!({})).await.0, 200);
    waits_for("");
    eventually(|| gateway.is_ready(1)).await;
    assert_eq!(gateway.get("/ready").await.0, 200);
}
