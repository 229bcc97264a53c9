//! Lock of a key: one fetch at a time, across all processes of a machine.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::FetchError;

/// A held lock, until it is dropped; the system releases it when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

/// What a fetch of several files is going to write, so that others leave it the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    /// Bytes of all files.
    pub(crate) whole_bytes: u64,
    /// Bytes of the longest that is still to come.
    pub(crate) longest_bytes: u64,
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
                // What the previous holder promised.
                file.set_len(0).map_err(&failed)?;
                return Ok(Some(Self {
                    path: path.to_owned(),
                    file,
                }));
            }
        }
    }

    /// Whether another process or handle holds the lock of that file.
    pub(crate) fn is_held(path: &Path) -> bool {
        File::open(path)
            .is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Tells others what the fetch that holds the lock is going to write.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the file cannot be written.
    pub(crate) fn promise(&self, promise: Promise) -> Result<(), FetchError> {
        // At one length, so that a reader sees all digits or none.
        let text = format!("{:020} {:020}", promise.whole_bytes, promise.longest_bytes);
        let written = self.file.write_all_at(text.as_bytes(), 0);
        written.map_err(FetchError::in_cache(&self.path))
    }

    /// Takes the promise back. One that stays costs others room until the lock is released.
    pub(crate) fn promise_nothing(&self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }

    /// What the holder of a lock has promised; `None` if it has not, or nobody holds it.
    pub(crate) fn promised(path: &Path) -> Option<Promise> {
        let text = fs::read_to_string(path).ok()?;
        // Earlier versions wrote the first number alone.
        let (whole, longest) = text.split_once(' ').unwrap_or((&text, "0"));
        let promise = Promise {
            whole_bytes: whole.parse().ok()?,
            longest_bytes: longest.parse().ok()?,
        };
        Self::is_held(path).then_some(promise)
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
        assert!(Lock::is_held(&path));
        assert_eq!(Lock::promised(&path), None);
        let promise = Promise {
            whole_bytes: 70_000,
            longest_bytes: 40_000,
        };
        first.promise(promise).unwrap();
        assert_eq!(Lock::promised(&path), Some(promise));
        fs::write(&path, format!("{:020}", 70_000)).unwrap();
        let whole = Lock::promised(&path).map(|it| it.whole_bytes);
        assert_eq!(whole, Some(70_000), "an earlier version's");
        first.remove();
        assert!(!Lock::is_held(&path));
        // The name is free again: a second lock is on another file.
        let second = Lock::try_acquire(&path).unwrap().unwrap();
        drop(first);
        assert!(Lock::try_acquire(&path).unwrap().is_none());
        second.promise(promise).unwrap();
        drop(second);
        assert_eq!(Lock::promised(&path), None);
        let _third = Lock::try_acquire(&path).unwrap().unwrap();
        assert_eq!(Lock::promised(&path), None, "the second one's");
    }
}
