//! Control groups of a test, made directly in this machine's v1 hierarchies and removed at the end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const ROOT: &str = "/sys/fs/cgroup";
/// Longest wait to remove a group, whose last process may have only just ended.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A group of one v1 controller.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Returns the reason that v1 groups of `controller` are unavailable here, or `None`. A skipped test prints it.
    pub fn unavailable(controller: &str) -> Option<String> {
        let file = Path::new(ROOT).join(controller).join("cgroup.procs");
        if !file.exists() {
            return Some(format!("there is no cgroup v1 hierarchy of {controller}"));
        }
        let is_root = rustix::process::geteuid().is_root();
        (!is_root).then(|| "groups are made by root".to_owned())
    }

    /// Creates a group below the one that this process is in.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn new(controller: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "hearth-tests-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = Path::new(ROOT)
            .join(controller)
            .join(own(controller))
            .join(name);
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let group = Self { path };
        if controller == "cpuset" {
            // A new cpuset is empty, and an empty one accepts no process.
            let above = group.path.parent().unwrap_or(Path::new(ROOT));
            for file in ["cpuset.mems", "cpuset.cpus"] {
                let text = std::fs::read_to_string(above.join(file)).unwrap_or_default();
                group.write(file, text.trim());
            }
        }
        group
    }

    /// Returns its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one of its files.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn write(&self, file: &str, text: &str) {
        let path = self.path.join(file);
        std::fs::write(&path, text)
            .unwrap_or_else(|error| panic!("{text:?} to {}: {error}", path.display()));
    }

    /// Moves the threads of a process that have such names here; the others stay where they are.
    ///
    /// # Panics
    /// When there is none, or the kernel refuses.
    pub fn take_threads(&self, pid: u32, is_taken: impl Fn(&str) -> bool) {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap_or_else(|error| panic!("threads of process {pid}: {error}"));
        let threads: Vec<PathBuf> = threads.flatten().map(|thread| thread.path()).collect();
        let name = |thread: &Path| std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        let taken = threads
            .iter()
            .filter(|thread| is_taken(name(thread).trim()));
        let taken: Vec<_> = taken.filter_map(|thread| thread.file_name()).collect();
        assert!(!taken.is_empty(), "process {pid} has no such thread");
        for thread in taken {
            self.write("tasks", &thread.to_string_lossy());
        }
    }

    /// Reads one of its files.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn read(&self, file: &str) -> String {
        let path = self.path.join(file);
        std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            .trim()
            .to_owned()
    }

    /// Returns a value in `memory.stat`; 0 if it is missing.
    pub fn stat(&self, name: &str) -> u64 {
        let text = self.read("memory.stat");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVE_TIMEOUT;
        while let Err(error) = std::fs::remove_dir(&self.path) {
            if Instant::now() > deadline {
                eprintln!("{} stays: {error}", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns the path of this process's group in a v1 hierarchy, without the leading slash.
fn own(controller: &str) -> String {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == controller)
            .then_some(path)
    });
    let path = path.unwrap_or_default().trim_matches('/').to_owned();
    // In a container the mount may already be the group.
    match Path::new(ROOT).join(controller).join(&path).is_dir() {
        true => path,
        false => String::new(),
    }
}
