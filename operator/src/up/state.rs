//! State kept on disk between commands: plans, logs, and running deployments.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use hearth_crds::{InferencePlanSpec, PlanRole};
use rustix::fs::{CWD, RenameFlags, rename, renameat_with};
use serde::{Deserialize, Serialize};

use crate::environment::Environment;

/// Where state is kept; shared by all commands.
#[derive(clap::Args, Clone)]
pub(crate) struct StateArgs {
    /// Directory for plans, logs and the list of running deployments
    #[arg(long, value_name = "DIR", env = "HEARTH_STATE_DIR", global = true)]
    pub(crate) state_dir: Option<PathBuf>,
}

/// Size granularity of the list of processes, in bytes.
const RUNNING_BYTES: usize = 16 << 10;

/// The directory of all deployments of this user.
#[derive(Clone, Debug)]
pub(crate) struct StateDir(PathBuf);

/// The directory of one deployment.
#[derive(Clone, Debug)]
pub(crate) struct DeploymentDir(PathBuf);

/// A running `hearth up`, as seen by other commands.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Running {
    /// Name of the deployment.
    pub(crate) name: String,
    /// Process id of `hearth up`.
    pub(crate) pid: u32,
    /// Base of the OpenAI API, `http://host:port/v1`.
    pub(crate) endpoint: String,
    /// URL of its metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<String>,
    /// Certificate of an HTTPS endpoint, as a PEM file; `None` for plain HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) certificate: Option<PathBuf>,
    /// Directory of the certificates between its processes; `None`: they speak plaintext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tls_dir: Option<PathBuf>,
    /// Model name in that API.
    pub(crate) served_name: String,
    /// The InferenceDeployment's file.
    pub(crate) file: PathBuf,
    /// Generation of the running plan.
    pub(crate) plan_generation: u64,
    /// Start time in RFC 3339.
    pub(crate) started_at: String,
    /// Whether all processes have become ready; `false` while starting.
    pub(crate) ready: bool,
    /// Each process with its restarts.
    pub(crate) processes: Vec<RunningProcess>,
}

/// One process of a running deployment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunningProcess {
    /// Name of the rank in the plan.
    pub(crate) rank: String,
    /// Role in lower case.
    pub(crate) role: String,
    /// Process id; `None` while it is being restarted.
    pub(crate) pid: Option<u32>,
    /// Whether it is ready.
    pub(crate) ready: bool,
    /// Whether it was ready and then stopped reporting.
    #[serde(default)]
    pub(crate) hung: bool,
    /// Whether it is not ready yet, and says nothing.
    #[serde(default)]
    pub(crate) silent: bool,
    /// Whether its engine has failed.
    #[serde(default)]
    pub(crate) failed: bool,
    /// Whether it was told to end, and has.
    #[serde(default)]
    pub(crate) ended: bool,
    /// Number of restarts.
    pub(crate) restarts: u32,
}

impl RunningProcess {
    /// Notes that it has ended.
    pub(crate) fn end(&mut self) {
        *self = Self {
            rank: std::mem::take(&mut self.rank),
            role: std::mem::take(&mut self.role),
            restarts: self.restarts,
            ..Self::default()
        };
    }

    /// What it does, in a word.
    pub(crate) fn state(&self) -> &'static str {
        match self {
            Self { hung: true, .. } => "Hung",
            Self { ready: true, .. } => "Ready",
            Self { failed: true, .. } => "Failed",
            Self { silent: true, .. } => "Silent",
            Self { ended: true, .. } => "Ended",
            Self {
                pid: None,
                restarts: 1..,
                ..
            } => "Restarting",
            _ => "Starting",
        }
    }
}

/// Names of the processes that are waited for: of a ring its stages that are not ready, without which no head is, and without such
/// ones all others that are not.
pub(crate) fn awaited<'p>(
    processes: impl Iterator<Item = &'p RunningProcess>,
) -> impl Iterator<Item = &'p str> {
    let not_ready = processes.filter(|process| !process.ready);
    let (stages, others): (Vec<_>, Vec<_>) =
        not_ready.partition(|process| process.role == PlanRole::Stage.as_str());
    let awaited = match stages.is_empty() {
        true => others,
        false => stages,
    };
    awaited.into_iter().map(|process| &*process.rank)
}

impl StateDir {
    /// Returns the requested directory, otherwise the user's state directory.
    ///
    /// # Errors
    /// Neither it nor a home directory is known.
    pub(crate) fn locate(asked: Option<&Path>, environment: &Environment) -> anyhow::Result<Self> {
        // An empty environment variable counts as unset.
        if let Some(directory) = asked.filter(|directory| !directory.as_os_str().is_empty()) {
            return Ok(Self(directory.to_owned()));
        }
        let directory = environment.state_directory();
        directory
            .map(Self)
            .context("there is no home directory to keep state in\n  name one: --state-dir DIR")
    }

    /// Returns the directory itself; it may not exist.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the directory of a deployment; it may not exist.
    pub(crate) fn deployment(&self, name: &str) -> DeploymentDir {
        DeploymentDir(self.0.join(name))
    }

    /// Returns the file with this machine's rates, shared by all deployments; it may not exist.
    pub(crate) fn profile(&self) -> PathBuf {
        self.0.join("profile.json")
    }

    /// All deployments whose `hearth up` is alive, sorted by name.
    ///
    /// # Errors
    /// The directory cannot be read; a missing one counts as empty.
    pub(crate) fn running(&self) -> anyhow::Result<Vec<Running>> {
        let mut running: Vec<Running> = self
            .deployments()?
            .into_iter()
            .filter(DeploymentDir::is_held)
            .filter_map(|directory| directory.read_running().ok())
            .collect();
        running.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(running)
    }

    /// The plans of all deployments whose `hearth up` is alive, by name. One that has no plan yet is left out: it has no
    /// worker either.
    ///
    /// # Errors
    /// Those of [`StateDir::running`].
    pub(crate) fn running_plans(
        &self,
    ) -> anyhow::Result<Vec<(String, anyhow::Result<InferencePlanSpec>)>> {
        let held = self.deployments()?.into_iter();
        let held = held.filter(|directory| directory.is_held() && directory.plan_file().exists());
        Ok(held
            .map(|directory| {
                let name = directory.0.file_name().unwrap_or_default();
                (name.to_string_lossy().into_owned(), directory.read_plan())
            })
            .collect())
    }

    /// Names of all deployments that run here or once did.
    ///
    /// # Errors
    /// Those of [`StateDir::running`].
    pub(crate) fn known(&self) -> anyhow::Result<Vec<String>> {
        let mut names: Vec<String> = self
            .deployments()?
            .iter()
            .filter(|directory| directory.logs().is_dir())
            .filter_map(|directory| Some(directory.0.file_name()?.to_str()?.to_owned()))
            .collect();
        names.sort();
        Ok(names)
    }

    /// The deployment that was started last, whether it still runs or not; `None` if none ever ran.
    ///
    /// # Errors
    /// Those of [`StateDir::running`].
    pub(crate) fn latest(&self) -> anyhow::Result<Option<String>> {
        let started = |name: &String| {
            let plan = self.deployment(name).plan_file();
            fs::metadata(plan).and_then(|plan| plan.modified()).ok()
        };
        Ok(self.known()?.into_iter().max_by_key(started))
    }

    fn deployments(&self) -> anyhow::Result<Vec<DeploymentDir>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(trouble(&self.0, "read", error)),
        };
        Ok(entries
            .flatten()
            .map(|entry| DeploymentDir(entry.path()))
            .collect())
    }

    /// Returns the running deployment of this name, or the only one.
    ///
    /// # Errors
    /// None runs, or several do and none is named.
    pub(crate) fn choose(&self, name: Option<&str>) -> anyhow::Result<Running> {
        let mut running = self.running()?;
        if let Some(name) = name {
            let names: Vec<String> = running.iter().map(|one| one.name.clone()).collect();
            return running.into_iter().find(|one| one.name == name).with_context(|| match names.as_slice() {
                [] => format!("{name} does not run here, nor does any other deployment\n  start it: hearth up -f FILE"),
                names => format!("{name} does not run here; these do: {}", names.join(", ")),
            });
        }
        match running.len() {
            0 => bail!(
                "no deployment runs on this machine; looked in {}\n  start one: hearth up -f manifests/examples/demo.yaml",
                self.0.display()
            ),
            1 => Ok(running.remove(0)),
            _ => {
                let names: Vec<&str> = running.iter().map(|one| one.name.as_str()).collect();
                bail!(
                    "several deployments run here: {}\n  name one of them",
                    names.join(", ")
                )
            }
        }
    }
}

impl DeploymentDir {
    /// Creates the directory and takes its lock, which is held as long as the returned file.
    ///
    /// # Errors
    /// Another `hearth up` holds it, or the directory cannot be written.
    pub(crate) fn acquire(&self, name: &str) -> anyhow::Result<File> {
        let logs = self.logs();
        fs::create_dir_all(&logs).map_err(|error| trouble(&logs, "made", error))?;
        let path = self.0.join("lock");
        let lock = File::create(&path).map_err(|error| trouble(&path, "written", error))?;
        if lock.try_lock().is_err() {
            return Err(self.held(name));
        }
        Ok(lock)
    }

    /// Checks in advance whether [`DeploymentDir::acquire`] would find the lock taken; changes nothing.
    ///
    /// # Errors
    /// Another `hearth up` holds the directory.
    pub(crate) fn check_free(&self, name: &str) -> anyhow::Result<()> {
        match self.is_held() {
            true => Err(self.held(name)),
            false => Ok(()),
        }
    }

    fn held(&self, name: &str) -> anyhow::Error {
        let by = self.read_running().map_or_else(
            |_| "by another process".to_owned(),
            |running| format!("at {} by process {}", running.endpoint, running.pid),
        );
        anyhow!(
            "{name} is already served {by}\n  stop it with Ctrl-C there, or give this deployment another metadata.name"
        )
    }

    /// Whether a `hearth up` holds the directory's lock.
    fn is_held(&self) -> bool {
        File::open(self.0.join("lock"))
            .is_ok_and(|lock| matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock)))
    }

    /// Directory of the logs.
    pub(crate) fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// Log file of a process.
    pub(crate) fn log(&self, rank: &str) -> PathBuf {
        self.logs().join(format!("{rank}.log"))
    }

    /// File of the plan.
    pub(crate) fn plan_file(&self) -> PathBuf {
        self.0.join("plan.json")
    }

    /// Generation of the next plan: one more than the last one's.
    pub(crate) fn next_generation(&self) -> u64 {
        let last = fs::read(self.plan_file())
            .ok()
            .and_then(|text| serde_json::from_slice::<InferencePlanSpec>(&text).ok());
        last.map_or(1, |plan| plan.generation + 1)
    }

    /// Writes the plan atomically.
    pub(crate) fn write_plan(&self, plan: &InferencePlanSpec) -> anyhow::Result<()> {
        let (path, temporary) = (self.plan_file(), self.0.join("plan.tmp"));
        fs::write(&temporary, serde_json::to_vec_pretty(plan)?)
            .map_err(|error| trouble(&temporary, "written", error))?;
        fs::rename(&temporary, &path).map_err(|error| trouble(&path, "written", error))
    }

    /// Reads the plan that is running or ran last.
    pub(crate) fn read_plan(&self) -> anyhow::Result<InferencePlanSpec> {
        let path = self.plan_file();
        let text = fs::read(&path).map_err(|error| trouble(&path, "read", error))?;
        serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} was written by another version of hearth",
                path.display()
            )
        })
    }

    /// Publishes the running processes to other commands. Readers never see a partial file, and it needs no more space
    /// than it was first given, so it stays accurate even if others have filled the disk.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn write_running(&self, running: &Running) -> anyhow::Result<()> {
        let (path, spare) = (self.running_file(), self.0.join("running.spare"));
        let mut text = serde_json::to_vec_pretty(running)?;
        text.resize(text.len().next_multiple_of(RUNNING_BYTES), b'\n');
        let write = || {
            // Overwrites the existing file: its blocks are already allocated.
            let mut file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&spare)?;
            file.write_all(&text)?;
            file.set_len(text.len() as u64)?;
            if path.exists() {
                renameat_with(CWD, &spare, CWD, &path, RenameFlags::EXCHANGE)
                    .or_else(|_| rename(&spare, &path))?;
            } else {
                rename(&spare, &path)?;
                // A spare for the next change, which would need additional space without it.
                let _ = fs::write(&spare, &text);
            }
            Ok(())
        };
        write().map_err(|error| trouble(&path, "written", error))
    }

    fn running_file(&self) -> PathBuf {
        self.0.join("running.json")
    }

    fn read_running(&self) -> anyhow::Result<Running> {
        Ok(serde_json::from_slice(&fs::read(self.running_file())?)?)
    }

    /// Removes the list of processes.
    pub(crate) fn clear_running(&self) {
        let _ = fs::remove_file(self.running_file());
        let _ = fs::remove_file(self.0.join("running.spare"));
    }
}

/// Error for a failed file operation, with the remedy.
fn trouble(path: &Path, verb: &str, error: io::Error) -> anyhow::Error {
    const ELSEWHERE: &str = "or keep state elsewhere: --state-dir DIR";
    let remedy = match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            format!("make it writable for you, {ELSEWHERE}")
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            format!("a file stands where a directory should be: move it away, {ELSEWHERE}")
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            format!("make room on its disk, {ELSEWHERE}")
        }
        _ => "keep state elsewhere: --state-dir DIR".to_owned(),
    };
    anyhow::Error::new(error).context(format!("{} cannot be {verb}\n  {remedy}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(restarts: u32) -> Running {
        Running {
            name: "demo".to_owned(),
            pid: 1,
            endpoint: "http://127.0.0.1:8080/v1".to_owned(),
            metrics: None,
            certificate: None,
            tls_dir: None,
            served_name: "hearth-demo".to_owned(),
            file: PathBuf::from("demo.yaml"),
            plan_generation: 1,
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            ready: true,
            processes: vec![RunningProcess {
                rank: "decode-0".to_owned(),
                role: "decode".to_owned(),
                pid: Some(2),
                ready: true,
                restarts,
                ..RunningProcess::default()
            }],
        }
    }

    fn environment() -> Environment {
        Environment::read(|name| (name == "HOME").then(|| "/home/ann".into()))
    }

    #[test]
    fn a_process_that_has_ended_is_not_told_as_one_that_starts() {
        let mut process = running(0).processes.remove(0);
        assert_eq!(process.state(), "Ready");
        process.end();
        assert_eq!(
            process.state(),
            "Starting",
            "it died before it was restarted"
        );
        process.restarts = 1;
        assert_eq!(process.state(), "Restarting");
        process.ended = true;
        assert_eq!(process.state(), "Ended");
    }

    #[test]
    fn what_runs_is_read_back_however_often_it_changes() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDir::locate(Some(root.path()), &environment()).unwrap();
        let directory = state.deployment("demo");
        let _lock = directory.acquire("demo").unwrap();
        for restarts in 0..5 {
            directory.write_running(&running(restarts)).unwrap();
            let seen = state.running().unwrap();
            assert_eq!(seen.len(), 1);
            assert_eq!(seen[0].processes[0].restarts, restarts);
        }
        assert_eq!(state.known().unwrap(), ["demo"]);
        directory.clear_running();
        assert!(state.running().unwrap().is_empty());
    }

    #[test]
    fn a_file_in_the_way_is_told() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let state = StateDir::locate(Some(&file), &environment()).unwrap();
        for error in [
            state.running().map(|_| ()).unwrap_err(),
            state
                .deployment("demo")
                .acquire("demo")
                .map(|_| ())
                .unwrap_err(),
        ] {
            let words = crate::terminal::ui::sentence(&error);
            assert!(words.starts_with(&file.display().to_string()), "{words}");
            assert!(
                words.contains("a file stands where a directory should be"),
                "{words}"
            );
        }
        let usual = StateDir::locate(Some(Path::new("")), &environment()).unwrap();
        assert_eq!(usual.path(), Path::new("/home/ann/.local/state/hearth"));
    }
}
