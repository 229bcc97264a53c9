//! Prompts read with other bits than answers are written with: two instruction sets simulate two devices, or the reader
//! expands latents. If either worker dies, streams continue with the bits of an undisturbed run of the same pair, as their
//! log-probabilities show.

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

/// How the reader and the writer compute.
#[derive(Clone, Copy, Debug)]
struct Kinds {
    /// Instruction sets.
    isas: [&'static str; 2],
    /// Whether the reader expands latents.
    expands: bool,
}

/// Kinds whose bits differ, and what the reader's would be like if they did not.
fn kinds() -> Vec<(Kinds, Kinds)> {
    let of = |isas, expands| Kinds { isas, expands };
    let forms = (of(["auto", "auto"], true), of(["auto", "auto"], false));
    let devices = instruction_sets()
        .map(|[reads, writes]| (of([reads, writes], false), of([writes, writes], false)));
    devices.into_iter().chain([forms]).collect()
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
    fn start(kinds: Kinds, is_tight: bool) -> Self {
        let [reader, writer] = kinds.isas;
        let mut ranks = Ranks::of_demo();
        if kinds.expands {
            ranks.edit(|plan| {
                for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
                    if rank["role"] == "Prefill" {
                        rank["mlaForm"] = json!("Expanded");
                    }
                }
            });
        }
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

    /// Waits until the gateway has both workers that were started last: without a reader, the writer reads prompts itself.
    fn wait_until_ready(&self) {
        Metrics::wait_for(&self.gateway.metrics_base(), "both are ready", |metrics| {
            self.workers.borrow().iter().all(|worker| {
                let label = format!("worker=\"{}\"", worker.name);
                metrics.values("hearth_worker_ready", &[&label]) == [1.0]
            })
        });
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
    for (kinds, alike) in kinds() {
        let body = long_prompt(0);
        let expected = Pair::start(kinds, false).ask(&body, |_, _| {}).await;
        assert_eq!(expected.logprobs.len(), LONG as usize);
        // The bits must show which worker read the prompt; otherwise this test would prove nothing.
        let alike = Pair::start(alike, false).ask(&body, |_, _| {}).await;
        assert_ne!(expected.logprobs, alike.logprobs, "{kinds:?}");
        survive(kinds, &body, &expected).await;
    }
}

/// Asks a pair while its workers are killed, each time after another piece of text.
async fn survive(kinds: Kinds, body: &Value, expected: &Answer) {
    let [reads, writes] = kinds.isas;
    let pair = Pair::start(kinds, false);
    let mut kills = 0;
    for (after, victims) in [
        (1, vec![Who::Writer]),
        (7, vec![Who::Reader, Who::Writer]),
        (12, vec![Who::Reader]),
        (20, vec![Who::Writer, Who::Reader]),
        (33, vec![Who::Writer]),
    ] {
        pair.wait_until_ready();
        let mut is_done = false;
        let answer = pair
            .ask(body, |pieces, _| {
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
            answer, *expected,
            "{kinds:?}: {victims:?} killed after {after} pieces of text"
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
    for (kinds, _) in kinds() {
        let mut expected = Vec::new();
        {
            let pair = Pair::start(kinds, false);
            for number in 0..4 {
                expected.push(pair.ask(&long_prompt(number), |_, _| {}).await);
            }
        }
        let pair = Pair::start(kinds, true);
        let bodies: Vec<Value> = (0..4).map(long_prompt).collect();
        for _ in 0..3 {
            let answers = bodies.iter().map(|body| pair.ask(body, |_, _| {}));
            assert_eq!(
                futures::future::join_all(answers).await,
                expected,
                "{kinds:?}"
            );
        }
        let preemptions =
            |metrics: &Metrics| metrics.of_role("hearth_worker_preemptions_total", "decode");
        // A worker reports its counters periodically.
        let metrics = Metrics::wait_for(
            &pair.gateway.metrics_base(),
            "somebody had to yield",
            |metrics| preemptions(metrics) > 0.0,
        );
        println!("{kinds:?}: {} preemptions", preemptions(&metrics));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_worker_has_cached_is_not_taken_for_the_others() {
    for (kinds, _) in kinds() {
        let body = long_prompt(0);
        let expected = Pair::start(kinds, false).ask(&body, |_, _| {}).await;
        let mut pair = Pair::start(kinds, false);
        // While the reader is away, the writer reads the same prompt itself and caches it.
        pair.ranks.route_to(&[&pair.workers.borrow()[1]]);
        Metrics::wait_for(
            &pair.gateway.metrics_base(),
            "the reader has left",
            |metrics| ready(metrics, "prefill") == 0.0,
        );
        let alone = pair.ask(&body, |_, _| {}).await;
        assert_ne!(alone.logprobs, expected.logprobs, "{kinds:?}");
        // The gateway knows that and would skip the reader; a new one does not.
        {
            let workers = pair.workers.borrow();
            pair.ranks.route_to(&[&workers[0], &workers[1]]);
        }
        pair.gateway = gateway(&pair.ranks, "gateway-1");
        for _ in 0..2 {
            assert_eq!(pair.ask(&body, |_, _| {}).await, expected, "{kinds:?}");
        }
    }
}

/// Its tokens are cached where they were written, with other bits than a reader gives them.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_comes_back_in_a_prompt_is_read_again() {
    for (kinds, _) in kinds() {
        let body = long_prompt(0);
        let pair = Pair::start(kinds, false);
        let first = pair.ask(&body, |_, _| {}).await;
        let mut next = body.clone();
        let messages = next["messages"].as_array_mut().expect("messages");
        messages.push(json!({"role": "assistant", "content": first.text}));
        messages.push(json!({"role": "user", "content": "What else does the lab have?"}));
        let expected = Pair::start(kinds, false).ask(&next, |_, _| {}).await;
        assert_eq!(pair.ask(&next, |_, _| {}).await, expected, "{kinds:?}");
    }
}
