//! `hearth-worker power` against a management library of the test's own: each GPU is a directory with a file for its limit, its
//! use, and so on (`nvml.c`).

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use support::{Agent, AgentOptions, Authority, free_address};
use tempfile::TempDir;

/// A node with GPUs of 450 W by default, of which 100 to 500 W can be set, and which their owner lets have 400 W.
struct Node {
    directory: TempDir,
}

impl Node {
    fn new(gpus: usize) -> Self {
        let directory = TempDir::new().unwrap();
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/power/nvml.c");
        let library = directory.path().join("libnvidia-ml.so.1");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{error}");
        let node = Self { directory };
        for gpu in 0..gpus {
            fs::create_dir(node.directory.path().join(gpu.to_string())).unwrap();
            for (file, value) in [
                ("limit", 400_000),
                ("default", 450_000),
                ("least", 100_000),
                ("most", 500_000),
                ("use", 0),
            ] {
                node.set(gpu, file, value);
            }
        }
        node
    }

    fn file(&self, gpu: usize, file: &str) -> PathBuf {
        self.directory.path().join(gpu.to_string()).join(file)
    }

    /// Replaces a file as a whole.
    fn set(&self, gpu: usize, file: &str, value: u32) {
        let new = self.file(gpu, "set");
        fs::write(&new, value.to_string()).unwrap();
        fs::rename(new, self.file(gpu, file)).unwrap();
    }

    fn number(&self, gpu: usize, file: &str) -> u32 {
        let text = fs::read_to_string(self.file(gpu, file)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    fn watts(&self, gpu: usize) -> u32 {
        self.number(gpu, "limit") / 1000
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth-worker"));
        command
            .arg("power")
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.directory.path())
            .env("FAKE_NVML_DIR", self.directory.path())
            .env_remove("RUST_LOG");
        // SAFETY: signal is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                // Who runs the tests may ignore it (`nohup`).
                libc::signal(libc::SIGHUP, libc::SIG_DFL);
                Ok(())
            });
        }
        command
    }

    fn start(&self, arguments: &[&str]) -> Power {
        let mut child = self
            .command(arguments)
            .arg("--state-dir")
            .arg(self.directory.path().join("state"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, into) = (
            BufReader::new(child.stderr.take().unwrap()).lines(),
            Arc::clone(&log),
        );
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                into.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Power { child, log }
    }

    /// Waits until the program has read a GPU several times more.
    fn is_read(&self, gpu: usize, power: &Power) {
        let before = self.number(gpu, "readings");
        let what = format!("GPU {gpu} is read");
        power.until(&what, || self.number(gpu, "readings") > before + 8);
    }
}

/// A running `hearth-worker power`, killed when dropped.
struct Power {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Power {
    fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while !is_so() {
            assert!(Instant::now() < deadline, "in vain: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn says(&self, words: &str) {
        self.until(words, || self.log().contains(words));
    }

    fn count(&self, words: &str) -> usize {
        self.log().matches(words).count()
    }

    /// Terminates it like a kubelet does.
    fn terminate(&mut self) {
        self.end_by(rustix::process::Signal::TERM);
    }

    fn end_by(&mut self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }

    /// Kills it with `kill -9`.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Power {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Quiet hours from two hours ago until two hours from now, by the clocks of a zone.
fn quiet_now(zone: &TimeZone, percent: u8) -> String {
    let time = |hours: i64| {
        let at = Timestamp::now() + hours.hours();
        at.to_zoned(zone.clone()).strftime("%H:%M").to_string()
    };
    format!("--quiet-hours={}-{}={percent}", time(-2), time(2))
}

#[test]
fn a_limit_falls_without_work_and_rises_with_it() {
    let node = Node::new(2);
    node.set(1, "use", 30);
    let mut power = node.start(&["--idle-percent=50", "--idle-after=500ms"]);
    power.until("the idle GPU's limit", || node.watts(0) == 225);
    power.says("power limit of Fake (GPU-0) falls from 400 W to 225 W: no work for 500ms");
    node.is_read(1, &power);
    assert_eq!(node.watts(1), 400, "{}", power.log());

    node.set(0, "use", 1);
    power.until("the working GPU's limit", || node.watts(0) == 400);
    power.says("power limit of Fake (GPU-0) rises from 225 W to 400 W: it works again");
    node.is_read(0, &power);
    assert_eq!(power.count("falls"), 1, "{}", power.log());
    assert_eq!(power.count("rises"), 1, "{}", power.log());
    power.terminate();
    assert_eq!((node.watts(0), node.watts(1)), (400, 400));
}

#[test]
fn quiet_hours_go_by_the_clocks_of_the_zone() {
    // India's clocks are 5 hours and 30 minutes ahead of UTC throughout the year.
    let zone = TimeZone::fixed(jiff::tz::Offset::from_seconds(19_800).unwrap());
    let quiet = quiet_now(&zone, 60);
    let node = Node::new(1);
    node.set(0, "use", 90);
    let mut there = node.start(&[&quiet, "--time-zone=Asia/Kolkata"]);
    there.until("the limit of quiet hours", || node.watts(0) == 270);
    there.says("falls from 400 W to 270 W: quiet hours ");
    there.terminate();
    assert_eq!(node.watts(0), 400);
    there.says("rises from 270 W to 400 W: the power policy ends");

    let mut here = node.start(&[&quiet]);
    node.is_read(0, &here);
    assert_eq!(node.watts(0), 400, "{}", here.log());
    here.terminate();
}

#[test]
fn after_a_kill_the_owner_s_limit_is_known() {
    let quiet = quiet_now(&TimeZone::UTC, 60);
    let node = Node::new(1);
    let lowered = || {
        let power = node.start(&[&quiet]);
        power.until("the limit of quiet hours", || node.watts(0) == 270);
        power
    };
    lowered().kill();
    assert_eq!(node.watts(0), 270);
    // The next one lowers it too, and knows that 270 W were not the owner's.
    let mut power = lowered();
    node.is_read(0, &power);
    power.terminate();
    assert_eq!(node.watts(0), 400);

    lowered().kill();
    let mut power = node.start(&["--idle-percent=50", "--idle-after=24h"]);
    power.until("the owner's limit", || node.watts(0) == 400);
    power.says("an earlier process had lowered it and was killed");
    power.terminate();
    assert_eq!(node.watts(0), 400);

    // What the owner sets while none runs is the owner's.
    lowered().kill();
    node.set(0, "limit", 350_000);
    let mut power = node.start(&["--idle-percent=50", "--idle-after=24h"]);
    node.is_read(0, &power);
    assert_eq!(node.watts(0), 350);
    power.terminate();
    assert_eq!(node.watts(0), 350);
}

#[test]
fn what_another_program_sets_is_the_owner_s() {
    let quiet = quiet_now(&TimeZone::UTC, 60);
    let node = Node::new(1);
    let mut power = node.start(&[&quiet]);
    power.until("the limit of quiet hours", || node.watts(0) == 270);
    node.set(0, "limit", 300_000);
    power.says(
        "another program has set the power limit of Fake (GPU-0) from 270 W to 300 W, which is taken for the owner's",
    );
    power.until("the limit of quiet hours again", || node.watts(0) == 270);
    node.is_read(0, &power);
    assert_eq!(power.count("another program"), 1, "{}", power.log());
    // One that is lower than the policy's is left as it is.
    node.set(0, "limit", 150_000);
    power.says("from 270 W to 150 W");
    node.is_read(0, &power);
    power.terminate();
    assert_eq!(node.watts(0), 150);
}

#[test]
fn a_gpu_that_refuses_is_said_once_and_the_others_go_on() {
    let quiet = quiet_now(&TimeZone::UTC, 60);
    let node = Node::new(3);
    node.set(0, "forbidden", 1);
    fs::remove_file(node.file(1, "least")).unwrap();
    let mut power = node.start(&[&quiet]);
    power.until("the limit of the third GPU", || node.watts(2) == 270);
    node.is_read(2, &power);
    for words in [
        "the power limit of Fake (GPU-0) cannot be set to 270 W: no permission",
        "root with the capability SYS_ADMIN",
        "the power limits of Fake (GPU-1) cannot be read: ",
    ] {
        assert_eq!(power.count(words), 1, "{words}: {}", power.log());
    }
    assert_eq!((node.watts(0), node.watts(1)), (400, 400));
    power.terminate();
    assert_eq!(node.watts(2), 400);
}

#[test]
fn a_gpu_that_does_not_say_whether_it_works_keeps_its_limit() {
    let node = Node::new(2);
    fs::remove_file(node.file(0, "use")).unwrap();
    let mut power = node.start(&["--idle-percent=50", "--idle-after=1ms"]);
    power.until("the limit of the other GPU", || node.watts(1) == 225);
    node.is_read(1, &power);
    power.says("Fake (GPU-0) does not say whether it works");
    assert_eq!(node.watts(0), 400, "{}", power.log());
    power.terminate();
}

#[test]
fn agents_tell_what_gpus_take() {
    let node = Node::new(2);
    node.set(0, "taken", 31_500);
    let (authority, address, cache) = (Authority::new(), free_address(), TempDir::new().unwrap());
    let directory = node.directory.path().display().to_string();
    let _agent = Agent::start(&AgentOptions {
        tls: &authority.issue("agent.hearth"),
        cache: cache.path(),
        user: None,
        private_patience_s: 3,
        environment: &[
            ("HEARTH_AGENT_METRICS", address.clone()),
            ("LD_LIBRARY_PATH", directory.clone()),
            ("FAKE_NVML_DIR", directory),
        ],
    });
    let scrape = || {
        let mut connection = TcpStream::connect(&address).unwrap();
        let ask = "GET /metrics HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n";
        connection.write_all(ask.as_bytes()).unwrap();
        let mut metrics = String::new();
        connection.read_to_string(&mut metrics).unwrap();
        metrics
    };
    // The first scrape begins the readings, and does not wait for them.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut metrics = scrape();
    while !metrics.contains("hearth_agent_gpu_power") {
        assert!(Instant::now() < deadline, "no reading: {metrics}");
        std::thread::sleep(Duration::from_millis(50));
        metrics = scrape();
    }
    for line in [
        "hearth_agent_gpu_power_limit_watts{uuid=\"GPU-0\"} 400.0\n",
        "hearth_agent_gpu_power_limit_watts{uuid=\"GPU-1\"} 400.0\n",
        "hearth_agent_gpu_power_watts{uuid=\"GPU-0\"} 31.5\n",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(
        !metrics.contains("power_watts{uuid=\"GPU-1\"}"),
        "{metrics}"
    );
}

#[test]
fn a_gpu_that_no_longer_says_whether_it_works_gets_its_limit_back() {
    let node = Node::new(1);
    let mut power = node.start(&["--idle-percent=50", "--idle-after=500ms"]);
    power.until("the idle GPU's limit", || node.watts(0) == 225);
    fs::write(node.file(0, "use"), "?").unwrap();
    power.until("the owner's limit", || node.watts(0) == 400);
    power.terminate();
}

#[test]
fn a_terminal_that_closes_ends_it_and_one_record_is_one_process_s() {
    let quiet = quiet_now(&TimeZone::UTC, 60);
    let node = Node::new(1);
    let mut power = node.start(&[&quiet]);
    power.until("the limit of quiet hours", || node.watts(0) == 270);
    let mut second = node.start(&[&quiet]);
    second.says("which another process uses");
    assert!(!second.child.wait().unwrap().success());
    power.end_by(rustix::process::Signal::HUP);
    assert_eq!(node.watts(0), 400);
}

#[test]
fn without_a_gpu_it_waits_for_one() {
    let node = Node::new(0);
    let mut power = node.start(&["--idle-percent=50"]);
    power.says("no GPU here, looked for again every minute");
    power.terminate();
}

#[test]
fn values_that_mean_nothing_are_refused() {
    let node = Node::new(1);
    for (arguments, words) in [
        (&[][..], &["neither --idle-percent nor --quiet-hours"][..]),
        (&["--idle-percent=0"], &["--idle-percent", "'0'", "1..=100"]),
        (
            &["--idle-percent=50", "--idle-after=soon"],
            &["--idle-after", "'soon'"],
        ),
        (&["--idle-after=5m"], &["--idle-percent"]),
        (
            &["--quiet-hours=25:00-07:00=60"],
            &["--quiet-hours", "25:00-07:00=60", "from 00:00 to 23:59"],
        ),
        (
            &["--quiet-hours=22:30-07:00=60", "--time-zone=Berlin"],
            &["--time-zone", "'Berlin'", "Europe/Berlin"],
        ),
        (
            &["--idle-percent=50", "--state-dir=/proc/hearth"],
            &["--state-dir is /proc/hearth"],
        ),
    ] {
        let output = node.command(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}: {error}");
        for word in words {
            assert!(error.contains(word), "{arguments:?}: {error}");
        }
    }
    assert_eq!(node.watts(0), 400);
}
