//! Gives the files of a model to another node: see [`crate::Seed`] for what goes over the connection.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::hold::Hold;
use crate::listing::{MAX_NAME_BYTES, may_be_needed};
use crate::room::Counters;
use crate::seed::{HERE, MISSING};
use crate::{Cache, Key};

/// Bytes that are read from the disk at once.
const PIECE_BYTES: usize = 256 << 10;

/// Times after which a connection is given up.
#[derive(Clone, Copy, Debug)]
pub struct GiverPatience {
    /// Without a request: the other may have to ask its hub again and again before it knows what it wants.
    pub idle: Duration,
    /// With bytes that the other does not take.
    pub stall: Duration,
}

impl Default for GiverPatience {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(300),
            stall: Duration::from_secs(30),
        }
    }
}

/// A complete model of a hub, in use until this is dropped.
#[derive(Debug)]
pub struct Giver {
    directory: PathBuf,
    _hold: Hold,
}

impl Giver {
    /// Holds a model of this commit. Blocks, for a second at most.
    ///
    /// # Errors
    /// The reason that it is not given, in words.
    pub fn hold(cache: &Cache, key: &Key, commit: &str) -> Result<Self, String> {
        let missing = || "the model is not complete on this node".to_owned();
        let directory = cache.model(key).ok_or_else(missing)?;
        let hold = Hold::take(&directory)
            .ok_or_else(|| format!("{} cannot be held", directory.display()))?;
        // It may have been removed, and another come in its place, before it was held.
        cache.model(key).ok_or_else(missing)?;
        match cache.about(key).and_then(|about| about.commit) {
            Some(here) if here == commit => Ok(Self {
                directory,
                _hold: hold,
            }),
            Some(here) => Err(format!("this node has commit {here} of it, not {commit}")),
            // The files of an archive have no checksums of their own.
            None => Err("it is not of a hub, or was fetched by an earlier version".to_owned()),
        }
    }

    /// Answers requests for files until the other node ends the connection.
    ///
    /// # Errors
    /// The system's error; `TimedOut` if nothing goes on for too long, `InvalidData` for what is no request.
    pub async fn give<S>(
        &self,
        connection: &mut S,
        patience: GiverPatience,
        counters: &Counters,
    ) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        loop {
            let Some(asked) = timeout(patience.idle, request(connection)).await?? else {
                return Ok(());
            };
            let Some(mut file) = self.open(&asked).await? else {
                timeout(patience.stall, connection.write_u8(MISSING)).await??;
                timeout(patience.stall, connection.flush()).await??;
                continue;
            };
            timeout(patience.stall, connection.write_u8(HERE)).await??;
            let mut left_bytes = asked.total_bytes - asked.from_byte;
            let mut piece = vec![0; PIECE_BYTES];
            while left_bytes > 0 {
                let most = left_bytes.min(PIECE_BYTES as u64) as usize;
                file.read_exact(&mut piece[..most]).await?;
                timeout(patience.stall, connection.write_all(&piece[..most])).await??;
                left_bytes -= most as u64;
                counters.given(most as u64);
            }
            timeout(patience.stall, connection.flush()).await??;
        }
    }

    /// Opens a file where the other wants to begin; `None` if there is none of that name and length.
    async fn open(&self, asked: &Asked) -> io::Result<Option<tokio::fs::File>> {
        if !may_be_needed(&asked.path) || asked.from_byte > asked.total_bytes {
            return Ok(None);
        }
        let path = self.directory.join(&asked.path);
        let total_bytes = asked.total_bytes;
        let opened = tokio::task::spawn_blocking(move || {
            let metadata = fs::symlink_metadata(&path).ok()?;
            let is_it = metadata.is_file() && metadata.len() == total_bytes;
            is_it.then(|| File::open(&path).ok()).flatten()
        });
        let Some(opened) = opened.await.map_err(io::Error::other)? else {
            return Ok(None);
        };
        let mut file = tokio::fs::File::from_std(opened);
        file.seek(io::SeekFrom::Start(asked.from_byte)).await?;
        Ok(Some(file))
    }
}

/// What the other node wants.
struct Asked {
    path: String,
    total_bytes: u64,
    from_byte: u64,
}

/// Reads the next request; `None` at the end of the connection.
async fn request<S: AsyncRead + Unpin>(connection: &mut S) -> io::Result<Option<Asked>> {
    let length = match connection.read_u16_le().await {
        Ok(length) => usize::from(length),
        Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if length > MAX_NAME_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut path = vec![0; length];
    connection.read_exact(&mut path).await?;
    let path = String::from_utf8(path).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Some(Asked {
        path,
        total_bytes: connection.read_u64_le().await?,
        from_byte: connection.read_u64_le().await?,
    }))
}
