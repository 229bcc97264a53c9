//! Long-running processes of a cluster: marked as its own, each with a log.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;

use super::keeper::MARK;
use super::network::AddressFamily;
use super::tools::Tools;

/// Enters a node's groups, then its namespaces.
const ENTER_NODE: &str = r#"
group=$1 target=$2
shift 2
for procs in /sys/fs/cgroup"$group"/sys/cgroup.procs /sys/fs/cgroup/*"$group"/sys/cgroup.procs; do
    [ ! -e "$procs" ] || echo $$ >"$procs"
done
exec nsenter --target "$target" --mount --uts --net --pid -- "$@"
"#;

/// Namespaces that a process runs in.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// The namespaces of the test.
    Host,
    /// The network namespace of a process.
    Network(u32),
    /// The namespaces of a node's first process, and the node's groups.
    Node { pid: u32, group: String },
}

/// A program to start, any number of times.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<OsString>,
    pub(super) place: Place,
}

impl Launch {
    pub(super) fn new(name: &str, program: impl Into<PathBuf>, place: &Place) -> Self {
        Self {
            name: name.to_owned(),
            program: program.into(),
            arguments: Vec::new(),
            place: place.clone(),
        }
    }

    pub(super) fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        let arguments = arguments.into_iter();
        self.arguments
            .extend(arguments.map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Adds `--NAME=VALUE`.
    pub(super) fn flag(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        let mut flag = OsString::from(format!("--{name}="));
        flag.push(value);
        self.arguments.push(flag);
        self
    }
}

/// State shared by all processes of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Workspace {
    pub(super) id: String,
    pub(super) state: PathBuf,
    pub(super) logs: PathBuf,
    pub(super) tools: Tools,
    pub(super) family: AddressFamily,
}

impl Workspace {
    /// Starts a process; its output goes to the log of its name.
    pub(super) fn spawn(&self, launch: &Launch) -> anyhow::Result<Child> {
        let log = self.log(&launch.name);
        let output = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| log.display().to_string())?;
        // Its own session: Ctrl-C is for the test, and the keeper handles the rest.
        let mut command = Command::new("setsid");
        match &launch.place {
            Place::Host => &mut command,
            Place::Network(pid) => {
                command.args(["nsenter", "--net", "--target", &pid.to_string(), "--"])
            }
            Place::Node { pid, group } => {
                command.args(["bash", "-euc", ENTER_NODE, "-", group, &pid.to_string()])
            }
        }
        .arg(&launch.program)
        .args(&launch.arguments);
        self.environment(&mut command);
        command.env(MARK, &self.id);
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        command
            .spawn()
            .with_context(|| format!("{} cannot be started", launch.program.display()))
    }

    /// Gives a command the cluster's programs and none of the user's settings: no proxy, no other kubeconfig.
    pub(super) fn environment(&self, command: &mut Command) {
        command
            .env_clear()
            .env("PATH", self.tools.path())
            .env("HOME", &self.state)
            .env("LC_ALL", "C.UTF-8");
    }

    /// Returns the path of a file in the state directory.
    pub(super) fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.state.join(name)
    }

    /// Returns the path of a process's log.
    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{name}.log"))
    }

    /// Returns the last lines of a log.
    pub(super) fn log_tail(&self, name: &str) -> String {
        let text = std::fs::read(self.log(name)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}
