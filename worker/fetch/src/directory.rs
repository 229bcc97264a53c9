//! Directories of models: built beside their place, and put there by one rename.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::FetchError;

/// Readable by every worker, writable by its owner.
pub(crate) const FILE_MODE: u32 = 0o644;
pub(crate) const DIRECTORY_MODE: u32 = 0o755;

/// Puts a complete directory in its place, on the disk too.
///
/// # Errors
/// [`FetchError::Cache`], [`FetchError::DiskFull`].
pub(crate) fn put(directory: &Path, target: &Path) -> Result<(), FetchError> {
    sync_directories(directory)?;
    fs::rename(directory, target).map_err(FetchError::in_cache(target))?;
    match target.parent() {
        Some(models) => sync(models),
        None => Ok(()),
    }
}

/// Writes a file at once: after a crash it has its old content or the new one.
///
/// # Errors
/// [`FetchError::Cache`], [`FetchError::DiskFull`].
pub(crate) fn replace(path: &Path, temporary: &Path, content: &[u8]) -> Result<(), FetchError> {
    File::create(temporary)
        .and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(temporary, path))
        .map_err(FetchError::in_cache(path))?;
    path.parent().map_or(Ok(()), sync)
}

/// A file of this machine, whatever its names: device and number.
pub(crate) type Inode = (u64, u64);

/// Sizes of the files below directories, each counted once however many names it has; what cannot be read counts nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contents {
    /// Bytes of files with one name.
    pub(crate) bytes: u64,
    /// Bytes of each file with several, which may be elsewhere.
    pub(crate) linked: BTreeMap<Inode, u64>,
}

impl Contents {
    /// Of what is below these directories.
    pub(crate) fn of(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        let mut contents = Self::default();
        let mut directories: Vec<PathBuf> = directories.into_iter().collect();
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                match entry.metadata() {
                    Ok(metadata) if metadata.is_dir() => directories.push(entry.path()),
                    Ok(metadata) if metadata.nlink() > 1 => {
                        let inode = (metadata.dev(), metadata.ino());
                        contents.linked.insert(inode, metadata.len());
                    }
                    Ok(metadata) => contents.bytes += metadata.len(),
                    Err(_) => {}
                }
            }
        }
        contents
    }

    /// Of both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.bytes += other.bytes;
        self.linked.extend(other.linked);
        self
    }

    /// Bytes of all of them.
    pub(crate) fn sum_bytes(&self) -> u64 {
        self.bytes + self.linked.values().sum::<u64>()
    }
}

/// Total size in bytes of all files below a directory.
pub(crate) fn bytes_below(directory: &Path) -> u64 {
    Contents::of([directory.to_owned()]).sum_bytes()
}

pub(crate) fn make_directory(path: &Path) -> Result<(), FetchError> {
    fs::create_dir(path).map_err(FetchError::in_cache(path))?;
    set_mode(path, DIRECTORY_MODE)
}

pub(crate) fn set_mode(path: &Path, mode: u32) -> Result<(), FetchError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(FetchError::in_cache(path))
}

/// Syncs the directories bottom-up: file names reach the disk before their directory is renamed.
fn sync_directories(directory: &Path) -> Result<(), FetchError> {
    let failed = FetchError::in_cache(directory);
    for entry in fs::read_dir(directory).map_err(&failed)? {
        let entry = entry.map_err(&failed)?;
        if entry.file_type().map_err(&failed)?.is_dir() {
            sync_directories(&entry.path())?;
        }
    }
    sync(directory)
}

pub(crate) fn sync(directory: &Path) -> Result<(), FetchError> {
    File::open(directory)
        .and_then(|opened| opened.sync_all())
        .map_err(FetchError::in_cache(directory))
}
