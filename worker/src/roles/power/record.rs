//! The owner's limits of GPUs, on disk: whoever comes after a process that was killed finds out what to go back to, and which limits
//! were that process's own.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// Name of the file in its directory.
const FILE: &str = "limits.json";
/// Name of the file that is locked by the process whose record it is.
const LOCK: &str = "lock";

/// GPUs whose limits are not their owners', by UUID.
pub(super) struct Record {
    directory: PathBuf,
    gpus: BTreeMap<String, Lowered>,
    /// Locked for as long as it is open: two processes would take each other's limits for the owner's.
    _lock: File,
}

/// A GPU whose limit was lowered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lowered {
    /// The limit to go back to.
    pub(super) owners_milliwatts: u32,
    /// Limits of this policy, one of which may be in force: the last one, and the one that was about to take its place.
    pub(super) own_milliwatts: Vec<u32>,
}

impl Record {
    /// Reads the record in a directory, which is created if it does not exist, and keeps it from other processes.
    ///
    /// # Errors
    /// The directory cannot be written to: no limit could be lowered without the risk that it stays so. Or another process has it.
    pub(super) fn open(directory: &Path) -> anyhow::Result<Self> {
        let unwritable = || {
            format!(
                "--state-dir is {}, which cannot be written to\n  no limit is lowered without a record of the owner's: name a directory \
                 that this user may write to",
                directory.display()
            )
        };
        std::fs::create_dir_all(directory).with_context(unwritable)?;
        let mut record = Self {
            directory: directory.to_owned(),
            gpus: BTreeMap::new(),
            _lock: lock(
                directory,
                File::create(directory.join(LOCK)).with_context(unwritable)?,
            )?,
        };
        let path = directory.join(FILE);
        match std::fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(gpus) => record.gpus = gpus,
                Err(error) => tracing::warn!(
                    "{} is no record of power limits ({error}): the limits in force are taken for the owner's; where one is too low, \
                     set it with nvidia-smi -i UUID -pl WATTS",
                    path.display()
                ),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("{} cannot be read", path.display()));
            }
        }
        record.write().with_context(unwritable)?;
        Ok(record)
    }

    /// The owner's limit of a GPU, if the one in force was set by an earlier process.
    pub(super) fn owners_milliwatts(&self, uuid: &str, in_force_milliwatts: u32) -> Option<u32> {
        let lowered = self.gpus.get(uuid)?;
        let is_own = lowered.own_milliwatts.contains(&in_force_milliwatts);
        is_own.then_some(lowered.owners_milliwatts)
    }

    /// Keeps what is known of a GPU; `None`: its limit is the owner's. Returns once it is on disk.
    ///
    /// # Errors
    /// It cannot be written; the record on disk is the one before.
    pub(super) fn keep(&mut self, uuid: &str, lowered: Option<Lowered>) -> io::Result<()> {
        if self.gpus.get(uuid) == lowered.as_ref() {
            return Ok(());
        }
        let before = self.gpus.clone();
        match lowered {
            Some(lowered) => drop(self.gpus.insert(uuid.to_owned(), lowered)),
            None => drop(self.gpus.remove(uuid)),
        }
        self.write().inspect_err(|_| self.gpus = before)
    }

    /// Replaces the file as a whole.
    fn write(&self) -> io::Result<()> {
        let (path, new) = (
            self.directory.join(FILE),
            self.directory.join(format!("{FILE}.new")),
        );
        let mut text = serde_json::to_vec_pretty(&self.gpus)?;
        text.push(b'\n');
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        File::open(&self.directory)?.sync_all()
    }
}

/// Locks the file of a directory until it is closed.
fn lock(directory: &Path, file: File) -> anyhow::Result<File> {
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "--state-dir is {}, which another process uses\n  one process sets the power limits of a machine: end the other one first",
            directory.display()
        ),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| {
            format!(
                "--state-dir is {}, where no file can be locked",
                directory.display()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowered(own_milliwatts: &[u32]) -> Option<Lowered> {
        Some(Lowered {
            owners_milliwatts: 450_000,
            own_milliwatts: own_milliwatts.to_vec(),
        })
    }

    #[test]
    fn the_next_process_knows_its_predecessor_s_limits() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("deep/er");
        let mut record = Record::open(&directory).unwrap();
        record.keep("GPU-1", lowered(&[225_000, 270_000])).unwrap();
        let Err(error) = Record::open(&directory) else {
            panic!("two processes have one record");
        };
        let error = error.to_string();
        assert!(error.contains("another process uses"), "{error}");
        drop(record);
        let mut next = Record::open(&directory).unwrap();
        for own in [225_000, 270_000] {
            assert_eq!(next.owners_milliwatts("GPU-1", own), Some(450_000));
        }
        assert_eq!(next.owners_milliwatts("GPU-1", 300_000), None);
        assert_eq!(next.owners_milliwatts("GPU-2", 225_000), None);
        next.keep("GPU-1", None).unwrap();
        drop(next);
        let last = Record::open(&directory).unwrap();
        assert_eq!(last.owners_milliwatts("GPU-1", 225_000), None);
    }

    #[test]
    fn a_file_of_something_else_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE);
        std::fs::write(&file, "limits").unwrap();
        let record = Record::open(directory.path()).unwrap();
        assert_eq!(record.owners_milliwatts("GPU-1", 225_000), None);
        assert_eq!(std::fs::read_to_string(file).unwrap(), "{}\n");
    }

    #[test]
    fn a_directory_that_cannot_be_written_to_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let Err(error) = Record::open(&file.path().join("limits")) else {
            panic!("a file is no directory");
        };
        let error = format!("{error:#}");
        assert!(
            error.contains(&file.path().display().to_string()),
            "{error}"
        );
    }
}
