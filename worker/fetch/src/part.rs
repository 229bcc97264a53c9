//! The downloaded part of an archive, or of one of a model's files, and the file that it belongs to.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::cache::remove_file;
use crate::digest::{Digest, Hasher};
use crate::directory::{FILE_MODE, bytes_below, set_mode};
use crate::lock::Lock;
use crate::need::{FilesToCome, Need};
use crate::progress::Reporter;
use crate::room::Room;
use crate::unpack::{HEAD_BYTES, is_of_model};
use crate::{Cache, FetchError, Key, Phase};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum number of written pieces that wait for their checksum.
const UNHASHED_PIECES: usize = 16;
/// Name of a copy until it is whole, beside its place.
const COPY: &str = ".copy";

/// Facts from a server about the file that a part belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileFacts {
    /// Digest of the URL: a validator is meaningful only to its own server, and a URL may hold a secret.
    pub(crate) url_sha256: String,
    /// ETag, if it is a strong one.
    pub(crate) etag: Option<String>,
    /// Last-Modified.
    pub(crate) last_modified: Option<String>,
    /// Bytes of the whole file.
    pub(crate) total_bytes: Option<u64>,
    /// SHA-256 of each URL and address that was asked for the first bytes; empty if several servers sent the bytes.
    #[serde(default)]
    pub(crate) asked: BTreeSet<String>,
    /// SHA-256 of the URL and address that sent them.
    #[serde(default)]
    pub(crate) from_sha256: String,
    /// Whether a non-public server was asked for any of the bytes.
    #[serde(default)]
    pub(crate) is_inside: bool,
    /// The checksum of the file, if several are fetched for one model.
    #[serde(default)]
    pub(crate) digest: String,
    /// Bytes of all of them.
    #[serde(default)]
    pub(crate) whole_bytes: Option<u64>,
}

/// The file that a part is to become.
#[derive(Clone, Debug)]
pub(crate) struct Whose {
    pub(crate) digest: Digest,
    /// Whether others are fetched for the model too.
    pub(crate) is_one_of_several: bool,
    /// Bytes of all of them; `None` if that is not known, or this is the only one.
    pub(crate) whole_bytes: Option<u64>,
}

impl Whose {
    /// The checksum as a part's facts name it. The key of an archive says as much, and earlier versions wrote none.
    fn named(&self) -> &str {
        match self.is_one_of_several {
            true => self.digest.digits(),
            false => "",
        }
    }
}

impl FileFacts {
    /// Validator for If-Range, which distinguishes this file from another one under the same URL.
    pub(crate) fn validator(&self) -> Option<&str> {
        self.etag.as_deref().or(self.last_modified.as_deref())
    }

    /// Whether all bytes come from one server, and everything in `asked` was also asked for the first of them. If a
    /// server leads elsewhere, it must not learn what is found there, or whether anything is.
    pub(crate) fn is_of_one(&self, asked: &BTreeSet<String>) -> bool {
        !self.asked.is_empty() && asked.is_subset(&self.asked)
    }
}

/// Bytes of a file from its start, and their checksum.
#[derive(Debug)]
pub(crate) struct Part {
    file: File,
    path: PathBuf,
    facts_path: PathBuf,
    len_bytes: u64,
    received_bytes: u64,
    whose: Whose,
    hasher: Hasher,
    facts: FileFacts,
    _lock: Arc<Lock>,
}

impl Part {
    /// Opens what an earlier fetch left and computes its checksum anew; empty if there is nothing.
    ///
    /// # Errors
    /// [`FetchError::Cache`].
    pub(crate) fn open(
        cache: &Cache,
        key: &Key,
        whose: Whose,
        lock: Arc<Lock>,
        reporter: &Reporter,
    ) -> Result<Self, FetchError> {
        let path = cache.part(key);
        let facts_path = cache.part_facts(key);
        let failed = FetchError::in_cache(&path);
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(&failed)?;
        let facts = read_facts(&facts_path);
        let found_bytes = file.metadata().map_err(&failed)?.len();
        let total_bytes = facts.as_ref().and_then(|facts| facts.total_bytes);
        let is_of_file = |facts: &FileFacts| facts.digest == whose.named();
        let is_usable = facts.as_ref().is_some_and(is_of_file)
            && total_bytes.is_none_or(|total| found_bytes <= total);
        let mut part = Self {
            file,
            path: path.clone(),
            facts_path,
            len_bytes: 0,
            received_bytes: 0,
            hasher: whose.digest.hasher(),
            whose,
            facts: facts.unwrap_or_default(),
            _lock: lock,
        };
        if is_usable {
            part.read_again(reporter).map_err(&failed)?;
        } else {
            part.file.set_len(0).map_err(&failed)?;
            part.facts = FileFacts::default();
        }
        Ok(part)
    }

    /// Number of bytes in the part.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Number of bytes added since it was opened, including those that were discarded again.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Facts about the file that they belong to.
    pub(crate) fn facts(&self) -> &FileFacts {
        &self.facts
    }

    /// Whether the part is the whole file.
    pub(crate) fn is_complete(&self) -> bool {
        self.facts.total_bytes == Some(self.len_bytes)
    }

    /// Sets the length of the file, which the server had not announced before.
    pub(crate) fn learn_total(&mut self, total_bytes: u64) {
        self.facts.total_bytes = Some(total_bytes);
    }

    /// Marks the current length as the end of a file of unknown length.
    pub(crate) fn end_here(&mut self) {
        self.facts.total_bytes = Some(self.len_bytes);
    }

    /// Discards the bytes, before those of another file or of the same one from its start.
    ///
    /// # Errors
    /// [`FetchError::Cache`], [`FetchError::DiskFull`].
    pub(crate) fn restart(&mut self, facts: FileFacts) -> Result<(), FetchError> {
        // In this order, bytes are never stored beside the facts of another file.
        self.file
            .set_len(0)
            .map_err(FetchError::in_cache(&self.path))?;
        self.len_bytes = 0;
        self.hasher = self.whose.digest.hasher();
        self.facts = FileFacts {
            digest: self.whose.named().to_owned(),
            whole_bytes: self.whose.whole_bytes,
            ..facts
        };
        self.keep_facts()
    }

    /// Continues with the bytes of an answer with these facts.
    ///
    /// # Errors
    /// [`FetchError::Cache`], [`FetchError::DiskFull`].
    pub(crate) fn go_on(&mut self, facts: &FileFacts) -> Result<(), FetchError> {
        let before = self.facts.clone();
        self.facts.is_inside |= facts.is_inside;
        if self.facts.from_sha256 != facts.from_sha256 {
            self.facts.asked.clear();
        }
        if self.facts == before {
            return Ok(());
        }
        self.keep_facts()
    }

    fn keep_facts(&self) -> Result<(), FetchError> {
        let temporary = self.facts_path.with_extension("json-new");
        let text = serde_json::to_vec(&self.facts).map_err(io::Error::from);
        text.and_then(|text| fs::write(&temporary, text))
            .and_then(|()| fs::rename(&temporary, &self.facts_path))
            .map_err(FetchError::in_cache(&self.facts_path))
    }

    /// Appends pieces as they come, until there is none. Their checksum is computed on a thread of its own: each piece after
    /// it is written, in their order, and all of them before this returns. Few pieces wait for it.
    ///
    /// # Errors
    /// [`FetchError::DiskFull`], [`FetchError::Cache`] and those of `next`; the part ends after the last whole piece.
    pub(crate) fn append(
        &mut self,
        mut next: impl FnMut() -> Result<Option<Bytes>, FetchError>,
    ) -> Result<(), FetchError> {
        let hasher = &mut self.hasher;
        thread::scope(|scope| {
            let (sender, written) = mpsc::sync_channel::<Bytes>(UNHASHED_PIECES);
            let hash = move || written.iter().for_each(|piece| hasher.update(&piece));
            let spawned = thread::Builder::new().spawn_scoped(scope, hash);
            spawned.map_err(FetchError::in_cache(&self.path))?;
            while let Some(piece) = next()? {
                if let Err(reason) = self.file.write_all_at(&piece, self.len_bytes) {
                    // Some of them may have been written: the file must not be longer than what was hashed.
                    let _ = self.file.set_len(self.len_bytes);
                    return Err(FetchError::file(&self.path, reason));
                }
                self.len_bytes += piece.len() as u64;
                self.received_bytes += piece.len() as u64;
                if sender.send(piece).is_err() {
                    // The thread has panicked, and the scope goes on with that.
                    break;
                }
            }
            Ok(())
        })
    }

    /// Checksum of the bytes, in hexadecimal digits.
    pub(crate) fn digits(&self) -> String {
        self.hasher.digits()
    }

    /// Whether the bytes begin like an archive or like weights.
    pub(crate) fn is_of_model(&self) -> bool {
        let mut head = Vec::new();
        let read = File::open(&self.path)
            .and_then(|file| file.take(HEAD_BYTES as u64).read_to_end(&mut head));
        read.is_ok() && is_of_model(&head)
    }

    /// Opens a reader at the start of the bytes.
    ///
    /// # Errors
    /// [`FetchError::Cache`].
    pub(crate) fn reader(&self) -> Result<File, FetchError> {
        File::open(&self.path).map_err(FetchError::in_cache(&self.path))
    }

    /// Removes the part.
    ///
    /// # Errors
    /// [`FetchError::Cache`].
    pub(crate) fn remove(self) -> Result<(), FetchError> {
        remove_file(&self.facts_path)?;
        remove_file(&self.path)
    }

    /// Moves the bytes, which are all there, to their place in the model's directory, or copies them where that is on
    /// another disk.
    ///
    /// # Errors
    /// [`FetchError::Cache`], [`FetchError::DiskFull`], [`FetchError::NoRoom`].
    pub(crate) fn put(self, target: &Path, room: &Room) -> Result<(), FetchError> {
        set_mode(&self.path, FILE_MODE)?;
        let synced = self.file.sync_data();
        synced.map_err(FetchError::in_cache(&self.path))?;
        match fs::rename(&self.path, target) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                let what = format!(
                    "{} MiB to copy to the models' disk",
                    self.len_bytes.div_ceil(1 << 20)
                );
                room.make(Need::of_copy(self.len_bytes), &what, SystemTime::now())?;
                let temporary = target.with_file_name(COPY);
                let copied = self.copy(&temporary);
                let copied = copied.and_then(|()| {
                    fs::rename(&temporary, target).map_err(FetchError::in_cache(target))
                });
                if copied.is_err() {
                    let _ = fs::remove_file(&temporary);
                }
                copied?;
                remove_file(&self.path)?;
            }
            Err(error) => return Err(FetchError::file(target, error)),
        }
        remove_file(&self.facts_path)
    }

    /// Writes the bytes to another file, and verifies that they are the same.
    fn copy(&self, to: &Path) -> Result<(), FetchError> {
        let failed = FetchError::in_cache(to);
        let mut from = self.reader()?;
        let mut file = File::create(to).map_err(&failed)?;
        let mut hasher = self.whose.digest.hasher();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(FetchError::file(&self.path, error)),
            };
            hasher.update(&chunk[..read]);
            file.write_all(&chunk[..read]).map_err(&failed)?;
        }
        if hasher.digits() != self.digits() {
            let reason = "its disk gave other bytes than were written to it: check the disk";
            return Err(FetchError::file(&self.path, io::Error::other(reason)));
        }
        set_mode(to, FILE_MODE)?;
        file.sync_data().map_err(&failed)
    }

    fn read_again(&mut self, reporter: &Reporter) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        self.file.seek(SeekFrom::Start(0))?;
        loop {
            let read = match self.file.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.hasher.update(&chunk[..read]);
            self.len_bytes += read as u64;
            reporter.tell(Phase::Checking, self.len_bytes, self.facts.total_bytes);
        }
    }
}

/// Bytes present of a model that another process fetches, and its size if known.
pub(crate) fn seen(cache: &Cache, key: &Key) -> (u64, Option<u64>) {
    let bytes = cache.part_bytes(key);
    let facts = read_facts(&cache.part_facts(key)).unwrap_or_default();
    match facts.whole_bytes {
        Some(whole_bytes) => {
            let before_bytes = bytes_below(&cache.unpacking(key));
            (bytes + before_bytes, Some(whole_bytes))
        }
        None => (bytes, facts.total_bytes),
    }
}

/// Whether a part is there, and of an archive.
pub(crate) fn is_of_archive(cache: &Cache, key: &Key) -> bool {
    read_facts(&cache.part_facts(key)).is_some_and(|facts| facts.digest.is_empty())
}

/// What a fetch of this model still has to write, as far as it or its server told.
pub(crate) fn promised(cache: &Cache, key: &Key) -> Need {
    let facts = read_facts(&cache.part_facts(key)).unwrap_or_default();
    let promise = Lock::promised(&cache.lock_file(key));
    let whole_bytes = promise.map(|it| it.whole_bytes).or(facts.whole_bytes);
    // In this order: a part that becomes a file meanwhile counts in neither, which keeps too much room, and not in both.
    let files_bytes = bytes_below(&cache.unpacking(key));
    let part_bytes = cache.part_bytes(key);
    let total_bytes = facts.total_bytes.unwrap_or_default();
    let of_files = |sum_bytes: u64, longest_bytes: u64| {
        Need::of_files(FilesToCome {
            sum_bytes,
            longest_bytes,
            part_bytes,
            are_copied: cache.copies_to_models(),
        })
    };
    match whole_bytes {
        Some(whole_bytes) => {
            let longest_bytes = promise.map_or(0, |it| it.longest_bytes).max(total_bytes);
            of_files(whole_bytes.saturating_sub(files_bytes), longest_bytes)
        }
        // Of a list whose length nobody knows: the file that is arriving.
        None if !facts.digest.is_empty() => of_files(total_bytes, total_bytes),
        // An archive's files are written beside it.
        None => {
            let of_part = Need::of_part(total_bytes.saturating_sub(part_bytes));
            of_part.and(Need::of_unpacked(total_bytes.saturating_sub(files_bytes)))
        }
    }
}

fn read_facts(path: &Path) -> Option<FileFacts> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Promise;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn open(cache: &Cache) -> Part {
        let key = Key::parse(KEY).unwrap();
        let lock = Lock::try_acquire(&cache.lock_file(&key)).unwrap().unwrap();
        let whose = Whose {
            digest: Digest::Sha256(String::new()),
            is_one_of_several: false,
            whole_bytes: None,
        };
        let reporter = Reporter::new(Arc::new(|_| {}));
        Part::open(cache, &key, whose, Arc::new(lock), &reporter).unwrap()
    }

    fn append(part: &mut Part, piece: &'static str) {
        let mut pieces = [Bytes::from(piece)].into_iter();
        part.append(|| Ok(pieces.next())).unwrap();
    }

    fn facts(total_bytes: u64) -> FileFacts {
        FileFacts {
            etag: Some("\"1\"".to_owned()),
            total_bytes: Some(total_bytes),
            ..FileFacts::default()
        }
    }

    #[test]
    fn a_part_goes_on_where_it_was_left_with_the_checksum_of_all() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        let mut part = open(&cache);
        part.restart(facts(11)).unwrap();
        append(&mut part, "hello ");
        drop(part);

        let mut part = open(&cache);
        assert_eq!((part.len_bytes(), part.is_complete()), (6, false));
        assert_eq!(part.facts().validator(), Some("\"1\""));
        append(&mut part, "world");
        assert!(part.is_complete());
        assert_eq!(part.digits(), crate::digest::sha256_of("hello world"));
        part.remove().unwrap();
        assert_eq!(open(&cache).len_bytes(), 0);
    }

    #[test]
    fn what_is_still_to_come_is_promised_on_the_disk_that_it_comes_to() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        let key = Key::parse(KEY).unwrap();
        assert_eq!(promised(&cache, &key).quota_bytes, 0);
        let mut part = open(&cache);
        part.restart(facts(11)).unwrap();
        append(&mut part, "hello ");
        let need = |bytes, parts, models| Need {
            quota_bytes: bytes,
            disk_bytes: bytes,
            parts_bytes: Some(parts),
            models_bytes: Some(models),
        };
        // An archive stays until all of it is unpacked; a repository's file becomes one of the model's.
        assert_eq!(promised(&cache, &key), need(16, 5, 11));
        let promise = |longest_bytes| {
            let whole_bytes = 100;
            let promise = Promise {
                whole_bytes,
                longest_bytes,
            };
            part._lock.promise(promise).unwrap();
        };
        promise(11);
        assert_eq!(promised(&cache, &key), need(94, 5, 100));
        // One that comes later is longer.
        promise(60);
        assert_eq!(promised(&cache, &key), need(94, 54, 100));
        fs::create_dir(cache.unpacking(&key)).unwrap();
        fs::write(cache.unpacking(&key).join("config.json"), [0; 70]).unwrap();
        promise(11);
        assert_eq!(promised(&cache, &key), need(24, 5, 30));
    }

    #[test]
    fn bytes_of_an_unknown_file_are_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        let key = Key::parse(KEY).unwrap();
        // Without facts, with truncated facts, and with more bytes than the file has.
        for facts in [
            "",
            "{\"url_sha256\":",
            "{\"url_sha256\":\"\",\"total_bytes\":3}",
        ] {
            fs::write(cache.part(&key), "hello").unwrap();
            fs::write(cache.part_facts(&key), facts).unwrap();
            let part = open(&cache);
            assert_eq!(
                (part.len_bytes(), part.facts()),
                (0, &FileFacts::default()),
                "{facts}"
            );
            assert_eq!(fs::metadata(cache.part(&key)).unwrap().len(), 0);
        }
    }
}
