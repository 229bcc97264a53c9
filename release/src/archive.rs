//! Archives whose bytes depend on names and contents alone.

use std::io::{Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Adds a file to an archive, with no owner and no time.
pub(crate) fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    name: impl AsRef<Path>,
    bytes: &[u8],
    mode: u32,
) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(mode);
    tar.append_data(&mut header, name, bytes)
}

/// SHA-256 of some bytes, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// A reader that digests what passes through it.
pub(crate) struct Digesting<R> {
    inner: R,
    digest: Sha256,
}

impl<R: Read> Digesting<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            digest: Sha256::new(),
        }
    }

    /// SHA-256 of what was read, in hexadecimal digits.
    pub(crate) fn digits(self) -> String {
        format!("{:x}", self.digest.finalize())
    }
}

impl<R: Read> Read for Digesting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.digest.update(&buffer[..read]);
        Ok(read)
    }
}
