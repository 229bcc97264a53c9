//! Two workers of a plan in one container, under `hearth-worker supervise`: each is restarted by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_tests::{
    Answer, Metrics, Rank, Ranks, chat_body, chat_stream, free_port, probe, worker, write_fault,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Longest time until something happens; a busy machine with an unoptimised build needs some.
const PATIENCE: Duration = Duration::from_secs(60);
/// Names of the two ranks; probes see the first one.
const NAMES: [&str; 2] = ["decode-0", "prefill-0"];

/// A supervisor with its two workers, killed when dropped.
struct Pair {
    ranks: Ranks,
    child: Child,
    log: PathBuf,
    health: String,
    /// The plan of both.
    plan: PathBuf,
}

impl Pair {
    /// Starts both, with what `edit` makes of their ranks.
    fn start(edit: impl Fn(&mut Value)) -> Self {
        let ranks = Ranks::of_demo();
        let endpoints = NAMES.map(|_| format!("127.0.0.1:{}", free_port()));
        let of = |n: usize, role: &str| {
            let mut plan = ranks.plan_of(role, NAMES[n], &endpoints[n]);
            edit(&mut plan["ranks"][0]);
            plan
        };
        let (mut plan, prefill) = (of(0, "decode"), of(1, "prefill"));
        plan["ranks"] = json!([plan["ranks"][0], prefill["ranks"][0]]);
        let path = |name: &str| ranks.directory().join(name);
        let (file, log) = (path("pair.json"), path("pair.log"));
        std::fs::write(&file, plan.to_string()).expect("the plan");
        let routes = ["Decode", "Prefill"].into_iter().zip(NAMES).zip(&endpoints);
        let routes =
            routes.map(|((role, name), at)| json!({"name": name, "role": role, "endpoint": at}));
        let routes = json!({"workers": routes.collect::<Vec<_>>()});
        std::fs::write(ranks.routes(), routes.to_string()).expect("the routes");
        let output = File::create(&log).expect("the log");
        let health = format!("127.0.0.1:{}", free_port());
        let child = worker()
            .args(["supervise", "--grace", "30", "--health", &health])
            .args(NAMES.iter().flat_map(|name| ["--rank", name]))
            .arg("--plan")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("the log"))
            .stderr(output)
            .spawn()
            .expect("the supervisor");
        Self {
            ranks,
            child,
            log,
            health,
            plan: file,
        }
    }

    /// Starts a gateway, and waits until it has both workers.
    fn gateway(&self) -> Rank {
        let routes = self.ranks.routes().display().to_string();
        let gateway = self
            .ranks
            .start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
        gateway.wait_for_metrics();
        wait_for_both(&gateway);
        gateway
    }

    fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The processes of the ranks, by name.
    fn processes(&self) -> BTreeMap<String, u32> {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
        let pids = processes.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
        let read = |pid: u32, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
        pids.filter(|pid| read(*pid, "status").is_ok_and(|status| status.contains(&parent)))
            .filter_map(|pid| {
                let line = read(pid, "cmdline").ok()?;
                let mut words = line.split('\0').skip_while(|word| *word != "--rank");
                Some((words.nth(1)?.to_owned(), pid))
            })
            .collect()
    }

    /// Waits until the rank has another process than `before`.
    fn wait_for_another(&self, rank: &str, before: u32) -> u32 {
        wait_until(&format!("{rank} is started again"), || {
            let pid = *self.processes().get(rank)?;
            (pid != before).then_some(pid)
        })
    }

    /// The lines of the supervisor's output that begin with `start`.
    fn lines(&self, start: &str) -> Vec<String> {
        let output = self.output();
        let lines = output.lines().filter(|line| line.starts_with(start));
        lines.map(str::to_owned).collect()
    }

    /// Makes the plan one that no prefill worker can start with; returns the plan as it was.
    fn spoil_prefill(&self) -> String {
        let before = std::fs::read_to_string(&self.plan).expect("the plan");
        let mut plan: Value = serde_json::from_str(&before).expect("a plan");
        let prefill = plan["ranks"][1].as_object_mut().expect("a rank");
        prefill.remove("kv").expect("a KV cache");
        std::fs::write(&self.plan, plan.to_string()).expect("the plan");
        before
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a status") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.output());
        }
    }
}

fn wait_until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    kill_process(pid, signal).expect("a signal");
}

fn runs(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

fn ready(metrics: &Metrics, role: &str) -> f64 {
    let label = format!("role=\"{role}\"");
    let ready = metrics.values("hearth_worker_ready", &[&label]);
    ready.iter().sum()
}

fn wait_for_both(gateway: &Rank) {
    Metrics::wait_for(&gateway.metrics_base(), "both are ready", |metrics| {
        ready(metrics, "prefill") == 1.0 && ready(metrics, "decode") == 1.0
    });
}

/// A prompt that is long enough for the prefill worker, with an answer of `tokens`.
fn body(number: usize, tokens: u32) -> Value {
    let filler = "The lab has a server and a laptop. ".repeat(12);
    let mut body = chat_body(
        "hearth-demo",
        &format!("{number}. {filler}What is Hearth?"),
        tokens,
    );
    body["temperature"] = json!(1.1);
    body["seed"] = json!(7 + number);
    body["logit_bias"] = json!({"1": -100});
    body
}

/// What probes of `address` are told until `is_over`.
async fn probed(address: String, is_over: Arc<AtomicBool>) -> BTreeSet<u8> {
    let mut told = BTreeSet::new();
    while !is_over.load(Ordering::Relaxed) {
        told.extend(probe(&address, "").await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    told
}

async fn ask(gateway: &Rank, body: &Value, each: impl FnMut(usize, &str)) -> Answer {
    let v1 = format!("{}/v1", gateway.base());
    let answer = chat_stream(&v1, body, each).await;
    answer.expect("the stream survives")
}

/// Neither takes the other with it, no token is lost, and the container stays ready while its second rank is away.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_rank_returns_while_the_other_goes_on() {
    let pair = Pair::start(|_| {});
    let gateway = pair.gateway();
    assert_eq!(probe(&pair.health, "").await, Some(1));
    let expected = ask(&gateway, &body(0, 60), |_, _| {}).await;
    let first = pair.processes();
    assert_eq!(first.len(), 2, "{first:?}");
    for victim in ["prefill-0", "decode-0"] {
        let before = pair.processes();
        let is_over = Arc::new(AtomicBool::new(false));
        let told = tokio::spawn(probed(pair.health.clone(), Arc::clone(&is_over)));
        let mut is_done = false;
        let answer = ask(&gateway, &body(0, 60), |pieces, _| {
            if pieces >= 5 && !std::mem::replace(&mut is_done, true) {
                signal(before[victim], Signal::KILL);
            }
        })
        .await;
        assert!(is_done);
        assert_eq!(answer, expected, "{victim} was killed");
        pair.wait_for_another(victim, before[victim]);
        wait_for_both(&gateway);
        is_over.store(true, Ordering::Relaxed);
        let told: Vec<u8> = told.await.expect("probes").into_iter().collect();
        let expected: &[u8] = match victim {
            "decode-0" => &[1, 2],
            _ => &[1],
        };
        assert_eq!(told, expected, "{victim} was killed");
        let after = pair.processes();
        for (rank, pid) in &before {
            assert_eq!(after[rank] == *pid, rank != victim, "{rank}");
        }
    }
    // The new prefill worker reads prompts.
    let read = |metrics: &Metrics| metrics.of_role("hearth_worker_prompt_tokens_total", "prefill");
    let before = read(&Metrics::of(&gateway.metrics_base()));
    let answer = ask(&gateway, &body(1, 4), |_, _| {}).await;
    assert_eq!(answer.logprobs.len(), 4);
    Metrics::wait_for(&gateway.metrics_base(), "a prompt is counted", |metrics| {
        read(metrics) > before
    });
}

/// Its process starts, is ready and ends, again and again: each start is later than the one before.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_ends_whenever_it_is_ready_is_restarted_ever_later() {
    let pair = Pair::start(|_| {});
    let mut pid = 0;
    for life in 1..=4 {
        wait_until("the prefill worker is ready", || {
            let ready = pair.lines("prefill-0: {\"event\":\"ready\"").len();
            (ready == life).then_some(())
        });
        pid = pair.wait_for_another("prefill-0", pid);
        signal(pid, Signal::KILL);
    }
    let ends = || pair.lines("prefill-0: killed by signal 9");
    wait_until("the fourth end is told", || {
        (ends().len() == 4).then_some(())
    });
    let pauses: Vec<String> = ends()
        .iter()
        .filter_map(|line| line.rsplit_once("again in "))
        .map(|(_, pause)| pause.to_owned())
        .collect();
    assert_eq!(pauses, ["100 ms", "200 ms", "400 ms", "800 ms"]);
}

/// The documented invariant: once both have been ready, a rank that cannot be started takes nothing with it, and comes back
/// when it can.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_cannot_start_again_leaves_the_other_one_alone() {
    let mut pair = Pair::start(|_| {});
    let gateway = pair.gateway();
    let before = pair.processes();
    let plan = pair.spoil_prefill();
    signal(before["prefill-0"], Signal::KILL);
    wait_until("five starts have failed", || {
        let failed = pair.lines("prefill-0: ended with exit code 1").len();
        let over = pair.child.try_wait().expect("a status");
        assert_eq!(over, None, "{}", pair.output());
        (failed >= 5).then_some(())
    });
    assert_eq!(pair.processes()["decode-0"], before["decode-0"]);
    assert_eq!(probe(&pair.health, "").await, Some(1));
    ask(&gateway, &body(0, 4), |_, _| {}).await;
    std::fs::write(&pair.plan, plan).expect("the plan");
    wait_for_both(&gateway);
    assert_eq!(pair.processes()["decode-0"], before["decode-0"]);
}

/// Its connection stays open, and it says nothing for longer than a serving process ever does.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_rank_that_hangs_is_not_ready_until_it_comes_back() {
    let pair = Pair::start(|_| {});
    let seen = async |wanted: u8| {
        let deadline = Instant::now() + PATIENCE;
        while probe(&pair.health, "").await != Some(wanted) {
            assert!(Instant::now() < deadline, "never {wanted}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    seen(1).await;
    let decode = pair.processes()["decode-0"];
    signal(decode, Signal::STOP);
    let stopped = Instant::now();
    seen(2).await;
    assert!(stopped.elapsed() > Duration::from_secs(1));
    signal(decode, Signal::CONT);
    seen(1).await;
    assert_eq!(pair.processes()["decode-0"], decode);
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_both_finish_what_is_in_flight() {
    let mut pair = Pair::start(|_| {});
    let gateway = pair.gateway();
    let processes = pair.processes();
    let supervisor = pair.child.id();
    let mut is_told = false;
    let answer = ask(&gateway, &body(0, 60), |pieces, _| {
        if pieces >= 3 && !std::mem::replace(&mut is_told, true) {
            signal(supervisor, Signal::TERM);
        }
    })
    .await;
    assert_eq!(answer.logprobs.len(), 60);
    assert_eq!(pair.wait().code(), Some(0));
    for (rank, pid) in processes {
        assert!(!runs(pid), "{rank} is left behind");
        let drained = format!("{rank}: {{\"event\":\"draining\"}}");
        assert!(pair.output().contains(&drained), "{}", pair.output());
    }
}

/// The device is gone for both, and what started the supervisor learns it from the exit code and the last line.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_device_ends_both_with_its_exit_code() {
    let directory = tempfile::tempdir().expect("a directory");
    let fault = directory.path().join("fault");
    let device = format!("virtual:memory=64Mi,fault={}", fault.display());
    let mut pair = Pair::start(|rank| {
        rank["device"] = json!("VIRTUAL-0");
        rank["gpuUuids"] = json!(["VIRTUAL-0"]);
        rank["gpuMemoryBytes"] = json!(64 << 20);
        rank["virtualDevice"] = json!(device);
    });
    let gateway = pair.gateway();
    ask(&gateway, &body(0, 4), |_, _| {}).await;
    let processes = pair.processes();
    write_fault(&fault, "Xid 79: it has fallen off the bus\n");
    let v1 = format!("{}/v1", gateway.base());
    let lost = body(1, 4);
    let asking = tokio::spawn(async move { chat_stream(&v1, &lost, |_, _| {}).await });
    assert_eq!(pair.wait().code(), Some(69));
    asking.abort();
    let output = pair.output();
    let last = output.lines().rfind(|line| line.starts_with("error: "));
    let last = last.unwrap_or_else(|| panic!("no error in {output}"));
    assert!(last.contains("-0: ") && last.contains("Xid 79"), "{last}");
    assert!(processes.values().all(|pid| !runs(*pid)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_cannot_start_ends_the_container_with_its_error() {
    let mut pair = Pair::start(|rank| {
        if rank["role"] == "Prefill" {
            rank.as_object_mut().expect("a rank").remove("kv");
        }
    });
    assert_eq!(pair.wait().code(), Some(1));
    let output = pair.output();
    let last = output.lines().rfind(|line| line.starts_with("error: "));
    assert_eq!(
        last,
        Some("error: prefill-0: the plan gives prefill-0 no KV cache"),
        "{output}"
    );
    assert!(pair.processes().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_killed_supervisor() {
    let mut pair = Pair::start(|_| {});
    let gateway = pair.gateway();
    let processes = pair.processes();
    drop(gateway);
    signal(pair.child.id(), Signal::KILL);
    pair.wait();
    wait_until("both have ended", || {
        processes.values().all(|pid| !runs(*pid)).then_some(())
    });
}

/// As where it died before its worker had come so far as to ask for the news of its end.
#[test]
fn a_worker_whose_parent_has_ended_before_it_came_so_far_ends_too() {
    let ranks = Ranks::of_demo();
    let start = |parent: u32| {
        let arguments = ["--with-parent".to_owned(), parent.to_string()];
        ranks.start("decode", "decode-0", &arguments)
    };
    start(std::process::id()).wait_until_ready();
    let mut gone = std::process::Command::new("true")
        .spawn()
        .expect("a process");
    assert!(gone.wait().expect("its end").success());
    let mut orphan = start(gone.id());
    assert_eq!(orphan.wait().code(), Some(1));
    let (output, why) = (
        orphan.output(),
        format!(
            "error: process {} is not the parent of this one: it has ended",
            gone.id()
        ),
    );
    assert!(output.contains(&why), "{output}");
}
