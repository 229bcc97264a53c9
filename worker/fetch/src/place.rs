//! A file on a server: where it is, what opens it, and what its bytes must be.

use reqwest::Url;

use crate::digest::Digest;
use crate::{Credentials, Key};

/// Where something is, and what opens it.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) url: Url,
    /// The URL as it may be shown: without user, password and query, which can hold secrets.
    pub(crate) shown: String,
    /// Sent to the URL's own server alone.
    pub(crate) credentials: Option<Credentials>,
    /// The repository that it belongs to, if it is on a hub.
    pub(crate) hub: Option<HubPlace>,
}

/// A place in a repository, in the words of the person who asked for it.
#[derive(Clone)]
pub(crate) struct HubPlace {
    /// `owner/name`.
    pub(crate) repo: String,
    /// Branch, tag or commit.
    pub(crate) revision: String,
    /// Path of the file; `None` for the repository's list of files.
    pub(crate) file: Option<String>,
}

/// One file to download.
pub(crate) struct Remote {
    pub(crate) place: Place,
    /// The model that it is of.
    pub(crate) key: Key,
    pub(crate) digest: Digest,
    /// Its length in bytes, where that is known before any server is asked for it: of a file of a repository.
    pub(crate) known_bytes: Option<u64>,
    /// Whether it is an archive, which is still to be unpacked.
    pub(crate) is_archive: bool,
}
