//! The archive to fetch, and the key that it is kept under.

use std::fmt;

use hearth_crds::{STORE_KEY_DIGITS, shown_url};
use reqwest::Url;

use crate::FetchError;
use crate::part::sha256_of;

/// Digits of a SHA-256, and of a key.
const SHA256_DIGITS: usize = 64;
const KEY_DIGITS: usize = STORE_KEY_DIGITS;

/// An archive: its URL, and the checksum that it must have.
#[derive(Clone, PartialEq, Eq)]
pub struct Source {
    url: Url,
    sha256: String,
    key: Key,
    credentials: Option<Credentials>,
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
            .field("url", &self.shown())
            .field("sha256", &self.sha256)
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
        let sha256 = sha256.trim().to_ascii_lowercase();
        if sha256.len() != SHA256_DIGITS || !is_hex(&sha256) {
            return Err(FetchError::Checksum { sha256 });
        }
        let refused = |reason: String| FetchError::Url {
            url: shown_url(url),
            reason,
        };
        let url = Url::parse(url.trim()).map_err(|error| refused(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(refused("it is neither http nor https".to_owned()));
        }
        Ok(Self {
            url,
            key: Key(sha256[..KEY_DIGITS].to_owned()),
            sha256,
            credentials: None,
        })
    }

    /// The same source under another key: where several users share one cache, the digest alone must not give access.
    #[must_use]
    pub fn kept_as(self, key: Key) -> Self {
        Self { key, ..self }
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

    /// Checksum of the archive, 64 lower-case hexadecimal digits.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The URL as it may be shown: without user, password and query, which can hold secrets.
    pub fn shown(&self) -> String {
        shown_url(self.url.as_str())
    }

    /// SHA-256 of the key and the credentials, 64 lower-case digits: shows whether a secret was replaced.
    pub(crate) fn fingerprint(&self) -> String {
        let (username, secret) = match &self.credentials {
            None => (None, None),
            Some(Credentials::Basic { username, password }) => (Some(username), Some(password)),
            Some(Credentials::Bearer { token }) => (None, Some(token)),
        };
        sha256_of(&serde_json::json!([self.key.as_str(), username, secret]).to_string())
    }

    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }
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
        assert_eq!(source.url().as_str(), url);
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
