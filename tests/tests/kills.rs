//! Many requests while workers are killed one after another: each gets the answer that it would have had.
//!
//! `HEARTH_KILL_REQUESTS` and `HEARTH_KILLS` set the size (default 60 and 3; docs/benchmarks.md has 800 and 40).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, chat_body, chat_stream};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

/// Concurrent clients.
const CLIENTS: usize = 16;
/// Longest time until a killed worker is ready again; a busy machine with an unoptimised build needs some.
const PATIENCE: Duration = Duration::from_secs(60);

fn size(variable: &str, default: usize) -> usize {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{variable}={text}: {error}")),
        Err(_) => default,
    }
}

/// Returns a different request for each number: greedy or sampled, of varying length.
fn body(number: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(number * 7 % 23);
    let question = format!("{filler}What is Hearth? {number}");
    let tokens = u32::try_from(20 + number * 13 % 90).expect("a small number");
    let mut body = chat_body("hearth-demo", &question, tokens);
    if !number.is_multiple_of(3) {
        body["temperature"] = json!(1.1);
        body["seed"] = json!(number);
    }
    body
}

/// Clients that begin one request per permit.
struct Clients {
    permits: Arc<Semaphore>,
    begun: Arc<AtomicUsize>,
    tasks: tokio::task::JoinSet<Vec<(usize, Result<Answer, String>)>>,
}

impl Clients {
    fn start(up: &Up, requests: usize) -> Self {
        let permits = Arc::new(Semaphore::new(0));
        let begun = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..CLIENTS {
            let (v1, permits, begun) = (up.v1(), permits.clone(), begun.clone());
            tasks.spawn(async move {
                let mut answers = Vec::new();
                loop {
                    let Ok(permit) = permits.acquire().await else {
                        return answers;
                    };
                    permit.forget();
                    let number = begun.fetch_add(1, Ordering::Relaxed);
                    if number >= requests {
                        return answers;
                    }
                    let answer = chat_stream(&v1, &body(number), |_, _| {}).await;
                    answers.push((number, answer.map_err(|error| format!("{error:#}"))));
                }
            });
        }
        Self {
            permits,
            begun,
            tasks,
        }
    }

    /// Releases all remaining requests and waits until they are answered.
    async fn finish(self) -> BTreeMap<usize, Result<Answer, String>> {
        self.permits.add_permits(1 << 20);
        self.tasks.join_all().await.into_iter().flatten().collect()
    }
}

/// Returns a rank's restart count, if it is ready now.
fn ready(up: &Up, rank: &str) -> Option<u64> {
    let status = up.status();
    let processes = status["processes"].as_array()?;
    let process = processes.iter().find(|process| process["rank"] == rank)?;
    (process["ready"] == true).then(|| process["restarts"].as_u64())?
}

/// Kills the worker as soon as it is ready after `before` earlier kills.
async fn kill(up: &Up, rank: &str, before: u64) {
    let deadline = Instant::now() + PATIENCE;
    while ready(up, rank) != Some(before) {
        assert!(Instant::now() < deadline, "{rank} is not ready again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    up.signal(rank, Signal::KILL);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_requests_survive_many_kills() {
    let requests = size("HEARTH_KILL_REQUESTS", 60);
    let kills = size("HEARTH_KILLS", 3);
    let undisturbed = {
        let up = Up::demo();
        Clients::start(&up, requests).finish().await
    };
    // A new deployment: a worker's prefix cache would spare it the work.
    let up = Up::demo();
    let began = Instant::now();
    let clients = Clients::start(&up, requests);
    let wave = requests / kills;
    let mut killed = BTreeMap::from([("decode-0", 0), ("prefill-0", 0)]);
    for number in 0..kills {
        clients.permits.add_permits(wave);
        // In mid-wave: half of it has begun.
        let deadline = Instant::now() + PATIENCE;
        while clients.begun.load(Ordering::Relaxed) < number * wave + wave / 2 {
            assert!(Instant::now() < deadline, "wave {number} does not begin");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let rank = if number.is_multiple_of(2) {
            "decode-0"
        } else {
            "prefill-0"
        };
        let before = killed.get_mut(rank).expect("a rank");
        kill(&up, rank, *before).await;
        *before += 1;
    }
    let answers = clients.finish().await;
    let failovers = up.metrics().count("hearth_failovers_total");
    println!(
        "{} answers, {kills} kills ({killed:?}), {failovers} failovers, {:.0} s",
        answers.len(),
        began.elapsed().as_secs_f64()
    );
    assert_eq!(answers.len(), requests);
    for (number, answer) in &answers {
        assert_eq!(Some(answer), undisturbed.get(number), "request {number}");
        assert!(answer.is_ok(), "request {number}: {answer:?}");
    }
    assert!(failovers >= 1.0, "no kill met a request");
}
