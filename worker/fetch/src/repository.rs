//! From a repository of a hub to a directory: the list of its files at one commit, then each file that is needed.
//!
//! Files are verified one by one and collected in a directory beside the model's place; the last step renames it. A
//! later fetch checks what an earlier one collected and goes on from there.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::address_policy::Guard;
use crate::cache::About;
use crate::collect::{self, Collected, keep_only};
use crate::connection::Clients;
use crate::digest::Digest;
use crate::download;
use crate::inventory::Begun;
use crate::line::Line;
use crate::listing::{HubFile, INDEX, Listing};
use crate::lock::{Lock, Promise};
use crate::need::{FilesToCome, Need};
use crate::part::{Part, Whose};
use crate::place::{HubPlace, Place, Remote};
use crate::progress::Reporter;
use crate::room::Room;
use crate::share;
use crate::source::Repository;
use crate::{Cache, Credentials, FetchError, Key, blocking, verified_now};

/// The fetch of one repository.
pub(crate) struct Fetch<'a> {
    pub(crate) hub: &'a Repository,
    /// Repository and revision.
    pub(crate) shown: String,
    pub(crate) key: Key,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) cache: &'a Cache,
    pub(crate) room: &'a Arc<Room>,
    pub(crate) reporter: &'a Arc<Reporter>,
    pub(crate) lock: Arc<Lock>,
}

/// What all requests of a fetch share.
struct Shared {
    clients: Clients,
    guard: Guard,
}

impl Fetch<'_> {
    /// Fetches the files and puts the directory in place.
    ///
    /// # Errors
    /// The errors of [`crate::fetch`]; the files that are complete, and the part of another, stay for the next call.
    pub(crate) async fn run(self) -> Result<PathBuf, FetchError> {
        let place = self.place(self.hub.listing_url(), None);
        // The address of the hub is the administrator's choice, not the requester's.
        let guard = Guard::of_administrator(&self.room.options.address_policy);
        let clients = Clients::new(&place, &self.room.options, &guard)?;
        let shared = Shared { clients, guard };
        let line = self.line(&place, &shared);
        let (listing, commit) = Listing::ask(&line, &self.shown).await?;
        if !self.hub.is_of(&commit) {
            let reason = format!("it is of commit {commit}, which was not asked for");
            return Err(listing.refused(reason));
        }
        let temporary = self.cache.unpacking(&self.key);
        collect::begin(&temporary).await?;
        self.note_begun(&commit, None).await?;
        let index = match listing.index()? {
            Some(index) => {
                // Only the index tells what there is besides.
                self.reporter.go_on_after(0, None);
                self.bring(&shared, &commit, &index, index.bytes).await?;
                let path = temporary.join(INDEX);
                let read = move || fs::read(&path).map_err(FetchError::in_cache(&path));
                Some(blocking(read).await?)
            }
            None => None,
        };
        let files = listing.needed(index.as_deref(), self.room.options.max_entries)?;
        let whole_bytes = listing.sum_bytes(&files)?;
        self.note_begun(&commit, Some(whole_bytes)).await?;
        let (files, shared_count) = self.share(&shared, &commit, files, whole_bytes).await?;
        let missing = self.make_room(&temporary, &files, whole_bytes).await?;
        let (there, to_bring) = files.split_at(shared_count);
        let mut before_bytes = there.iter().map(|file| file.bytes).sum();
        for (at, file) in (shared_count..).zip(to_bring) {
            self.lock.promise(Promise {
                whole_bytes,
                longest_bytes: longest_of(&missing[at..]),
            })?;
            self.reporter.go_on_after(before_bytes, Some(whole_bytes));
            self.bring(&shared, &commit, file, whole_bytes).await?;
            before_bytes += file.bytes;
        }
        let about = About {
            source: self.shown.clone(),
            commit: Some(commit),
            sha256: None,
            files: collect::sha256_by_path(&files),
            holder: self.room.holder.clone(),
            for_all: false,
            verified_at_s: verified_now(),
        };
        let collected = Collected {
            cache: self.cache.clone(),
            key: self.key.clone(),
            names: files.iter().map(|file| PathBuf::from(&file.path)).collect(),
            about,
            lock: self.lock,
        };
        collected.put().await
    }

    /// Records what is fetched, for whoever lists the cache meanwhile.
    async fn note_begun(&self, commit: &str, total_bytes: Option<u64>) -> Result<(), FetchError> {
        let begun = Begun {
            source: self.shown.clone(),
            commit: Some(commit.to_owned()),
            total_bytes,
        };
        let (cache, key) = (self.cache.clone(), self.key.clone());
        blocking(move || {
            cache.note_begun(&key, &begun);
            Ok(())
        })
        .await
    }

    /// Links those of the files that other models of this machine have, as far as the hub gives them for these credentials: its list
    /// alone, which anybody may read of a gated repository, shows nothing. Returns all files, the linked ones first, and their number.
    async fn share(
        &self,
        shared: &Shared,
        commit: &str,
        files: Vec<HubFile>,
        whole_bytes: u64,
    ) -> Result<(Vec<HubFile>, usize), FetchError> {
        let (mut there, mut others) = (Vec::new(), Vec::new());
        let mut before_bytes = 0;
        for file in files {
            self.reporter.go_on_after(before_bytes, Some(whole_bytes));
            match self.is_linked(shared, commit, &file).await? {
                true => {
                    before_bytes += file.bytes;
                    there.push(file);
                }
                false => others.push(file),
            }
        }
        let count = there.len();
        there.append(&mut others);
        Ok((there, count))
    }

    /// Links one file, unless an earlier fetch has brought it.
    async fn is_linked(
        &self,
        shared: &Shared,
        commit: &str,
        file: &HubFile,
    ) -> Result<bool, FetchError> {
        let Digest::Sha256(sha256) = &file.digest else {
            return Ok(false);
        };
        let target = self.cache.unpacking(&self.key).join(&file.path);
        let is_brought = tokio::fs::symlink_metadata(&target)
            .await
            .is_ok_and(|there| there.len() == file.bytes);
        if is_brought || !share::may_have(self.room, &file.digest).await? {
            return Ok(false);
        }
        let remote = self.remote(commit, file);
        let line = self.line(&remote.place, shared);
        if !line.gives(sha256, file.bytes).await? {
            return Ok(false);
        }
        let linked = share::put(self.room, &file.digest, &target, self.reporter).await?;
        Ok(linked.is_some())
    }

    /// Brings one file into the directory, unless it is there. A file that arrives altered is fetched once more from its
    /// start: what an earlier connection brought may have been of another file.
    async fn bring(
        &self,
        shared: &Shared,
        commit: &str,
        file: &HubFile,
        whole_bytes: u64,
    ) -> Result<(), FetchError> {
        let target = self.cache.unpacking(&self.key).join(&file.path);
        let (path, digest, reporter) = (
            target.clone(),
            file.digest.clone(),
            Arc::clone(self.reporter),
        );
        let bytes = file.bytes;
        let there = move || collect::there(&path, Some(bytes), &digest, &reporter);
        if blocking(there).await?.is_some() {
            return Ok(());
        }
        let remote = self.remote(commit, file);
        // Others fill the disk, too.
        let what = format!("{} MiB of {}", bytes.div_ceil(1 << 20), file.path);
        let need = Need::of_files(self.to_come(&[bytes]));
        Room::make_soon(self.room, need, what).await?;
        let line = self.line(&remote.place, shared);
        let part = self.begun(file, whole_bytes, &remote).await?;
        let part = match download::complete(&line, self.room, &remote, part).await {
            Err(FetchError::Altered { found, .. }) => {
                tracing::warn!(url = remote.place.shown, found, "a wrong file: again");
                download::complete(
                    &line,
                    self.room,
                    &remote,
                    self.part(file, whole_bytes).await?,
                )
                .await?
            }
            other => other?,
        };
        let room = Arc::clone(self.room);
        blocking(move || {
            if let Some(directory) = target.parent() {
                fs::create_dir_all(directory).map_err(FetchError::in_cache(directory))?;
            }
            part.put(&target, &room)
        })
        .await
    }

    /// What is here of a file, after another node has given what it has.
    async fn begun(
        &self,
        file: &HubFile,
        whole_bytes: u64,
        remote: &Remote,
    ) -> Result<Part, FetchError> {
        let part = self.part(file, whole_bytes).await?;
        let Some(seed) = &self.room.options.seed else {
            return Ok(part);
        };
        let completed = seed.complete(self.room, remote, part, self.reporter);
        match completed.await? {
            Some(part) => Ok(part),
            None => self.part(file, whole_bytes).await,
        }
    }

    /// What is here of a file.
    async fn part(&self, file: &HubFile, whole_bytes: u64) -> Result<Part, FetchError> {
        let whose = Whose {
            digest: file.digest.clone(),
            is_one_of_several: true,
            whole_bytes: Some(whole_bytes),
        };
        let (cache, key) = (self.cache.clone(), self.key.clone());
        let (lock, reporter) = (Arc::clone(&self.lock), Arc::clone(self.reporter));
        blocking(move || Part::open(&cache, &key, whose, lock, &reporter)).await
    }

    /// What is to come of files with these lengths in bytes.
    fn to_come(&self, missing: &[u64]) -> FilesToCome {
        FilesToCome {
            sum_bytes: missing.iter().sum(),
            longest_bytes: longest_of(missing),
            part_bytes: self.cache.part_bytes(&self.key),
            are_copied: self.cache.copies_to_models(),
        }
    }

    /// Makes room for what is missing of the files, and returns how many bytes of each are: all or none.
    async fn make_room(
        &self,
        temporary: &Path,
        files: &[HubFile],
        whole_bytes: u64,
    ) -> Result<Vec<u64>, FetchError> {
        // Files of another commit make room themselves.
        let names = files.iter().map(|file| PathBuf::from(&file.path)).collect();
        let earlier = temporary.to_owned();
        blocking(move || match earlier.exists() {
            true => keep_only(&earlier, Path::new(""), &names),
            false => Ok(()),
        })
        .await?;
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let missing_bytes = |file: &HubFile| match length(temporary.join(&file.path)) {
            there if there == file.bytes => 0,
            _ => file.bytes,
        };
        let missing: Vec<u64> = files.iter().map(missing_bytes).collect();
        let need = Need::of_files(self.to_come(&missing));
        let what = format!("{} MiB to fetch", need.quota_bytes.div_ceil(1 << 20));
        let promise = Promise {
            whole_bytes,
            longest_bytes: longest_of(&missing),
        };
        Room::make_whole(self.room, &self.lock, (need, promise), what).await?;
        Ok(missing)
    }

    fn remote(&self, commit: &str, file: &HubFile) -> Remote {
        Remote {
            place: self.place(self.hub.file_url(commit, &file.path), Some(&file.path)),
            key: self.key.clone(),
            digest: file.digest.clone(),
            known_bytes: Some(file.bytes),
            is_archive: false,
        }
    }

    fn place(&self, url: reqwest::Url, file: Option<&str>) -> Place {
        Place {
            shown: hearth_crds::shown_url(url.as_str()),
            url,
            credentials: self.credentials.clone(),
            hub: Some(HubPlace {
                repo: self.hub.repo.clone(),
                revision: self.hub.revision.clone(),
                file: file.map(str::to_owned),
            }),
        }
    }

    fn line<'a>(&'a self, place: &'a Place, shared: &'a Shared) -> Line<'a> {
        Line {
            place,
            options: &self.room.options,
            reporter: self.reporter,
            guard: &shared.guard,
            clients: &shared.clients,
        }
    }
}

/// The most bytes; 0 of none.
fn longest_of(files: &[u64]) -> u64 {
    files.iter().copied().max().unwrap_or_default()
}
