//! From a list of files behind URLs to a directory: each one that is needed, verified by the SHA-256 in the list.
//!
//! Whoever wrote the list chose the servers: of each file as little is told before it is verified as of an archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cache::About;
use crate::collect::{self, Collected};
use crate::digest::Digest;
use crate::download;
use crate::inventory::Begun;
use crate::lengths;
use crate::listing::{HubFile, INDEX, LIST_REMEDY, Listing, MAX_INDEX_BYTES};
use crate::lock::Lock;
use crate::part::{Part, Whose};
use crate::place::Remote;
use crate::progress::Reporter;
use crate::room::Room;
use crate::share;
use crate::source::ListedFile;
use crate::{Cache, FetchError, Owner, Phase, Source, blocking, verified_now};

/// The fetch of one list.
pub(crate) struct Fetch<'a> {
    pub(crate) source: &'a Source,
    pub(crate) files: &'a [ListedFile],
    /// SHA-256 of the list.
    pub(crate) revision: &'a str,
    pub(crate) cache: &'a Cache,
    pub(crate) room: &'a Arc<Room>,
    pub(crate) reporter: &'a Arc<Reporter>,
    pub(crate) lock: Arc<Lock>,
}

impl Fetch<'_> {
    /// Fetches the files and puts the directory in place.
    ///
    /// # Errors
    /// The errors of [`crate::fetch`]; the files that are complete, and the part of another, stay for the next call.
    pub(crate) async fn run(self) -> Result<PathBuf, FetchError> {
        let listing = Listing::of_files(self.source.shown(), self.files);
        let temporary = self.cache.unpacking(&self.source.key());
        collect::begin(&temporary).await?;
        listing.check_config()?;
        self.note_begun(None).await?;
        let mut before_bytes = 0;
        let index = match listing.index()? {
            Some(index) => {
                // Only the index tells what is needed besides.
                before_bytes = self.bring(self.listed(&index)?, 0, None).await?;
                if before_bytes > MAX_INDEX_BYTES {
                    return Err(FetchError::NotAModel {
                        repo: self.source.shown(),
                        reason: format!("{INDEX} has {before_bytes} bytes"),
                        remedy: LIST_REMEDY,
                    });
                }
                let path = temporary.join(INDEX);
                let read = move || fs::read(&path).map_err(FetchError::in_cache(&path));
                Some(blocking(read).await?)
            }
            None => None,
        };
        let files = listing.needed(index.as_deref(), self.room.options.max_entries)?;
        let listed = files.iter().map(|file| self.listed(file));
        let mut listed: Vec<&ListedFile> = listed.collect::<Result<_, _>>()?;
        listed.retain(|file| file.path != INDEX);
        let lengths = self.lengths(&listed).await;
        if let Some(lengths) = &lengths {
            let sum = lengths
                .iter()
                .copied()
                .fold(before_bytes, u64::saturating_add);
            self.note_begun(Some(sum)).await?;
        }
        for (at, file) in listed.into_iter().enumerate() {
            let to_come = lengths.as_ref().and_then(|lengths| lengths.get(at..));
            let whole_bytes =
                to_come.map(|rest| rest.iter().copied().fold(before_bytes, u64::saturating_add));
            before_bytes += self.bring(file, before_bytes, whole_bytes).await?;
        }
        let collected = Collected {
            cache: self.cache.clone(),
            key: self.source.key(),
            names: files.iter().map(|file| PathBuf::from(&file.path)).collect(),
            about: About {
                source: self.source.shown(),
                commit: None,
                sha256: Some(self.revision.to_owned()),
                files: collect::sha256_by_path(&files),
                holder: self.room.holder.clone(),
                for_all: self.source.is_for_all(),
                verified_at_s: verified_now(),
            },
            lock: self.lock,
        };
        collected.put().await
    }

    /// Records what is fetched, for whoever lists the cache meanwhile.
    async fn note_begun(&self, total_bytes: Option<u64>) -> Result<(), FetchError> {
        let begun = Begun {
            source: self.source.shown(),
            commit: None,
            total_bytes,
        };
        let (cache, key) = (self.cache.clone(), self.source.key());
        blocking(move || {
            cache.note_begun(&key, &begun);
            Ok(())
        })
        .await
    }

    /// What the servers say of the files' lengths in bytes, if they say it of all.
    async fn lengths(&self, files: &[&ListedFile]) -> Option<Vec<u64>> {
        self.reporter.tell(Phase::Connecting, 0, None);
        let asked = files
            .iter()
            .map(|file| (self.remote(file), self.target(file)));
        let asked: Vec<(Remote, PathBuf)> = asked.collect();
        lengths::ask(&asked, self.room, self.reporter).await
    }

    /// Where a file is once it is complete.
    fn target(&self, file: &ListedFile) -> PathBuf {
        self.cache.unpacking(&self.source.key()).join(&file.path)
    }

    fn remote(&self, file: &ListedFile) -> Remote {
        let digest = Digest::Sha256(file.sha256.clone());
        self.source.file(&file.url, digest)
    }

    /// Brings one file into the directory, unless it is there, and returns its length in bytes. `before_bytes` is the length of those
    /// before it, and `whole_bytes` that of all, as far as it is known.
    async fn bring(
        &self,
        file: &ListedFile,
        before_bytes: u64,
        whole_bytes: Option<u64>,
    ) -> Result<u64, FetchError> {
        let key = self.source.key();
        let target = self.target(file);
        self.reporter.go_on_after(before_bytes, whole_bytes);
        let digest = Digest::Sha256(file.sha256.clone());
        let (path, expected) = (target.clone(), digest.clone());
        let reporter = Arc::clone(self.reporter);
        let there = move || collect::there(&path, None, &expected, &reporter);
        if let Some(bytes) = blocking(there).await? {
            return Ok(bytes);
        }
        let is_own = self.room.options.owner == Owner::User;
        if is_own && let Some(bytes) = self.linked(&digest, &target).await? {
            return Ok(bytes);
        }
        // What an earlier file's server gave says nothing about this one's.
        let policy = &self.room.options.address_policy;
        self.reporter.hide(policy.is_limited());
        let remote = self.remote(file);
        let whose = Whose {
            digest: digest.clone(),
            is_one_of_several: true,
            whole_bytes: None,
        };
        let (cache, reporter) = (self.cache.clone(), Arc::clone(self.reporter));
        let lock = Arc::clone(&self.lock);
        let part = blocking(move || Part::open(&cache, &key, whose, lock, &reporter)).await?;
        let part = download::chosen(&remote, self.room, part, self.reporter).await?;
        let bytes = part.len_bytes();
        // Whoever wrote the list chose the server too, which could confirm any checksum: here it has given the bytes.
        if !is_own && self.linked(&digest, &target).await?.is_some() {
            blocking(move || part.remove()).await?;
            return Ok(bytes);
        }
        let room = Arc::clone(self.room);
        blocking(move || {
            if let Some(directory) = target.parent() {
                fs::create_dir_all(directory).map_err(FetchError::in_cache(directory))?;
            }
            part.put(&target, &room)
        })
        .await?;
        Ok(bytes)
    }

    /// Links a file that another model of this machine has; returns its length in bytes.
    async fn linked(&self, digest: &Digest, target: &Path) -> Result<Option<u64>, FetchError> {
        share::put(self.room, digest, target, self.reporter).await
    }

    /// A needed file with its URL.
    fn listed(&self, needed: &HubFile) -> Result<&ListedFile, FetchError> {
        let mut files = self.files.iter();
        let listed = files.find(|listed| listed.path == needed.path);
        listed.ok_or_else(|| FetchError::NotAModel {
            repo: self.source.shown(),
            reason: format!("{} is not in it", needed.path),
            remedy: LIST_REMEDY,
        })
    }
}
