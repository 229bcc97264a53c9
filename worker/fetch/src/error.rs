//! Errors of a fetch, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::FetchOptions;

/// A model that could not be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The URL cannot be fetched.
    #[error("url is {url:?}: {reason}\n  write a URL such as https://nas.lan/models/qwen3.tar")]
    Url {
        /// The value as given.
        url: String,
        /// Reason that it was rejected.
        reason: String,
    },
    /// The value is not a SHA-256.
    #[error(
        "sha256 is {sha256:?}\n  write the 64 hexadecimal digits that sha256sum prints for the archive"
    )]
    Checksum {
        /// The value as given.
        sha256: String,
    },
    /// The server has no such file.
    #[error(
        "{url} was not found: the server answered {status}\n  check the URL, and that the file is on the server"
    )]
    NotFound {
        /// URL without secrets.
        url: String,
        /// `404 Not Found` or `410 Gone`.
        status: String,
    },
    /// The server requires authentication or denies access.
    #[error(
        "{url} may not be read: the server answered {status}\n  allow this machine to read it, or use a URL that carries its own permission"
    )]
    Denied {
        /// URL without secrets.
        url: String,
        /// `401 …`, `403 …`, `407 …`.
        status: String,
    },
    /// An answer that is not a file.
    #[error(
        "{url} returned no file: the server answered {answer}\n  open the URL from this machine to see why"
    )]
    Answer {
        /// URL without secrets.
        url: String,
        /// Status of the answer.
        answer: String,
    },
    /// Too many redirects.
    #[error(
        "{url} redirects in a loop: more than {limit} redirects\n  use the URL of the file itself"
    )]
    Redirects {
        /// URL without secrets.
        url: String,
        /// Maximum number of redirects.
        limit: usize,
    },
    /// The server's certificate was rejected, or the server does not speak TLS.
    #[error(
        "TLS verification failed for {url}: {reason}\n  add its certificate authority to this machine's certificates (or name its PEM file in SSL_CERT_FILE), or use http:// for a server without TLS"
    )]
    Tls {
        /// URL without secrets.
        url: String,
        /// The library's reason.
        reason: String,
    },
    /// The address is off limits to the machine that fetches.
    #[error(
        "{url} is not allowed: its address is {why}\n  put the archive on a server outside the cluster, or name its range in agent.fetch.allowedRanges of Hearth's chart"
    )]
    Forbidden {
        /// URL without secrets.
        url: String,
        /// Kind of address that it is.
        why: &'static str,
    },
    /// A non-public server gave something other than the archive, or nothing: all of these failures look alike.
    #[error(
        "{url} did not yield the archive with the sha256 {sha256}: its address is not public, so the details are only in the log of this node's agent\n  check the URL, the checksum, that the server lets this node read the file, and that the node's disk has room for it"
    )]
    KeptBack {
        /// URL without secrets.
        url: String,
        /// The requested checksum.
        sha256: String,
        /// The error that is not shown.
        cause: Box<FetchError>,
        /// Whether the downloaded bytes stay for the next try, and the progress already showed that to the requester.
        is_resumed: bool,
    },
    /// The connection broke repeatedly, or could not be made.
    #[error(
        "{url} cannot be fetched: {reason} ({attempts} attempts made no progress)\n  check the network and the server; the next attempt resumes with the {bytes} bytes that are here"
    )]
    Lost {
        /// URL without secrets.
        url: String,
        /// Reason of the last attempt.
        reason: String,
        /// Consecutive tries without a new byte.
        attempts: u32,
        /// Bytes of the archive that are kept.
        bytes: u64,
    },
    /// More bytes than the server announced.
    #[error(
        "{url} sent more than the {announced_bytes} bytes that its server announced\n  the server or a proxy in front of it is at fault: try another"
    )]
    TooLong {
        /// URL without secrets.
        url: String,
        /// Length of the file as announced by the server.
        announced_bytes: u64,
    },
    /// A file with another checksum than the requested one.
    #[error(
        "{url} has the sha256\n  {found}, not\n  {expected}: the download was removed\n  check that the sha256 is that of the archive behind the URL"
    )]
    Mismatch {
        /// URL without secrets.
        url: String,
        /// The requested checksum.
        expected: String,
        /// Checksum of the received bytes.
        found: String,
    },
    /// Not enough free disk space.
    #[error("{path} has {free} MiB free, and {need} MiB are needed: {what}\n  free space on that disk, or keep models on another one", path = path.display(), free = free_bytes >> 20, need = need_bytes.div_ceil(1 << 20))]
    DiskFull {
        /// Directory of the cache.
        path: PathBuf,
        /// Purpose of the space.
        what: String,
        /// Bytes that must be free.
        need_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The cache's own files cannot be used.
    #[error("{path}: {reason}\n  the directory of the cache must be writable for user {user}", path = path.display())]
    Cache {
        /// File or directory.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
        /// Effective user id of this process.
        user: u32,
    },
    /// Not an archive.
    #[error(
        "{url} is not an archive that can be unpacked: {what}\n  pack the model's directory as .tar, .tar.gz or .tar.zst: tar -cf model.tar -C /models/NAME ."
    )]
    NotAnArchive {
        /// URL without secrets.
        url: String,
        /// Kind of file it is instead, or the reason that it cannot be read.
        what: String,
    },
    /// An archive that is truncated or corrupt.
    #[error(
        "{url} is a broken archive: {reason}\n  its sha256 is right, so the file was broken when that was computed: pack it again"
    )]
    Corrupt {
        /// URL without secrets.
        url: String,
        /// Place and cause of the damage.
        reason: String,
    },
    /// An entry that would reach outside the directory, or is not a model's file.
    #[error(
        "{url} was not unpacked: its entry {entry:?} {reason}\n  pack the model's own files, links followed: tar -chf model.tar -C /models/NAME ."
    )]
    Unsafe {
        /// URL without secrets.
        url: String,
        /// Name in the archive.
        entry: String,
        /// Reason that it was refused.
        reason: String,
    },
    /// More files than any model has.
    #[error("{url} has more than {limit} entries\n  pack only the model's own files")]
    TooMany {
        /// URL without secrets.
        url: String,
        /// Maximum number of entries.
        limit: u64,
    },
    /// An archive without a model.
    #[error(
        "{url} holds no model: config.json is neither at its top nor in a single directory there (it has {names})\n  pack the model's directory: tar -cf model.tar -C /models/NAME ."
    )]
    NoModel {
        /// URL without secrets.
        url: String,
        /// Names at the top level.
        names: String,
    },
    /// The work was stopped from outside.
    #[error("the fetch was interrupted: {reason}\n  fetch again: it resumes where it stopped")]
    Ended {
        /// Cause of the interruption.
        reason: String,
    },
}

/// Party that can fix a failed fetch; decides when it is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOrigin {
    /// The request: the answer is the same every time.
    Request,
    /// The network or the server: may work soon.
    Remote,
    /// The content behind the URL: finding out again costs a whole download.
    Content,
    /// This machine's disk.
    Local,
    /// Kept back: the requester must not learn it, not even from the time of the next try.
    Unknown,
}

impl FetchError {
    /// Whether the next try costs, or may cost, as much as this one. For a non-public server that is assumed of all
    /// failures, except where the progress already showed that the bytes are kept.
    pub fn costs_all_again(&self) -> bool {
        match self {
            Self::KeptBack { is_resumed, .. } => !is_resumed,
            _ => matches!(self.fault_origin(), FaultOrigin::Content),
        }
    }

    /// Party that can fix the failure.
    pub fn fault_origin(&self) -> FaultOrigin {
        match self {
            Self::Url { .. } | Self::Checksum { .. } | Self::Forbidden { .. } => {
                FaultOrigin::Request
            }
            Self::KeptBack { .. } => FaultOrigin::Unknown,
            Self::NotFound { .. }
            | Self::Denied { .. }
            | Self::Answer { .. }
            | Self::Redirects { .. }
            | Self::Tls { .. }
            | Self::Lost { .. }
            | Self::TooLong { .. }
            | Self::Ended { .. } => FaultOrigin::Remote,
            Self::Mismatch { .. }
            | Self::NotAnArchive { .. }
            | Self::Corrupt { .. }
            | Self::Unsafe { .. }
            | Self::TooMany { .. }
            | Self::NoModel { .. } => FaultOrigin::Content,
            Self::DiskFull { .. } | Self::Cache { .. } => FaultOrigin::Local,
        }
    }

    /// Whether more free space on this machine's disk could help, even if the cause is kept back.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::DiskFull { .. } => true,
            Self::KeptBack { cause, .. } => cause.is_disk_full(),
            _ => false,
        }
    }

    /// Error of a failed file operation in the cache; distinguishes a full disk from other causes.
    pub(crate) fn file(path: &Path, reason: io::Error) -> Self {
        let is_full = matches!(
            reason.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        );
        if is_full {
            let free_bytes = free_bytes(path).unwrap_or_default();
            return Self::DiskFull {
                path: path.to_owned(),
                what: "the disk or its quota is full".to_owned(),
                need_bytes: free_bytes.saturating_add(1),
                free_bytes,
            };
        }
        Self::Cache {
            path: path.to_owned(),
            reason,
            user: rustix::process::geteuid().as_raw(),
        }
    }

    /// Returns a function for `map_err` that reports I/O errors at `path` as [`Self::file`] does.
    pub(crate) fn in_cache(path: &Path) -> impl Fn(io::Error) -> Self + '_ {
        move |reason| Self::file(path, reason)
    }
}

/// Bytes that this user may still write to the disk of `path`, or of its nearest existing ancestor.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    path.ancestors().find_map(|path| {
        let stat = rustix::fs::statvfs(path).ok()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    })
}

/// Bytes to leave free on the disk of `path`.
pub(crate) fn reserve_bytes(path: &Path, options: &FetchOptions) -> u64 {
    let total_bytes = path.ancestors().find_map(|path| {
        let stat = rustix::fs::statvfs(path).ok()?;
        Some(stat.f_blocks.saturating_mul(stat.f_frsize))
    });
    let percent = u64::from(options.reserve_percent);
    let part_bytes = total_bytes.unwrap_or_default() / 100 * percent;
    options.reserve_bytes.max(part_bytes)
}

/// Checks that `reserve_bytes` would still be free on the disk after writing `need_bytes` more.
///
/// # Errors
/// [`FetchError::DiskFull`].
pub(crate) fn check_room(
    path: &Path,
    need_bytes: u64,
    reserve_bytes: u64,
    what: &str,
) -> Result<(), FetchError> {
    let Some(free_bytes) = free_bytes(path) else {
        return Ok(());
    };
    let need_bytes = need_bytes.saturating_add(reserve_bytes);
    if free_bytes >= need_bytes {
        return Ok(());
    }
    Err(FetchError::DiskFull {
        path: path.to_owned(),
        what: format!("{what}, and {} MiB stay free", reserve_bytes >> 20),
        need_bytes,
        free_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_of_bytes_and_percent_stays_free() {
        let options = |reserve_bytes, reserve_percent| FetchOptions {
            reserve_bytes,
            reserve_percent,
            ..FetchOptions::default()
        };
        let path = Path::new("/tmp/is/not/there");
        assert_eq!(reserve_bytes(path, &options(7, 0)), 7);
        let tenth = reserve_bytes(path, &options(7, 10));
        assert!(tenth > 7 && reserve_bytes(path, &options(tenth + 1, 10)) == tenth + 1);
        let stat = rustix::fs::statvfs("/tmp").unwrap();
        assert_eq!(tenth, stat.f_blocks * stat.f_frsize / 100 * 10);
        // A disk with less than that free takes nothing more.
        let all = reserve_bytes(path, &options(0, 100));
        let error = check_room(path, 0, all, "a model").unwrap_err();
        assert!(matches!(error, FetchError::DiskFull { .. }), "{error}");
    }

    #[test]
    fn a_full_disk_is_told_from_one_that_refuses() {
        let path = Path::new("/tmp");
        let full = FetchError::file(path, io::Error::from_raw_os_error(28));
        assert!(matches!(full, FetchError::DiskFull { .. }), "{full}");
        let refused = FetchError::file(path, io::Error::from_raw_os_error(30));
        assert!(matches!(refused, FetchError::Cache { .. }), "{refused}");
        assert_eq!(refused.fault_origin(), FaultOrigin::Local);
    }

    #[test]
    fn room_is_told_with_what_is_missing() {
        let error =
            check_room(Path::new("/tmp/is/not/there"), 1 << 60, 1 << 20, "a model").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("MiB free, and 1099511627777 MiB are needed: a model"),
            "{text}"
        );
        assert!(check_room(Path::new("/tmp"), 0, 0, "nothing").is_ok());
    }
}
