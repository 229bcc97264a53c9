//! What is kept on disk between commands: plans, logs, and what runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hearth_crds::InferencePlanSpec;
use serde::{Deserialize, Serialize};

/// The directory of all deployments of this user.
#[derive(Clone, Debug)]
pub(crate) struct StateDir(PathBuf);

/// The directory of one deployment.
#[derive(Clone, Debug)]
pub(crate) struct DeploymentDir(PathBuf);

/// A running `hearth up`, as other commands see it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Running {
    /// Name of the deployment.
    pub(crate) name: String,
    /// Process id of `hearth up`.
    pub(crate) pid: u32,
    /// Base of the OpenAI API, `http://host:port/v1`.
    pub(crate) endpoint: String,
    /// Model name in that API.
    pub(crate) served_name: String,
    /// The InferenceDeployment's file.
    pub(crate) file: PathBuf,
    /// Generation of the plan that runs.
    pub(crate) plan_generation: u64,
    /// RFC 3339.
    pub(crate) started_at: String,
    /// When requests were first served; none while starting.
    pub(crate) ready: bool,
    /// Each process with its restarts.
    pub(crate) processes: Vec<RunningProcess>,
}

/// One process of a running deployment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunningProcess {
    /// Rank's name in the plan.
    pub(crate) rank: String,
    /// Role in lower case.
    pub(crate) role: String,
    /// Process id; none while it is being started again.
    pub(crate) pid: Option<u32>,
    /// Whether it serves.
    pub(crate) ready: bool,
    /// How often it was started again.
    pub(crate) restarts: u32,
}

impl StateDir {
    /// The directory asked for, else the user's state directory.
    ///
    /// # Errors
    /// When neither it nor a home directory is known.
    pub(crate) fn locate(asked: Option<&Path>) -> anyhow::Result<Self> {
        if let Some(directory) = asked {
            return Ok(Self(directory.to_owned()));
        }
        let base = match std::env::var_os("XDG_STATE_HOME") {
            Some(directory) if !directory.is_empty() => PathBuf::from(directory),
            _ => {
                let home = std::env::var_os("HOME").context(
                    "there is no home directory to keep state in\n  name one: --state-dir DIR",
                )?;
                PathBuf::from(home).join(".local/state")
            }
        };
        Ok(Self(base.join("hearth")))
    }

    /// The directory of a deployment; it may not exist.
    pub(crate) fn deployment(&self, name: &str) -> DeploymentDir {
        DeploymentDir(self.0.join(name))
    }

    /// All deployments whose `hearth up` is alive, by name.
    pub(crate) fn running(&self) -> Vec<Running> {
        let Ok(entries) = fs::read_dir(&self.0) else {
            return Vec::new();
        };
        let mut running: Vec<Running> = entries
            .flatten()
            .map(|entry| DeploymentDir(entry.path()))
            .filter(DeploymentDir::is_held)
            .filter_map(|directory| directory.read_running().ok())
            .collect();
        running.sort_by(|a, b| a.name.cmp(&b.name));
        running
    }

    /// The running deployment of that name, or the only one.
    ///
    /// # Errors
    /// When none runs, or several and none is named.
    pub(crate) fn choose(&self, name: Option<&str>) -> anyhow::Result<Running> {
        let mut running = self.running();
        if let Some(name) = name {
            let names: Vec<String> = running.iter().map(|one| one.name.clone()).collect();
            return running.into_iter().find(|one| one.name == name).with_context(|| match names.as_slice() {
                [] => format!("{name} does not run here, nor does any other deployment\n  start it: hearth up -f FILE"),
                names => format!("{name} does not run here; these do: {}", names.join(", ")),
            });
        }
        match running.len() {
            0 => bail!(
                "no deployment runs on this machine\n  start one: hearth up -f manifests/examples/demo.yaml"
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
    /// Makes the directory and takes its lock, which lasts as long as the file is held.
    ///
    /// # Errors
    /// When another `hearth up` holds it, or the disk refuses.
    pub(crate) fn acquire(&self, name: &str) -> anyhow::Result<File> {
        fs::create_dir_all(self.logs())
            .with_context(|| format!("{} cannot be made", self.0.display()))?;
        let path = self.0.join("lock");
        let lock = File::create(&path).with_context(|| format!("{}", path.display()))?;
        if lock.try_lock().is_err() {
            let pid = self.read_running().map_or_else(
                |_| "another process".to_owned(),
                |running| format!("process {}", running.pid),
            );
            bail!(
                "{name} is already served by {pid}\n  stop it with Ctrl-C there, or give this deployment another metadata.name"
            );
        }
        Ok(lock)
    }

    /// Whether a `hearth up` holds the directory.
    fn is_held(&self) -> bool {
        File::open(self.0.join("lock"))
            .is_ok_and(|lock| matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock)))
    }

    /// Where logs are.
    pub(crate) fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// The log of a process.
    pub(crate) fn log(&self, rank: &str) -> PathBuf {
        self.logs().join(format!("{rank}.log"))
    }

    /// The plan's file.
    pub(crate) fn plan_file(&self) -> PathBuf {
        self.0.join("plan.json")
    }

    /// Generation for the next plan: one more than the last one's.
    pub(crate) fn next_generation(&self) -> u64 {
        let last = fs::read(self.plan_file())
            .ok()
            .and_then(|text| serde_json::from_slice::<InferencePlanSpec>(&text).ok());
        last.map_or(1, |plan| plan.generation + 1)
    }

    /// Keeps the plan.
    pub(crate) fn write_plan(&self, plan: &InferencePlanSpec) -> anyhow::Result<()> {
        replace(&self.plan_file(), &serde_json::to_vec_pretty(plan)?)
    }

    /// Reads the plan that runs or last ran.
    pub(crate) fn read_plan(&self) -> anyhow::Result<InferencePlanSpec> {
        let path = self.plan_file();
        let text = fs::read(&path).with_context(|| format!("{}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} was written by another version of hearth",
                path.display()
            )
        })
    }

    /// Tells other commands what runs.
    pub(crate) fn write_running(&self, running: &Running) -> anyhow::Result<()> {
        replace(
            &self.0.join("running.json"),
            &serde_json::to_vec_pretty(running)?,
        )
    }

    fn read_running(&self) -> anyhow::Result<Running> {
        Ok(serde_json::from_slice(&fs::read(
            self.0.join("running.json"),
        )?)?)
    }

    /// Forgets what ran.
    pub(crate) fn clear_running(&self) {
        let _ = fs::remove_file(self.0.join("running.json"));
    }
}

/// Writes beside and renames, so that a reader never sees half a file.
fn replace(path: &Path, contents: &[u8]) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, contents)
        .with_context(|| format!("{} cannot be written", temporary.display()))?;
    fs::rename(&temporary, path).with_context(|| format!("{}", path.display()))
}
