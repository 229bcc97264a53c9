//! Lock of a key: one fetch at a time, across all processes of a machine.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::FetchError;

/// A held lock, until it is dropped; the system releases it when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

impl Lock {
    /// Takes the lock; `None` if another process or handle holds it.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the file cannot be created.
    pub(crate) fn try_acquire(path: &Path) -> Result<Option<Self>, FetchError> {
        let failed = FetchError::in_cache(path);
        loop {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path)
                .map_err(&failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(reason)) => return Err(failed(reason)),
            }
            // The previous holder may have removed the file between our open and our lock: then ours locks nothing.
            let ours = file.metadata().map_err(&failed)?;
            if fs::metadata(path)
                .is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
            {
                return Ok(Some(Self {
                    path: path.to_owned(),
                    _file: file,
                }));
            }
        }
    }

    /// Removes the file: from then on, others lock a new one.
    pub(crate) fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_lock_locks_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lock");
        let first = Lock::try_acquire(&path).unwrap().unwrap();
        assert!(Lock::try_acquire(&path).unwrap().is_none());
        first.remove();
        // The name is free again: a second lock is on another file.
        let second = Lock::try_acquire(&path).unwrap().unwrap();
        drop(first);
        assert!(Lock::try_acquire(&path).unwrap().is_none());
        drop(second);
        assert!(Lock::try_acquire(&path).unwrap().is_some());
    }
}
