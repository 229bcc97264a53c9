//! One client's connection, and how it ends without losing a request.
//!
//! A client keeps its connection and may use it at any moment. To close it in that moment loses the request, and the
//! client cannot know whether it was served. So a gateway that ends tells before it closes: an answer by HTTP/1 says
//! `Connection: close`, HTTP/2 has its GOAWAY. A connection that nothing was asked on for a while is closed too, but
//! never with bytes of a request in it.

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

/// Whether the gateway is ending, and what it leaves its clients.
#[derive(Clone)]
pub(crate) struct Drain {
    began: CancellationToken,
    /// For a connection that nothing is asked on.
    idle: Duration,
}

impl Drain {
    pub(crate) fn new(idle: Duration) -> Self {
        Self {
            began: CancellationToken::new(),
            idle,
        }
    }

    /// The gateway is ending from now on.
    pub(crate) fn begin(&self) {
        self.began.cancel();
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.began.is_cancelled()
    }

    /// Returns when a connection that has been idle since now is to be closed.
    async fn patience(self) {
        self.began.cancelled().await;
        sleep(self.idle).await;
    }
}

/// Serves one connection until it ends: by its client, or in a drain. `silence` is for a client that has not said
/// anything yet.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    builder: &auto::Builder<TokioExecutor>,
    router: Router,
    drain: Drain,
    silence: Duration,
) {
    let activity = Arc::new(Activity::default());
    let watched = Watched {
        stream,
        activity: activity.clone(),
        drain: drain.clone(),
        silence,
        patience: None,
        is_unflushed: false,
        has_ended: false,
    };
    let ending = (drain.clone(), activity.clone());
    let service = service_fn(|request: Request<Incoming>| {
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

/// Returns when a client is to be told by the protocol itself that the connection ends: by HTTP/2 at once. By HTTP/1
/// that closes a connection on which a request may have come in; answers and [`Watched`] do it there.
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

/// What goes on on a connection.
#[derive(Default)]
struct Activity {
    /// Requests without their whole answer.
    in_flight: AtomicUsize,
    /// Bytes came that may be a part of a request.
    has_unanswered: AtomicBool,
    has_asked: AtomicBool,
    is_http2: CancellationToken,
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

    fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
            && !self.has_unanswered.load(Ordering::Relaxed)
            && !self.is_http2.is_cancelled()
    }
}

/// A request, until its answer is made or nobody waits for it.
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

/// A stream that ends, as if the client had ended it, when it has been idle for long enough and there is nothing to
/// be read.
struct Watched<S> {
    stream: S,
    activity: Arc<Activity>,
    drain: Drain,
    silence: Duration,
    /// Runs while the connection is idle.
    patience: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Some of an answer may not have been sent.
    is_unflushed: bool,
    has_ended: bool,
}

impl<S> Watched<S> {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        if self.is_unflushed || !self.activity.is_idle() {
            self.patience = None;
            return false;
        }
        let is_new = !self.activity.has_asked.load(Ordering::Relaxed);
        let (drain, silence) = (&self.drain, self.silence);
        let patience = self.patience.get_or_insert_with(|| {
            let patience = drain.clone().patience();
            if is_new {
                return Box::pin(async move {
                    tokio::select! {
                        () = patience => {}
                        () = sleep(silence) => {}
                    }
                });
            }
            Box::pin(patience)
        });
        self.has_ended = patience.as_mut().poll(cx).is_ready();
        self.has_ended
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
            if buffer.filled().len() > before {
                self.activity.has_unanswered.store(true, Ordering::Relaxed);
                self.patience = None;
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
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.is_unflushed = true;
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.is_unflushed &= flushed.is_pending();
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
