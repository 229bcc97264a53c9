//! Programs of the test cluster: found where `tests/cluster/build.sh` puts them, or in the system.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::programs::root;

/// Directories with the cluster's own programs, in search order.
#[derive(Clone, Debug)]
pub(crate) struct Tools(Vec<PathBuf>);

impl Tools {
    /// Asks the build script for its output directories. With `HEARTH_TEST_OLDEST`, the API server is the oldest
    /// version that the chart allows.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let script = root().join("tests/cluster/build.sh");
        let oldest = std::env::var_os("HEARTH_TEST_OLDEST").map(|_| "oldest");
        let output = Command::new(&script)
            .arg("directories")
            .args(oldest)
            .output()
            .with_context(|| format!("{} cannot be run", script.display()))?;
        if !output.status.success() {
            bail!(
                "{} directories: {}",
                script.display(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let lines = String::from_utf8_lossy(&output.stdout);
        Ok(Self(lines.lines().map(PathBuf::from).collect()))
    }

    /// Returns a program that the script builds; `None` if it has not been built.
    pub(crate) fn built(&self, name: &str) -> Option<PathBuf> {
        self.0
            .iter()
            .map(|directory| directory.join(name))
            .find(|path| path.is_file())
    }

    /// Returns a program that the script builds.
    pub(crate) fn get(&self, name: &str) -> anyhow::Result<PathBuf> {
        self.built(name).with_context(|| {
            format!("{name} is not built\n  run tests/cluster/build.sh, which needs Go")
        })
    }

    /// Returns the directory of one of its programs.
    pub(crate) fn directory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.get(name)?;
        Ok(path.parent().unwrap_or(Path::new("/")).to_path_buf())
    }

    /// Returns a `PATH` with all of them before the system's own.
    pub(crate) fn path(&self) -> OsString {
        let system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"]
            .into_iter()
            .chain(["/sbin", "/bin"])
            .map(PathBuf::from);
        std::env::join_paths(self.0.iter().cloned().chain(system)).unwrap_or_default()
    }
}

/// Returns a system program, found by `PATH` or in the usual directories.
pub(crate) fn in_system(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}
