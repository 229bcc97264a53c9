//! An operator as a child process of the test.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::SocketAddr;
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::cluster::try_wait_until;
use crate::programs::hearth;

/// A running operator, killed when dropped.
pub struct Operator {
    child: Child,
    log: File,
    files: TempDir,
    api: SocketAddr,
    namespace: String,
    arguments: Vec<String>,
}

impl Operator {
    /// Starts an operator that talks to `api` over plain HTTP and runs in `namespace`. It has no leader election, and
    /// no agents unless `arguments`, which are added, configure them.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(api: SocketAddr, namespace: &str, arguments: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap_or_else(|error| panic!("no directory: {error}"));
        let path = files.path().join("operator.log");
        let log = File::options()
            .create(true)
            .append(true)
            .read(true)
            .open(&path);
        let log = log.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let child = spawn(&files, &log, api, namespace, &arguments);
        Self {
            child,
            log,
            files,
            api,
            namespace: namespace.to_owned(),
            arguments,
        }
    }

    /// Restarts it after it has ended.
    pub fn restart(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = spawn(
            &self.files,
            &self.log,
            self.api,
            &self.namespace,
            &self.arguments,
        );
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Returns everything that it has logged.
    pub fn log(&mut self) -> String {
        let mut text = String::new();
        let _ = self.log.seek(SeekFrom::Start(0));
        let _ = self.log.read_to_string(&mut text);
        text
    }

    /// Returns the address of its metrics, from its log.
    ///
    /// # Panics
    /// When it does not log it within 10 s.
    pub fn metrics_address(&mut self) -> SocketAddr {
        let found = try_wait_until(
            "the operator serves metrics",
            Duration::from_secs(10),
            || {
                let log = self.log();
                let line = log.lines().rfind(|line| line.contains("/metrics"))?;
                line.split("address=").nth(1)?.trim().parse().ok()
            },
        );
        found.unwrap_or_else(|error| panic!("{error}: {}", self.log()))
    }

    /// Asks it to terminate, waits for that and returns its exit code.
    ///
    /// # Panics
    /// When it does not end within 12 s.
    pub fn terminate(&mut self) -> Option<i32> {
        let pid = i32::try_from(self.pid()).ok();
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let ended = try_wait_until("the operator ends", Duration::from_secs(12), || {
            self.ended()
        });
        ended
            .unwrap_or_else(|error| panic!("{error}: {}", self.log()))
            .code()
    }

    /// Returns current and peak resident memory, in KiB.
    pub fn resident_kib(&self) -> (u64, u64) {
        let path = format!("/proc/{}/status", self.pid());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        (line("VmRSS:").unwrap_or(0), line("VmHWM:").unwrap_or(0))
    }

    /// CPU time so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        crate::cpu_time(self.pid()).as_secs_f64()
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(60)..];
            eprintln!("--- operator ---\n{}", tail.join("\n"));
        }
    }
}

fn spawn(
    files: &TempDir,
    log: &File,
    api: SocketAddr,
    namespace: &str,
    arguments: &[String],
) -> Child {
    let kubeconfig = files.path().join("kubeconfig");
    let text = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{api}")}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    let written = std::fs::write(&kubeconfig, text.to_string());
    written.unwrap_or_else(|error| panic!("{}: {error}", kubeconfig.display()));
    let stderr = log.try_clone();
    let stderr = stderr.unwrap_or_else(|error| panic!("log: {error}"));
    let has_agents = arguments.iter().any(|argument| argument == "--agents");
    let agents: &[&str] = if has_agents {
        &[]
    } else {
        &["--agents", "false"]
    };
    let mut command = hearth();
    command
        .arg("operator")
        .args(["--worker-image", "hearth-worker:test"])
        .args(["--leader-elect", "false"])
        .args(agents)
        .args(["--operator-namespace", namespace])
        .args(["--listen", "127.0.0.1:0"])
        .args(arguments)
        .env("KUBECONFIG", &kubeconfig)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr);
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}
