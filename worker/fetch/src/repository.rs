//! From a repository of a hub to a directory: the list of its files at one commit, then each file that is needed.
//!
//! Files are verified one by one and collected in a directory beside the model's place; the last step renames it. A
//! later fetch checks what an earlier one collected and goes on from there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::address_policy::Guard;
use crate::cache::{About, remove_directory, remove_file};
use crate::connection::Clients;
use crate::digest::Digest;
use crate::directory::{make_directory, put};
use crate::download;
use crate::line::Line;
use crate::listing::{HubFile, INDEX, Listing};
use crate::lock::Lock;
use crate::need::Need;
use crate::part::{Part, Whose};
use crate::place::{HubPlace, Place, Remote};
use crate::progress::Reporter;
use crate::room::Room;
use crate::source::Repository;
use crate::{Cache, Credentials, FetchError, Key, Phase, blocking, verified_now};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 20;

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
        let listing = Listing::ask(&line, &self.shown).await?;
        if !self.hub.is_of(&listing.commit) {
            let reason = format!(
                "it is of commit {}, which was not asked for",
                listing.commit
            );
            return Err(listing.refused(reason));
        }
        let temporary = self.cache.unpacking(&self.key);
        let made = temporary.clone();
        blocking(move || match made.is_dir() {
            true => Ok(()),
            false => make_directory(&made),
        })
        .await?;
        let index = match listing.index()? {
            Some(index) => {
                // Only the index tells what there is besides.
                self.reporter.go_on_after(0, None);
                self.bring(&shared, &listing.commit, &index, index.bytes)
                    .await?;
                let path = temporary.join(INDEX);
                let read = move || fs::read(&path).map_err(FetchError::in_cache(&path));
                Some(blocking(read).await?)
            }
            None => None,
        };
        let files = listing.needed(index.as_deref(), self.room.options.max_entries)?;
        let whole_bytes = listing.sum_bytes(&files)?;
        self.make_room(&temporary, &files, whole_bytes).await?;
        let mut before_bytes = 0;
        for file in &files {
            self.reporter.go_on_after(before_bytes, Some(whole_bytes));
            self.bring(&shared, &listing.commit, file, whole_bytes)
                .await?;
            before_bytes += file.bytes;
        }
        let about = About {
            source: self.shown.clone(),
            commit: Some(listing.commit.clone()),
            sha256: None,
            verified_at_s: verified_now(),
        };
        self.finish(temporary, &files, about).await
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
        if blocking(move || is_there(&path, bytes, &digest, &reporter)).await? {
            return Ok(());
        }
        let remote = Remote {
            place: self.place(self.hub.file_url(commit, &file.path), Some(&file.path)),
            key: self.key.clone(),
            digest: file.digest.clone(),
            known_bytes: Some(file.bytes),
        };
        // Others fill the disk, too.
        let what = format!("{} MiB of {}", bytes.div_ceil(1 << 20), file.path);
        let missing_bytes = bytes.saturating_sub(self.cache.part_bytes(&self.key));
        let need = Need {
            models_bytes: Some(bytes),
            ..Need::of_part(missing_bytes)
        };
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
            whole_bytes: Some(whole_bytes),
        };
        let (cache, key) = (self.cache.clone(), self.key.clone());
        let (lock, reporter) = (Arc::clone(&self.lock), Arc::clone(self.reporter));
        blocking(move || Part::open(&cache, &key, whose, lock, &reporter)).await
    }

    /// Makes room for what is missing of the files.
    async fn make_room(
        &self,
        temporary: &Path,
        files: &[HubFile],
        whole_bytes: u64,
    ) -> Result<(), FetchError> {
        // Files of another commit make room themselves.
        let names = files.iter().map(|file| PathBuf::from(&file.path)).collect();
        let earlier = temporary.to_owned();
        blocking(move || match earlier.exists() {
            true => keep_only(&earlier, Path::new(""), &names),
            false => Ok(()),
        })
        .await?;
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let is_missing = |file: &&HubFile| length(temporary.join(&file.path)) != file.bytes;
        let missing = files.iter().filter(is_missing).map(|file| file.bytes);
        let files_bytes: u64 = missing.clone().sum();
        let longest_bytes = missing.max().unwrap_or_default();
        let part_bytes = self.cache.part_bytes(&self.key);
        let missing_bytes = files_bytes.saturating_sub(part_bytes);
        let what = format!("{} MiB to fetch", missing_bytes.div_ceil(1 << 20));
        let need = Need {
            held_bytes: missing_bytes,
            // One file after another is a part.
            parts_bytes: Some(longest_bytes.saturating_sub(part_bytes)),
            models_bytes: Some(files_bytes),
        };
        Room::make_whole(self.room, &self.lock, (need, whole_bytes), what).await
    }

    /// Puts the directory in place, without what an earlier fetch of another commit left in it.
    async fn finish(
        self,
        temporary: PathBuf,
        files: &[HubFile],
        about: About,
    ) -> Result<PathBuf, FetchError> {
        let names = files.iter().map(|file| PathBuf::from(&file.path)).collect();
        let (cache, key) = (self.cache.clone(), self.key.clone());
        let target = cache.directory(&key);
        let lock = self.lock;
        let commit = about.commit.clone();
        blocking(move || {
            keep_only(&temporary, Path::new(""), &names)?;
            remove_file(&cache.part(&key))?;
            remove_file(&cache.part_facts(&key))?;
            cache.note_about(&key, &about)?;
            // From here on its bytes are elsewhere.
            lock.promise_nothing();
            put(&temporary, &target)?;
            cache.note_use(&key, SystemTime::now());
            lock.remove();
            tracing::info!(
                model = about.source,
                commit,
                directory = %target.display(),
                "model put in place"
            );
            Ok(target)
        })
        .await
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

/// Whether the file is there with the right bytes; removes another.
fn is_there(
    path: &Path,
    bytes: u64,
    digest: &Digest,
    reporter: &Reporter,
) -> Result<bool, FetchError> {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return Ok(false);
    };
    if metadata.is_dir() {
        remove_directory(path)?;
        return Ok(false);
    }
    let is_same = metadata.is_file() && metadata.len() == bytes && {
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
                    reporter.tell(Phase::Checking, read_bytes, Some(bytes));
                }
            }
        }
    };
    if !is_same {
        remove_file(path)?;
    }
    Ok(is_same)
}

/// Removes all files below `top` that are not named; `inside` is the path within it.
fn keep_only(top: &Path, inside: &Path, names: &BTreeSet<PathBuf>) -> Result<(), FetchError> {
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
