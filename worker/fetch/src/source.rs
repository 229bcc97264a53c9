//! The archive, the files or the repository to fetch, and the key that it is kept under.

use std::collections::BTreeSet;
use std::fmt;

use hearth_crds::{
    HUB_REVISION, HttpFile, HttpSource, STORE_KEY_DIGITS, files_revision, files_store_key,
    hub_store_key, shown_files, shown_url,
};
use reqwest::Url;

use crate::FetchError;
use crate::digest::{Digest, sha256_of};
use crate::place::{Place, Remote};

/// Digits of a SHA-256, and of a key.
const SHA256_DIGITS: usize = 64;
const KEY_DIGITS: usize = STORE_KEY_DIGITS;

/// Longest name of a repository, and of a revision, in bytes.
const MAX_REPO_BYTES: usize = 193;
const MAX_REVISION_BYTES: usize = 128;
/// Digits of a commit.
const COMMIT_DIGITS: usize = 40;

/// What a model is fetched from: an archive at a URL, files at URLs, or a repository of a hub.
#[derive(Clone, PartialEq, Eq)]
pub struct Source {
    origin: Origin,
    key: Key,
    credentials: Option<Credentials>,
    /// See [`Source::for_all`].
    is_for_all: bool,
    /// See [`Source::held_by`].
    holder: Option<String>,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// An archive, with the checksum that it must have.
    Archive {
        url: Url,
        sha256: String,
    },
    /// A model's files.
    Files {
        files: Vec<ListedFile>,
        /// SHA-256 of the list.
        revision: String,
        /// Where they are, without secrets.
        shown: String,
    },
    Repository(Repository),
}

/// A file of a list.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ListedFile {
    pub(crate) url: Url,
    /// The checksum that it must have.
    pub(crate) sha256: String,
    /// Its path in the model's directory.
    pub(crate) path: String,
}

/// A repository of a hub that speaks the protocol of the Hugging Face Hub.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Repository {
    endpoint: Url,
    /// `owner/name`.
    pub(crate) repo: String,
    /// Branch, tag or commit.
    pub(crate) revision: String,
    /// The commit to fetch, if it is known which one the revision stands for.
    commit: Option<String>,
}

/// Credentials for a URL.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    /// `Authorization: Basic`.
    Basic {
        /// The user's name.
        username: String,
        /// The user's password.
        password: String,
    },
    /// `Authorization: Bearer`.
    Bearer {
        /// The token.
        token: String,
    },
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("shown", &self.shown())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

impl Source {
    /// Validates the URL and the checksum.
    ///
    /// # Errors
    /// [`FetchError::Url`] if it is not an http or https URL, [`FetchError::Checksum`] if it is not a SHA-256.
    pub fn new(url: &str, sha256: &str) -> Result<Self, FetchError> {
        let (url, sha256) = (valid_url(url)?, valid_sha256(sha256)?);
        Ok(Self {
            key: Key(sha256[..KEY_DIGITS].to_owned()),
            origin: Origin::Archive { url, sha256 },
            credentials: None,
            is_for_all: false,
            holder: None,
        })
    }

    /// Validates a list of a model's files. What is fetched are those of them that serving needs.
    ///
    /// # Errors
    /// [`FetchError::Url`] and [`FetchError::Checksum`] as for an archive; [`FetchError::FilePath`] if a path is none within
    /// the model's directory, or that of two files.
    pub fn of_files(source: &HttpSource) -> Result<Self, FetchError> {
        let mut paths = BTreeSet::new();
        let listed = |file: &HttpFile| {
            let path = file.path();
            let refused = |reason| FetchError::FilePath {
                path: path.to_owned(),
                reason,
            };
            if !file.has_plain_path() {
                return Err(refused("it is no path of a model's file"));
            }
            if !paths.insert(path.to_owned()) {
                return Err(refused("two files have it"));
            }
            Ok(ListedFile {
                url: valid_url(&file.url)?,
                sha256: valid_sha256(&file.sha256)?,
                path: path.to_owned(),
            })
        };
        let files = source.files.iter().map(listed);
        let files: Vec<ListedFile> = files.collect::<Result<_, _>>()?;
        let first = files.first().map(|file| file.url.as_str());
        Ok(Self {
            origin: Origin::Files {
                revision: files_revision(&source.files),
                // As it was parsed: the text may have what a terminal obeys.
                shown: shown_files(first.unwrap_or_default(), files.len()),
                files,
            },
            key: Key(files_store_key(&source.files, "")),
            credentials: None,
            is_for_all: false,
            holder: None,
        })
    }

    /// Validates the address of a hub and the names of a repository (`owner/name`) and a revision, by default main.
    /// What is fetched is the commit that the revision stands for at that time.
    ///
    /// # Errors
    /// [`FetchError::Endpoint`], [`FetchError::Repository`], [`FetchError::Revision`].
    pub fn of_hub(endpoint: &str, repo: &str, revision: Option<&str>) -> Result<Self, FetchError> {
        let refused = |reason: String| FetchError::Endpoint {
            endpoint: shown_url(endpoint),
            reason,
        };
        let endpoint = parsed(endpoint).map_err(refused)?;
        if endpoint.query().is_some() || endpoint.fragment().is_some() {
            return Err(refused("it has a query or a fragment".to_owned()));
        }
        let revision = revision.unwrap_or(HUB_REVISION);
        let mut names = repo.split('/');
        let is_repo = matches!(
            (names.next(), names.next(), names.next()),
            (Some(owner), Some(name), None) if is_name(owner, "._-") && is_name(name, "._-")
        );
        if !is_repo || repo.len() > MAX_REPO_BYTES {
            return Err(FetchError::Repository {
                repo: repo.to_owned(),
            });
        }
        let is_revision = is_name(revision, "._/-") && !revision.contains("..");
        if !is_revision || revision.len() > MAX_REVISION_BYTES {
            return Err(FetchError::Revision {
                revision: revision.to_owned(),
            });
        }
        Ok(Self {
            key: Key(hub_store_key(repo, revision, "")),
            origin: Origin::Repository(Repository {
                endpoint,
                repo: repo.to_owned(),
                revision: revision.to_owned(),
                commit: None,
            }),
            credentials: None,
            is_for_all: false,
            holder: None,
        })
    }

    /// The same repository at this commit, whatever the revision stands for by now. Changes no archive.
    ///
    /// # Errors
    /// [`FetchError::Revision`] if it is not 40 lower-case hexadecimal digits.
    pub fn at_commit(mut self, commit: &str) -> Result<Self, FetchError> {
        if !is_commit(commit) {
            return Err(FetchError::Revision {
                revision: commit.to_owned(),
            });
        }
        if let Origin::Repository(repository) = &mut self.origin {
            repository.commit = Some(commit.to_owned());
        }
        Ok(self)
    }

    /// The same source under another key: where several users share one cache, the digest alone must not give access.
    #[must_use]
    pub fn kept_as(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// The same source, for every deployment that names it: nothing secret opens it.
    #[must_use]
    pub fn for_all(self) -> Self {
        Self {
            is_for_all: true,
            ..self
        }
    }

    /// Whether it is for every deployment that names it ([`Source::for_all`]).
    pub fn is_for_all(&self) -> bool {
        self.is_for_all
    }

    /// The same source for this holder: where several users share one cache, a file of another model stands for a download if that one
    /// has the same holder, or an empty one, and is for everybody.
    #[must_use]
    pub fn held_by(self, holder: &str) -> Self {
        Self {
            holder: Some(holder.to_owned()),
            ..self
        }
    }

    /// Who may have what is fetched ([`Source::held_by`]); `None` if that is not known.
    pub fn holder(&self) -> Option<&str> {
        self.holder.as_deref()
    }

    /// The same source with credentials, which are sent only to the URL's own server.
    #[must_use]
    pub fn opened_by(self, credentials: Credentials) -> Self {
        Self {
            credentials: Some(credentials),
            ..self
        }
    }

    /// The directory's name in a cache: by default the first 32 digits of the archive's SHA-256.
    pub fn key(&self) -> Key {
        self.key.clone()
    }

    /// Checksum of an archive, 64 lower-case hexadecimal digits; `None` of files and a repository, whose files have one each.
    pub fn sha256(&self) -> Option<&str> {
        match &self.origin {
            Origin::Archive { sha256, .. } => Some(sha256),
            Origin::Files { .. } | Origin::Repository(_) => None,
        }
    }

    /// The URL without user, password and query, which can hold secrets, that of the first file's directory, or the repository
    /// with its revision.
    pub fn shown(&self) -> String {
        match &self.origin {
            Origin::Archive { url, .. } => shown_url(url.as_str()),
            Origin::Files { shown, .. } => shown.clone(),
            Origin::Repository(hub) => format!("{}@{}", hub.repo, hub.revision),
        }
    }

    /// SHA-256 of the key, the hub and the credentials, 64 lower-case digits: shows whether a secret was replaced, or
    /// another mirror chosen.
    pub(crate) fn fingerprint(&self) -> String {
        let (username, secret) = match &self.credentials {
            None => (None, None),
            Some(Credentials::Basic { username, password }) => (Some(username), Some(password)),
            Some(Credentials::Bearer { token }) => (None, Some(token)),
        };
        let mut parts = serde_json::json!([self.key.as_str(), username, secret]);
        if let (Origin::Repository(hub), Some(parts)) = (&self.origin, parts.as_array_mut()) {
            parts.push(hub.endpoint.as_str().into());
        }
        sha256_of(&parts.to_string())
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    /// The archive as a file to download.
    pub(crate) fn archive(&self, url: &Url, sha256: &str) -> Remote {
        Remote {
            is_archive: true,
            ..self.file(url, Digest::Sha256(sha256.to_owned()))
        }
    }

    /// One of the files of a list to download. Credentials are for the first one's server alone.
    pub(crate) fn file(&self, url: &Url, digest: Digest) -> Remote {
        let first = match &self.origin {
            Origin::Files { files, .. } => files.first().map(|file| &file.url),
            Origin::Archive { .. } | Origin::Repository(_) => None,
        };
        let is_for_it = first.is_none_or(|first| first.origin() == url.origin());
        Remote {
            place: Place {
                url: url.clone(),
                shown: shown_url(url.as_str()),
                credentials: self.credentials.clone().filter(|_| is_for_it),
                hub: None,
            },
            key: self.key(),
            digest,
            known_bytes: None,
            is_archive: false,
        }
    }
}

impl Repository {
    /// URL of the list of files.
    pub(crate) fn listing_url(&self) -> Url {
        let revision = self.commit.as_deref().unwrap_or(&self.revision);
        let mut url = self.below(&["api", "models"], &["revision", revision]);
        url.set_query(Some("blobs=true"));
        url
    }

    /// URL of a file of a commit.
    pub(crate) fn file_url(&self, commit: &str, path: &str) -> Url {
        let names: Vec<&str> = ["resolve", commit]
            .into_iter()
            .chain(path.split('/'))
            .collect();
        self.below(&[], &names)
    }

    /// Whether a commit is the one that was asked for, if one was.
    pub(crate) fn is_of(&self, commit: &str) -> bool {
        let named = is_commit(&self.revision).then_some(&*self.revision);
        let mut asked = self.commit.as_deref().into_iter().chain(named);
        asked.all(|asked| asked == commit)
    }

    fn below(&self, before: &[&str], after: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        // An http URL has segments. A slash in a name of them, as in a branch, is encoded.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty();
            segments.extend(before);
            segments.extend(self.repo.split('/'));
            segments.extend(after);
        }
        url
    }
}

/// Whether the text is a commit's name.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && is_hex(text)
}

/// Whether the text begins with a letter or a digit and has only such and these marks.
fn is_name(text: &str, marks: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric();
    let mut bytes = text.bytes();
    bytes.next().is_some_and(is_plain)
        && bytes.all(|byte| is_plain(byte) || marks.bytes().any(|mark| mark == byte))
}

fn valid_url(url: &str) -> Result<Url, FetchError> {
    parsed(url).map_err(|reason| FetchError::Url {
        url: shown_url(url),
        reason,
    })
}

fn valid_sha256(sha256: &str) -> Result<String, FetchError> {
    let sha256 = sha256.trim().to_ascii_lowercase();
    match sha256.len() == SHA256_DIGITS && is_hex(&sha256) {
        true => Ok(sha256),
        false => Err(FetchError::Checksum { sha256 }),
    }
}

/// Parses an http or https URL.
fn parsed(url: &str) -> Result<Url, String> {
    let url = Url::parse(url.trim()).map_err(|error| error.to_string())?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err("it is neither http nor https".to_owned());
    }
    Ok(url)
}

/// The name of a model in a cache.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// Reads 32 lower-case hexadecimal digits; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        (text.len() == KEY_DIGITS && is_hex(text)).then(|| Self(text.to_owned()))
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    #[test]
    fn secrets_of_a_url_are_not_shown() {
        let url = "https://ann:secret@nas.lan:8443/models/a.tar?X-Signature=abc#x";
        let source = Source::new(url, SHA).unwrap();
        assert_eq!(source.shown(), "https://nas.lan:8443/models/a.tar");
        let Origin::Archive { url: kept, .. } = source.origin() else {
            panic!("no archive")
        };
        assert_eq!(kept.as_str(), url);
        let opened = source.opened_by(Credentials::Bearer {
            token: "secret".to_owned(),
        });
        let text = format!("{opened:?}");
        assert!(!text.contains("secret") && !text.contains("abc"), "{text}");
        let error = Source::new("ftp://ann:secret@nas/a?secret", SHA).unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }

    #[test]
    fn the_key_is_the_half_of_the_checksum() {
        let source = Source::new("http://nas/a.tar", &SHA.to_uppercase()).unwrap();
        assert_eq!(source.key().as_str(), "9f86d081884c7d659a2feaa0c55ad015");
        assert_eq!(Key::parse(source.key().as_str()), Some(source.key()));
        for bad in ["", "9f86", "../../etc/passwd", &SHA.to_uppercase()[..32]] {
            assert_eq!(Key::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_repository_s_files_are_below_its_hub() {
        let urls = |endpoint: &str, revision: Option<&str>| {
            let source = Source::of_hub(endpoint, "a/b", revision).unwrap();
            let Origin::Repository(hub) = source.origin() else {
                panic!("no repository")
            };
            let commit = "c".repeat(40);
            let file = hub.file_url(&commit, "x/y z%2f?.json");
            (hub.listing_url().to_string(), file.to_string())
        };
        let commit = "c".repeat(40);
        assert_eq!(
            urls("http://hub/", None),
            (
                "http://hub/api/models/a/b/revision/main?blobs=true".to_owned(),
                format!("http://hub/a/b/resolve/{commit}/x/y%20z%252f%3F.json")
            )
        );
        // A mirror below a path, and a branch with a slash.
        assert_eq!(
            urls("https://nas:8443/hf", Some("refs/pr/1")).0,
            "https://nas:8443/hf/api/models/a/b/revision/refs%2Fpr%2F1?blobs=true"
        );
        // Git has no such names, and a proxy that decodes them would leave the repository.
        assert!(Source::of_hub("http://hub", "a/b", Some("a/../../x")).is_err());
    }

    #[test]
    fn what_is_no_repository_is_said() {
        let error = |endpoint: &str, repo: &str, revision: &str| {
            Source::of_hub(endpoint, repo, Some(revision)).unwrap_err()
        };
        for repo in [
            "", "a", "a/b/c", "/b", "a/", "../b", "a/..", "a/b@main", "a b/c",
        ] {
            let error = error("http://hub", repo, "main");
            assert!(matches!(error, FetchError::Repository { .. }), "{error}");
        }
        for revision in ["", "../x", "a b", "a?b", &"a".repeat(129)] {
            let error = error("http://hub", "a/b", revision);
            assert!(matches!(error, FetchError::Revision { .. }), "{error}");
        }
        for endpoint in ["", "hub", "ftp://hub", "http://ann:secret@hub?x"] {
            let error = error(endpoint, "a/b", "main");
            assert!(matches!(error, FetchError::Endpoint { .. }), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let source = Source::of_hub("http://hub", "a/b", None).unwrap();
        assert!(source.clone().at_commit("main").is_err());
        let pinned = source.clone().at_commit(&"a".repeat(40)).unwrap();
        assert_eq!(pinned.key(), source.key());
    }

    #[test]
    fn what_cannot_be_fetched_is_said() {
        for url in ["nas/a.tar", "ftp://nas/a.tar", "file:///etc/passwd", ""] {
            let error = Source::new(url, SHA).unwrap_err();
            assert!(matches!(error, FetchError::Url { .. }), "{error}");
        }
        for sha in ["", "abc", &SHA[..63], &SHA.replace('9', "g")] {
            let error = Source::new("http://nas/a.tar", sha).unwrap_err();
            assert!(matches!(error, FetchError::Checksum { .. }), "{error}");
        }
    }
}
