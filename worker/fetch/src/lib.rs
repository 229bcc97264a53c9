//! Downloads a model's archive from a URL and unpacks it into a directory on this machine.
//!
//! [`fetch`] downloads the archive (resuming where an earlier try stopped), verifies its SHA-256, unpacks it and puts
//! the directory in place by one rename: a directory in the cache is complete or absent. Processes that want the same
//! model wait for the one that fetches it.
//!
//! - [`Source`]: the archive to fetch, its credentials, and its [`Key`] in the cache.
//! - [`AddressPolicy`]: the addresses that may be fetched from.
//! - [`Cache`]: the directory of models and parts; [`Cache::retain`] removes what is no longer wanted.
//! - [`Tries`]: the record of earlier tries, kept for the next process.
//! - [`Progress`]: a report on a running fetch.
//! - [`FetchError`]: the failure and its remedy, and whether trying again can help ([`FetchError::fault_origin`]).
//!
//! **Invariants**
//! - Nothing in an archive is unpacked before its checksum has been verified.
//! - No entry of an archive reaches outside the model's directory: links become hard links to files in it.
//! - Where addresses are limited, nothing about a non-public server is disclosed before the checksum holds: neither in
//!   messages, nor in sizes (except of an archive that comes from a single server), nor by the time a failure takes.
//! - A server can neither make this machine hold more than it announced nor fill its disk.

#![forbid(unsafe_code)]

mod address_policy;
mod answer;
mod cache;
mod connection;
mod download;
mod error;
mod lock;
mod part;
mod progress;
mod retry;
mod source;
mod tries;
mod unpack;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use address_policy::AddressPolicy;
pub use cache::Cache;
pub use error::{FaultOrigin, FetchError};
pub use progress::{Observer, Phase, Progress};
pub use source::{Credentials, Key, Source};
pub use tries::Tries;

use lock::Lock;
use part::Part;
use progress::Reporter;

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
    /// Addresses that may be fetched from.
    pub address_policy: AddressPolicy,
    /// Maximum number of files and directories in an archive.
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
            address_policy: AddressPolicy::anywhere(),
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
        return Ok(directory);
    }
    cache.create()?;
    let reserve_bytes = error::reserve_bytes(&cache.lock_file(&key), options);
    let options = &FetchOptions {
        reserve_bytes,
        ..options.clone()
    };
    let reporter = Arc::new(Reporter::new(observer));
    // The size stays hidden until the server is known to be public, or the file to be an archive.
    reporter.hide(options.address_policy.is_limited());
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

/// Runs blocking work on a blocking thread.
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
