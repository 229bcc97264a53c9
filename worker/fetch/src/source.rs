//! What is fetched, and under which key it is kept.

use std::fmt;

use reqwest::Url;

use crate::FetchError;

/// Digits of a SHA-256, and of a key.
const SHA256_DIGITS: usize = 64;
const KEY_DIGITS: usize = 32;

/// An archive: where it is, and what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    url: Url,
    sha256: String,
}

impl Source {
    /// Checks both.
    ///
    /// # Errors
    /// [`FetchError::Url`] for what is no http or https URL, [`FetchError::Checksum`] for what is no SHA-256.
    pub fn new(url: &str, sha256: &str) -> Result<Self, FetchError> {
        let sha256 = sha256.trim().to_ascii_lowercase();
        if sha256.len() != SHA256_DIGITS || !is_hex(&sha256) {
            return Err(FetchError::Checksum { sha256 });
        }
        let refused = |reason: String| FetchError::Url {
            url: url.to_owned(),
            reason,
        };
        let url = Url::parse(url.trim()).map_err(|error| refused(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(refused("it is neither http nor https".to_owned()));
        }
        Ok(Self { url, sha256 })
    }

    /// The directory's name in a cache: the first 32 digits of the archive's SHA-256.
    pub fn key(&self) -> Key {
        Key(self.sha256[..KEY_DIGITS].to_owned())
    }

    /// Of the archive, 64 lower-case digits.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The URL as it may be shown: without password and query, which can hold secrets.
    pub fn shown(&self) -> String {
        let mut url = self.url.clone();
        // A URL with a host takes both.
        let _ = url.set_password(None);
        let _ = url.set_username("");
        url.set_query(None);
        url.set_fragment(None);
        url.to_string()
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }
}

/// The name of a model in a cache.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// Reads 32 lower-case hexadecimal digits; none for anything else.
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
