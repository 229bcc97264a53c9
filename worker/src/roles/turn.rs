//! The order in which workers on one machine map its weights. A worker whose memory limit has room for them comes
//! first. If the plan assigns the weights to NUMA nodes, only one of those maps them at a time, since pages are
//! allocated where they are first touched.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_crds::{PlanRank, ResidencyPolicy, format_bytes};
use hearth_residency::{Held, WeightFile};

/// Time between two checks by a waiting worker.
const LOOK_PERIOD: Duration = Duration::from_millis(200);
/// Time between two log messages of a waiting worker.
const TELL_PERIOD: Duration = Duration::from_secs(30);
/// Longest wait if there is no worker with room at all. After it, the worker maps the weights in spite of its limit:
/// on a file system that does not share locks, it would wait forever.
const PATIENCE: Duration = Duration::from_secs(600);
/// Time within which a worker with the claim on the weights must signal that it reads them.
const CLAIM_PATIENCE: Duration = Duration::from_secs(2);
/// Tolerance for limits, which are rounded down to whole pages.
const ROUNDING_BYTES: u64 = 64 << 10;
/// File system type of an overlay, from `statfs`: for files in images, on which every container has separate locks.
const OVERLAY: u64 = 0x794c_7630;

/// A worker's turn to map the weights. While it lives, other workers know that they are in memory or being read.
pub(super) struct Turn {
    file: Option<WeightFile>,
}

impl Turn {
    /// Waits until it is this rank's turn, calling `waits` repeatedly in the meantime. `limit_bytes` is the memory
    /// limit of its control group; without a limit it has room. `is_placed`: whether the plan assigns the rank's
    /// memory to NUMA nodes.
    pub(super) fn take(
        directory: &Path,
        rank: &PlanRank,
        limit_bytes: Option<u64>,
        is_placed: bool,
        waits: &dyn Fn(),
    ) -> Self {
        let opened = open(directory).filter(|_| maps_all(rank));
        let Some(file) = opened else {
            return Self { file: None };
        };
        let has_room =
            limit_bytes.is_none_or(|limit| limit.saturating_add(ROUNDING_BYTES) >= needs(rank));
        if has_room {
            if is_placed {
                wait_for_placing(&file, &rank.name, waits);
            }
            if let Err(error) = file.say_loading() {
                tracing::debug!(%error, "cannot tell other workers about the weights");
            }
            return Self { file: Some(file) };
        }
        wait(&file, rank, limit_bytes.unwrap_or(u64::MAX), waits);
        Self { file: None }
    }

    /// Whether no other worker has mapped the weights or is about to, so that pages dropped from the page cache are
    /// really gone.
    pub(super) fn is_alone(&self) -> bool {
        let file = self.file.as_ref();
        file.is_some_and(|file| {
            matches!(file.claim(), Ok(true)) && matches!(file.held(), Ok(Held::Nowhere))
        })
    }

    /// Signals that all weights are in memory, so the next worker may place its own. Releases the locks that could get
    /// in the way of another machine or of a process that replaces the file.
    pub(super) fn loaded(&self) {
        let Some(file) = &self.file else {
            return;
        };
        if let Err(error) = file.say_loaded() {
            tracing::debug!(%error, "cannot tell other workers about the weights");
        }
        if let Err(error) = file.release_claim() {
            tracing::debug!(%error, "the claim on the weights is kept until this worker ends");
        }
    }
}

/// Waits while another worker reads the weights: it places them as its plan says, and both use them there.
fn wait_for_placing(file: &WeightFile, rank: &str, waits: &dyn Fn()) {
    let mut heard = Instant::now();
    let mut has_told = false;
    while matches!(file.claim(), Ok(false)) {
        match file.held() {
            Ok(Held::Loading) => heard = Instant::now(),
            // The holder of the claim is about to signal that it loads, or is not one of our workers.
            Ok(Held::Nowhere) if heard.elapsed() < CLAIM_PATIENCE => {}
            Ok(Held::Nowhere | Held::Loaded) | Err(_) => return,
        }
        if !std::mem::replace(&mut has_told, true) {
            tracing::info!(
                rank,
                "waiting while another worker reads the weights into memory"
            );
        }
        waits();
        std::thread::sleep(LOOK_PERIOD);
    }
}

fn wait(file: &WeightFile, rank: &PlanRank, limit_bytes: u64, waits: &dyn Fn()) {
    let mut told: Option<Instant> = None;
    let mut alone_since = Instant::now();
    loop {
        match file.held() {
            Ok(Held::Loaded) => return,
            Ok(Held::Loading) => alone_since = Instant::now(),
            Ok(Held::Nowhere) => {}
            Err(error) => {
                tracing::debug!(%error, "cannot find out whether other workers have the weights");
                return;
            }
        }
        if alone_since.elapsed() >= PATIENCE {
            tracing::warn!(
                rank = rank.name,
                "no worker with room for the weights has come: they are mapped although the memory limit is too small for them, and will be read again and again"
            );
            return;
        }
        if told.is_none_or(|told| told.elapsed() >= TELL_PERIOD) {
            tracing::info!(
                rank = rank.name,
                limit = format_bytes(limit_bytes),
                needed = format_bytes(needs(rank)),
                "waiting until a worker whose memory limit has room for the weights has read them"
            );
            told = Some(Instant::now());
        }
        waits();
        std::thread::sleep(LOOK_PERIOD);
    }
}

/// Whether the rank keeps all weights that its CPUs compute with mapped in this machine's memory.
fn maps_all(rank: &PlanRank) -> bool {
    rank.residency
        .as_ref()
        .is_some_and(|residency| match residency.policy {
            ResidencyPolicy::Resident => !rank.is_on_gpu(),
            ResidencyPolicy::HostExperts => residency.host_budget_bytes.is_none(),
            ResidencyPolicy::MmapPrefetch | ResidencyPolicy::StreamLoading => false,
        })
}

/// Memory that the rank needs on the host, including the weights, in bytes.
fn needs(rank: &PlanRank) -> u64 {
    let sum = rank
        .host_weight_bytes()
        .saturating_add(rank.host_kv_bytes());
    sum.saturating_add(rank.scratch_bytes)
}

/// Opens the first weights file, if the processes of a machine see each other's locks on it.
fn open(directory: &Path) -> Option<WeightFile> {
    let entries = std::fs::read_dir(directory).ok()?.flatten();
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|ext| ext == "safetensors");
    let path = entries.map(|entry| entry.path()).filter(is_weights).min()?;
    let overlay = rustix::fs::statfs(&path).is_ok_and(|fs| fs.f_type as u64 == OVERLAY);
    if overlay {
        return None;
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    WeightFile::open(&path, &whose(boot.trim(), directory)?).ok()
}

/// Identifies this boot of this machine and the model: models may have files in common, but each has a directory of its own.
fn whose(boot: &str, directory: &Path) -> Option<String> {
    let inode = std::fs::metadata(directory).ok()?.ino();
    Some(format!("{boot} {inode}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Two revisions of a model may have a weights file in common.
    #[test]
    fn models_with_one_file_do_not_see_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let directory = |name: &str| {
            let directory = folder.path().join(name);
            std::fs::create_dir(&directory).unwrap();
            directory
        };
        let [old, new] = ["old", "new"].map(directory);
        std::fs::write(old.join("model.safetensors"), b"weights").unwrap();
        std::fs::hard_link(old.join("model.safetensors"), new.join("model.safetensors")).unwrap();
        let Some(loaded) = open(&old) else {
            eprintln!("SKIPPED: {} is an overlay", old.display());
            return;
        };
        loaded.say_loaded().unwrap();
        assert_eq!(open(&old).unwrap().held().unwrap(), Held::Loaded);
        assert_eq!(open(&new).unwrap().held().unwrap(), Held::Nowhere);
    }

    #[test]
    fn one_worker_reads_the_weights_and_others_wait_until_it_has_or_is_gone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || WeightFile::open(file.path(), "boot").unwrap();
        for loads in [true, false] {
            let file = open();
            wait_for_placing(&file, "prefill-0", &|| {
                panic!("there is nobody to wait for")
            });
            file.say_loading().unwrap();
            let mut first = Turn { file: Some(file) };
            assert!(first.is_alone());
            let second = open();
            let (waits, waited) = mpsc::channel();
            let waiting = thread::spawn(move || {
                wait_for_placing(&second, "decode-0", &|| waits.send(()).unwrap());
                second
            });
            for _ in 0..3 {
                waited.recv_timeout(Duration::from_secs(20)).unwrap();
            }
            if loads {
                first.loaded();
            } else {
                drop(first.file.take());
            }
            let second = waiting.join().unwrap();
            assert!(
                second.claim().unwrap(),
                "the first has done, and keeps the file from nobody"
            );
            assert!(!open().claim().unwrap(), "the second has it now");
            let second = Turn { file: Some(second) };
            assert_eq!(second.is_alone(), !loads, "the first one's weights");
        }
    }

    /// A directory of weights; `None`, said on stderr, where processes do not see each other's locks.
    fn weights() -> Option<tempfile::TempDir> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("model.safetensors"), "weights").unwrap();
        let opened = open(directory.path());
        if opened.is_none() {
            // Bypasses the test harness, which shows output only of failed tests.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: temporary files are on an overlay"
            );
        }
        opened.map(|_| directory)
    }

    /// A rank whose dense modules are on a GPU; its experts, of 100 bytes, are read from the node's memory.
    fn rank_on_gpu(name: &str, policy: &str) -> PlanRank {
        let json = serde_json::json!({
            "name": name, "role": "Decode", "index": 0, "node": "office", "cpus": [0], "numaNodes": [0],
            "threads": 1, "pinning": "Exclusive", "device": "GPU-0", "gpuUuids": ["GPU-0"], "maxBatch": 1,
            "chunkTokens": 1, "scratchBytes": 5,
            "residency": {"policy": policy, "weightBytes": 120, "budgetBytes": 20, "hostBytes": 100},
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn ranks_whose_experts_are_on_the_host_take_turns_to_place_them() {
        let Some(directory) = weights() else {
            return;
        };
        let take = |name: &str, policy: &str, waits: &dyn Fn()| {
            let rank = rank_on_gpu(name, policy);
            Turn::take(directory.path(), &rank, None, true, waits)
        };
        let nobody = || panic!("there is nobody to wait for");
        // What is copied to a GPU has no place on the host.
        for policy in ["Resident", "StreamLoading"] {
            assert!(take("prefill-0", policy, &nobody).file.is_none());
        }
        let first = take("decode-0", "HostExperts", &nobody);
        assert!(first.is_alone());
        thread::scope(|scope| {
            let (waits, waited) = mpsc::channel();
            let second = scope.spawn(move || {
                let turn = take("decode-1", "HostExperts", &|| waits.send(()).unwrap());
                (turn.is_alone(), turn.file.is_some())
            });
            for _ in 0..3 {
                waited.recv_timeout(Duration::from_secs(20)).unwrap();
            }
            assert!(!second.is_finished());
            first.loaded();
            let (is_alone, has_file) = second.join().unwrap();
            assert!(has_file && !is_alone, "the first one has placed them");
        });
    }

    #[test]
    fn a_rank_without_room_for_the_experts_waits_until_another_has_read_them() {
        let Some(directory) = weights() else {
            return;
        };
        let rank = rank_on_gpu("decode-0", "HostExperts");
        assert_eq!(needs(&rank), 105, "experts and scratch, no dense modules");
        let (waits, waited) = mpsc::channel();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let waits = || waits.send(()).unwrap();
                wait(open(directory.path()).as_ref().unwrap(), &rank, 104, &waits);
            });
            for _ in 0..2 {
                waited.recv_timeout(Duration::from_secs(20)).unwrap();
            }
            assert!(!waiting.is_finished());
            let other = open(directory.path()).unwrap();
            other.say_loaded().unwrap();
            waiting.join().unwrap();
        });
    }
}
