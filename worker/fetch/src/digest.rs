//! What the bytes of a file must be, and the checksum of those that came.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The checksum that a file must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Digest {
    /// SHA-256 of the bytes, in lower-case hexadecimal digits.
    Sha256(String),
    /// Git's name of the bytes: SHA-1 of `blob LENGTH\0` and the bytes.
    GitBlob {
        /// The digits.
        sha1: String,
        /// Length in bytes.
        bytes: u64,
    },
}

impl Digest {
    /// The hexadecimal digits.
    pub(crate) fn digits(&self) -> &str {
        match self {
            Self::Sha256(digits) | Self::GitBlob { sha1: digits, .. } => digits,
        }
    }

    /// Starts the checksum of a file's bytes.
    pub(crate) fn hasher(&self) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::GitBlob { bytes, .. } => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {bytes}\0"));
                Hasher::Sha1(hasher)
            }
        }
    }
}

/// A checksum in the making.
#[derive(Clone, Debug)]
pub(crate) enum Hasher {
    Sha256(Sha256),
    Sha1(Sha1),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha1(hasher) => hasher.update(bytes),
        }
    }

    /// Checksum of the bytes so far, in hexadecimal digits.
    pub(crate) fn digits(&self) -> String {
        match self.clone() {
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::Sha1(hasher) => hex(&hasher.finalize()),
        }
    }
}

/// SHA-256 of a text, in hexadecimal digits.
pub(crate) fn sha256_of(text: &str) -> String {
    hex(&Sha256::digest(text))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn git_names_a_file_by_its_length_and_its_bytes() {
        let of = |digest: &Digest, bytes: &[u8]| {
            let mut hasher = digest.hasher();
            hasher.update(bytes);
            hasher.digits()
        };
        // As `git hash-object` and sha256sum print them.
        let blob = Digest::GitBlob {
            sha1: String::new(),
            bytes: 6,
        };
        assert_eq!(
            of(&blob, b"hello\n"),
            "ce013625030ba8dba906f756967f9e9ca394464a"
        );
        assert_eq!(
            of(&Digest::Sha256(String::new()), b"hello\n"),
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
    }
}
