//! The commands that Pods run: answers to probes, the pause before termination, inspection of a model.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_tests::{Rank, Ranks, copy_of_demo, free_port, probe, root, run, skipped, worker};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Size limit of a container's termination message.
const REPORT_BYTES: u64 = 4096;

async fn until_probe(rank: &mut Rank, address: &str, service: &str, expected: u8) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while probe(address, service).await != Some(expected) {
        assert!(
            Instant::now() < deadline && !rank.has_ended(),
            "{service:?} is not {expected} in time:\n{}",
            rank.output()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Replaces the tokenizer with a FIFO, at which a load blocks; returns its path and the old content.
fn stop_loads_of(model: &Path) -> (PathBuf, Vec<u8>) {
    let tokenizer = model.join("tokenizer.json");
    let content = std::fs::read(&tokenizer).expect("tokenizer");
    std::fs::remove_file(&tokenizer).expect("remove");
    mknodat(CWD, &tokenizer, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("fifo");
    (tokenizer, content)
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_follow_a_worker_that_loads_serves_and_drains() {
    let mut ranks = Ranks::of_demo();
    let model = copy_of_demo(ranks.directory());
    let (tokenizer, content) = stop_loads_of(&model);
    ranks.edit(|plan| plan["model"]["path"] = json!(model));
    let health = free_address();
    let arguments = ["--health", &health, "--grace", "200"].map(str::to_owned);
    let mut rank = ranks.start("decode", "decode-0", &arguments);
    until_probe(&mut rank, &health, "live", 1).await;
    assert_eq!(
        probe(&health, "").await,
        Some(2),
        "it is not ready before it has loaded"
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(probe(&health, "").await, Some(2));
    tokio::task::spawn_blocking(move || std::fs::write(tokenizer, content))
        .await
        .expect("task")
        .expect("write");
    until_probe(&mut rank, &health, "", 1).await;

    // A request that is read slowly stays in flight for that long; meanwhile the worker is not ready.
    std::fs::remove_file(model.join("tokenizer.json")).expect("remove");
    std::fs::copy(
        root().join("models/hearth-demo/tokenizer.json"),
        model.join("tokenizer.json"),
    )
    .expect("copy");
    let routes = ["--routes".to_owned(), ranks.routes().display().to_string()];
    let gateway = ranks.start("gateway", "gateway-0", &routes);
    ranks.route_to(&[&rank]);
    let v1 = format!("{}/v1", gateway.base());
    let mut body = hearth_tests::chat_body("hearth-demo", "What is Hearth?", 1500);
    body["logit_bias"] = json!({"1": -100});
    until_serving(&gateway).await;
    let (tell, told) = tokio::sync::oneshot::channel();
    let stream = tokio::spawn(async move {
        let mut tell = Some(tell);
        hearth_tests::chat_stream(&v1, &body, |_, _| {
            let _ = tell.take().map(|tell| tell.send(()));
        })
        .await
    });
    told.await.expect("the stream begins");
    rank.signal(Signal::TERM);
    until_probe(&mut rank, &health, "", 2).await;
    assert_eq!(probe(&health, "live").await, Some(1));
    let answer = stream.await.expect("task").expect("the stream is finished");
    assert_eq!(answer.completion_tokens, 1500);
    assert!(rank.wait().success(), "{}", rank.output());
}

/// A program run as the first process of a container, which the kernel shields from signals that it does not handle.
struct Container(Child);

impl Container {
    /// Starts it; `None` where namespaces are unavailable.
    fn start(arguments: &[&OsStr]) -> Option<Self> {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(["--map-root-user", "--pid", "--fork", "--kill-child"]);
            command
        };
        if !unshare()
            .arg("true")
            .output()
            .is_ok_and(|output| output.status.success())
        {
            skipped("there are no PID namespaces here (unshare --map-root-user --pid)");
            return None;
        }
        let child = unshare()
            .arg(worker().get_program())
            .args(arguments)
            .stdin(Stdio::null())
            .spawn();
        Some(Self(child.expect("unshare")))
    }

    /// Tells the program to terminate every second, as it may not listen at all at first; returns its exit code.
    fn end(mut self) -> Option<i32> {
        let parent = self.0.id();
        let children = format!("/proc/{parent}/task/{parent}/children");
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.0.try_wait().expect("wait") {
                return status.code();
            }
            let children = std::fs::read_to_string(&children).unwrap_or_default();
            let first = children.split_whitespace().next();
            let pid = first.and_then(|pid| Pid::from_raw(pid.parse().ok()?));
            if let Some(pid) = pid {
                // It has just exited.
                let _ = kill_process(pid, Signal::TERM);
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks that a Pod deleted while it loads frees its memory and CPUs at once, not at the end of its grace period.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_pod_runs_ends_when_told_while_it_loads() {
    const TOLD: i32 = 128 + 15;
    let mut ranks = Ranks::of_demo();
    let model = copy_of_demo(ranks.directory());
    stop_loads_of(&model);
    let report = ranks.directory().join("report");
    std::fs::write(&report, "").expect("report");
    let look = [
        "inspect".as_ref(),
        "--model".as_ref(),
        model.as_os_str(),
        "--report".as_ref(),
        report.as_os_str(),
    ];
    let Some(look) = Container::start(&look) else {
        return;
    };
    assert_eq!(look.end(), Some(TOLD));

    ranks.edit(|plan| plan["model"]["path"] = json!(model));
    let health = free_address();
    let plan = ranks.directory().join("plan.json");
    let content = ranks.plan_of("decode", "decode-0", &free_address());
    std::fs::write(&plan, content.to_string()).expect("plan");
    let decode = [
        "decode".as_ref(),
        "--rank".as_ref(),
        "decode-0".as_ref(),
        "--plan".as_ref(),
        plan.as_os_str(),
        "--health".as_ref(),
        health.as_ref(),
    ];
    let decode = Container::start(&decode).expect("namespaces");
    let deadline = Instant::now() + Duration::from_secs(60);
    while probe(&health, "live").await != Some(1) {
        assert!(Instant::now() < deadline, "it does not begin to load");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(decode.end(), Some(TOLD));
}

async fn until_serving(gateway: &Rank) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let response = reqwest::get(format!("{}/ready", gateway.base())).await;
        if response.is_ok_and(|response| response.status() == 200) {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "not ready:\n{}",
            gateway.output()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn free_address() -> String {
    format!("127.0.0.1:{}", free_port())
}

#[test]
fn a_worker_whose_probes_cannot_be_answered_says_so() {
    let ranks = Ranks::of_demo();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("port");
    let address = taken.local_addr().expect("address").to_string();
    let mut rank = ranks.start(
        "decode",
        "decode-0",
        &["--health".to_owned(), address.clone()],
    );
    assert_eq!(rank.wait().code(), Some(1));
    assert!(
        rank.output()
            .contains(&format!("cannot listen on {address}")),
        "{}",
        rank.output()
    );
}

#[test]
fn linger_waits_and_ends_at_once_when_told() {
    let began = Instant::now();
    let (code, _, stderr) = run(worker().args(["linger", "--seconds", "1"]));
    let took = began.elapsed();
    assert_eq!(code, 0, "{stderr}");
    assert!(
        took >= Duration::from_secs(1) && took < Duration::from_secs(5),
        "{took:?}"
    );

    let mut child = worker()
        .args(["linger", "--seconds", "600"])
        .stdin(Stdio::null())
        .spawn()
        .expect("linger");
    wait_until_it_heeds(child.id(), Signal::TERM);
    assert!(matches!(child.try_wait(), Ok(None)), "it did not wait");
    let pid = Pid::from_raw(child.id().cast_signed()).expect("pid");
    kill_process(pid, Signal::TERM).expect("signal");
    let deadline = Instant::now() + Duration::from_secs(5);
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(0));
    let (code, _, stderr) = run(worker().args(["linger", "--seconds", "soon"]));
    assert!(code != 0 && stderr.contains("soon"), "{stderr}");
}

/// Waits until a process has a handler for a signal; before that, the kernel would kill it.
fn wait_until_it_heeds(pid: u32, signal: Signal) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let heeds = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
        let caught = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.expect("a mask of signals") & (1 << (signal.as_raw() - 1)) != 0
    };
    while !heeds() {
        assert!(Instant::now() < deadline, "it takes no {signal:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs an inspection of a model; returns exit code, report and standard error. The report is an existing file that
/// may not be replaced, like a container's.
fn inspect(model: &Path, report: &Path) -> (i32, String, String) {
    let stale = "x".repeat(9000);
    std::fs::write(report, stale).expect("write");
    let inode = |path: &Path| {
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).expect("report"))
    };
    let before = inode(report);
    let mut command: Command = worker();
    let (code, _, stderr) = run(command
        .args(["inspect", "--model"])
        .arg(model)
        .arg("--report")
        .arg(report));
    assert_eq!(inode(report), before, "the report was replaced");
    assert!(std::fs::metadata(report).expect("report").len() <= REPORT_BYTES);
    (
        code,
        std::fs::read_to_string(report).expect("report"),
        stderr,
    )
}

#[test]
fn inspect_leaves_the_facts_that_the_planner_reads() {
    let directory = tempfile::tempdir().expect("directory");
    let report = directory.path().join("termination-log");
    let demo = root().join("models/hearth-demo");
    let (code, text, stderr) = inspect(&demo, &report);
    assert_eq!(code, 0, "{stderr}");
    let facts: Value = serde_json::from_str(&text).expect("JSON");
    let (_, printed, _) = run(worker().args(["facts", "--json", "--model"]).arg(&demo));
    assert_eq!(
        facts,
        serde_json::from_str::<Value>(&printed).expect("JSON")
    );
}

#[test]
fn inspect_refuses_what_cannot_be_served_in_its_own_words() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 4] = [
        (
            "no weights",
            |model| remove(model, "model.safetensors"),
            &["safetensors"],
        ),
        (
            "no tokenizer",
            |model| remove(model, "tokenizer.json"),
            &["tokenizer.json"],
        ),
        (
            "another architecture",
            |model| edit_config(model, |config| config["model_type"] = json!("mamba")),
            &["mamba"],
        ),
        (
            "a template that is none",
            |model| std::fs::write(model.join("chat_template.jinja"), "{% for %}").expect("write"),
            &["template"],
        ),
    ];
    for (name, damage, words) in cases {
        let directory = tempfile::tempdir().expect("directory");
        let model = copy_of_demo(directory.path());
        damage(&model);
        let (code, text, stderr) = inspect(&model, &directory.path().join("termination-log"));
        assert_eq!(code, 1, "{name}: {text}");
        for word in words {
            assert!(text.contains(word), "{name}: {text}");
        }
        assert!(
            stderr.contains(&format!("error: {text}")),
            "{name}: {stderr}"
        );
        assert!(!text.starts_with('{'), "{name}: {text}");
    }
    let nowhere = PathBuf::from("/nowhere/report");
    let demo = root().join("models/hearth-demo");
    let (code, _, stderr) = run(worker()
        .args(["inspect", "--model"])
        .arg(demo)
        .arg("--report")
        .arg(nowhere));
    assert_eq!(code, 1);
    assert!(
        stderr.contains("--report /nowhere/report cannot be written"),
        "{stderr}"
    );
}

fn remove(model: &Path, file: &str) {
    std::fs::remove_file(model.join(file)).expect("remove");
}

fn edit_config(model: &Path, edit: impl FnOnce(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    edit(&mut config);
    std::fs::write(path, config.to_string()).expect("write");
}
