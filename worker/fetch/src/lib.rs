//! Fetches a model into a directory on this machine: an archive behind a URL, a list of files behind URLs, or a repository of a hub.
//!
//! [`fetch`] downloads the archive (resuming where an earlier try stopped), verifies its SHA-256, unpacks it and puts
//! the directory in place by one rename: a directory in the cache is complete or absent. Of a list it downloads the files that are
//! needed, each verified by its SHA-256; of a repository those of the commit that the revision stands for, each verified against
//! the hub's list.
//! Processes that want the same model wait for the one that fetches it.
//!
//! - [`Source`]: the archive, files or repository to fetch, its credentials, and its [`Key`] in the cache.
//! - [`AddressPolicy`]: the addresses that may be fetched from.
//! - [`Egress`]: the proxies and the further certificate authorities on the way there.
//! - [`Cache`]: the directory of models and parts; [`Cache::retain`] removes what is no longer wanted, [`Cache::stored`]
//!   and [`Cache::unfinished`] tell what is there, [`Cache::pin`] keeps it.
//! - [`Claims`]: what the cache's owner still wants, when models are removed to make room for another.
//! - [`Hold`]: a model in use, which nothing removes.
//! - [`Throttle`], [`Counters`]: the rate of all downloads of a process, and what they did.
//! - [`Tries`]: the record of earlier tries, kept for the next process.
//! - [`Seed`]: another node that has the model, and is asked for a hub's files before the hub is; [`Giver`]: its side.
//! - [`Progress`]: a report on a running fetch.
//! - [`FetchError`]: the failure and its remedy, and whether trying again can help ([`FetchError::fault_origin`]).
//!
//! **Invariants**
//! - Nothing in an archive is unpacked before its checksum has been verified.
//! - No entry of an archive reaches outside the model's directory: links become hard links to files in it.
//! - A checksum alone gives nobody a file that another model has: in a cache of several users its source gives it first, and the
//!   other model is the same holder's or everybody's.
//! - Nothing of a repository or a list reaches the model's directory before its checksum has been verified, and no name in the
//!   list leads out of it.
//! - Credentials go to the source's own server, and to none that it redirects to.
//! - A proxy is asked for nothing that is this machine's own or, where addresses are limited, the cluster's.
//! - Where addresses are limited, nothing about a non-public server that the requester chose is disclosed before the checksum holds: neither in
//!   messages, nor in sizes (except of an archive, or of weights, that come from a single server), nor by the time a failure takes.
//! - Other nodes are given the files of one complete model, and only those that a fetch asks for.
//! - A model that somebody holds, that is pinned or that its owner wants is never removed to make room for another.
//! - A server can neither make this machine hold more than it announced nor fill its disk.

#![forbid(unsafe_code)]

mod address_policy;
mod answer;
mod cache;
mod collect;
mod connection;
mod digest;
mod directory;
mod disks;
mod download;
mod egress;
mod error;
mod files;
mod giver;
mod hold;
mod inventory;
mod lengths;
mod line;
mod listing;
mod lock;
mod names;
mod need;
mod part;
mod place;
mod progress;
mod repository;
mod retry;
mod room;
mod seed;
mod share;
mod source;
mod throttle;
mod tries;
mod unpack;
mod uses;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use address_policy::AddressPolicy;
pub use cache::{About, Cache};
pub use egress::{Egress, ProxyVariables, is_own};
pub use error::{FaultOrigin, FetchError};
pub use giver::{Giver, GiverPatience};
pub use hold::Hold;
pub use inventory::{Begun, Stored, Unfinished};
pub use progress::{Observer, Phase, Progress};
pub use room::{Claim, Claims, Counters, Owner};
pub use seed::Seed;
pub use source::{Credentials, Key, Source};
pub use throttle::Throttle;
pub use tries::Tries;

use lock::Lock;
use part::{Part, Whose};
use place::Remote;
use progress::Reporter;
use repository::Fetch;
use room::Room;
use source::Origin;

/// Interval at which a process that waits for another checks whether it has finished.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Timeouts, retries and limits of a fetch.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Time to connect.
    pub connect_timeout: Duration,
    /// Silence of the server after which the connection counts as lost.
    pub stall_timeout: Duration,
    /// Consecutive tries without new bytes after which the fetch gives up.
    pub attempts: u32,
    /// Wait before the second of these tries; doubled for each further one.
    pub first_backoff: Duration,
    /// Longest of these waits.
    pub max_backoff: Duration,
    /// Longest wait that a server may request with Retry-After; if it requests more, the fetch gives up.
    pub max_retry_after: Duration,
    /// Time for which a non-public server that sends no byte is tried, where addresses are limited. Every failure there
    /// is reported after this time or a multiple of it, so that its timing reveals nothing about the server.
    pub private_patience: Duration,
    /// Bytes of disk space to leave free.
    pub reserve_bytes: u64,
    /// The same as a percentage of the disk; the larger of the two applies.
    pub reserve_percent: u8,
    /// Most bytes that models and parts in the cache may have together; `None` for as many as the disk has.
    pub quota_bytes: Option<u64>,
    /// Time after its last use for which a model is not removed to make room: a deployment that is deleted and applied
    /// again finds its model.
    pub recent: Duration,
    /// What the cache's owner still wants.
    pub claims: Claims,
    /// Whose cache it is.
    pub owner: Owner,
    /// Rate of all downloads that share it; `None` for as fast as they come.
    pub throttle: Option<Arc<Throttle>>,
    /// Who gives the files of a hub before the hub does, at a rate of its own.
    pub seed: Option<Seed>,
    /// Time in which it gives a mebibyte, or what is left of a file; otherwise the hub is asked.
    pub seed_patience: Duration,
    /// Counts what this fetch does.
    pub counters: Arc<Counters>,
    /// Addresses that may be fetched from.
    pub address_policy: AddressPolicy,
    /// How servers are reached.
    pub egress: Egress,
    /// Maximum number of files and directories of a model.
    pub max_entries: u64,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            attempts: 8,
            first_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(30),
            max_retry_after: Duration::from_secs(300),
            private_patience: Duration::from_secs(60),
            reserve_bytes: 256 << 20,
            reserve_percent: 0,
            quota_bytes: None,
            recent: Duration::from_secs(600),
            claims: Claims::by(|_| Claim::Personal),
            owner: Owner::User,
            throttle: None,
            seed: None,
            seed_patience: Duration::from_secs(10),
            counters: Arc::default(),
            address_policy: AddressPolicy::anywhere(),
            egress: Egress::default(),
            max_entries: 100_000,
        }
    }
}

/// Returns the model's directory in the cache, fetching the model first if it is not there. Dropping the future stops
/// the download at once; the part downloaded so far stays for the next call. Needs a tokio runtime with time and I/O.
///
/// # Errors
/// See the variants of [`FetchError`].
pub async fn fetch(
    source: &Source,
    cache: &Cache,
    options: &FetchOptions,
    observer: Observer,
) -> Result<PathBuf, FetchError> {
    let key = source.key();
    if let Some(directory) = cache.model(&key) {
        cache.note_use(&key, SystemTime::now());
        return Ok(directory);
    }
    cache.create()?;
    let of_parts = || error::reserve_bytes(&cache.partial(), options);
    let parts_reserve_bytes = cache.has_models_apart().then(of_parts);
    let reserve_bytes = error::reserve_bytes(&cache.models(), options);
    let options = &FetchOptions {
        reserve_bytes,
        ..options.clone()
    };
    let room = Arc::new(Room {
        cache: cache.clone(),
        key: key.clone(),
        shown: source.shown(),
        holder: source.holder().map(str::to_owned),
        options: options.clone(),
        parts_reserve_bytes,
        shared_bytes: Arc::default(),
    });
    let reporter = Arc::new(Reporter::new(observer));
    let is_chosen = !matches!(source.origin(), Origin::Repository(_));
    // The size stays hidden until the server is known to be public, or the file to be an archive or weights.
    reporter.hide(is_chosen && options.address_policy.is_limited());
    let lock = Arc::new(wait_for_lock(cache, &key, &reporter).await?);
    if let Some(directory) = cache.model(&key) {
        lock.remove();
        return Ok(directory);
    }
    let fetched = match source.origin() {
        Origin::Archive { url, sha256 } => {
            let remote = source.archive(url, sha256);
            fetch_archive(&remote, sha256, &room, &reporter, lock).await
        }
        Origin::Files {
            files, revision, ..
        } => {
            let fetch = files::Fetch {
                source,
                files,
                revision,
                cache,
                room: &room,
                reporter: &reporter,
                lock,
            };
            fetch.run().await
        }
        Origin::Repository(hub) => {
            let fetch = Fetch {
                hub,
                shown: source.shown(),
                key,
                credentials: source.credentials().cloned(),
                cache,
                room: &room,
                reporter: &reporter,
                lock,
            };
            fetch.run().await
        }
    };
    conclude(&fetched, &room);
    fetched
}

/// Counts what was fetched whole, and forgets what was begun in vain.
fn conclude(fetched: &Result<PathBuf, FetchError>, room: &Room) {
    let Room {
        cache,
        key,
        options,
        shared_bytes,
        ..
    } = room;
    match fetched {
        Ok(model) => {
            let taken_bytes = options.seed.as_ref().map_or(0, Seed::taken_bytes);
            let shared_bytes = shared_bytes.load(Ordering::Relaxed);
            let bytes = directory::bytes_below(model).saturating_sub(shared_bytes);
            options.counters.fetched(bytes, taken_bytes);
        }
        Err(_) if cache.has_arrived(key) => {}
        Err(_) => {
            // The fetch's own error is the one to tell.
            let _ = cache.forget_begun(key);
        }
    }
}

async fn fetch_archive(
    remote: &Remote,
    sha256: &str,
    room: &Arc<Room>,
    reporter: &Arc<Reporter>,
    lock: Arc<Lock>,
) -> Result<PathBuf, FetchError> {
    let (cache, key) = (&room.cache, remote.key.clone());
    let begun = Begun {
        source: remote.place.shown.clone(),
        commit: None,
        total_bytes: None,
    };
    let part = {
        let (cache, key, reporter) = (cache.clone(), key.clone(), Arc::clone(reporter));
        let lock = Arc::clone(&lock);
        let whose = Whose {
            digest: remote.digest.clone(),
            is_one_of_several: false,
            whole_bytes: None,
        };
        blocking(move || {
            cache.note_begun(&key, &begun);
            Part::open(&cache, &key, whose, lock, &reporter)
        })
        .await?
    };
    let part = download::chosen(remote, room, part, reporter).await?;
    let unpacking = unpack::Unpacking {
        shown: remote.place.shown.clone(),
        sha256: sha256.to_owned(),
        temporary: cache.unpacking(&key),
        target: cache.directory(&key),
        room: Arc::clone(room),
        max_entries: room.options.max_entries,
    };
    let about = About {
        source: unpacking.shown.clone(),
        commit: None,
        sha256: Some(unpacking.sha256.clone()),
        files: BTreeMap::new(),
        holder: room.holder.clone(),
        for_all: false,
        verified_at_s: verified_now(),
    };
    let (cache, reporter) = (cache.clone(), Arc::clone(reporter));
    blocking(move || {
        // First: a model in its place always says what it is.
        cache.note_about(&key, &about)?;
        let directory = match unpack::put_in_place(&unpacking, part, &reporter) {
            Ok(directory) => directory,
            Err(error) => {
                cache::remove_file(&cache.about_file(&key))?;
                return Err(error);
            }
        };
        cache.note_use(&key, SystemTime::now());
        cache.forget_begun(&key)?;
        lock.remove();
        Ok(directory)
    })
    .await
}

/// Waits for the key's lock and takes it; meanwhile reports how far the other process is.
async fn wait_for_lock(cache: &Cache, key: &Key, reporter: &Reporter) -> Result<Lock, FetchError> {
    loop {
        if let Some(lock) = Lock::try_acquire(&cache.lock_file(key))? {
            return Ok(lock);
        }
        let (bytes, total_bytes) = part::seen(cache, key);
        reporter.tell(Phase::Waiting, bytes, total_bytes);
        tokio::time::sleep(LOOK_PERIOD).await;
    }
}

/// The time of [`About::verified_at_s`] for what was just verified.
pub(crate) fn verified_now() -> Option<u64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.ok().map(|since| since.as_secs())
}

/// Runs blocking work on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FetchError> + Send + 'static,
) -> Result<T, FetchError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(FetchError::Ended {
            reason: error.to_string(),
        }),
    }
}
