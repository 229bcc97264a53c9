//! What a cache holds: complete models, downloads that are not, and everything by its key. A file that several models have is
//! there once ([`crate::share`]), and counts once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::cache::remove_file;
use crate::directory::{Contents, Inode, bytes_below, replace};
use crate::lock::Lock;
use crate::room::{self, Item, Stays};
use crate::uses::modified;
use crate::{About, Cache, FetchError, FetchOptions, Key, hold, part};

/// A model that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name in the cache.
    pub key: Key,
    /// What it is; `None` if an earlier version fetched it.
    pub about: Option<About>,
    /// Size of its files in bytes.
    pub bytes: u64,
    /// Bytes of these that something else in the cache has, too.
    pub shared_bytes: u64,
    /// When it was last asked for, named or released.
    pub used: Option<SystemTime>,
    /// Whether a process holds it ([`crate::Hold`]).
    pub is_in_use: bool,
    /// Whether it stays until a person removes it.
    pub is_pinned: bool,
    /// Its directory.
    pub directory: PathBuf,
}

/// What has arrived of a model that is not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Its name in the cache.
    pub key: Key,
    /// What it is going to be; `None` if an earlier version began it.
    pub begun: Option<Begun>,
    /// Bytes that are here.
    pub bytes: u64,
    /// Bytes of these that something else in the cache has, too.
    pub shared_bytes: u64,
    /// Bytes of all that is to arrive, if that is known.
    pub total_bytes: Option<u64>,
    /// Whether a process fetches it at this time.
    pub is_running: bool,
}

/// What a fetch has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The URL without secrets, or repository and revision.
    pub source: String,
    /// The commit, of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Bytes of all files, of several, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
}

impl Cache {
    /// All complete models, by name.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the directory cannot be read.
    pub fn stored(&self) -> Result<Vec<Stored>, FetchError> {
        let mut models = Vec::new();
        let mut contents = BTreeMap::new();
        for key in self.keys()? {
            let directory = self.model(&key);
            let files = Contents::of(directory.clone());
            let rest = Contents::of([self.unpacking(&key), self.removing(&key)]);
            contents.insert(key.clone(), files.clone().and(rest));
            models.extend(directory.map(|directory| (key, directory, files)));
        }
        let shared = shared_of(&contents);
        let stored = models.into_iter().map(|(key, directory, files)| Stored {
            about: self.about(&key),
            bytes: files.sum_bytes(),
            shared_bytes: sum_of(&files, &shared),
            used: self.used(&key).or_else(|| modified(&directory)),
            is_in_use: hold::is_held(&directory),
            is_pinned: self.is_pinned(&key),
            directory,
            key,
        });
        Ok(stored.collect())
    }

    /// What has arrived of models that are not complete, and what is being fetched, by name.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the directory cannot be read.
    pub fn unfinished(&self) -> Result<Vec<Unfinished>, FetchError> {
        let contents = self.contents()?;
        let shared = shared_of(&contents);
        let unfinished = contents.iter().filter_map(|(key, files)| {
            if self.model(key).is_some() {
                return None;
            }
            let is_running = Lock::is_held(&self.lock_file(key));
            let begun = self.begun(key);
            let (seen_bytes, seen_total_bytes) = part::seen(self, key);
            let is_archive = part::is_of_archive(self, key);
            // The files of an archive are unpacked beside it.
            let bytes = match is_archive {
                true => seen_bytes,
                false => self.part_bytes(key) + bytes_below(&self.unpacking(key)),
            };
            let told_bytes = begun.as_ref().and_then(|begun| begun.total_bytes);
            let total_bytes = match is_archive {
                true => seen_total_bytes,
                false => told_bytes,
            };
            let is_there = bytes > 0 || (is_running && begun.is_some());
            is_there.then(|| Unfinished {
                shared_bytes: sum_of(files, &shared),
                total_bytes: total_bytes.filter(|total_bytes| *total_bytes >= bytes),
                key: key.clone(),
                begun,
                bytes,
                is_running,
            })
        });
        Ok(unfinished.collect())
    }

    /// Bytes of the models that are whole.
    ///
    /// # Errors
    /// [`FetchError::Cache`] if the directory cannot be read.
    pub fn stored_bytes(&self) -> Result<u64, FetchError> {
        let keys = self.keys()?;
        let models = keys.iter().filter_map(|key| self.model(key));
        Ok(Contents::of(models).sum_bytes())
    }

    /// Everything in the cache, and why it stays where `fetched` needs its room.
    pub(crate) fn items(
        &self,
        fetched: &Key,
        options: &FetchOptions,
        now: SystemTime,
    ) -> Result<Vec<Item>, FetchError> {
        let contents = self.contents()?;
        let shared = shared_of(&contents);
        let item = |(key, files): (Key, Contents)| {
            let directory = self.model(&key);
            let used = self.used(&key);
            let stays = if key == *fetched || Lock::is_held(&self.lock_file(&key)) {
                Some(Stays::Fetched)
            } else if directory.as_deref().is_some_and(hold::is_held) {
                Some(Stays::Used)
            } else if self.is_pinned(&key) {
                Some(Stays::Pinned)
            } else {
                room::stays(&key, used, options, now)
            };
            let part_bytes = self.part_bytes(&key);
            let own_bytes = files.sum_bytes() - sum_of(&files, &shared);
            let mut shared_files = files.linked;
            shared_files.retain(|inode, _| shared.contains(inode));
            Item {
                bytes: part_bytes.saturating_add(own_bytes),
                shared: shared_files,
                part_bytes,
                key,
                used,
                stays,
            }
        };
        Ok(contents.into_iter().map(item).collect())
    }

    /// The files of each key, without its part.
    fn contents(&self) -> Result<BTreeMap<Key, Contents>, FetchError> {
        let contents = self.keys()?.into_iter().map(|key| {
            let directories = [
                self.directory(&key),
                self.unpacking(&key),
                self.removing(&key),
            ];
            (key, Contents::of(directories))
        });
        Ok(contents.collect())
    }

    /// Records what a fetch has begun, until it is complete or removed. Without the record, as on a disk that has to be made room on
    /// first, what has arrived is told without a name.
    pub(crate) fn note_begun(&self, key: &Key, begun: &Begun) {
        let path = self.begun_file(key);
        let text = serde_json::to_vec(begun).map_err(std::io::Error::from);
        let text = text.map_err(FetchError::in_cache(&path));
        let noted = text.and_then(|text| replace(&path, &path.with_extension("begun-new"), &text));
        if let Err(error) = noted {
            tracing::debug!(%key, "what is fetched was not recorded: {error}");
        }
    }

    /// Whether anything is here of a model that is not complete.
    pub(crate) fn has_arrived(&self, key: &Key) -> bool {
        self.part_bytes(key) > 0 || bytes_below(&self.unpacking(key)) > 0
    }

    /// Removes the record.
    pub(crate) fn forget_begun(&self, key: &Key) -> Result<(), FetchError> {
        let path = self.begun_file(key);
        remove_file(&path.with_extension("begun-new"))?;
        remove_file(&path)
    }

    /// What a fetch has begun; `None` if that is not recorded.
    pub(crate) fn begun(&self, key: &Key) -> Option<Begun> {
        serde_json::from_slice(&fs::read(self.begun_file(key)).ok()?).ok()
    }

    fn begun_file(&self, key: &Key) -> PathBuf {
        self.partial().join(format!("{key}.begun"))
    }
}

/// Files that more than one key has.
fn shared_of(contents: &BTreeMap<Key, Contents>) -> BTreeSet<Inode> {
    let mut seen = BTreeSet::new();
    let files = contents.values().flat_map(|files| files.linked.keys());
    files
        .filter(|inode| !seen.insert(**inode))
        .copied()
        .collect()
}

/// Bytes of those files that are among these.
fn sum_of(files: &Contents, among: &BTreeSet<Inode>) -> u64 {
    let shared = files
        .linked
        .iter()
        .filter(|(inode, _)| among.contains(inode));
    shared.map(|(_, bytes)| bytes).sum()
}
