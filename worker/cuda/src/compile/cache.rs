//! Compiled kernels on disk.
//!
//! A file is `magic, SHA-256 of its key and the cubin, cubin`: one that is truncated, damaged or stored under another
//! key does not match, and is recompiled and replaced.
//! Files are written to a temporary name and renamed, so that two workers that compile at once do not interfere.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use hearth_kernels::KernelError;
use sha2::{Digest, Sha256};

use crate::driver::fault;

const MAGIC: &[u8; 8] = b"HEARTHK1";
const HASH_BYTES: usize = 32;

/// Directories of compiled kernels: all are read, the last one is written.
pub(super) struct Cache {
    directories: Vec<PathBuf>,
}

impl Cache {
    pub(super) fn new(directories: Vec<PathBuf>) -> Self {
        Self { directories }
    }

    /// Returns the cubin for this key, if a directory has it intact.
    pub(super) fn read(&self, key: &str) -> Option<Vec<u8>> {
        self.directories.iter().find_map(|directory| {
            let path = file(directory, key);
            let stored = fs::read(&path).ok()?;
            let cubin = unwrap(key, &stored);
            if cubin.is_none() {
                tracing::warn!(path = %path.display(), "a cached kernel is damaged and will be recompiled");
            }
            cubin
        })
    }

    /// Stores a cubin.
    ///
    /// # Errors
    /// [`KernelError::Device`] naming the file that could not be written.
    pub(super) fn write(&self, key: &str, cubin: &[u8]) -> Result<(), KernelError> {
        let Some(directory) = self.directories.last() else {
            return Ok(());
        };
        let path = file(directory, key);
        let written = fs::create_dir_all(directory).and_then(|()| replace(&path, key, cubin));
        written.map_err(|error| {
            fault(format!(
                "{} cannot be written: {error}\n  name a directory that can be with --kernel-cache",
                path.display()
            ))
        })
    }
}

fn file(directory: &Path, key: &str) -> PathBuf {
    directory.join(format!("{key}.cubin"))
}

fn replace(path: &Path, key: &str, cubin: &[u8]) -> std::io::Result<()> {
    let beside = path.with_extension(format!(
        "{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let mut file = fs::File::create(&beside)?;
    file.write_all(MAGIC)?;
    file.write_all(&digest(key, cubin))?;
    file.write_all(cubin)?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

/// Extracts the cubin from an intact file.
fn unwrap(key: &str, stored: &[u8]) -> Option<Vec<u8>> {
    let rest = stored.strip_prefix(MAGIC)?;
    let (hash, cubin) = rest.split_at_checked(HASH_BYTES)?;
    (digest(key, cubin) == hash).then(|| cubin.to_vec())
}

fn digest(key: &str, cubin: &[u8]) -> [u8; HASH_BYTES] {
    let mut hash = Sha256::new();
    hash.update(key);
    hash.update(cubin);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let directory =
            std::env::temp_dir().join(format!("hearth-kernels-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        directory
    }

    #[test]
    fn a_half_written_file_is_as_good_as_none() {
        let directory = scratch("half");
        let cache = Cache::new(vec![directory.clone()]);
        assert_eq!(cache.read("k"), None);
        cache.write("k", b"some machine code").unwrap();
        assert_eq!(cache.read("k").unwrap(), b"some machine code");
        let whole = fs::read(file(&directory, "k")).unwrap();
        for len in [0, 5, 8, 39, 40, whole.len() - 1] {
            fs::write(file(&directory, "k"), &whole[..len]).unwrap();
            assert_eq!(cache.read("k"), None, "{len} bytes");
        }
        let mut flipped = whole;
        flipped[45] ^= 1;
        fs::write(file(&directory, "k"), flipped).unwrap();
        assert_eq!(cache.read("k"), None);
        cache.write("other", b"another kernel").unwrap();
        fs::copy(file(&directory, "other"), file(&directory, "k")).unwrap();
        assert_eq!(cache.read("k"), None, "another kernel in its place");
        cache.write("k", b"again").unwrap();
        assert_eq!(cache.read("k").unwrap(), b"again");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn all_directories_are_read_and_the_last_is_written() {
        let (image, home) = (scratch("image"), scratch("home"));
        Cache::new(vec![image.clone()]).write("a", b"1").unwrap();
        let cache = Cache::new(vec![image.clone(), home.clone()]);
        cache.write("b", b"2").unwrap();
        assert_eq!(cache.read("a").unwrap(), b"1");
        assert!(file(&home, "b").exists() && !file(&image, "b").exists());
        fs::remove_dir_all(image).unwrap();
        fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named() {
        let blocked = scratch("blocked");
        fs::write(&blocked, "a file").unwrap();
        let error = Cache::new(vec![blocked.clone()])
            .write("k", b"1")
            .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(&*blocked.to_string_lossy()) && text.contains("--kernel-cache"),
            "{text}"
        );
        fs::remove_file(blocked).unwrap();
    }
}
