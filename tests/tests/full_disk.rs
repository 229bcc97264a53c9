//! A full disk costs log lines, but does not affect serving.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Metrics, Ranks, Up, UpOptions, chat_body, chat_stream, skipped};
use rustix::process::Signal;
use serde_json::{Value, json};

const TOKENS: u32 = 200;
const STREAMS: u64 = 6;

/// Returns a sampled request that never ends before `TOKENS`: the end-of-text token is banned.
fn seeded(seed: u64) -> Value {
    let mut body = chat_body("hearth-demo", "What is Hearth?", TOKENS);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(seed);
    body["logit_bias"] = json!({"1": -100});
    body
}

/// Sends all requests at once; `kill` is called when the first one has some tokens.
async fn ask_all(v1: &str, kill: impl Fn()) -> Vec<Answer> {
    let mut others = tokio::task::JoinSet::new();
    for seed in 1..STREAMS {
        let v1 = v1.to_owned();
        others.spawn(async move { (seed, chat_stream(&v1, &seeded(seed), |_, _| {}).await) });
    }
    let mut has_killed = false;
    let first = chat_stream(v1, &seeded(0), |pieces, _| {
        if pieces >= 5 && !std::mem::replace(&mut has_killed, true) {
            kill();
        }
    })
    .await;
    let mut answers = others.join_all().await;
    answers.push((0, first));
    answers.sort_by_key(|(seed, _)| *seed);
    let whole = answers
        .into_iter()
        .map(|(seed, answer)| answer.unwrap_or_else(|error| panic!("stream {seed}: {error:#}")));
    whole.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_whose_standard_error_takes_nothing_serve_on() {
    let mut ranks = Ranks::of_demo();
    ranks.write_errors_to(Path::new("/dev/full"));
    let arguments = ["--routes".to_owned(), ranks.routes().display().to_string()];
    let mut gateway = ranks.start("gateway", "gateway-0", &arguments);
    let mut first = ranks.start("decode", "decode-0", &[]);
    first.wait_until_ready();
    gateway.wait_until_ready();
    ranks.route_to(&[&first]);
    let serves = |count: f64| {
        Metrics::wait_for(
            &gateway.metrics_base(),
            "a decode worker serves",
            |metrics| metrics.count("hearth_worker_ready") == count,
        );
    };
    serves(1.0);
    let v1 = format!("{}/v1", gateway.base());
    let expected = ask_all(&v1, || {}).await;
    let mut second = ranks.start("decode", "decode-1", &[]);
    second.wait_until_ready();
    ranks.route_to(&[&first, &second]);
    serves(2.0);
    let answers = ask_all(&v1, || first.signal(Signal::KILL)).await;
    assert_eq!(answers, expected);
    serves(1.0);
    assert!(!second.has_ended());
}

/// A file system of a few MiB, unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it; `None` if mounting is not permitted.
    fn mount(at: &Path) -> Option<Self> {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
            .arg(at)
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then(|| Self(at.to_owned()))
    }

    /// Leaves no byte free: neither a block nor the rest of a log's last block.
    fn fill(&self, logs: &Path) -> PathBuf {
        let filler = self.0.join("filler");
        let mut file = File::create(&filler).expect("filler");
        while file.write_all(&[0; 4096]).is_ok() {}
        for log in std::fs::read_dir(logs).expect("logs").flatten() {
            let mut log = OpenOptions::new()
                .append(true)
                .open(log.path())
                .expect("log");
            for _ in 0..4096 {
                if log.write_all(b"\n").is_err() {
                    break;
                }
            }
        }
        filler
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_state_directory_costs_no_stream_and_no_worker() {
    let place = tempfile::tempdir().expect("directory");
    let Some(disk) = SmallDisk::mount(place.path()) else {
        skipped("no file system may be mounted here: a full disk was not tried");
        return;
    };
    let up = Up::start(&UpOptions {
        state_in: Some(place.path().to_owned()),
        ..UpOptions::default()
    });
    let expected = ask_all(&up.v1(), || {}).await;
    let filler = disk.fill(&up.state_dir().join("demo/logs"));
    let answers = ask_all(&up.v1(), || up.signal("decode-0", Signal::KILL)).await;
    assert_eq!(answers, expected);
    // The disk is as full as before, and the restarted worker serves.
    let answers = ask_all(&up.v1(), || {}).await;
    assert_eq!(answers, expected);
    std::fs::remove_file(filler).expect("filler");
    up.signal("decode-0", Signal::KILL);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !up.logs().contains("serving rank=\"decode-0\"") {
        assert!(
            Instant::now() < deadline,
            "nothing is logged any more:\n{}",
            up.logs()
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(ask_all(&up.v1(), || {}).await, expected);
}
