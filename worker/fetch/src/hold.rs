//! Whether a model is in use: whoever maps its files holds its directory, and what is held is not removed.
//!
//! A hold is a shared lock of the directory itself (`flock`). It needs no right to write, reaches across containers of one
//! machine, and ends with the process.

use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// Attempts to hold a directory: whoever lists the store has each model alone for a moment.
const ATTEMPTS: u32 = 100;
/// Wait between two of them.
const PAUSE: Duration = Duration::from_millis(10);

/// A model's directory in use, until it is dropped.
#[derive(Debug)]
pub struct Hold {
    _directory: File,
}

impl Hold {
    /// Holds a directory; blocks for a second at most. `None` if it cannot be held: it is being removed, or its file system
    /// has no locks.
    pub fn take(directory: &Path) -> Option<Self> {
        let Ok(opened) = File::open(directory) else {
            return None;
        };
        for _ in 0..ATTEMPTS {
            match opened.try_lock_shared() {
                Ok(()) => return Some(Self { _directory: opened }),
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) => {
                    tracing::debug!("{} is not held: {error}", directory.display());
                    return None;
                }
            }
        }
        tracing::warn!("{} is being removed", directory.display());
        None
    }
}

/// Whether anyone holds the directory.
pub(crate) fn is_held(directory: &Path) -> bool {
    matches!(exclusive(directory), Exclusive::Held)
}

/// Attempt to have a directory alone.
pub(crate) enum Exclusive {
    /// Nobody holds it, and nobody can until this is dropped. `None`: it is not there, or has no locks.
    Free(Option<File>),
    /// Somebody holds it.
    Held,
}

/// Keeps everybody from holding the directory, unless somebody does.
pub(crate) fn exclusive(directory: &Path) -> Exclusive {
    let opened = match File::open(directory) {
        Ok(opened) => opened,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::debug!("{}: {error}", directory.display());
            }
            return Exclusive::Free(None);
        }
    };
    match opened.try_lock() {
        Ok(()) => Exclusive::Free(Some(opened)),
        Err(TryLockError::WouldBlock) => Exclusive::Held,
        Err(TryLockError::Error(error)) => {
            tracing::debug!("{} cannot be locked: {error}", directory.display());
            Exclusive::Free(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_hold_a_directory_and_nobody_has_it_alone_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (one, two) = (Hold::take(path).unwrap(), Hold::take(path).unwrap());
        drop(one);
        assert!(is_held(path));
        drop(two);
        let alone = exclusive(path);
        assert!(matches!(alone, Exclusive::Free(Some(_))));
        assert!(Hold::take(path).is_none());
        drop(alone);
        assert!(Hold::take(path).is_some());
        assert!(!is_held(&path.join("missing")));
    }
}
