//! The bytes of a hub's files from another node that has them, over a connection that somebody else has made.
//!
//! Whoever wants a file sends the length of its path (2 bytes) and the path, the file's length and the position to begin
//! at (8 bytes each; all numbers little-endian). The answer is [`HERE`] and the bytes from there to the end, or
//! [`MISSING`]. Nothing is believed: what comes is verified as a download is, and whatever fails, the hub is asked for
//! the rest.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Mutex, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use crate::download::{Ahead, CHANNEL_PIECES, Join, write};
use crate::part::{FileFacts, Part};
use crate::place::Remote;
use crate::progress::Reporter;
use crate::room::Room;
use crate::{FetchError, Phase, blocking};

/// The bytes follow.
pub(crate) const HERE: u8 = 1;
/// There is no such file.
pub(crate) const MISSING: u8 = 0;
/// Bytes that are passed on to the disk at once.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes that come within [`crate::FetchOptions::seed_patience`] at least, unless fewer are left.
const LEAST_BYTES: u64 = 1 << 20;

/// What bytes go over.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Connection for S {}

/// A connection to another node that has a model; clones share it. It is given up at the first failure.
#[derive(Clone)]
pub struct Seed(Arc<Inner>);

struct Inner {
    node: String,
    /// `None` once it has failed.
    connection: Mutex<Option<Box<dyn Connection>>>,
    taken_bytes: AtomicU64,
}

impl fmt::Debug for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Seed").field(&self.0.node).finish()
    }
}

impl Seed {
    /// Takes files from this node, over this connection to its [`crate::Giver`].
    pub fn new(
        node: impl Into<String>,
        connection: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Self {
        Self(Arc::new(Inner {
            node: node.into(),
            connection: Mutex::new(Some(Box::new(connection))),
            taken_bytes: AtomicU64::new(0),
        }))
    }

    /// Bytes that came and were used.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.0.taken_bytes.load(Ordering::Relaxed)
    }

    /// Adds to the part what the node has of its file. Returns the part, which the hub completes if it is not whole;
    /// `None` if the bytes were wrong, and the part is removed.
    ///
    /// # Errors
    /// Those of this machine's disk: [`FetchError::DiskFull`], [`FetchError::NoRoom`], [`FetchError::Cache`].
    pub(crate) async fn complete(
        &self,
        room: &Arc<Room>,
        remote: &Remote,
        mut part: Part,
        reporter: &Reporter,
    ) -> Result<Option<Part>, FetchError> {
        let file = remote.place.hub.as_ref().and_then(|hub| hub.file.as_ref());
        let (Some(file), Some(total_bytes)) = (file, remote.known_bytes) else {
            return Ok(Some(part));
        };
        let here_bytes = part.len_bytes();
        if here_bytes >= total_bytes {
            return Ok(Some(part));
        }
        let Some(mut connection) = self.0.connection.lock().await.take() else {
            return Ok(Some(part));
        };
        reporter.come_from(Some(&self.0.node));
        let join = joined(&mut part, total_bytes);
        let (sender, mut receiver) = mpsc::channel(CHANNEL_PIECES);
        let ahead = Ahead::of_known_length(room);
        let writer = tokio::task::spawn_blocking(move || {
            let written = write(&mut part, join, &mut receiver, &ahead);
            (part, written)
        });
        let wanted = Wanted {
            file,
            from_byte: here_bytes,
            total_bytes,
            patience: room.options.seed_patience,
        };
        let passed = wanted.pass_on(&mut *connection, sender, reporter).await;
        reporter.come_from(None);
        let (part, written) = writer.await.map_err(|error| FetchError::Ended {
            reason: error.to_string(),
        })?;
        written?;
        let node = &self.0.node;
        match passed {
            Ok(true) if part.digits() != remote.digest.digits() => {
                let found = part.digits();
                tracing::warn!(node, file, found, "wrong bytes from there: asking the hub");
                blocking(move || part.remove()).await?;
                return Ok(None);
            }
            Ok(is_there) => {
                if !is_there {
                    tracing::info!(node, file, "not there: asking the hub for it");
                }
                *self.0.connection.lock().await = Some(connection);
            }
            Err(why) => tracing::warn!(node, file, "{why}: going on with the hub"),
        }
        let taken_bytes = part.len_bytes() - here_bytes;
        self.0.taken_bytes.fetch_add(taken_bytes, Ordering::Relaxed);
        Ok(Some(part))
    }
}

/// How bytes of a file of this length come to those that are here.
fn joined(part: &mut Part, total_bytes: u64) -> Join {
    if part.len_bytes() > 0 {
        part.learn_total(total_bytes);
        // Several have sent the bytes then.
        return Join::Append(FileFacts::default());
    }
    Join::Restart(FileFacts {
        total_bytes: Some(total_bytes),
        ..FileFacts::default()
    })
}

/// What is wanted of a file.
struct Wanted<'a> {
    file: &'a str,
    from_byte: u64,
    total_bytes: u64,
    patience: Duration,
}

impl Wanted<'_> {
    /// Asks for the bytes and passes them on; returns whether the file is there. An error is a reason in words.
    async fn pass_on(
        &self,
        connection: &mut dyn Connection,
        sender: mpsc::Sender<Bytes>,
        reporter: &Reporter,
    ) -> Result<bool, String> {
        let silent = || format!("nothing came for {:?}", self.patience);
        let broken = |error: std::io::Error| format!("the connection was lost: {error}");
        let asked = async {
            connection.write_all(&self.request()).await?;
            connection.flush().await?;
            connection.read_u8().await
        };
        let answer = timeout(self.patience, asked).await;
        match answer.map_err(|_| silent())?.map_err(broken)? {
            HERE => {}
            MISSING => return Ok(false),
            other => return Err(format!("the answer {other} is none")),
        }
        let mut bytes = self.from_byte;
        let (mut deadline, mut window_bytes) = (Instant::now() + self.patience, 0);
        while bytes < self.total_bytes {
            let most = (self.total_bytes - bytes).min(PIECE_BYTES as u64);
            let mut piece = BytesMut::with_capacity(most as usize);
            let mut rest = (&mut *connection).take(most);
            while (piece.len() as u64) < most {
                let read = timeout_at(deadline, rest.read_buf(&mut piece)).await;
                let read = read.map_err(|_| match piece.is_empty() && window_bytes == 0 {
                    true => silent(),
                    false => format!("less than 1 MiB came within {:?}", self.patience),
                })?;
                if read.map_err(broken)? == 0 {
                    let total_bytes = self.total_bytes;
                    bytes += piece.len() as u64;
                    let _ = sender.send(piece.freeze()).await;
                    return Err(format!(
                        "the answer ended after {bytes} of {total_bytes} bytes"
                    ));
                }
            }
            (bytes, window_bytes) = (bytes + most, window_bytes + most);
            let came = Instant::now();
            if sender.send(piece.freeze()).await.is_err() {
                return Err("they are not written any more".to_owned());
            }
            if window_bytes >= LEAST_BYTES {
                (deadline, window_bytes) = (Instant::now() + self.patience, 0);
            } else {
                // This machine's disk takes its own time.
                deadline += came.elapsed();
            }
            reporter.tell(Phase::Downloading, bytes, Some(self.total_bytes));
        }
        Ok(true)
    }

    fn request(&self) -> Vec<u8> {
        let path = self.file.as_bytes();
        let mut request = Vec::with_capacity(path.len() + 18);
        request.extend_from_slice(&(path.len() as u16).to_le_bytes());
        request.extend_from_slice(path);
        request.extend_from_slice(&self.total_bytes.to_le_bytes());
        request.extend_from_slice(&self.from_byte.to_le_bytes());
        request
    }
}
