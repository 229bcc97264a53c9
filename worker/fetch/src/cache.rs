//! Directory of models and of parts of archives.
//!
//! ```text
//! DIR/models/KEY/              a complete model, put there by one rename
//! DIR/models/.unpack-KEY/      being unpacked, or collected file by file
//! DIR/models/.remove-KEY/      being removed
//! DIR/models/.about-KEY        what the model is; its mtime: when it was last used
//! DIR/models/.pinned-KEY       the model stays until a person removes this
//! DIR/partial/KEY.part         the downloaded part of an archive, or of one file
//! DIR/partial/KEY.json         facts about the file that the part belongs to
//! DIR/partial/KEY.begun        what is being fetched, or was until it was cut off
//! DIR/partial/KEY.lock         held by the process that fetches
//! DIR/partial/KEY.tries        the record of earlier tries
//! DIR/partial/KEY.used         its mtime: when a model without .about-KEY was last used
//! DIR/partial/room.lock        held by the process that makes room
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::directory::{bytes_below, replace};
use crate::hold::{self, Exclusive};
use crate::lock::Lock;
use crate::need::Need;
use crate::{FetchError, Key, part};

const UNPACK: &str = ".unpack-";
const REMOVE: &str = ".remove-";
const ABOUT: &str = ".about-";
const PINNED: &str = ".pinned-";
/// Precision of the times of use that [`Cache::retain`] records, so as not to keep waking the disk.
const USE_PRECISION: Duration = Duration::from_secs(600);

/// What a stored model is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The URL without secrets, or repository and revision.
    pub source: String,
    /// The commit, of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// SHA-256 of the archive, of one, or of a list of files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// SHA-256 of files of a repository or a list, by their paths, as far as they have one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// Who may have it ([`crate::Source::held_by`]), empty for everybody; `None` if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Of a list of files: whether every deployment that names it may have it. Of others the key says so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_all: bool,
    /// When its files were verified, in seconds since 1970; `None` if an earlier version fetched it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified_at_s: Option<u64>,
}

/// A directory of models.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

impl Cache {
    /// Creates a handle; reads and creates nothing on disk yet.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// The directory itself; it may not exist.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// The model's directory, if it is complete.
    pub fn model(&self, key: &Key) -> Option<PathBuf> {
        Some(self.directory(key)).filter(|path| path.is_dir())
    }

    /// Creates the missing directories of the cache.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if this user may not create or write them.
    pub fn create(&self) -> Result<(), FetchError> {
        for directory in [self.models(), self.partial()] {
            fs::create_dir_all(&directory).map_err(FetchError::in_cache(&directory))?;
            rustix::fs::access(&directory, rustix::fs::Access::WRITE_OK)
                .map_err(|error| FetchError::file(&directory, error.into()))?;
        }
        Ok(())
    }

    /// What the stored model is; `None` if that is not recorded.
    pub fn about(&self, key: &Key) -> Option<About> {
        let text = fs::read(self.about_file(key)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Size of a model's files in bytes; 0 if it is not complete.
    pub fn bytes(&self, key: &Key) -> u64 {
        bytes_below(&self.directory(key))
    }

    /// Removes a model, or what has arrived of one, with everything that belongs to it.
    ///
    /// # Errors
    /// [`FetchError::Busy`] if it is being fetched, [`FetchError::InUse`] if a process holds it, [`FetchError::Pinned`],
    /// [`FetchError::Cache`].
    pub fn forget(&self, key: &Key) -> Result<(), FetchError> {
        let name = || {
            let about = self.about(key).map(|about| about.source);
            let begun = || self.begun(key).map(|begun| begun.source);
            about.or_else(begun).unwrap_or_else(|| key.to_string())
        };
        if self.is_pinned(key) {
            return Err(FetchError::Pinned { name: name() });
        }
        match self.try_remove(key)? {
            Removal::Removed => Ok(()),
            Removal::Fetched => Err(FetchError::Busy { name: name() }),
            Removal::InUse => Err(FetchError::InUse { name: name() }),
        }
    }

    /// Records what the model is, from now on in use.
    pub(crate) fn note_about(&self, key: &Key, about: &About) -> Result<(), FetchError> {
        let path = self.about_file(key);
        let text = serde_json::to_vec(about).map_err(std::io::Error::from);
        let text = text.map_err(FetchError::in_cache(&path))?;
        replace(&path, &self.about_temporary(key), &text)
    }

    /// Whether a model besides this one is being fetched.
    pub(crate) fn is_fetched_besides(&self, key: &Key) -> bool {
        let keys = self.keys().unwrap_or_default();
        let mut others = keys.iter().filter(|other| *other != key);
        others.any(|other| Lock::is_held(&self.lock_file(other)))
    }

    /// What running fetches of other models still have to write.
    pub(crate) fn promised(&self, key: &Key) -> Result<Need, FetchError> {
        let keys = self.keys()?;
        let others = keys.iter().filter(|other| *other != key);
        let fetched = others.filter(|other| Lock::is_held(&self.lock_file(other)));
        Ok(fetched
            .map(|key| part::promised(self, key))
            .fold(Need::default(), Need::and))
    }

    /// Removes everything of a key, unless it is being fetched or held.
    pub(crate) fn try_remove(&self, key: &Key) -> Result<Removal, FetchError> {
        let Some(lock) = Lock::try_acquire(&self.lock_file(key))? else {
            return Ok(Removal::Fetched);
        };
        let Exclusive::Free(_alone) = hold::exclusive(&self.directory(key)) else {
            lock.remove();
            return Ok(Removal::InUse);
        };
        self.remove(key)?;
        lock.remove();
        Ok(Removal::Removed)
    }

    /// Removes parts whose keys are not named, and models that have not been used for `keep`; returns the removed
    /// keys. Anything that a running fetch works on stays, and so do models that are pinned or in use.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the directory cannot be read or something in it cannot be removed; what was removed
    /// before that stays removed.
    pub fn retain(
        &self,
        keys: &BTreeSet<Key>,
        keep: Duration,
        now: SystemTime,
    ) -> Result<Vec<Key>, FetchError> {
        let mut removed = Vec::new();
        for key in self.keys()? {
            let is_stored = self.model(&key).is_some();
            if keys.contains(&key) {
                let is_fresh = self.used(&key).is_some_and(|used| {
                    let age = now.duration_since(used);
                    age.is_ok_and(|age| age < USE_PRECISION)
                });
                if is_stored && !is_fresh {
                    self.try_note_use(&key, now)?;
                }
                continue;
            }
            if is_stored && self.is_pinned(&key) {
                continue;
            }
            if is_stored && !keep.is_zero() && self.is_kept(&key, keep, now)? {
                continue;
            }
            if self.try_remove(&key)? == Removal::Removed {
                removed.push(key);
            }
        }
        Ok(removed)
    }

    /// Whether the model was used less than `keep` ago. A model without a recorded time counts from `now` on.
    fn is_kept(&self, key: &Key, keep: Duration, now: SystemTime) -> Result<bool, FetchError> {
        let Some(used) = self.used(key) else {
            self.try_note_use(key, now)?;
            return Ok(true);
        };
        Ok(now.duration_since(used).is_ok_and(|age| age < keep))
    }

    /// Bytes of the part that has the key.
    pub(crate) fn part_bytes(&self, key: &Key) -> u64 {
        fs::metadata(self.part(key)).map_or(0, |part| part.len())
    }

    /// Returns every key that anything in the cache belongs to.
    pub(crate) fn keys(&self) -> Result<BTreeSet<Key>, FetchError> {
        let mut keys = BTreeSet::new();
        for directory in [self.models(), self.partial()] {
            let entries = match fs::read_dir(&directory) {
                Ok(entries) => entries,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(FetchError::file(&directory, error)),
            };
            // A name that is not a key is not ours.
            keys.extend(entries.flatten().filter_map(|entry| {
                let name = entry.file_name();
                let name = name.to_str()?;
                let name = [UNPACK, REMOVE, ABOUT, PINNED]
                    .iter()
                    .find_map(|prefix| name.strip_prefix(prefix))
                    .unwrap_or(name);
                Key::parse(name.split_once('.').map_or(name, |(stem, _)| stem))
            }));
        }
        Ok(keys)
    }

    /// Removes what a removal of this key has left that was cut off.
    pub(crate) fn forget_removed(&self, key: &Key) -> Result<(), FetchError> {
        remove_directory(&self.removing(key))
    }

    /// Removes everything of a key except its lock, which the caller holds.
    fn remove(&self, key: &Key) -> Result<(), FetchError> {
        let going = self.removing(key);
        remove_directory(&going)?;
        // Moved out of its place first: half a model is never seen there.
        match fs::rename(self.directory(key), &going) {
            Ok(()) => remove_directory(&going)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(FetchError::file(&self.directory(key), error)),
        }
        remove_directory(&self.unpacking(key))?;
        remove_file(&self.part(key))?;
        remove_file(&self.used_file(key))?;
        remove_file(&self.about_file(key))?;
        remove_file(&self.about_temporary(key))?;
        remove_file(&self.pinned_file(key))?;
        remove_file(&self.tries_file(key))?;
        remove_file(&self.tries_file(key).with_extension("tries-new"))?;
        self.forget_begun(key)?;
        remove_file(&self.part_facts(key))
    }

    /// Where a complete model's directory is, whether it is there or not.
    pub fn directory(&self, key: &Key) -> PathBuf {
        self.models().join(key.as_str())
    }

    pub(crate) fn unpacking(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{UNPACK}{key}"))
    }

    pub(crate) fn removing(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{REMOVE}{key}"))
    }

    /// Where it is recorded what the model is ([`About`]).
    pub fn about_file(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{ABOUT}{key}"))
    }

    fn about_temporary(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{ABOUT}{key}.new"))
    }

    /// The file whose presence pins the model ([`Cache::pin`]).
    pub fn pinned_file(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{PINNED}{key}"))
    }

    pub(crate) fn room_lock_file(&self) -> PathBuf {
        self.partial().join("room.lock")
    }

    pub(crate) fn part(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.part"))
    }

    pub(crate) fn part_facts(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.json"))
    }

    pub(crate) fn tries_file(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.tries"))
    }

    pub(crate) fn used_file(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.used"))
    }

    pub(crate) fn lock_file(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.lock"))
    }

    pub(crate) fn models(&self) -> PathBuf {
        self.directory.join("models")
    }

    pub(crate) fn partial(&self) -> PathBuf {
        self.directory.join("partial")
    }
}

/// Outcome of an attempt to remove what has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Nothing of it is left.
    Removed,
    /// It is being fetched.
    Fetched,
    /// A process holds it.
    InUse,
}

/// Removes a directory and its contents; succeeds if it does not exist.
pub(crate) fn remove_directory(path: &Path) -> Result<(), FetchError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FetchError::file(path, error)),
        _ => Ok(()),
    }
}

/// Removes a file; succeeds if it does not exist.
pub(crate) fn remove_file(path: &Path) -> Result<(), FetchError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(FetchError::file(path, error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digit: char) -> Key {
        Key::parse(&digit.to_string().repeat(32)).unwrap()
    }

    #[test]
    fn only_what_is_named_and_what_is_in_work_stays() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        let retain = |keys: &BTreeSet<Key>| {
            cache
                .retain(keys, Duration::ZERO, SystemTime::now())
                .unwrap()
        };
        assert_eq!(retain(&BTreeSet::new()), []);
        cache.create().unwrap();
        for digit in ['a', 'b', 'c'] {
            fs::create_dir(cache.directory(&key(digit))).unwrap();
            fs::write(cache.directory(&key(digit)).join("config.json"), "{}").unwrap();
        }
        // A part, a half-unpacked model, a half-removed one, and a directory that is not ours.
        fs::write(cache.part(&key('d')), "half").unwrap();
        fs::write(cache.part_facts(&key('d')), "{}").unwrap();
        fs::create_dir(cache.unpacking(&key('e'))).unwrap();
        fs::create_dir(cache.models().join(format!("{REMOVE}{}", key('f')))).unwrap();
        fs::create_dir(cache.models().join("my-own-model")).unwrap();
        let in_work = Lock::try_acquire(&cache.lock_file(&key('b')))
            .unwrap()
            .unwrap();

        let removed = retain(&BTreeSet::from([key('a')]));
        assert_eq!(removed, [key('c'), key('d'), key('e'), key('f')]);
        let names = |path: PathBuf| -> BTreeSet<String> {
            let entries = fs::read_dir(path).unwrap().flatten();
            entries
                .map(|e| e.file_name().to_str().unwrap().to_owned())
                .collect()
        };
        let kept = [
            key('a').to_string(),
            key('b').to_string(),
            "my-own-model".to_owned(),
        ];
        assert_eq!(names(cache.models()), kept.into());
        assert_eq!(
            names(cache.partial()),
            [format!("{}.lock", key('b')), format!("{}.used", key('a'))].into()
        );

        drop(in_work);
        assert_eq!(retain(&BTreeSet::new()), [key('a'), key('b')]);
        assert!(names(cache.partial()).is_empty());
    }

    #[test]
    fn a_stored_model_says_what_it_is_until_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        assert_eq!(cache.stored().unwrap(), []);
        cache.create().unwrap();
        for digit in ['a', 'b'] {
            fs::create_dir(cache.directory(&key(digit))).unwrap();
            fs::write(cache.directory(&key(digit)).join("config.json"), "{}").unwrap();
        }
        let about = About {
            source: "a/b@main".to_owned(),
            commit: Some("c".repeat(40)),
            sha256: None,
            files: BTreeMap::new(),
            holder: None,
            for_all: false,
            verified_at_s: Some(1),
        };
        cache.note_about(&key('a'), &about).unwrap();
        // Of a model that a fetch has not finished.
        cache.note_about(&key('c'), &about).unwrap();
        let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        cache.note_use(&key('a'), then);
        cache.note_use(&key('b'), then);
        let stored = cache.stored().unwrap();
        assert_eq!(stored.len(), 2);
        assert_eq!(
            (&stored[0].about, stored[0].bytes, stored[0].used),
            (&Some(about), 2, Some(then))
        );
        assert_eq!(stored[1].about, None);
        let lock = Lock::try_acquire(&cache.lock_file(&key('a'))).unwrap();
        let error = cache.forget(&key('a')).unwrap_err();
        assert!(matches!(error, FetchError::Busy { .. }), "{error}");
        drop(lock);
        cache.forget(&key('a')).unwrap();
        assert_eq!(
            (cache.model(&key('a')), cache.about(&key('a'))),
            (None, None)
        );
        assert_eq!(cache.stored().unwrap().len(), 1);
    }

    #[test]
    fn a_model_outlives_its_last_mention_for_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        fs::create_dir(cache.directory(&key('a'))).unwrap();
        fs::create_dir(cache.directory(&key('b'))).unwrap();
        fs::write(cache.part(&key('c')), "half").unwrap();
        let (named, none) = (BTreeSet::from([key('a')]), BTreeSet::new());
        let began = SystemTime::now();
        let (hour, day) = (Duration::from_secs(3600), Duration::from_secs(86_400));
        let retain =
            |keys: &BTreeSet<Key>, after: Duration| cache.retain(keys, day, began + after).unwrap();
        // It is unknown since when `b` is unwanted; a part is not worth keeping.
        assert_eq!(retain(&named, Duration::ZERO), [key('c')]);
        assert_eq!(retain(&named, 12 * hour), []);
        assert_eq!(retain(&none, 23 * hour), []);
        assert_eq!(retain(&none, 24 * hour), [key('b')]);
        assert_eq!(retain(&none, 35 * hour), []);
        assert_eq!(retain(&none, 36 * hour), [key('a')]);
        assert_eq!(retain(&none, 37 * hour), []);
        assert!(fs::read_dir(cache.partial()).unwrap().next().is_none());
        // When disk space is needed, nothing is kept.
        fs::create_dir(cache.directory(&key('a'))).unwrap();
        retain(&named, 38 * hour);
        assert_eq!(
            cache
                .retain(&none, Duration::ZERO, began + 38 * hour)
                .unwrap(),
            [key('a')]
        );
    }
}
