//! Directories of models: built beside their place, and put there by one rename.

use std::collections::BTreeSet;
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

/// Total size of all files below a directory in bytes, each counted once however many names it has; what cannot be read
/// counts nothing.
pub(crate) fn bytes_below(directory: &Path) -> u64 {
    let mut bytes = 0;
    let mut linked = BTreeSet::new();
    let mut directories: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => directories.push(entry.path()),
                Ok(metadata) if metadata.nlink() > 1 && !linked.insert(metadata.ino()) => {}
                Ok(metadata) => bytes += metadata.len(),
                Err(_) => {}
            }
        }
    }
    bytes
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
