//! From an archive behind a URL to a model's directory on this machine.
//!
//! [`fetch`] downloads (and goes on where an earlier try stopped), verifies the archive's SHA-256, unpacks it and puts
//! the directory in place by one rename: a directory of the cache is complete or not there. Processes that want
//! the same model wait for the one that fetches it.
//!
//! - [`Source`]: what is fetched, what opens it, and its [`Key`] in the cache.
//! - [`Reach`]: from which addresses.
//! - [`Cache`]: where models and parts lie; what is not wanted any more is removed by [`Cache::retain`].
//! - [`Tries`]: what became of earlier ones, kept for the next process.
//! - [`Progress`]: how far it is.
//! - [`FetchError`]: what went wrong and what to do, and whether trying again can help ([`FetchError::blame`]).
//!
//! **Invariants**
//! - Nothing of an archive is unpacked before its checksum is right.
//! - No entry of an archive reaches outside of the model's directory: links become second names of files in it.
//! - Where the reach is limited, nothing of a server that is not public is told before the checksum holds: neither in
//!   words, nor in sizes but those of an archive that one server gives, nor by the time that a failure takes.
//! - A server never makes this machine hold more than it announced, nor fill its disk.

#![forbid(unsafe_code)]

mod answer;
mod cache;
mod connection;
mod download;
mod error;
mod lock;
mod part;
mod progress;
mod reach;
mod retry;
mod source;
mod tries;
mod unpack;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use cache::Cache;
pub use error::{Blame, FetchError};
pub use progress::{Observer, Phase, Progress};
pub use reach::Reach;
pub use source::{Credentials, Key, Source};
pub use tries::Tries;

use lock::Lock;
use part::Part;
use progress::Reporter;

/// How often a process that waits for another looks whether it has ended.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// How patient a fetch is, and what it leaves free.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Time to connect.
    pub connect_timeout: Duration,
    /// Silence of the server after which the connection counts as lost.
    pub stall_timeout: Duration,
    /// Tries in a row that bring nothing new before the fetch gives up.
    pub attempts: u32,
    /// Wait before the second of such tries; each further one is twice as long.
    pub first_backoff: Duration,
    /// Longest of these waits.
    pub max_backoff: Duration,
    /// Longest wait that a server may ask for by Retry-After; for a longer one the fetch gives up.
    pub max_retry_after: Duration,
    /// How long a server that is not public is tried without a byte, where the reach is limited. Every failure there
    /// is told after it, or after a multiple of it: when one comes says nothing of the server.
    pub private_patience: Duration,
    /// Bytes of the disk that stay free.
    pub reserve_bytes: u64,
    /// The same in percent of the disk: the more of both counts.
    pub reserve_percent: u8,
    /// Addresses that may be fetched from.
    pub reach: Reach,
    /// Most files and directories of an archive.
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
            reach: Reach::anywhere(),
            max_entries: 100_000,
        }
    }
}

/// The model's directory in the cache; fetched if it is not there. Dropping the future stops the download at once,
/// and what is there of the archive stays for the next call. Needs a tokio runtime with time and I/O.
///
/// # Errors
/// [`FetchError`], as each of its variants says.
pub async fn fetch(
    source: &Source,
    cache: &Cache,
    options: &FetchOptions,
    observer: Observer,
) -> Result<PathBuf, FetchError> {
    let key = source.key();
    if let Some(directory) = cache.model(&key) {
        return Ok(directory);
    }
    cache.create()?;
    let reserve_bytes = error::reserve_bytes(&cache.lock_file(&key), options);
    let options = &FetchOptions {
        reserve_bytes,
        ..options.clone()
    };
    let reporter = Arc::new(Reporter::new(observer));
    // Until its server is known to be public, or the file to be an archive, its size is nobody's business.
    reporter.hide(options.reach.is_limited());
    let lock = Arc::new(wait_for_lock(cache, &key, &reporter).await?);
    if let Some(directory) = cache.model(&key) {
        lock.remove();
        return Ok(directory);
    }
    let part = {
        let (cache, key, reporter) = (cache.clone(), key.clone(), Arc::clone(&reporter));
        let lock = Arc::clone(&lock);
        blocking(move || Part::open(&cache, &key, lock, &reporter)).await?
    };
    let part = download::download(source, options, part, &reporter).await?;
    let unpacking = unpack::Unpacking {
        shown: source.shown(),
        sha256: source.sha256().to_owned(),
        temporary: cache.unpacking(&key),
        target: cache.directory(&key),
        reserve_bytes: options.reserve_bytes,
        max_entries: options.max_entries,
    };
    blocking(move || {
        let directory = unpack::put_in_place(&unpacking, part, &reporter)?;
        lock.remove();
        Ok(directory)
    })
    .await
}

/// Holds the key's lock as soon as nobody else does; tells meanwhile how far the other is.
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

/// Runs what blocks on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FetchError> + Send + 'static,
) -> Result<T, FetchError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) => Err(FetchError::Ended {
            reason: error.to_string(),
        }),
    }
}
