//! TLS handshakes of a server. They run concurrently with accepting, so a slow client does not block others.

use std::{io, net::SocketAddr, time::Duration};

use futures::{Stream, StreamExt, stream};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::TcpIncoming;

use crate::Tls;

/// Time limit for one handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest number of concurrent handshakes; beyond it, callers wait to be accepted.
const MAX_HANDSHAKES: usize = 1024;
/// Minimum time between two log lines: a rejected client may retry continually.
const LOG_EVERY: Duration = Duration::from_secs(1);

type Secured = TlsStream<TcpStream>;

/// Yields the connections of `incoming` whose handshakes succeed, each using the certificates current at that time.
pub(crate) fn secured(
    incoming: TcpIncoming,
    tls: Tls,
) -> impl Stream<Item = io::Result<Secured>> + Send {
    let accepting = Accepting {
        incoming,
        tls,
        handshakes: JoinSet::new(),
        logged: None,
    };
    stream::unfold(accepting, |mut accepting| async move {
        let next = accepting.next().await?;
        Some((next, accepting))
    })
}

struct Accepting {
    incoming: TcpIncoming,
    tls: Tls,
    /// Dropped with the server, which cancels the handshakes.
    handshakes: JoinSet<Result<Secured, Refused>>,
    logged: Option<Instant>,
}

struct Refused {
    peer: Option<SocketAddr>,
    reason: io::Error,
}

impl Accepting {
    async fn next(&mut self) -> Option<io::Result<Secured>> {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Ok(stream)) => return Some(Ok(stream)),
                    Ok(Err(refused)) => self.log(&refused),
                    Err(error) => tracing::warn!(%error, "a TLS handshake panicked"),
                },
                accepted = self.incoming.next(), if self.handshakes.len() < MAX_HANDSHAKES => {
                    match accepted? {
                        Ok(stream) => {
                            self.handshakes.spawn(handshake(stream, self.tls.clone()));
                        }
                        Err(error) => return Some(Err(error)),
                    }
                }
            }
        }
    }

    fn log(&mut self, refused: &Refused) {
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            self.logged = Some(Instant::now());
            tracing::warn!(peer = ?refused.peer, reason = %refused.reason, "TLS handshake refused");
        }
    }
}

async fn handshake(stream: TcpStream, tls: Tls) -> Result<Secured, Refused> {
    let peer = stream.peer_addr().ok();
    let refused = |reason| Refused { peer, reason };
    match timeout(HANDSHAKE_TIMEOUT, tls.acceptor().accept(stream)).await {
        Ok(outcome) => outcome.map_err(refused),
        Err(_) => Err(refused(io::ErrorKind::TimedOut.into())),
    }
}
