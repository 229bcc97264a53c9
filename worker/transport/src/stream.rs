//! Connections with mutual TLS that carry something else than gRPC, between two processes that know each other's names.

use std::{io, time::Duration};

use futures::StreamExt;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

use crate::{Endpoint, Listener, Tls, accept, client};

/// A connection's bytes, both ways.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for S {}

/// Connects to the process at `endpoint`, which must carry the name that `tls` expects. Requires a tokio runtime.
///
/// # Errors
/// The system's or TLS's error; `TimedOut` after `patience`.
pub async fn connect(
    endpoint: &Endpoint,
    tls: &Tls,
    patience: Duration,
) -> io::Result<impl Stream + use<>> {
    match timeout(patience, client::secured(endpoint, tls)).await {
        Ok(connected) => connected,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Waits for one caller with a name that `tls` accepts; others are turned away. Nothing listens any more when this
/// returns or is dropped.
///
/// # Errors
/// The system's error; `TimedOut` after `patience`.
pub async fn accept_one(
    listener: Listener,
    tls: Tls,
    patience: Duration,
) -> io::Result<impl Stream + use<>> {
    let mut callers = Box::pin(accept::secured(listener.incoming, tls));
    match timeout(patience, callers.next()).await {
        Ok(Some(caller)) => caller,
        Ok(None) => Err(io::ErrorKind::NotConnected.into()),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}
