//! Files that are verified one by one and collected in a directory beside the model's place, until one rename puts it there.
//! A later fetch checks what an earlier one collected and goes on from there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::cache::{About, remove_directory, remove_file};
use crate::digest::Digest;
use crate::directory::{make_directory, put};
use crate::listing::HubFile;
use crate::lock::Lock;
use crate::progress::Reporter;
use crate::{Cache, FetchError, Key, Phase, blocking};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Makes the directory, unless an earlier fetch has.
///
/// # Errors
/// [`FetchError::Cache`].
pub(crate) async fn begin(directory: &Path) -> Result<(), FetchError> {
    let made = directory.to_owned();
    blocking(move || match made.is_dir() {
        true => Ok(()),
        false => make_directory(&made),
    })
    .await
}

/// A model whose files are all there.
pub(crate) struct Collected {
    pub(crate) cache: Cache,
    pub(crate) key: Key,
    /// Paths of its files.
    pub(crate) names: BTreeSet<PathBuf>,
    pub(crate) about: About,
    pub(crate) lock: Arc<Lock>,
}

impl Collected {
    /// Puts the directory in place, without what an earlier fetch of other files left in it.
    ///
    /// # Errors
    /// [`FetchError::Cache`], [`FetchError::DiskFull`].
    pub(crate) async fn put(self) -> Result<PathBuf, FetchError> {
        let Self {
            cache,
            key,
            names,
            about,
            lock,
        } = self;
        let (temporary, target) = (cache.unpacking(&key), cache.directory(&key));
        blocking(move || {
            keep_only(&temporary, Path::new(""), &names)?;
            remove_file(&cache.part(&key))?;
            remove_file(&cache.part_facts(&key))?;
            cache.note_about(&key, &about)?;
            // From here on its bytes are elsewhere.
            lock.promise_nothing();
            put(&temporary, &target)?;
            cache.forget_begun(&key)?;
            cache.note_use(&key, SystemTime::now());
            lock.remove();
            tracing::info!(
                model = about.source,
                commit = about.commit,
                directory = %target.display(),
                "model put in place"
            );
            Ok(target)
        })
        .await
    }
}

/// SHA-256 of the files that have one, by their paths.
pub(crate) fn sha256_by_path(files: &[HubFile]) -> BTreeMap<String, String> {
    let named = files.iter().filter_map(|file| match &file.digest {
        Digest::Sha256(digits) => Some((file.path.clone(), digits.clone())),
        Digest::GitBlob { .. } => None,
    });
    named.collect()
}

/// Length of a file that is there with the right bytes; removes another. `bytes` is its length, where that is known.
///
/// # Errors
/// [`FetchError::Cache`].
pub(crate) fn there(
    path: &Path,
    bytes: Option<u64>,
    digest: &Digest,
    reporter: &Reporter,
) -> Result<Option<u64>, FetchError> {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return Ok(None);
    };
    if metadata.is_dir() {
        remove_directory(path)?;
        return Ok(None);
    }
    let found_bytes = metadata.len();
    let is_long_enough = bytes.is_none_or(|bytes| bytes == found_bytes);
    let is_same = metadata.is_file() && is_long_enough && {
        let mut hasher = digest.hasher();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut file = File::open(path).map_err(FetchError::in_cache(path))?;
        let mut read_bytes = 0;
        loop {
            match file.read(&mut chunk).map_err(FetchError::in_cache(path))? {
                0 => break hasher.digits() == digest.digits(),
                read => {
                    hasher.update(&chunk[..read]);
                    read_bytes += read as u64;
                    reporter.tell(Phase::Checking, read_bytes, Some(found_bytes));
                }
            }
        }
    };
    if !is_same {
        remove_file(path)?;
    }
    Ok(is_same.then_some(found_bytes))
}

/// Removes all files below `top` that are not named; `inside` is the path within it.
///
/// # Errors
/// [`FetchError::Cache`].
pub(crate) fn keep_only(
    top: &Path,
    inside: &Path,
    names: &BTreeSet<PathBuf>,
) -> Result<(), FetchError> {
    let directory = top.join(inside);
    let failed = FetchError::in_cache(&directory);
    for entry in fs::read_dir(&directory).map_err(&failed)? {
        let entry = entry.map_err(&failed)?;
        let path = inside.join(entry.file_name());
        let is_directory = entry.file_type().map_err(&failed)?.is_dir();
        let is_above = names.iter().any(|name| name.starts_with(&path));
        match (is_directory, is_above) {
            (true, true) => keep_only(top, &path, names)?,
            (true, false) => remove_directory(&entry.path())?,
            (false, _) if names.contains(&path) => {}
            (false, _) => remove_file(&entry.path())?,
        }
    }
    Ok(())
}
