//! Workers of one virtual device are killed in the middle of what they do: one that streams a prompt's experts over a slow
//! link, and one whose experts the CPUs compute. Nothing is lost, and the next process reads no weights from the disk.

use std::time::{Duration, Instant};

use hearth_tests::{Answer, Metrics, Up, UpOptions, chat_body, chat_stream, deployment, skipped};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Room for both workers, and a link that takes more than two seconds for the experts of a prompt.
const DEVICE: &str = "virtual:memory=40Mi,copy=1.5MB/s";
/// Tokens of an answer.
const LONG: u32 = 96;
/// What a process that reads no weights may read from the disk; the weights are seven times as many bytes.
const LITTLE_BYTES: u64 = 1 << 20;
/// Longest time until a killed worker is ready again; a busy machine with an unoptimised build needs some.
const PATIENCE: Duration = Duration::from_secs(60);

fn start() -> (TempDir, Up) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = deployment(directory.path(), |spec| {
        spec["model"]["contextLength"] = json!(256);
        spec["prefill"] = json!({"mode": "StreamLoading", "chunkedBelowTokens": 0});
        spec["decode"] = json!({"maxBatch": 4, "dualBatch": "On"});
    });
    let up = Up::start(&UpOptions {
        file: Some(file),
        arguments: ["--virtual-device", DEVICE].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    });
    let plan = std::fs::read_to_string(up.state_dir().join("demo/plan.json"));
    let plan: Value = serde_json::from_str(&plan.expect("the plan")).expect("a plan");
    let policy = |rank: usize| plan["ranks"][rank]["residency"]["policy"].clone();
    assert_eq!([policy(1), policy(2)], ["StreamLoading", "HostExperts"]);
    (directory, up)
}

/// A question of its own for each number, whose answer does not end early; every second one is sampled.
fn question(number: usize) -> Value {
    let text = format!("{number}. {}What is Hearth?", "The lab. ".repeat(number));
    let mut body = chat_body("hearth-demo", &text, LONG);
    body["logit_bias"] = json!({"1": -100});
    if !number.is_multiple_of(2) {
        body["temperature"] = json!(1.1);
        body["seed"] = json!(number);
    }
    body
}

/// An answer during which a worker was killed.
struct Asked {
    answer: Answer,
    /// The process that took the dead one's place.
    next_pid: u32,
}

async fn ask(up: &Up, number: usize, each: impl FnMut(usize, &str)) -> Answer {
    let answer = chat_stream(&up.v1(), &question(number), each).await;
    answer.unwrap_or_else(|error| panic!("{number}: {error:#}\n{}", up.logs()))
}

/// Bytes that have crossed the link, once no prompt is read and the gateway has asked the worker again.
async fn settled(up: &Up) -> f64 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let before = copied(&up.metrics());
        tokio::time::sleep(Duration::from_millis(2500)).await;
        if copied(&up.metrics()) == before {
            return before;
        }
        assert!(Instant::now() < deadline, "experts are copied without end");
    }
}

fn copied(metrics: &Metrics) -> f64 {
    metrics.of_role("hearth_worker_expert_copy_bytes_total", "prefill")
}

/// Waits until another process of a rank is ready than the one that was killed.
async fn replaced(up: &Up, rank: &str, killed: u32) -> u32 {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = up.status();
        let processes = status["processes"].as_array().cloned().unwrap_or_default();
        let ready = processes
            .iter()
            .find(|process| process["rank"] == rank && process["ready"] == true);
        let pid = ready.and_then(|process| process["pid"].as_u64());
        if let Some(pid) = pid.filter(|pid| *pid != u64::from(killed)) {
            return u32::try_from(pid).expect("a process id");
        }
        assert!(Instant::now() < deadline, "{rank} does not come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Kills the prefill worker once the first bytes of the prompt's experts have crossed the link.
async fn kill_while_the_prompt_streams(up: &Up, number: usize) -> Asked {
    let killed = up.pid("prefill-0");
    let idle = settled(up).await;
    let kill = async {
        let deadline = Instant::now() + PATIENCE;
        while copied(&up.metrics()) <= idle {
            assert!(Instant::now() < deadline, "the prompt is never read");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        up.signal("prefill-0", Signal::KILL);
    };
    let (answer, ()) = tokio::join!(ask(up, number, |_, _| {}), kill);
    Asked {
        answer,
        next_pid: replaced(up, "prefill-0", killed).await,
    }
}

/// Kills the decode worker after a few pieces of the answer.
async fn kill_while_the_answer_is_written(up: &Up, number: usize) -> Asked {
    let killed = up.pid("decode-0");
    let answer = ask(up, number, |piece, _| {
        if piece == 5 {
            let pid = Pid::from_raw(killed.cast_signed()).expect("a process id");
            kill_process(pid, Signal::KILL).expect("it runs");
        }
    })
    .await;
    Asked {
        answer,
        next_pid: replaced(up, "decode-0", killed).await,
    }
}

/// Bytes that a process has read from the disk; `None` where the kernel does not say.
fn read_bytes(pid: u32) -> Option<u64> {
    let path = format!("/proc/{pid}/io");
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("read_bytes:"));
            Some(line?.trim().parse().expect("a number"))
        }
        Err(error) => {
            skipped(&format!(
                "bytes that a new worker reads from the disk: {path}: {error}"
            ));
            None
        }
    }
}

/// Tokens and text are the same whoever reads the prompt again. While nothing was said yet, that may be the decode worker,
/// whose latent attention is absorbed: its logits differ by rounding.
fn assert_says_the_same(one: &Answer, other: &Answer) {
    assert_eq!((&one.text, &one.tokens), (&other.text, &other.tokens));
    assert_eq!(one.finish_reason, other.finish_reason);
    assert_eq!(one.completion_tokens, other.completion_tokens);
    assert_eq!(other.tokens.len(), LONG as usize);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_in_a_streamed_prompt_or_in_an_answer_costs_no_token() {
    let mut undisturbed = Vec::new();
    {
        let (_directory, mut up) = start();
        for number in 0..4 {
            undisturbed.push(ask(&up, number, |_, _| {}).await);
        }
        // The prompts take seconds: each is told while it is read, and at its end.
        up.wait_for_output("prefill-0 read a prompt, ");
        up.wait_for_output(" s so far: ");
        up.wait_for_output(" tokens in ");
        let output = up.output();
        let mut told = output.lines().filter(|line| line.contains(" s so far: "));
        assert!(told.any(|line| !line.contains(" 0.0 s so far")), "{output}");
    }
    assert_ne!(undisturbed[0].text, undisturbed[1].text);
    let (_directory, up) = start();
    for (number, expected) in undisturbed.iter().enumerate() {
        let before = up.metrics().count("hearth_failovers_total");
        let asked = match number {
            0 | 1 => kill_while_the_prompt_streams(&up, number).await,
            _ => kill_while_the_answer_is_written(&up, number).await,
        };
        assert_says_the_same(&asked.answer, expected);
        if number >= 2 {
            assert_eq!(asked.answer.logprobs, expected.logprobs, "{number}");
        }
        let failovers = up.metrics().count("hearth_failovers_total") - before;
        assert!(failovers >= 1.0, "{number}: the kill met no request");
        if let Some(bytes) = read_bytes(asked.next_pid) {
            println!("{number}: the new process has read {bytes} bytes from the disk");
            assert!(bytes <= LITTLE_BYTES, "{number}: {bytes} bytes");
        }
    }
}
