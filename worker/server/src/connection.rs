//! One client's connection, and how it ends without losing a request.
//!
//! A client keeps its connection and may use it at any moment. Closing it at that moment loses the request, and the
//! client cannot know whether it was served. So a gateway that shuts down announces it before it closes: an HTTP/1
//! answer says `Connection: close`, HTTP/2 has its GOAWAY. A connection that has been idle for a while is closed too,
//! but never with bytes of a request in it.
//!
//! A client that takes nothing of its answer for a while is cut off, and its work with it: otherwise it could hold
//! memory for ever.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body as AxumBody;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, Version, header};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::metrics::{CutReason, Metrics};

/// First bytes that an HTTP/2 client sends.
const HTTP2_BEGIN: &[u8] = b"PRI * HTTP/2.0";

/// Whether the gateway is shutting down, and the time that it leaves idle clients.
#[derive(Clone)]
pub(crate) struct Drain {
    began: CancellationToken,
    /// Time for an idle connection.
    idle: Duration,
}

impl Drain {
    pub(crate) fn new(idle: Duration) -> Self {
        Self {
            began: CancellationToken::new(),
            idle,
        }
    }

    /// Starts the shutdown.
    pub(crate) fn begin(&self) {
        self.began.cancel();
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.began.is_cancelled()
    }

    /// Returns when a connection that has been idle since the call is to be closed.
    async fn patience(self) {
        self.began.cancelled().await;
        sleep(self.idle).await;
    }
}

/// Time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time from the first byte of a request to the end of its headers, and for a client that has sent nothing yet.
    pub(crate) headers: Duration,
    /// Time between an answer and the next request.
    pub(crate) keep_alive: Duration,
    /// Time for a client to take a byte of what is sent.
    pub(crate) stall: Duration,
}

/// Marks a request on a connection that was opened after the shutdown began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Late;

/// Shared parts of all connections of a gateway.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) router: Router,
    pub(crate) drain: Drain,
    pub(crate) patience: Patience,
    pub(crate) metrics: Arc<Metrics>,
}

/// Serves one connection until it ends: by its client, in a drain, or because nothing happens on it.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    builder: &auto::Builder<TokioExecutor>,
    service: Service,
    is_late: bool,
) {
    let Service {
        router,
        drain,
        patience,
        metrics,
    } = service;
    let activity = Arc::new(Activity::default());
    let watched = Watched {
        stream,
        activity: activity.clone(),
        drain: drain.clone(),
        patience,
        metrics,
        waiting: None,
        stalled: None,
        is_unflushed: false,
        has_ended: false,
    };
    let ending = (drain.clone(), activity.clone());
    let service = service_fn(|mut request: Request<Incoming>| {
        if is_late {
            request.extensions_mut().insert(Late);
        }
        answer(router.clone(), request, drain.clone(), activity.clone())
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(watched), service));
    let mut told = pin!(goodbye(ending.0, ending.1));
    let outcome = tokio::select! {
        outcome = &mut connection => outcome,
        () = &mut told => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "connection ended");
    }
}

/// Returns when the protocol itself is to announce the end of the connection: at once with HTTP/2. With HTTP/1 that
/// would close a connection on which a request may have arrived, so answers and [`Watched`] do it there.
async fn goodbye(drain: Drain, activity: Arc<Activity>) {
    drain.began.cancelled().await;
    tokio::select! {
        () = activity.is_http2.cancelled() => {}
        () = sleep(drain.idle) => {
            // It may be the beginning of HTTP/2, with no request in it.
            if activity.has_asked.load(Ordering::Relaxed) {
                activity.is_http2.cancelled().await;
            }
        }
    }
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    drain: Drain,
    activity: Arc<Activity>,
) -> Result<Response<Watching>, Infallible> {
    let version = request.version();
    let request_in_flight = activity.begin(version);
    let mut response = router.oneshot(request.map(AxumBody::new)).await?;
    if drain.has_begun() && version < Version::HTTP_2 {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    Ok(response.map(|body| Watching {
        body,
        _in_flight: request_in_flight,
    }))
}

/// Activity on a connection.
#[derive(Default)]
struct Activity {
    /// Requests whose answer is not complete.
    in_flight: AtomicUsize,
    /// Whether bytes arrived that may be part of a request.
    has_unanswered: AtomicBool,
    has_asked: AtomicBool,
    /// Whether the first bytes are those that HTTP/2 begins with.
    begins_http2: AtomicBool,
    is_http2: CancellationToken,
}

/// Event that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// The first byte.
    Beginning,
    /// The end of a request's headers.
    Headers,
    /// Another request.
    Next,
}

impl Activity {
    fn begin(self: Arc<Self>, version: Version) -> InFlight {
        if version == Version::HTTP_2 {
            self.is_http2.cancel();
        }
        self.has_asked.store(true, Ordering::Relaxed);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self)
    }

    /// Returns what the client is to send next; `None` on the gateway's turn, and with HTTP/2, which has pings.
    fn awaited(&self) -> Option<Awaited> {
        if self.in_flight.load(Ordering::Relaxed) > 0 || self.is_http2.is_cancelled() {
            return None;
        }
        let has_bytes = self.has_unanswered.load(Ordering::Relaxed);
        Some(match self.has_asked.load(Ordering::Relaxed) {
            // An HTTP/2 connection may be opened ahead of its requests.
            false if self.begins_http2.load(Ordering::Relaxed) => Awaited::Next,
            _ if has_bytes => Awaited::Headers,
            false => Awaited::Beginning,
            true => Awaited::Next,
        })
    }
}

/// A request, until its answer is complete or the client has left.
struct InFlight(Arc<Activity>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.0.has_unanswered.store(false, Ordering::Relaxed);
    }
}

/// An answer's body; the request is in flight as long as it lives.
struct Watching {
    body: AxumBody,
    _in_flight: InFlight,
}

impl Body for Watching {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that ends, as though the client had ended it, when what is awaited has not arrived for too long, and that
/// fails when the client takes nothing of what is sent.
struct Watched<S> {
    stream: S,
    activity: Arc<Activity>,
    drain: Drain,
    patience: Patience,
    metrics: Arc<Metrics>,
    /// Runs while the client is expected to send something.
    waiting: Option<(Awaited, Timer)>,
    /// Runs while the client takes nothing.
    stalled: Option<Timer>,
    /// Whether some of an answer may not have been sent.
    is_unflushed: bool,
    has_ended: bool,
}

type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<S> Watched<S> {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(awaited) = self.activity.awaited().filter(|_| !self.is_unflushed) else {
            self.waiting = None;
            return false;
        };
        if self
            .waiting
            .as_ref()
            .is_none_or(|(what, _)| *what != awaited)
        {
            let limit = match awaited {
                Awaited::Beginning | Awaited::Headers => self.patience.headers,
                Awaited::Next => self.patience.keep_alive,
            };
            // A drain ends no connection in the middle of a request, or of what may be the beginning of HTTP/2.
            let has_bytes = self.activity.has_unanswered.load(Ordering::Relaxed);
            let drained = self.drain.clone().patience();
            let timer: Timer = Box::pin(async move {
                tokio::select! {
                    () = drained, if !has_bytes => {}
                    () = sleep(limit) => {}
                }
            });
            self.waiting = Some((awaited, timer));
        }
        if let Some((_, timer)) = &mut self.waiting {
            self.has_ended = timer.as_mut().poll(cx).is_ready();
        }
        self.has_ended
    }

    /// Passes on the outcome of sending; fails once the client has taken nothing for too long.
    fn sent<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let limit = self.patience.stall;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.metrics.client_cut(CutReason::Stalled);
        let words = format!("the client read nothing for {limit:?}");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, words)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            let bytes = buffer.filled().get(before..).unwrap_or_default();
            if !bytes.is_empty() {
                let begins_http2 = HTTP2_BEGIN.starts_with(&bytes[..bytes.len().min(4)]);
                if !self.activity.has_unanswered.swap(true, Ordering::Relaxed) {
                    // The first bytes of a request: headers that trickle in byte by byte get no more time.
                    self.waiting = None;
                    let is_first = !self.activity.has_asked.load(Ordering::Relaxed);
                    let begins_http2 = is_first && begins_http2;
                    self.activity
                        .begins_http2
                        .store(begins_http2, Ordering::Relaxed);
                }
            }
            return read;
        }
        if self.has_ended || self.is_over(cx) {
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.is_unflushed = true;
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.sent(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.is_unflushed = true;
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.sent(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.is_unflushed &= flushed.is_pending();
        self.sent(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
