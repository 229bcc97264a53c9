//! Directory of models and of parts of archives.
//!
//! ```text
//! DIR/models/KEY/              a complete model, put there by one rename
//! DIR/models/.unpack-KEY/      being unpacked
//! DIR/models/.remove-KEY/      being removed
//! DIR/partial/KEY.part         the downloaded part of an archive
//! DIR/partial/KEY.json         facts about the file that the part belongs to
//! DIR/partial/KEY.lock         held by the process that fetches
//! DIR/partial/KEY.tries        the record of earlier tries
//! DIR/partial/KEY.used         its mtime: when the model was last named
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::lock::Lock;
use crate::{FetchError, Key};

const UNPACK: &str = ".unpack-";
const REMOVE: &str = ".remove-";

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

    /// Removes parts whose keys are not named, and models that have not been named for `keep`; returns the removed
    /// keys. Anything that a running fetch works on stays.
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
            if keys.contains(&key) {
                self.note_use(&key, now)?;
                continue;
            }
            if self.model(&key).is_some() && !keep.is_zero() && self.is_kept(&key, keep, now)? {
                continue;
            }
            let key = &key;
            let Some(lock) = Lock::try_acquire(&self.lock_file(key))? else {
                continue;
            };
            self.remove(key)?;
            lock.remove();
            removed.push(key.clone());
        }
        Ok(removed)
    }

    /// Whether the model was named less than `keep` ago. A model without a recorded time counts from `now` on.
    fn is_kept(&self, key: &Key, keep: Duration, now: SystemTime) -> Result<bool, FetchError> {
        let used = fs::metadata(self.used(key)).and_then(|it| it.modified());
        let Ok(used) = used else {
            self.note_use(key, now)?;
            return Ok(true);
        };
        Ok(now.duration_since(used).is_ok_and(|age| age < keep))
    }

    /// Records the time of use, at most every ten minutes, so as not to keep waking the disk.
    fn note_use(&self, key: &Key, now: SystemTime) -> Result<(), FetchError> {
        const PRECISION: Duration = Duration::from_secs(600);
        let path = self.used(key);
        let used = fs::metadata(&path).and_then(|it| it.modified());
        let is_fresh = used.is_ok_and(|used| {
            let age = now.duration_since(used);
            age.is_ok_and(|age| age < PRECISION)
        });
        if is_fresh || self.model(key).is_none() {
            return Ok(());
        }
        let noted = fs::File::create(&path).and_then(|file| file.set_modified(now));
        noted.map_err(|error| FetchError::file(&path, error))
    }

    /// Returns every key that anything in the cache belongs to.
    fn keys(&self) -> Result<BTreeSet<Key>, FetchError> {
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
                let name = [UNPACK, REMOVE]
                    .iter()
                    .find_map(|prefix| name.strip_prefix(prefix))
                    .unwrap_or(name);
                Key::parse(name.split_once('.').map_or(name, |(stem, _)| stem))
            }));
        }
        Ok(keys)
    }

    /// Removes everything of a key except its lock, which the caller holds.
    fn remove(&self, key: &Key) -> Result<(), FetchError> {
        let going = self.models().join(format!("{REMOVE}{key}"));
        remove_directory(&going)?;
        // Moved out of its place first: half a model is never seen there.
        match fs::rename(self.directory(key), &going) {
            Ok(()) => remove_directory(&going)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(FetchError::file(&self.directory(key), error)),
        }
        remove_directory(&self.unpacking(key))?;
        remove_file(&self.part(key))?;
        remove_file(&self.used(key))?;
        remove_file(&self.tries_file(key))?;
        remove_file(&self.tries_file(key).with_extension("tries-new"))?;
        remove_file(&self.part_facts(key))
    }

    pub(crate) fn directory(&self, key: &Key) -> PathBuf {
        self.models().join(key.as_str())
    }

    pub(crate) fn unpacking(&self, key: &Key) -> PathBuf {
        self.models().join(format!("{UNPACK}{key}"))
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

    fn used(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.used"))
    }

    pub(crate) fn lock_file(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.lock"))
    }

    fn models(&self) -> PathBuf {
        self.directory.join("models")
    }

    fn partial(&self) -> PathBuf {
        self.directory.join("partial")
    }
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
