//! A running `hearth up` for one test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::ports::free_port;
use crate::programs::{hearth, root, run};

/// Longest time a start may take; a busy machine with an unoptimised build needs some.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Options of a `hearth up`: the deployment and how it is served.
#[derive(Default)]
pub struct UpOptions {
    /// The InferenceDeployment; `None`: the demo example.
    pub file: Option<PathBuf>,
    /// Additional arguments of `hearth up`.
    pub arguments: Vec<String>,
    /// Additional environment variables of all processes.
    pub environment: Vec<(String, String)>,
    /// Parent of the state directory; `None`: the default temporary directory.
    pub state_in: Option<PathBuf>,
}

/// A running `hearth up`, ended when dropped.
pub struct Up {
    child: Child,
    port: u16,
    metrics_port: u16,
    state: TempDir,
}

impl Up {
    /// Serves the demo example and waits until it is ready.
    pub fn demo() -> Self {
        Self::start(&UpOptions::default())
    }

    /// Starts it and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready; its output is in the message.
    pub fn start(options: &UpOptions) -> Self {
        let mut up = Self::spawn(options);
        let deadline = Instant::now() + START_TIMEOUT;
        while !up.is_ready() {
            if let Ok(Some(status)) = up.child.try_wait() {
                panic!("hearth up ended ({status}):\n{}", up.output());
            }
            assert!(
                Instant::now() < deadline,
                "hearth up is not ready in time:\n{}\n{}",
                up.output(),
                up.logs()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        up
    }

    /// Starts without waiting.
    ///
    /// # Panics
    /// When the program cannot be run.
    pub fn spawn(options: &UpOptions) -> Self {
        let state = match &options.state_in {
            Some(directory) => TempDir::new_in(directory),
            None => TempDir::new(),
        };
        let state = state.unwrap_or_else(|error| panic!("no temporary directory: {error}"));
        let (port, metrics_port) = (free_port(), free_port());
        let file = options
            .file
            .clone()
            .unwrap_or_else(|| root().join("manifests/examples/demo.yaml"));
        let output =
            File::create(state.path().join("output")).unwrap_or_else(|error| panic!("{error}"));
        let mut command = hearth();
        command
            .arg("up")
            .arg("-f")
            .arg(file)
            .args(["--port", &port.to_string()])
            .args(["--metrics", &format!("127.0.0.1:{metrics_port}")])
            .arg("--state-dir")
            .arg(state.path());
        command
            .args(&options.arguments)
            .envs(options.environment.iter().cloned());
        let errors = output.try_clone().unwrap_or_else(|error| panic!("{error}"));
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self {
            child,
            port,
            metrics_port,
            state,
        }
    }

    /// Base URL of the gateway: `http://127.0.0.1:PORT`.
    pub fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Base URL of the metrics: `http://127.0.0.1:PORT`.
    pub fn metrics_base(&self) -> String {
        format!("http://127.0.0.1:{}", self.metrics_port)
    }

    /// Base URL of the OpenAI API.
    pub fn v1(&self) -> String {
        format!("{}/v1", self.base())
    }

    /// Its state directory.
    pub fn state_dir(&self) -> &Path {
        self.state.path()
    }

    /// Returns all that `hearth up` has written so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.state.path().join("output")).unwrap_or_default()
    }

    /// Waits until `hearth up` has written `text`.
    ///
    /// # Panics
    /// When it ends first, or does not write it in time.
    pub fn wait_for_output(&mut self, text: &str) {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            // In this order, so that its last output is not missed.
            let ended = self.child.try_wait();
            if self.output().contains(text) {
                return;
            }
            assert!(
                matches!(ended, Ok(None)) && Instant::now() < deadline,
                "{text:?} is not in ({ended:?}):\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the logs of its processes, each after its name.
    pub fn logs(&self) -> String {
        let (_, stdout, _) = run(hearth()
            .args(["logs", &self.name(), "-n", "40", "--state-dir"])
            .arg(self.state.path()));
        stdout
    }

    fn name(&self) -> String {
        let entries = std::fs::read_dir(self.state.path())
            .into_iter()
            .flatten()
            .flatten();
        let directory = entries.into_iter().find(|entry| entry.path().is_dir());
        directory.map_or_else(
            || "demo".to_owned(),
            |entry| entry.file_name().to_string_lossy().into_owned(),
        )
    }

    /// Returns the output of `hearth status -o json` for it; null if it is not running.
    pub fn status(&self) -> Value {
        let (_, stdout, _) = run(hearth()
            .args(["status", "-o", "json", "--state-dir"])
            .arg(self.state.path()));
        let all: Value = serde_json::from_str(&stdout).unwrap_or_default();
        all.get(0).cloned().unwrap_or_default()
    }

    fn is_ready(&self) -> bool {
        let status = self.status();
        status["ready"] == true && status["serving"] == true
    }

    /// The process id of a rank.
    ///
    /// # Panics
    /// When the rank is not running.
    pub fn pid(&self, rank: &str) -> u32 {
        let status = self.status();
        let processes = status["processes"].as_array().cloned().unwrap_or_default();
        let process = processes.iter().find(|process| process["rank"] == rank);
        let pid = process.and_then(|process| process["pid"].as_u64());
        pid.and_then(|pid| u32::try_from(pid).ok())
            .unwrap_or_else(|| panic!("{rank} does not run: {status:#}"))
    }

    /// Sends a signal to a rank's process.
    pub fn signal(&self, rank: &str, signal: Signal) {
        send(self.pid(rank), signal);
    }

    /// Sends a signal to `hearth up` itself.
    pub fn signal_up(&self, signal: Signal) {
        send(self.child.id(), signal);
    }

    /// Waits for `hearth up` to end and returns its exit code.
    ///
    /// # Panics
    /// When it does not end in time or is killed.
    pub fn wait(&mut self) -> i32 {
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    return status
                        .code()
                        .unwrap_or_else(|| panic!("{status}\n{}", self.output()));
                }
                Ok(None) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(
                Instant::now() < deadline,
                "hearth up does not end:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.child.id(), Signal::INT);
            let deadline = Instant::now() + Duration::from_secs(5);
            while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!(
                "--- hearth up ---\n{}\n--- logs ---\n{}",
                self.output(),
                self.logs()
            );
        }
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}
