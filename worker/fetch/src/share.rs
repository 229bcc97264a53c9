//! Files that another model of this machine has: hard links to them stand for downloads.
//!
//! A checksum alone gives nobody a file. Whoever calls this owns all of the cache, or has the file from its source, or was given it by
//! the hub, which says who may have it ([`crate::line::Line::gives`]). And nobody learns what others have: on a node, the other model is
//! the same holder's, or one that everybody may have and see there. A link is verified as a download is, and nothing ever writes to a
//! file that is in its place: one model goes, or is fetched anew, without the other.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use crate::cache::remove_file;
use crate::collect;
use crate::digest::Digest;
use crate::directory::{FILE_MODE, set_mode};
use crate::listing::may_be_needed;
use crate::need::Need;
use crate::progress::Reporter;
use crate::room::Room;
use crate::{FetchError, Owner, blocking};

impl Room {
    /// Files of other complete models that had this SHA-256 when they were verified.
    fn copies(&self, sha256: &str) -> Result<Vec<PathBuf>, FetchError> {
        let mut found = Vec::new();
        let others = self.cache.keys()?.into_iter();
        for key in others.filter(|key| *key != self.key) {
            let (Some(directory), Some(about)) = (self.cache.model(&key), self.cache.about(&key))
            else {
                continue;
            };
            if !self.may_take_from(about.holder.as_deref()) {
                continue;
            }
            let same = about.files.iter().filter(|(_, digits)| *digits == sha256);
            let paths = same
                .map(|(path, _)| path)
                .filter(|path| may_be_needed(path));
            found.extend(paths.map(|path| directory.join(path)));
        }
        Ok(found)
    }

    /// Whether files may be another model's, which is for this holder.
    fn may_take_from(&self, holder: Option<&str>) -> bool {
        match self.options.owner {
            Owner::User => true,
            Owner::Node(_) => match holder {
                Some("") => true,
                Some(holder) => self.holder.as_deref() == Some(holder),
                None => false,
            },
        }
    }
}

/// Whether another model may have the file.
///
/// # Errors
/// [`FetchError::Cache`].
pub(crate) async fn may_have(room: &Arc<Room>, digest: &Digest) -> Result<bool, FetchError> {
    let Digest::Sha256(sha256) = digest.clone() else {
        return Ok(false);
    };
    let room = Arc::clone(room);
    blocking(move || Ok(!room.copies(&sha256)?.is_empty())).await
}

/// Puts a file of another model at `target`, where whatever is there is removed first; returns its length in bytes. `None` if no model
/// has it with the right bytes.
///
/// # Errors
/// [`FetchError::Cache`], [`FetchError::DiskFull`], [`FetchError::NoRoom`].
pub(crate) async fn put(
    room: &Arc<Room>,
    digest: &Digest,
    target: &Path,
    reporter: &Arc<Reporter>,
) -> Result<Option<u64>, FetchError> {
    let Digest::Sha256(sha256) = digest else {
        return Ok(None);
    };
    let (sha256, digest) = (sha256.clone(), digest.clone());
    let (room, target, reporter) = (Arc::clone(room), target.to_owned(), Arc::clone(reporter));
    blocking(move || {
        for from in room.copies(&sha256)? {
            if !link(&from, &target, &room)? {
                continue;
            }
            if let Some(bytes) = collect::there(&target, None, &digest, &reporter)? {
                room.shared_bytes.fetch_add(bytes, Ordering::Relaxed);
                tracing::info!(
                    model = room.shown,
                    sha256,
                    bytes,
                    "another model has the file"
                );
                return Ok(Some(bytes));
            }
            let path = from.display();
            tracing::warn!("{path} is not what it was when it was verified: check its disk");
        }
        Ok(None)
    })
    .await
}

/// Links a file to its second place, or copies it where the file system has no such links; `false` if it is gone.
fn link(from: &Path, target: &Path, room: &Room) -> Result<bool, FetchError> {
    let Ok(metadata) = fs::symlink_metadata(from) else {
        return Ok(false);
    };
    if !metadata.is_file() {
        return Ok(false);
    }
    // First: what is there may be another model's file.
    remove_file(target)?;
    if let Some(directory) = target.parent() {
        fs::create_dir_all(directory).map_err(FetchError::in_cache(directory))?;
    }
    match fs::hard_link(from, target) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => tracing::info!("{} is copied: {error}", from.display()),
    }
    let bytes = metadata.len();
    let what = format!("{} MiB to copy from another model", bytes.div_ceil(1 << 20));
    room.make(Need::of_unpacked(bytes), &what, SystemTime::now())?;
    let failed = FetchError::in_cache(target);
    match fs::copy(from, target) {
        Ok(_) => {}
        // The other model went.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            remove_file(target)?;
            return Ok(false);
        }
        Err(error) => return Err(failed(error)),
    }
    set_mode(target, FILE_MODE)?;
    File::open(target)
        .and_then(|file| file.sync_data())
        .map_err(&failed)?;
    Ok(true)
}
