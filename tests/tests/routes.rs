//! Workers that join, leave and die behind a running gateway, which learns of them from a file, as in a cluster.
//! All use mutual TLS under one shared name, whatever their addresses.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Metrics, Rank, Ranks, chat_body, chat_stream, write_certificates};
use rustix::process::Signal;
use serde_json::{Value, json};

const QUESTION: &str = "What is Hearth?";
const NAME: &str = "demo.default.hearth";

/// A gateway that follows a file, and the workers that a test starts for it.
struct Service {
    ranks: Ranks,
    gateway: Rank,
}

impl Service {
    /// Starts the gateway and waits until it can queue requests.
    async fn start() -> Self {
        let ranks = Ranks::of_demo();
        write_certificates(ranks.directory(), &[NAME]);
        let mut arguments = tls(ranks.directory());
        arguments.extend(["--routes".to_owned(), ranks.routes().display().to_string()]);
        let gateway = ranks.start("gateway", "gateway-0", &arguments);
        until_status(&format!("{}/health", gateway.base()), 200).await;
        Self { ranks, gateway }
    }

    fn worker(&self, role: &'static str, name: &str) -> Rank {
        self.ranks.start(role, name, &tls(self.ranks.directory()))
    }

    fn wait_for(&self, what: &str, holds: impl Fn(&Metrics) -> bool) {
        Metrics::wait_for(&self.gateway.metrics_base(), what, holds);
    }

    fn wait_until_ready(&self, workers: &[&Rank]) {
        self.wait_for("all are ready", |metrics| {
            workers.iter().all(|worker| metrics.has(READY, worker, 1.0))
        });
    }

    async fn ask(&self, body: &Value, each: impl FnMut(usize)) -> Answer {
        let v1 = format!("{}/v1", self.gateway.base());
        let mut each = each;
        chat_stream(&v1, body, |pieces, _| each(pieces))
            .await
            .expect("the stream survives")
    }

    fn failovers(&self) -> f64 {
        Metrics::of(&self.gateway.metrics_base()).count("hearth_failovers_total")
    }

    /// Returns the worker that runs the only stream, and the other one.
    fn busy<'a>(&self, workers: [&'a Rank; 2]) -> (&'a Rank, &'a Rank) {
        let metrics = Metrics::of(&self.gateway.metrics_base());
        let [first, second] = workers;
        match metrics.has(REQUESTS, first, 1.0) {
            true => (first, second),
            false => (second, first),
        }
    }

    /// Removes `busy` from the routes in mid-stream: it is stopped until that is seen, since a short stream would end
    /// before.
    fn leaves_while_busy(&self, busy: &Rank, other: &Rank) {
        busy.signal(Signal::STOP);
        self.ranks.route_to(&[other]);
        self.wait_for("it leaves", |metrics| metrics.has(READY, busy, 0.0));
    }
}

const READY: &str = "hearth_worker_ready";
const REQUESTS: &str = "hearth_worker_requests";

trait OfWorker {
    fn has(&self, name: &str, worker: &Rank, value: f64) -> bool;
}

impl OfWorker for Metrics {
    fn has(&self, name: &str, worker: &Rank, value: f64) -> bool {
        let address = format!("address=\"{}\"", worker.endpoint);
        self.values(name, &[&address]) == [value]
    }
}

fn tls(directory: &Path) -> Vec<String> {
    let directory = directory.display().to_string();
    ["--tls-dir", &directory, "--tls-name", NAME]
        .map(str::to_owned)
        .to_vec()
}

/// Tokens of a stream that is long enough to be caught in mid-stream.
const LONG_TOKENS: u32 = 300;

/// Returns a seeded request that never ends before its last token: the end-of-text token is banned.
fn seeded(seed: u64) -> Value {
    let mut body = chat_body("hearth-demo", QUESTION, LONG_TOKENS);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(seed);
    body["logit_bias"] = json!({"1": -100});
    body
}

async fn status(url: &str) -> u16 {
    match reqwest::get(url).await {
        Ok(response) => response.status().as_u16(),
        Err(_) => 0,
    }
}

async fn until_status(url: &str, expected: u16) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while status(url).await != expected {
        assert!(Instant::now() < deadline, "{url} is not {expected} in time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_holds_requests_until_its_first_worker_is_named() {
    let mut service = Service::start().await;
    assert_eq!(
        status(&format!("{}/ready", service.gateway.base())).await,
        503
    );
    let worker = service.worker("decode", "decode-0");
    let (v1, body) = (
        format!("{}/v1", service.gateway.base()),
        chat_body("hearth-demo", QUESTION, 16),
    );
    let asked = tokio::spawn(async move { chat_stream(&v1, &body, |_, _| {}).await });
    service.wait_for("the request waits", |metrics| {
        metrics.sum("hearth_requests_queued", &[]) == 1.0
    });
    service.ranks.route_to(&[&worker]);
    let answer = asked.await.expect("task").expect("answer");
    assert!(answer.completion_tokens > 0, "{answer:?}");
    assert_eq!(
        status(&format!("{}/ready", service.gateway.base())).await,
        200
    );
    // An unreadable file changes nothing, and is reported once.
    std::fs::write(service.ranks.routes(), "{\"workers\": [nonsense").expect("write");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let answer = service
        .ask(&chat_body("hearth-demo", QUESTION, 4), |_| {})
        .await;
    assert!(answer.completion_tokens > 0);
    let complaints = service
        .gateway
        .output()
        .matches("keeping the previous routes")
        .count();
    assert_eq!(complaints, 1, "{}", service.gateway.output());
    // It terminates when told to.
    service.gateway.signal(Signal::TERM);
    assert!(service.gateway.wait().success());
}

/// The worker that comes has one slot, and is given one request beyond it: each answer that ends lets the next request of the
/// queue go. It would pass, nearly always, if the first two came in another order: those that are let go at once are
/// the subject of the gateway's own tests.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_gateway_holds_is_answered_in_the_order_of_its_arrival() {
    const HELD: usize = 12;
    let mut service = Service::start().await;
    service.ranks.edit(|plan| {
        let ranks = plan["ranks"].as_array_mut();
        for rank in ranks.into_iter().flatten() {
            rank["maxBatch"] = json!(1);
        }
    });
    let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
    let mut asked = Vec::new();
    for number in 0..HELD {
        let v1 = format!("{}/v1", service.gateway.base());
        let begins = begins.clone();
        asked.push(tokio::spawn(async move {
            let body = chat_body("hearth-demo", QUESTION, 8);
            let answer = chat_stream(&v1, &body, |pieces, _| {
                if pieces == 1 {
                    begins.send(number).expect("the test listens");
                }
            });
            answer.await
        }));
        service.wait_for("the request waits", |metrics| {
            metrics.sum("hearth_requests_queued", &[]) == (number + 1) as f64
        });
    }
    let worker = service.worker("decode", "decode-0");
    service.ranks.route_to(&[&worker]);
    for asked in asked {
        asked.await.expect("task").expect("answer");
    }
    drop(begins);
    let mut order = Vec::new();
    while let Some(number) = begun.recv().await {
        order.push(number);
    }
    assert_eq!(order, Vec::from_iter(0..HELD));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_finishes_its_stream_and_one_that_dies_costs_no_token() {
    let service = Service::start().await;
    let first = service.worker("decode", "decode-0");
    service.ranks.route_to(&[&first]);
    service.wait_until_ready(&[&first]);
    let bodies = [seeded(1), seeded(2), seeded(3)];
    let mut expected = Vec::new();
    for body in &bodies {
        expected.push(service.ask(body, |_| {}).await);
        assert_eq!(
            expected.last().map(|answer| answer.completion_tokens),
            Some(u64::from(LONG_TOKENS))
        );
    }
    // Another one joins with the same name, as the next plan's does.
    let second = service.worker("decode", "decode-0");
    service.ranks.route_to(&[&first, &second]);
    service.wait_until_ready(&[&first, &second]);

    // It leaves during a stream, which it finishes.
    let mut left = None;
    let answer = service
        .ask(&bodies[0], |pieces| {
            if pieces == 5 {
                let (busy, other) = service.busy([&first, &second]);
                service.leaves_while_busy(busy, other);
                busy.signal(Signal::CONT);
                left = Some(busy);
            }
        })
        .await;
    assert_eq!(answer, expected[0]);
    assert_eq!(service.failovers(), 0.0);
    let left = left.expect("a worker left");
    service.wait_for("nothing of it is left", |metrics| {
        !metrics.has(READY, left, 0.0)
    });

    // Both again. One leaves during a stream and dies before its end.
    service.ranks.route_to(&[&first, &second]);
    service.wait_until_ready(&[&first, &second]);
    let mut died = None;
    let answer = service
        .ask(&bodies[1], |pieces| {
            if pieces == 5 {
                let (busy, other) = service.busy([&first, &second]);
                service.leaves_while_busy(busy, other);
                busy.signal(Signal::KILL);
                died = Some((busy, other));
            }
        })
        .await;
    assert_eq!(answer, expected[1]);
    assert_eq!(service.failovers(), 1.0);

    // The last one is killed while a member, and a new one takes its place only then.
    let (_, survivor) = died.expect("a worker died");
    let mut third = None;
    let answer = service
        .ask(&bodies[2], |pieces| {
            if pieces == 5 {
                survivor.signal(Signal::KILL);
                let next = service.worker("decode", "decode-1");
                service.ranks.route_to(&[&next]);
                third = Some(next);
            }
        })
        .await;
    assert_eq!(answer, expected[2]);
    assert!(service.failovers() >= 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_end_finishes_its_stream_while_another_takes_over() {
    let service = Service::start().await;
    let mut first = service.worker("decode", "decode-0");
    service.ranks.route_to(&[&first]);
    service.wait_until_ready(&[&first]);
    let expected = service.ask(&seeded(4), |_| {}).await;
    let second = service.worker("decode", "decode-0");
    let mut is_told = false;
    let answer = service
        .ask(&seeded(4), |pieces| {
            if pieces == 5 {
                service.ranks.route_to(&[&second]);
                first.signal(Signal::TERM);
                is_told = true;
            }
        })
        .await;
    assert!(is_told);
    assert_eq!(answer, expected);
    assert_eq!(service.failovers(), 0.0);
    assert!(first.wait().success(), "{}", first.output());
    assert_eq!(service.ask(&seeded(4), |_| {}).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_workers_join_too() {
    let service = Service::start().await;
    let decode = service.worker("decode", "decode-0");
    service.ranks.route_to(&[&decode]);
    service.wait_until_ready(&[&decode]);
    let long = |number: usize| {
        let text = format!(
            "{number}. {}{QUESTION}",
            "The lab has a server. ".repeat(30)
        );
        chat_body("hearth-demo", &text, 24)
    };
    let alone = service.ask(&long(1), |_| {}).await;
    let prefill = service.worker("prefill", "prefill-0");
    service.ranks.route_to(&[&decode, &prefill]);
    service.wait_until_ready(&[&decode, &prefill]);
    service.ask(&long(2), |_| {}).await;
    service.wait_for("KV has moved", |metrics| {
        metrics.of_rank("hearth_worker_kv_moved_bytes_total", "prefill-0") > 0.0
    });
    // The same answer, whichever reads the prompt: a new worker has nothing of the first in its cache.
    let fresh = service.worker("decode", "decode-1");
    service.ranks.route_to(&[&fresh, &prefill]);
    service.wait_until_ready(&[&fresh, &prefill]);
    assert_eq!(service.ask(&long(1), |_| {}).await, alone);
}
