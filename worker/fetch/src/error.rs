//! Errors of a fetch, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::{FetchOptions, Owner};

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
        "sha256 is {sha256:?}\n  write the 64 hexadecimal digits that sha256sum prints for the file"
    )]
    Checksum {
        /// The value as given.
        sha256: String,
    },
    /// The path is not one of a model's file.
    #[error(
        "path is {path:?}: {reason}\n  write a path such as config.json, of letters, digits and ._-, for each file another one"
    )]
    FilePath {
        /// The value as given, or the last part of the URL.
        path: String,
        /// Reason that it was rejected.
        reason: &'static str,
    },
    /// The name is not that of a repository.
    #[error(
        "repo is {repo:?}\n  write the repository as owner/name, such as Qwen/Qwen3-30B-A3B, without https://; a revision is apart, as in hearth models pull Qwen/Qwen3-30B-A3B@main"
    )]
    Repository {
        /// The value as given.
        repo: String,
    },
    /// The name is not that of a revision.
    #[error("revision is {revision:?}\n  write a branch, a tag or the 40 digits of a commit")]
    Revision {
        /// The value as given.
        revision: String,
    },
    /// The address of the hub cannot be used.
    #[error(
        "the address of the hub is {endpoint:?}: {reason}\n  write a URL such as https://hub.lan: HF_ENDPOINT on one machine, agent.fetch.hubEndpoint of Hearth's chart in a cluster"
    )]
    Endpoint {
        /// URL without secrets.
        endpoint: String,
        /// Reason that it was rejected.
        reason: String,
    },
    /// A token that no request can carry.
    #[error(
        "the token for {url} cannot be sent: a header holds no line breaks and control characters\n  write it anew: in the Secret in a cluster, in HEARTH_MODEL_TOKEN on one machine"
    )]
    Token {
        /// URL without secrets.
        url: String,
    },
    /// The hub has no such repository, revision or file.
    #[error(
        "{what} was not found: the hub answered {answer}\n  check the names of the repository and the revision; a private repository needs a token: tokenSecretRef in a cluster, HEARTH_MODEL_TOKEN on one machine"
    )]
    HubNotFound {
        /// Repository, revision and file.
        what: String,
        /// Status, with the hub's own word for it.
        answer: String,
    },
    /// The hub requires a token, or the token's owner may not read the repository.
    #[error(
        "{what} may not be read: the hub answered {answer}\n  check the repository's name, accept its licence on the hub if it is gated, and give a token that may read it: tokenSecretRef in a cluster, HEARTH_MODEL_TOKEN on one machine"
    )]
    HubDenied {
        /// Repository, revision and file.
        what: String,
        /// Status, with the hub's own word for it.
        answer: String,
    },
    /// The hub's list of files cannot be used.
    #[error(
        "{url} is no list of a repository's files: {reason}\n  check the hub's address: HF_ENDPOINT on one machine, agent.fetch.hubEndpoint of Hearth's chart in a cluster; a mirror must answer ?blobs=true"
    )]
    Listing {
        /// URL without secrets.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A repository without a model that can be served.
    #[error("{repo} holds no model that can be served: {reason}\n  {remedy}")]
    NotAModel {
        /// Repository and revision.
        repo: String,
        /// What is missing.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A file of a repository with another checksum than the hub's list says.
    #[error(
        "{url} has the checksum {found}, and the hub's list says {expected}: the download was removed\n  the mirror, or a proxy in front of it, alters or mixes up files: fetch again, or from another"
    )]
    Altered {
        /// URL without secrets.
        url: String,
        /// Checksum in the hub's list.
        expected: String,
        /// Checksum of the received bytes.
        found: String,
    },
    /// The model is being fetched by another process.
    #[error(
        "{name} is being fetched by another process, and stays\n  wait until that has finished, or end it first"
    )]
    Busy {
        /// The model, or its name in the cache.
        name: String,
    },
    /// The model is in use.
    #[error("{name} is in use by a worker, which maps its files\n  end its deployment first")]
    InUse {
        /// The model, or its name in the cache.
        name: String,
    },
    /// The model is pinned.
    #[error("{name} is pinned\n  unpin it first: hearth models unpin {name}")]
    Pinned {
        /// The model, or its name in the cache.
        name: String,
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
        "TLS verification failed for {url}: {reason}\n  add its certificate authority to this machine's certificates (or name its PEM file in HEARTH_CA_BUNDLE, in a cluster in caBundle of Hearth's chart), or use http:// for a server without TLS"
    )]
    Tls {
        /// URL without secrets.
        url: String,
        /// The library's reason.
        reason: String,
    },
    /// The file with further certificate authorities is not one.
    #[error(
        "{path} {reason}\n  HEARTH_CA_BUNDLE (in a cluster caBundle of Hearth's chart) must name a PEM file with one certificate authority or several: BEGIN CERTIFICATE", path = path.display()
    )]
    Authorities {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A variable that names a proxy names none.
    #[error(
        "{variable} is {value:?}, which is no proxy that can be used\n  write the address of an HTTP proxy, such as http://proxy.lan:3128, or unset it"
    )]
    Proxy {
        /// `HTTP_PROXY`, `HTTPS_PROXY` or `ALL_PROXY`.
        variable: &'static str,
        /// Its value without user and password.
        value: String,
    },
    /// The address is off limits to the machine that fetches.
    #[error(
        "{url} is not allowed: its address is {why}\n  use a server outside the cluster, or name its range in agent.fetch.allowedRanges of Hearth's chart"
    )]
    Forbidden {
        /// URL without secrets.
        url: String,
        /// Kind of address that it is.
        why: &'static str,
    },
    /// A non-public server gave something other than the archive or file, or nothing: all of these failures look alike.
    #[error(
        "{url} did not yield the file with the sha256 {sha256}: its address is not public, or it is reached through a proxy, so the details are only in the log of this node's agent\n  check the URL, the checksum, that the server lets this node read the file, and that the node's disk has room for it"
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
        "{url} cannot be fetched: {reason} ({attempts} attempts made no progress)\n  {remedy}{}",
        resumed(*bytes)
    )]
    Lost {
        /// URL without secrets.
        url: String,
        /// Reason of the last attempt.
        reason: String,
        /// Consecutive tries without a new byte.
        attempts: u32,
        /// What to do.
        remedy: &'static str,
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
        "{url} has the sha256\n  {found}, not\n  {expected}: the download was removed\n  check that the sha256 is that of the file behind the URL"
    )]
    Mismatch {
        /// URL without secrets.
        url: String,
        /// The requested checksum.
        expected: String,
        /// Checksum of the received bytes.
        found: String,
    },
    /// The quota of the cache or the reserve of its disk leaves no room, and nothing more may be removed for it.
    #[error("{of} has no room for {shown}: {what}\n  {holds}\n  {remedy}", of = owner.named())]
    NoRoom {
        /// Whose cache it is.
        owner: Owner,
        /// The model.
        shown: String,
        /// The bytes that are needed, the limit, and what is left of it.
        what: String,
        /// What the cache holds, by the reason that it stays.
        holds: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The disk is full.
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
            Self::Url { .. }
            | Self::Checksum { .. }
            | Self::FilePath { .. }
            | Self::Repository { .. }
            | Self::Revision { .. }
            | Self::Endpoint { .. }
            | Self::Token { .. }
            | Self::Forbidden { .. } => FaultOrigin::Request,
            Self::KeptBack { .. } => FaultOrigin::Unknown,
            Self::NotFound { .. }
            | Self::HubNotFound { .. }
            | Self::HubDenied { .. }
            | Self::Listing { .. }
            | Self::Denied { .. }
            | Self::Answer { .. }
            | Self::Redirects { .. }
            | Self::Tls { .. }
            | Self::Lost { .. }
            | Self::TooLong { .. }
            | Self::Ended { .. } => FaultOrigin::Remote,
            Self::Mismatch { .. }
            | Self::Altered { .. }
            | Self::NotAModel { .. }
            | Self::NotAnArchive { .. }
            | Self::Corrupt { .. }
            | Self::Unsafe { .. }
            | Self::TooMany { .. }
            | Self::NoModel { .. } => FaultOrigin::Content,
            Self::DiskFull { .. }
            | Self::NoRoom { .. }
            | Self::Cache { .. }
            | Self::Authorities { .. }
            | Self::Proxy { .. }
            | Self::InUse { .. }
            | Self::Pinned { .. }
            | Self::Busy { .. } => FaultOrigin::Local,
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

/// What becomes of the bytes that are here.
fn resumed(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        _ => format!("; the next attempt resumes with the {bytes} bytes that are here"),
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
}
