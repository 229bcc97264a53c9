//! Ranks of a plan as single processes, started by hand the way a cluster starts Pods: each has a plan with only
//! itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cgroup::Cgroup;
use crate::ports::free_port;
use crate::programs::{hearth, root, run, worker};

/// Longest time until a process serves; a busy machine with an unoptimised build needs some.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time until a process ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// A directory for processes of one plan: the demo's.
pub struct Ranks {
    directory: TempDir,
    plan: Value,
    errors: Option<PathBuf>,
}

/// One process, killed when dropped.
pub struct Rank {
    /// Its name in the plan, such as `decode-0`.
    pub name: String,
    /// `host:port` that it serves on.
    pub endpoint: String,
    metrics: String,
    role: &'static str,
    child: Child,
    log: PathBuf,
}

impl Ranks {
    /// Plans the demo for this machine.
    ///
    /// # Panics
    /// When there is no such plan.
    pub fn of_demo() -> Self {
        let directory =
            TempDir::new().unwrap_or_else(|error| panic!("no temporary directory: {error}"));
        let (code, stdout, stderr) = run(hearth()
            .args(["plan", "-o", "json", "-f"])
            .arg(root().join("manifests/examples/demo.yaml"))
            .arg("--state-dir")
            .arg(directory.path().join("state")));
        assert_eq!(code, 0, "{stderr}");
        let mut plan: Value = serde_json::from_str(&stdout)
            .unwrap_or_else(|error| panic!("the plan: {error}: {stdout}"));
        plan["why"] = json!([]);
        plan["notChosen"] = json!([]);
        Self {
            directory,
            plan,
            errors: None,
        }
    }

    /// Directory of its files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Changes the plan of processes started from now on.
    pub fn edit(&mut self, edit: impl FnOnce(&mut Value)) {
        edit(&mut self.plan);
    }

    /// Makes processes started from now on write standard error to `path` instead of their logs.
    pub fn write_errors_to(&mut self, path: &Path) {
        self.errors = Some(path.to_owned());
    }

    /// Starts a rank of `role` (`gateway`, `prefill`, `decode`) with the given name on a free port.
    ///
    /// # Panics
    /// When the plan has no such role or the process cannot be started.
    pub fn start(&self, role: &'static str, name: &str, arguments: &[String]) -> Rank {
        self.start_in(role, name, arguments, &[])
    }

    /// Starts a rank like [`Ranks::start`], in control groups.
    ///
    /// # Panics
    /// Like [`Ranks::start`].
    pub fn start_in(
        &self,
        role: &'static str,
        name: &str,
        arguments: &[String],
        groups: &[&Cgroup],
    ) -> Rank {
        let endpoint = format!("127.0.0.1:{}", free_port());
        let plan = self.plan_of(role, name, &endpoint);
        self.start_of(&plan, (role, name, &endpoint), arguments, groups)
    }

    /// Starts a rank of a whole plan, which says that it serves on `endpoint`.
    ///
    /// # Panics
    /// When the process cannot be started.
    pub fn start_of(
        &self,
        plan: &Value,
        (role, name, endpoint): (&'static str, &str, &str),
        arguments: &[String],
        groups: &[&Cgroup],
    ) -> Rank {
        let path = |kind: &str| {
            self.directory()
                .join(format!("{name}-{}.{kind}", free_port()))
        };
        let (file, log) = (path("json"), path("log"));
        std::fs::write(&file, plan.to_string()).unwrap_or_else(|error| panic!("plan: {error}"));
        let output = File::create(&log).unwrap_or_else(|error| panic!("log: {error}"));
        let errors = match &self.errors {
            Some(path) => File::options().write(true).open(path),
            None => output.try_clone(),
        };
        let errors = errors.unwrap_or_else(|error| panic!("log: {error}"));
        let mut command = in_groups(worker(), groups);
        command
            .args([role, "--rank", name, "--plan"])
            .arg(file)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        let metrics = format!("127.0.0.1:{}", free_port());
        if role == "gateway" {
            command.args(["--metrics", &metrics]);
        }
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Rank {
            name: name.to_owned(),
            endpoint: endpoint.to_owned(),
            metrics,
            role,
            child,
            log,
        }
    }

    /// Returns the plan of one process.
    ///
    /// # Panics
    /// When the plan has no such role.
    pub fn plan_of(&self, role: &str, name: &str, endpoint: &str) -> Value {
        let mut plan = self.plan.clone();
        let ranks = plan["ranks"].as_array().cloned().unwrap_or_default();
        let is_ours = |rank: &Value| {
            let its = rank["role"].as_str().unwrap_or_default();
            its.eq_ignore_ascii_case(role)
        };
        let mut rank = ranks
            .into_iter()
            .find(is_ours)
            .unwrap_or_else(|| panic!("no {role} in the plan"));
        rank["name"] = json!(name);
        rank["endpoint"] = json!(endpoint);
        plan["ranks"] = json!([rank]);
        plan
    }

    /// Returns the path of the file that lists a gateway's workers.
    pub fn routes(&self) -> PathBuf {
        self.directory().join("routes.json")
    }

    /// Makes these the gateway's workers, by replacing the file atomically.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn route_to(&self, workers: &[&Rank]) {
        let workers: Vec<Value> = workers.iter().map(|worker| worker.route()).collect();
        let next = self.directory().join("routes.next");
        let swap = || {
            std::fs::write(&next, json!({"workers": workers}).to_string())?;
            std::fs::rename(&next, self.routes())
        };
        swap().unwrap_or_else(|error: std::io::Error| panic!("routes: {error}"));
    }
}

impl Rank {
    fn route(&self) -> Value {
        let role = match self.role {
            "prefill" => "Prefill",
            _ => "Decode",
        };
        json!({"name": self.name, "role": role, "endpoint": self.endpoint})
    }

    /// `http://HOST:PORT` of a gateway.
    pub fn base(&self) -> String {
        format!("http://{}", self.endpoint)
    }

    /// `http://HOST:PORT` of a gateway's metrics.
    pub fn metrics_base(&self) -> String {
        format!("http://{}", self.metrics)
    }

    /// Waits until a gateway serves its metrics.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn wait_for_metrics(&self) {
        let deadline = Instant::now() + STOP_TIMEOUT;
        while std::net::TcpStream::connect(&self.metrics).is_err() {
            assert!(
                Instant::now() < deadline,
                "{} does not listen:\n{}",
                self.name,
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns all that it has written so far, but for the beats that say that it lives.
    pub fn output(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.replace("{\"event\":\"alive\"}\n", "")
    }

    /// Waits until it serves.
    ///
    /// # Panics
    /// When it ends, or does not serve in time.
    pub fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + START_TIMEOUT;
        while !self.output().contains("\"event\":\"ready\"") {
            let is_late = Instant::now() > deadline;
            assert!(
                !is_late && !self.has_ended(),
                "{} does not serve:\n{}",
                self.name,
                self.output()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for it to end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status,
                Ok(None) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(
                Instant::now() < deadline,
                "{} does not end:\n{}",
                self.name,
                self.output()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Wraps the command in a shell that joins the groups first.
fn in_groups(command: Command, groups: &[&Cgroup]) -> Command {
    if groups.is_empty() {
        return command;
    }
    let mut shell = Command::new("sh");
    let joins = groups.iter().map(|group| {
        let path = group.path().display();
        format!("echo $$ > '{path}/cgroup.procs' && ")
    });
    let script = joins.collect::<String>() + "exec \"$@\"";
    shell.args(["-c", &script, "sh"]).arg(command.get_program());
    shell
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.name, self.output());
        }
    }
}
