//! Bounded reading of the files that accompany the weights, which are read whole. A model may come from an untrusted
//! source, and a file of spaces compresses to almost nothing: each kind of file has a size limit, and a longer file is
//! not read.
//! read.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::FormatError;

/// Largest accepted size of config.json, generation_config.json, tokenizer_config.json and a chat template, in bytes:
/// the largest published ones are below 1 MiB.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Largest accepted size of model.safetensors.index.json, in bytes: 90,000 tensors take 9 MiB.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Largest accepted size of tokenizer.json, in bytes: the largest published ones have about 35 MiB.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// Reads a file of at most `max_bytes`. `remedy` tells the user what to do if it cannot be read.
///
/// # Errors
/// [`FormatError::Io`], [`FormatError::TooLarge`].
pub fn read_file(path: &Path, max_bytes: u64, remedy: &str) -> Result<Vec<u8>, FormatError> {
    let failed = |error| FormatError::io(path, error, remedy);
    let file = File::open(path).map_err(failed)?;
    let told_bytes = file.metadata().map_err(failed)?.len();
    let mut bytes = Vec::new();
    if told_bytes <= max_bytes {
        // A pipe reports no length, and a file can grow.
        let limit_bytes = max_bytes.saturating_add(1);
        file.take(limit_bytes)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
    }
    let bytes_there = told_bytes.max(bytes.len() as u64);
    if bytes_there > max_bytes {
        let name = path.file_name().unwrap_or(path.as_os_str());
        return Err(FormatError::TooLarge {
            file: name.to_string_lossy().into_owned(),
            bytes: bytes_there,
            max_bytes,
        });
    }
    Ok(bytes)
}
