//! API keys: a file with one key per line, or a directory of such files, compared in constant time.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::config::GatewayError;
use crate::error::{ApiError, ErrorType};

/// Time between two checks of the files.
const LOOK_EVERY: Duration = Duration::from_secs(2);

type Hash = [u8; 32];

/// The accepted keys.
pub(crate) struct ApiKeys {
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    hashes: Arc<[Hash]>,
    looked: Instant,
    /// Error of the last check, if it failed; logged once.
    complaint: Option<String>,
}

impl ApiKeys {
    /// Reads the file, or the files of the directory.
    ///
    /// # Errors
    /// [`GatewayError::ApiKeys`], [`GatewayError::NoApiKeys`].
    pub(crate) fn open(path: &Path) -> Result<Self, GatewayError> {
        let hashes = read(path)?;
        Ok(Self {
            path: path.to_owned(),
            state: Mutex::new(State {
                hashes,
                looked: Instant::now(),
                complaint: None,
            }),
        })
    }

    /// Accepts a request that carries one of the keys.
    ///
    /// # Errors
    /// 401.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let unauthorised = |message: &str| {
            ApiError::new(StatusCode::UNAUTHORIZED, ErrorType::Authentication, message)
                .with_code("invalid_api_key")
        };
        let value = headers.get(header::AUTHORIZATION).ok_or_else(|| {
            unauthorised("no API key was given: send it as 'Authorization: Bearer KEY'")
        })?;
        let key = value
            .as_bytes()
            .split_first_chunk::<7>()
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "))
            .map(|(_, key)| key.trim_ascii())
            .ok_or_else(|| {
                unauthorised("the Authorization header is not of the form 'Bearer KEY'")
            })?;
        let given = hash(key);
        // Every key is compared, and every byte of each: the time reveals nothing about either.
        let is_known = self.hashes().iter().fold(0u8, |found, known| {
            found | u8::from(is_equal(known, &given))
        });
        if is_known == 1 {
            Ok(())
        } else {
            Err(unauthorised(
                "the API key is not valid here: check it, or ask whoever runs this endpoint",
            ))
        }
    }

    /// Returns the keys, read again every [`LOOK_EVERY`]. Files that cannot be read or hold no key leave the keys as
    /// they were: a mistake must neither let everyone in nor lock everyone out.
    fn hashes(&self) -> Arc<[Hash]> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.looked.elapsed() >= LOOK_EVERY {
            state.looked = Instant::now();
            match read(&self.path) {
                Ok(hashes) => {
                    state.complaint = None;
                    if hashes != state.hashes {
                        state.hashes = hashes;
                        tracing::info!(keys = state.hashes.len(), "API keys reloaded");
                    }
                }
                Err(error) => {
                    let complaint = Some(error.to_string());
                    if state.complaint != complaint {
                        tracing::warn!(%error, "keeping the previous API keys");
                        state.complaint = complaint;
                    }
                }
            }
        }
        state.hashes.clone()
    }
}

fn read(path: &Path) -> Result<Arc<[Hash]>, GatewayError> {
    let mut hashes = Vec::new();
    for file in files(path)? {
        let text = std::fs::read_to_string(&file).map_err(|source| GatewayError::ApiKeys {
            path: file.clone(),
            source,
        })?;
        let keys = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        hashes.extend(keys.map(|key| hash(key.as_bytes())));
    }
    if hashes.is_empty() {
        return Err(GatewayError::NoApiKeys {
            path: path.to_owned(),
        });
    }
    Ok(hashes.into())
}

/// Returns the file itself, or a directory's files by name. Names that begin with a dot are left out: a mounted
/// Secret keeps its versions there, behind links that are swapped.
fn files(path: &Path) -> Result<Vec<PathBuf>, GatewayError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let list = || -> std::io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if !is_hidden && !entry.path().is_dir() {
                files.push(entry.path());
            }
        }
        files.sort();
        Ok(files)
    };
    list().map_err(|source| GatewayError::ApiKeys {
        path: path.to_owned(),
        source,
    })
}

fn hash(key: &[u8]) -> Hash {
    Sha256::digest(key).into()
}

fn is_equal(left: &Hash, right: &Hash) -> bool {
    let difference = left
        .iter()
        .zip(right)
        .fold(0u8, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(difference) == 0
}
