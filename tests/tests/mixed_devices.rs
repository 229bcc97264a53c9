//! Prompts read by one device and answers written by another: two instruction sets simulate two devices. If either
//! dies, streams continue with the bits of an undisturbed run of the same pair, as their log-probabilities show.

use std::cell::RefCell;

use hearth_tests::{Answer, Metrics, Rank, Ranks, chat_body, chat_stream, skipped};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Tokens of a stream that is long enough to be interrupted.
const LONG: u32 = 80;

/// A gateway with one worker that reads prompts and one that writes answers.
struct Pair {
    ranks: Ranks,
    gateway: Rank,
    workers: RefCell<[Rank; 2]>,
    started: RefCell<u32>,
}

/// One of the two workers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Reader,
    Writer,
}

/// Returns the instruction sets that simulate two devices: not the reference kernels, which are slow.
fn instruction_sets() -> Option<[&'static str; 2]> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| cpu.split_whitespace().any(|word| word == flag);
    match (
        has("avx2") && has("fma"),
        has("avx512f") && has("avx512vbmi"),
    ) {
        (true, true) => Some(["avx2", "avx512"]),
        (true, false) => Some(["scalar", "avx2"]),
        (false, _) => {
            skipped(
                "this CPU has neither AVX2 nor AVX-512, so there are no two kinds of bits to mix",
            );
            None
        }
    }
}

impl Pair {
    /// Starts both; with `is_tight` the writer's KV cache holds one context, and a short one.
    fn start([reader, writer]: [&'static str; 2], is_tight: bool) -> Self {
        let mut ranks = Ranks::of_demo();
        if is_tight {
            ranks.edit(|plan| {
                let context = 320;
                plan["model"]["contextLength"] = json!(context);
                let token_bytes = plan["model"]["kvBytesPerToken"]
                    .as_u64()
                    .unwrap_or_default();
                for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
                    if rank["role"] == "Decode" {
                        rank["kv"]["memoryBytes"] = json!(context * token_bytes);
                    }
                }
            });
        }
        let workers = [
            ranks.start("prefill", "prefill-0", &isa(reader)),
            ranks.start("decode", "decode-0", &isa(writer)),
        ];
        ranks.route_to(&[&workers[0], &workers[1]]);
        let gateway = gateway(&ranks, "gateway-0");
        Self {
            ranks,
            gateway,
            workers: RefCell::new(workers),
            started: RefCell::new(0),
        }
    }

    /// Kills a worker with `kill -9` and starts another in its place, at another address.
    fn replace(&self, who: Who, isa_name: &str) {
        *self.started.borrow_mut() += 1;
        let number = *self.started.borrow();
        let (place, role, name) = match who {
            Who::Reader => (0, "prefill", format!("prefill-{number}")),
            Who::Writer => (1, "decode", format!("decode-{number}")),
        };
        let mut workers = self.workers.borrow_mut();
        workers[place].signal(Signal::KILL);
        workers[place] = self.ranks.start(role, &name, &isa(isa_name));
        self.ranks.route_to(&[&workers[0], &workers[1]]);
    }

    async fn ask(&self, body: &Value, each: impl FnMut(usize, &str)) -> Answer {
        let v1 = format!("{}/v1", self.gateway.base());
        let answer = chat_stream(&v1, body, each).await;
        answer.expect("the stream survives")
    }

    fn metrics(&self) -> Metrics {
        Metrics::of(&self.gateway.metrics_base())
    }
}

/// Starts a gateway with the workers of the routes, and waits until it has both.
fn gateway(ranks: &Ranks, name: &str) -> Rank {
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", name, &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    Metrics::wait_for(&gateway.metrics_base(), "both are ready", |metrics| {
        ready(metrics, "prefill") == 1.0 && ready(metrics, "decode") == 1.0
    });
    gateway
}

/// Returns the number of a role's workers that accept requests.
fn ready(metrics: &Metrics, role: &str) -> f64 {
    let label = format!("role=\"{role}\"");
    metrics
        .values("hearth_worker_ready", &[&label])
        .iter()
        .sum()
}

fn isa(name: &str) -> Vec<String> {
    vec!["--isa".to_owned(), name.to_owned()]
}

/// Returns a prompt long enough for a prefill worker, with a seeded answer that never ends before `LONG`.
fn long_prompt(number: usize) -> Value {
    let text = format!(
        "{number}. {}What is Hearth?",
        "The lab has a server and a laptop. ".repeat(12)
    );
    let mut body = chat_body("hearth-demo", &text, LONG);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(7 + number);
    body["logit_bias"] = json!({"1": -100});
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_dies_the_answer_has_the_bits_of_its_pair() {
    let Some(sets) = instruction_sets() else {
        return;
    };
    let [reads, writes] = sets;
    let body = long_prompt(0);
    let expected = Pair::start(sets, false).ask(&body, |_, _| {}).await;
    assert_eq!(expected.logprobs.len(), LONG as usize);
    // The bits must show which worker read the prompt; otherwise this test would prove nothing.
    let alike = Pair::start([writes, writes], false)
        .ask(&body, |_, _| {})
        .await;
    assert_ne!(expected.logprobs, alike.logprobs);

    let pair = Pair::start(sets, false);
    let mut kills = 0;
    for (after, victims) in [
        (1, vec![Who::Writer]),
        (7, vec![Who::Reader, Who::Writer]),
        (12, vec![Who::Reader]),
        (20, vec![Who::Writer, Who::Reader]),
        (33, vec![Who::Writer]),
    ] {
        let mut is_done = false;
        let answer = pair
            .ask(&body, |pieces, _| {
                if pieces >= after && !is_done {
                    is_done = true;
                    kills += victims.len();
                    for who in &victims {
                        pair.replace(*who, if *who == Who::Reader { reads } else { writes });
                    }
                }
            })
            .await;
        assert_eq!(
            answer, expected,
            "{victims:?} killed after {after} pieces of text"
        );
    }
    assert_eq!(kills, 7);
    let metrics = pair.metrics();
    assert!(metrics.count("hearth_failovers_total") >= 4.0);
    assert_eq!(
        metrics.count("hearth_failovers_changed_numerics_total"),
        0.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_lose_their_kv_read_the_prompt_where_it_was_read() {
    let Some(sets) = instruction_sets() else {
        return;
    };
    let mut expected = Vec::new();
    {
        let pair = Pair::start(sets, false);
        for number in 0..4 {
            expected.push(pair.ask(&long_prompt(number), |_, _| {}).await);
        }
    }
    let pair = Pair::start(sets, true);
    let bodies: Vec<Value> = (0..4).map(long_prompt).collect();
    for _ in 0..3 {
        let answers = bodies.iter().map(|body| pair.ask(body, |_, _| {}));
        assert_eq!(futures::future::join_all(answers).await, expected);
    }
    let preemptions =
        |metrics: &Metrics| metrics.of_role("hearth_worker_preemptions_total", "decode");
    // A worker reports its counters periodically.
    let metrics = Metrics::wait_for(
        &pair.gateway.metrics_base(),
        "somebody had to yield",
        |metrics| preemptions(metrics) > 0.0,
    );
    println!("{} preemptions", preemptions(&metrics));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_device_has_cached_is_not_taken_for_the_others() {
    let Some(sets) = instruction_sets() else {
        return;
    };
    let body = long_prompt(0);
    let expected = Pair::start(sets, false).ask(&body, |_, _| {}).await;
    let mut pair = Pair::start(sets, false);
    // While the reader is away, the writer reads the same prompt itself and caches it.
    pair.ranks.route_to(&[&pair.workers.borrow()[1]]);
    Metrics::wait_for(
        &pair.gateway.metrics_base(),
        "the reader has left",
        |metrics| ready(metrics, "prefill") == 0.0,
    );
    let alone = pair.ask(&body, |_, _| {}).await;
    assert_ne!(alone.logprobs, expected.logprobs);
    // The gateway knows that and would skip the reader; a new one does not.
    {
        let workers = pair.workers.borrow();
        pair.ranks.route_to(&[&workers[0], &workers[1]]);
    }
    pair.gateway = gateway(&pair.ranks, "gateway-1");
    for _ in 0..2 {
        assert_eq!(pair.ask(&body, |_, _| {}).await, expected);
    }
}
