//! Output that was produced for clients and that they have not read yet.
//!
//! An answer is written as fast as its worker yields tokens: a slow client never occupies a worker's
//! slot. Output that a client has not read waits here, within one budget of bytes for all of them. When it is spent,
//! the client with the most waiting output is cut off, provided that it has read nothing for a moment.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::Version;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;

use crate::error::ApiError;
use crate::metrics::{CutReason, Metrics};

/// Time within which a client that took something counts as reading, and is not cut off for lack of memory.
const READS_WITHIN: Duration = Duration::from_secs(1);
/// Size of the pieces that a whole answer is split into.
const PIECE_BYTES: usize = 16 << 10;

/// Encodes the error that a client is sent at the end of its answer when it is cut off.
pub(crate) type LastWords = fn(&ApiError) -> Bytes;

/// All waiting answers.
pub(crate) struct Backlog {
    budget_bytes: usize,
    stall: Duration,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held_bytes: usize,
    next_id: u64,
    answers: HashMap<u64, Waiting>,
    /// Whether a task to make room is already scheduled.
    is_due: bool,
}

/// One waiting answer.
struct Waiting {
    pieces: VecDeque<Bytes>,
    bytes: usize,
    reader: Option<Waker>,
    /// Time when the client last took something, or last had everything.
    taken: Instant,
    /// Whether nothing more follows.
    has_ended: bool,
    is_cut: bool,
    last_words: Option<LastWords>,
}

/// The writing end of an answer.
pub(crate) struct Outbox {
    backlog: Arc<Backlog>,
    id: u64,
}

/// The reading end of an answer, the body of a response. Dropping it ends the work on the answer.
pub(crate) struct Delivery {
    backlog: Arc<Backlog>,
    id: u64,
    writer: Option<AbortOnDropHandle<()>>,
}

impl Backlog {
    /// Creates a backlog of at most `budget_bytes`; a client that takes nothing for `stall` is cut off.
    pub(crate) fn new(budget_bytes: usize, stall: Duration, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            budget_bytes,
            stall,
            metrics,
            state: Mutex::default(),
        })
    }

    /// Opens a new answer. Without `last_words` it breaks off when its client is cut off.
    pub(crate) fn open(self: &Arc<Self>, last_words: Option<LastWords>) -> (Outbox, Delivery) {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        let waiting = Waiting {
            pieces: VecDeque::new(),
            bytes: 0,
            reader: None,
            taken: Instant::now(),
            has_ended: false,
            is_cut: false,
            last_words,
        };
        state.answers.insert(id, waiting);
        let outbox = Outbox {
            backlog: self.clone(),
            id,
        };
        let delivery = Delivery {
            backlog: self.clone(),
            id,
            writer: None,
        };
        (outbox, delivery)
    }

    /// Returns the body of an answer that is already complete.
    pub(crate) fn whole(self: &Arc<Self>, mut bytes: Bytes, version: Version) -> Delivery {
        let (outbox, delivery) = self.open(None);
        while !bytes.is_empty() {
            outbox.push(bytes.split_to(bytes.len().min(PIECE_BYTES)));
        }
        outbox.end();
        let watching = tokio::spawn(async move { outbox.stalled(version).await });
        delivery.owning(AbortOnDropHandle::new(watching))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts off the client in the way of the others, now or as soon as it is known which one does not read.
    fn make_room(self: &Arc<Self>, state: &mut State) {
        while state.held_bytes > self.budget_bytes {
            let idle = state.answers.iter().filter(|(_, waiting)| {
                let is_idle = waiting.taken.elapsed() >= READS_WITHIN;
                is_idle && !waiting.is_cut && waiting.bytes > 0
            });
            let Some((&id, _)) = idle.max_by_key(|(_, waiting)| waiting.bytes) else {
                if !std::mem::replace(&mut state.is_due, true) {
                    let backlog = self.clone();
                    tokio::spawn(async move {
                        sleep(READS_WITHIN / 4).await;
                        let mut state = backlog.lock();
                        state.is_due = false;
                        backlog.make_room(&mut state);
                    });
                }
                return;
            };
            let words = format!(
                "the answer was cut off: its client reads it too slowly, and more than {} bytes of answers are waiting",
                self.budget_bytes
            );
            self.cut(state, id, CutReason::Backlog, &words);
        }
    }

    fn cut(&self, state: &mut State, id: u64, reason: CutReason, words: &str) {
        let Some(waiting) = state.answers.get_mut(&id) else {
            return;
        };
        let error = ApiError::unavailable(words, READS_WITHIN).with_code("client_too_slow");
        let before = std::mem::take(&mut waiting.bytes);
        waiting.pieces.clear();
        waiting.is_cut = true;
        waiting.has_ended = true;
        if let Some(last_words) = waiting.last_words {
            let piece = last_words(&error);
            waiting.bytes = piece.len();
            waiting.pieces.push_back(piece);
        }
        let after = waiting.bytes;
        let reader = waiting.reader.take();
        state.held_bytes = state.held_bytes - before + after;
        self.metrics.answers_waiting(state.held_bytes);
        self.metrics.client_cut(reason);
        tracing::info!(bytes = before, words, "client cut off");
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Outbox {
    /// Appends the next piece; false if it will never be read.
    pub(crate) fn push(&self, piece: Bytes) -> bool {
        let mut guard = self.backlog.lock();
        let state = &mut *guard;
        let Some(waiting) = state.answers.get_mut(&self.id) else {
            return false;
        };
        if waiting.is_cut {
            return false;
        }
        if waiting.pieces.is_empty() {
            waiting.taken = Instant::now();
        }
        waiting.bytes += piece.len();
        state.held_bytes += piece.len();
        waiting.pieces.push_back(piece);
        if let Some(reader) = waiting.reader.take() {
            reader.wake();
        }
        self.backlog.metrics.answers_waiting(state.held_bytes);
        self.backlog.make_room(state);
        true
    }

    /// Whether nothing is waiting.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.backlog.lock();
        let waiting = state.answers.get(&self.id);
        waiting.is_none_or(|waiting| waiting.pieces.is_empty())
    }

    /// Marks the end of the answer.
    pub(crate) fn end(&self) {
        let mut state = self.backlog.lock();
        if let Some(waiting) = state.answers.get_mut(&self.id) {
            waiting.has_ended = true;
            if let Some(reader) = waiting.reader.take() {
                reader.wake();
            }
        }
    }

    /// Returns when the client was cut off because it took nothing of the waiting output for too long. Never returns
    /// for HTTP/1, whose connection is watched byte by byte and ended; one of HTTP/2 also carries the streams
    /// of other clients.
    pub(crate) async fn stalled(&self, version: Version) {
        let stall = self.backlog.stall;
        if version < Version::HTTP_2 {
            return std::future::pending().await;
        }
        loop {
            sleep(stall / 8).await;
            let mut state = self.backlog.lock();
            let is_stalled = state.answers.get(&self.id).is_some_and(|waiting| {
                !waiting.pieces.is_empty() && waiting.taken.elapsed() >= stall
            });
            if is_stalled {
                let words =
                    format!("the answer was cut off: its client read nothing for {stall:?}");
                self.backlog
                    .cut(&mut state, self.id, CutReason::Stalled, &words);
                return;
            }
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.end();
    }
}

impl Delivery {
    /// Ties the work of `writer` to the body: it ends when the body is dropped.
    pub(crate) fn owning(mut self, writer: AbortOnDropHandle<()>) -> Self {
        self.writer = Some(writer);
        self
    }
}

impl Body for Delivery {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let mut guard = self.backlog.lock();
        let state = &mut *guard;
        let Some(waiting) = state.answers.get_mut(&self.id) else {
            return Poll::Ready(None);
        };
        if let Some(piece) = waiting.pieces.pop_front() {
            waiting.taken = Instant::now();
            waiting.bytes -= piece.len();
            state.held_bytes -= piece.len();
            self.backlog.metrics.answers_waiting(state.held_bytes);
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        if waiting.is_cut && waiting.last_words.is_none() {
            let words = "its client reads the answer too slowly";
            return Poll::Ready(Some(Err(io::Error::other(words))));
        }
        if waiting.has_ended {
            return Poll::Ready(None);
        }
        waiting.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let mut state = self.backlog.lock();
        if let Some(waiting) = state.answers.remove(&self.id) {
            state.held_bytes -= waiting.bytes;
            self.backlog.metrics.answers_waiting(state.held_bytes);
        }
        drop(state);
        self.writer = None;
    }
}
