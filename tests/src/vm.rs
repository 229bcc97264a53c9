//! An emulated machine for features that this one may lack: cgroup v2, several NUMA nodes, a kernel older than 6.2.
//! Its CPU has no AVX, so workers run their scalar kernels, ten to twenty times slower than here: it shows behaviour, never speed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{program, root};

/// Hardware of the machine, and the files that are copied into it.
#[derive(Clone, Debug)]
pub struct Vm {
    memory_mib: u32,
    cpus: u32,
    numa_nodes: u32,
    limit_s: u32,
    files: Vec<(PathBuf, String)>,
    disks: Vec<(PathBuf, String)>,
    modules: Vec<String>,
    /// Contents of files and their paths in the machine.
    texts: Vec<(String, String)>,
}

impl Default for Vm {
    fn default() -> Self {
        Self {
            memory_mib: 1024,
            cpus: 2,
            numa_nodes: 1,
            limit_s: 900,
            files: Vec::new(),
            disks: Vec::new(),
            modules: Vec::new(),
            texts: Vec::new(),
        }
    }
}

impl Vm {
    /// Returns the reason that no machine can be emulated here, or `None`. A skipped test prints it.
    pub fn unavailable() -> Option<String> {
        let built = Command::new(root().join("tests/vm/build.sh")).output();
        match built {
            Ok(Output { status, .. }) if status.success() => None,
            Ok(Output { stderr, .. }) => Some(String::from_utf8_lossy(&stderr).trim().to_owned()),
            Err(error) => Some(format!("tests/vm/build.sh: {error}")),
        }
    }

    /// Sets the memory, split evenly among the NUMA nodes.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets the CPUs, split evenly among the NUMA nodes in ascending order.
    #[must_use]
    pub fn cpus(mut self, cpus: u32, numa_nodes: u32) -> Self {
        (self.cpus, self.numa_nodes) = (cpus, numa_nodes);
        self
    }

    /// Attaches a host directory as a disk of the machine, read-only at `target`.
    #[must_use]
    pub fn disk(mut self, directory: impl AsRef<Path>, target: &str) -> Self {
        self.disks
            .push((directory.as_ref().to_owned(), target.to_owned()));
        self
    }

    /// Copies a host file or directory into the machine's memory at `target`.
    #[must_use]
    pub fn file(mut self, path: impl AsRef<Path>, target: &str) -> Self {
        self.files
            .push((path.as_ref().to_owned(), target.to_owned()));
        self
    }

    /// Loads a module of the kernel, with those that it needs.
    #[must_use]
    pub fn module(mut self, name: &str) -> Self {
        self.modules.push(name.to_owned());
        self
    }

    /// Adds a JSON file in the machine's memory.
    #[must_use]
    pub fn json(mut self, content: &Value, target: &str) -> Self {
        self.texts.push((content.to_string(), target.to_owned()));
        self
    }

    /// Adds `hearth-worker` as `/bin/hearth-worker`.
    ///
    /// # Panics
    /// When it is not built.
    #[must_use]
    pub fn worker(self) -> Self {
        self.file(program("hearth-worker"), "/bin/hearth-worker")
    }

    /// Adds `hearth` as `/bin/hearth`, and the workers that it starts.
    ///
    /// # Panics
    /// When they are not built.
    #[must_use]
    pub fn hearth(self) -> Self {
        self.worker().file(program("hearth"), "/bin/hearth")
    }

    /// Boots, runs a shell script to completion and returns its output. The script stops at its first failure.
    ///
    /// # Panics
    /// When the script fails or the machine does not finish; the message has all output.
    pub fn run(&self, script: &str) -> String {
        let mut command = Command::new(root().join("tests/vm/run.sh"));
        command
            .args(["-m", &self.memory_mib.to_string()])
            .args(["-c", &self.cpus.to_string()])
            .args(["-n", &self.numa_nodes.to_string()])
            .args(["-t", &self.limit_s.to_string()]);
        for (option, list) in [("-f", &self.files), ("-d", &self.disks)] {
            for (path, target) in list {
                let argument = format!("{}={target}", path.display());
                command.args([option, &argument]);
            }
        }
        for module in &self.modules {
            command.args(["-k", module]);
        }
        let directory =
            TempDir::new().unwrap_or_else(|error| panic!("no temporary directory: {error}"));
        for (number, (text, target)) in self.texts.iter().enumerate() {
            let path = directory.path().join(number.to_string());
            std::fs::write(&path, text).unwrap_or_else(|error| panic!("{target}: {error}"));
            command.args(["-f", &format!("{}={target}", path.display())]);
        }
        command.args(["--", "sh", "-euc", script]);
        let Output {
            status,
            stdout,
            stderr,
        } = command
            .output()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let (stdout, stderr) = (text(stdout), text(stderr));
        assert!(status.success(), "{status}\n{stdout}\n{stderr}");
        stdout
    }
}
