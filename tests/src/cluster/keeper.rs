//! The keeper: a process that outlives the test and tears its cluster down, however the test ended.
//!
//! It learns of the test's end from a pipe that the kernel closes. A run whose keeper was killed too is swept by the
//! next keeper. A cluster's processes are identified by a mark in their environment, which only their children
//! inherit; Pods' processes die with the first process of their node's PID namespace.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::cgroups::Groups;
use super::host;
use super::network::UPLINK;
use crate::programs::program;

/// Environment variable that names a process's cluster.
pub(super) const MARK: &str = "HEARTH_CLUSTER";
/// File in the state directory of a cluster that has nodes.
const HAS_NODES: &str = "nodes";
/// Longest time that this cluster waits for another one with nodes.
const TURN_TIMEOUT: Duration = Duration::from_secs(1200);
const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// The test's handle to a keeper.
pub(super) struct Keeper {
    child: Child,
}

impl Keeper {
    /// Starts a keeper for the cluster `id` and waits until leftovers of dead runs are gone and, for a cluster with
    /// nodes, until no other has any.
    pub(super) fn start(id: &str, nodes: bool) -> anyhow::Result<Self> {
        // Its own session, so that Ctrl-C in the tests' terminal does not reach it.
        let mut command = Command::new("setsid");
        command.arg(program("hearth-cluster")).arg("keep").arg(id);
        command.args(nodes.then_some("--nodes"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command
            .spawn()
            .with_context(|| format!("{command:?} cannot be run"))?;
        let mut keeper = Self { child };
        let mut line = String::new();
        if let Some(stdout) = keeper.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.trim() != "ready" {
            bail!("the keeper of the cluster ended: {}", keeper.child.wait()?);
        }
        Ok(keeper)
    }

    /// Begins the teardown.
    pub(super) fn dismiss(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Whether the teardown is complete.
    pub(super) fn is_done(&mut self) -> anyhow::Result<bool> {
        match self.child.try_wait()? {
            None => Ok(false),
            Some(status) if status.success() => Ok(true),
            Some(status) => bail!("the teardown of the cluster is incomplete: {status}"),
        }
    }
}

/// The state directory of a cluster.
pub(super) fn state_dir(id: &str) -> anyhow::Result<PathBuf> {
    Ok(host::base()?.join(id))
}

/// Runs the keeper: the whole of `hearth-cluster keep`.
///
/// # Errors
/// When anything of the cluster is left.
pub fn keep(id: &str, nodes: bool) -> anyhow::Result<()> {
    let base = host::base()?;
    let state = base.join(id);
    let guard = lock_file(&base.join("guard"))?;
    guard.lock()?;
    std::fs::create_dir(&state).with_context(|| state.display().to_string())?;
    let alive = lock_file(&state.join("alive"))?;
    alive.lock()?;
    sweep_others(&base)?;
    guard.unlock()?;
    let turn = lock_file(&base.join("turn"))?;
    if nodes {
        wait_for_turn(&turn)?;
        File::create(state.join(HAS_NODES))?;
    }
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    tear_down(&state)
}

/// Removes leftovers of dead runs: the whole of `hearth-cluster down`.
///
/// # Errors
/// When something cannot be removed.
pub fn sweep() -> anyhow::Result<()> {
    let base = host::base()?;
    let guard = lock_file(&base.join("guard"))?;
    guard.lock()?;
    sweep_others(&base)
}

fn lock_file(path: &Path) -> anyhow::Result<File> {
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| path.display().to_string())
}

fn wait_for_turn(turn: &File) -> anyhow::Result<()> {
    let deadline = Instant::now() + TURN_TIMEOUT;
    while turn.try_lock().is_err() {
        if Instant::now() > deadline {
            bail!("another cluster is up since {} s", TURN_TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Tears down each cluster whose keeper is dead, that is, whose `alive` file nobody has locked.
fn sweep_others(base: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(base)?.flatten() {
        let state = entry.path();
        if !state.is_dir() {
            continue;
        }
        let alive = lock_file(&state.join("alive"))?;
        if alive.try_lock().is_ok() {
            tear_down(&state)?;
        }
    }
    Ok(())
}

/// Ends all processes of a cluster and removes its traces, its state directory last.
fn tear_down(state: &Path) -> anyhow::Result<()> {
    let id = state
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let deadline = Instant::now() + TEARDOWN_TIMEOUT;
    // Nothing, twice: a process may be between its fork and taking its mark.
    let mut quiet = 0;
    while quiet < 2 {
        let mut pids = marked(&id);
        pids.extend(Groups::of_machine().processes(&id));
        quiet = if pids.is_empty() { quiet + 1 } else { 0 };
        for pid in &pids {
            kill(*pid);
        }
        if Instant::now() > deadline {
            bail!("processes {pids:?} of cluster {id} do not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    while let Err(error) = Groups::of_machine().remove(&id) {
        if Instant::now() > deadline {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if state.join(HAS_NODES).exists() {
        // Its peer vanishes with its namespace, if the kernel has got round to that.
        let _ = Command::new("ip")
            .args(["link", "delete", UPLINK])
            .stderr(Stdio::null())
            .status();
    }
    while let Err(error) = std::fs::remove_dir_all(state) {
        if Instant::now() > deadline {
            return Err(error).with_context(|| state.display().to_string());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the processes that carry a cluster's mark.
fn marked(id: &str) -> Vec<u32> {
    let mark = format!("{MARK}={id}");
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|&byte| byte == 0)
                .any(|variable| variable == mark.as_bytes())
        })
        .collect()
}

/// Sends SIGKILL to a process; one that is gone is not an error.
pub(super) fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

/// Sends a signal to a process; one that is gone is not an error.
pub(super) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}
