//! Limits on reading and preparing requests: parsing, the chat template, tokenisation and checks of schemas. All of
//! that is computation, and much of it for a large request.
//!
//! As many requests are prepared at a time as there are CPUs: the tokenizer caches seen words once per thread, so
//! threads must be few. Large requests are prepared one at a time, so that they take no memory beyond what one needs
//! and leave slots to the others. Requests with schemas, from which grammars are built, have slots of their own, so
//! that the others never wait for them. Nothing is prepared for a client that has left, and what was begun stops.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::body;
use super::room::{LAST_WITHIN, MemoryBudget, Room};
use crate::config::Limits;
use crate::error::ApiError;

/// Minimum and maximum number of slots.
const PLACES: (usize, usize) = (2, 8);
/// Body size above which a request counts as large.
const LARGE_BYTES: usize = 256 << 10;
/// Schema size above which a request is prepared like a large one: building a grammar takes much longer than reading.
const HEAVY_SCHEMA_BYTES: usize = 16 << 10;
/// Maximum bytes that requests of more than [`LARGE_BYTES`] hold while they wait for a worker or are answered.
const LARGE_REQUESTS_BYTES: usize = 64 << 20;
/// Unit in which those bytes are counted.
const UNIT_BYTES: usize = 1 << 10;

/// The slots of one gateway; clones share them.
#[derive(Clone)]
pub(super) struct PrepareLimiter {
    places: Arc<Semaphore>,
    with_schemas: Arc<Semaphore>,
    large: Arc<Semaphore>,
    bodies: MemoryBudget,
    /// Permits in [`UNIT_BYTES`].
    requests: Arc<Semaphore>,
}

/// A request's body, and its share of the memory for large ones.
pub(super) struct Held {
    bytes: Bytes,
    room: Arc<Room>,
}

/// Result of preparing a body, which keeps the body's share until it is dropped.
pub(super) struct Prepared<T> {
    pub(super) value: T,
    pub(super) body_room: Arc<Room>,
}

/// A request that is being prepared.
pub(crate) struct Work {
    is_over: Arc<AtomicBool>,
    class: RequestClass,
}

/// Class of requests that share slots.
#[derive(Clone, Copy)]
enum RequestClass {
    /// Small requests without a schema.
    Plain,
    /// Small requests with small schemas.
    WithSchemas,
    /// Large requests, with or without schemas.
    Large,
}

impl Work {
    /// Whether the client is still there.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Whether a request with this many bytes of schemas is prepared in this class; otherwise in a later one.
    pub(super) fn takes(&self, schema_bytes: usize) -> bool {
        match self.class {
            RequestClass::Plain => schema_bytes == 0,
            RequestClass::WithSchemas => schema_bytes <= HEAVY_SCHEMA_BYTES,
            RequestClass::Large => true,
        }
    }

    /// Checks between two steps whether to continue.
    ///
    /// # Errors
    /// If the client has left; the error is never read.
    pub(crate) fn go_on(&self) -> Result<(), ApiError> {
        match self.is_wanted() {
            true => Ok(()),
            false => Err(ApiError::internal("the client has left")),
        }
    }
}

impl PrepareLimiter {
    /// Creates a slot for each CPU that this process may use, half as many for requests with schemas, both within
    /// [`PLACES`], and one for large requests.
    pub(super) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(PLACES.0, NonZero::get);
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            places: semaphore(cpus.clamp(PLACES.0, PLACES.1)),
            with_schemas: semaphore((cpus / 2).clamp(PLACES.0, PLACES.1)),
            large: semaphore(1),
            bodies: MemoryBudget::new(),
            requests: semaphore(LARGE_REQUESTS_BYTES / UNIT_BYTES),
        }
    }

    /// Reads a body. A large one waits, unread, until there is memory for it.
    ///
    /// # Errors
    /// Those of [`body::read`].
    pub(super) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        limits: &Limits,
    ) -> Result<Held, ApiError> {
        let mut room = self.bodies.room();
        let bytes = body::read(headers, body, limits, LARGE_BYTES, &mut room).await?;
        Ok(Held {
            bytes,
            room: Arc::new(room),
        })
    }

    /// Runs `work` on a body. Work that finds that the request belongs to another class returns `None` and is repeated
    /// there. Dropping the future tells the work to stop, and it keeps its slot until it has.
    ///
    /// # Errors
    /// Those of the work; 500 if it panicked.
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        body: Held,
        work: impl Fn(Bytes, &Work) -> Result<Option<T>, ApiError> + Clone + Send + 'static,
    ) -> Result<Prepared<T>, ApiError> {
        let Held { mut bytes, room } = body;
        let all = [
            (&self.places, RequestClass::Plain),
            (&self.with_schemas, RequestClass::WithSchemas),
            (&self.large, RequestClass::Large),
        ];
        let first = if bytes.len() <= LARGE_BYTES { 0 } else { 2 };
        let mut value = None;
        for (places, class) in &all[first..] {
            // Large work drops the body as soon as it is read.
            let body = match class {
                RequestClass::Large => std::mem::take(&mut bytes),
                RequestClass::Plain | RequestClass::WithSchemas => bytes.clone(),
            };
            let (work, room) = (work.clone(), room.clone());
            let work = move |now: &Work| (work(body, now), room).0;
            value = run(places, *class, work).await?;
            if value.is_some() {
                break;
            }
        }
        Ok(Prepared {
            value: value.ok_or_else(lost)?,
            body_room: room,
        })
    }

    /// Reserves memory for a request that holds this many bytes, for as long as it lasts; `None` for a small one,
    /// since the queue bounds their number. Waits at most `patience`, and no longer than [`LAST_WITHIN`]: meanwhile it
    /// keeps the memory that other bodies wait for.
    ///
    /// # Errors
    /// 503 if the others kept theirs all the time.
    pub(super) async fn keep(
        &self,
        bytes: usize,
        patience: Duration,
    ) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        if bytes <= LARGE_BYTES {
            return Ok(None);
        }
        let room = room_for(&self.requests, bytes, LARGE_REQUESTS_BYTES);
        timeout(patience.min(LAST_WITHIN), room)
            .await
            .map_err(|_| body::no_room("answered"))
    }
}

/// Runs work in one of `places`.
async fn run<T: Send + 'static>(
    places: &Arc<Semaphore>,
    class: RequestClass,
    work: impl FnOnce(&Work) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let place = places.clone().acquire_owned().await.map_err(|_| lost())?;
    let is_over = Arc::new(AtomicBool::new(false));
    let ending = Ending(is_over.clone());
    let work = move || {
        let _place = place;
        work(&Work { is_over, class })
    };
    let done = tokio::task::spawn_blocking(work).await;
    drop(ending);
    done.map_err(|_| lost())?
}

fn lost() -> ApiError {
    ApiError::internal("the request could not be prepared")
}

/// Reserves a share of the memory for large requests, at most all of it.
async fn room_for(
    of: &Arc<Semaphore>,
    bytes: usize,
    all_bytes: usize,
) -> Option<OwnedSemaphorePermit> {
    let units = bytes.min(all_bytes).div_ceil(UNIT_BYTES);
    let units = u32::try_from(units).unwrap_or(u32::MAX);
    of.clone().acquire_many_owned(units).await.ok()
}

/// Tells work, when dropped, that its result is no longer needed.
struct Ending(Arc<AtomicBool>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use super::*;

    fn held(bytes: usize) -> Held {
        Held {
            bytes: Bytes::from(vec![b' '; bytes]),
            room: Arc::new(MemoryBudget::new().room()),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn work_for_a_client_that_has_left_stops_and_gives_its_place_back() {
        let limiter = PrepareLimiter::new();
        let (began, stopped) = (mpsc::channel(), mpsc::channel());
        let preparing = tokio::spawn({
            let limiter = limiter.clone();
            async move {
                let work = move |_: Bytes, work: &Work| {
                    began.0.send(()).unwrap();
                    while work.is_wanted() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    stopped.0.send(()).unwrap();
                    work.go_on().map(Some)
                };
                limiter.prepare(held(LARGE_BYTES + 1), work).await
            }
        });
        began.1.recv_timeout(Duration::from_secs(10)).unwrap();
        // Small requests have slots of their own meanwhile, unless their schemas are large.
        let small = limiter.prepare(held(10), |bytes, _| Ok(Some(bytes.len())));
        assert_eq!(small.await.unwrap().value, 10);
        let heavy = |_: Bytes, work: &Work| Ok(work.takes(HEAVY_SCHEMA_BYTES + 1).then_some(()));
        let waiting = timeout(Duration::from_millis(100), limiter.prepare(held(10), heavy));
        assert!(waiting.await.is_err(), "it waits with the large ones");
        preparing.abort();
        stopped.1.recv_timeout(Duration::from_secs(10)).unwrap();
        let next = limiter.prepare(held(LARGE_BYTES + 1), |bytes, _| Ok(Some(bytes.len())));
        assert_eq!(next.await.unwrap().value, LARGE_BYTES + 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_without_a_schema_wait_for_none_with_one() {
        let limiter = PrepareLimiter::new();
        let is_held = Arc::new(AtomicBool::new(true));
        let under_way = Arc::new(AtomicUsize::new(0));
        let (mut tasks, places) = (Vec::new(), limiter.with_schemas.available_permits());
        // More than fit into all slots of both kinds.
        for _ in 0..2 * PLACES.1 + 1 {
            let (limiter, is_held, under_way) =
                (limiter.clone(), is_held.clone(), under_way.clone());
            let work = move |_: Bytes, work: &Work| {
                if !work.takes(1) {
                    return Ok(None);
                }
                under_way.fetch_add(1, Ordering::SeqCst);
                while is_held.load(Ordering::SeqCst) && work.is_wanted() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(Some(()))
            };
            tasks.push(tokio::spawn(async move {
                limiter.prepare(held(10), work).await.is_ok()
            }));
        }
        let all_began = async {
            while under_way.load(Ordering::SeqCst) < places {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let patience = Duration::from_secs(10);
        let has_begun = timeout(patience, all_began).await.is_ok();
        let plain = limiter.prepare(held(10), |_, work| Ok(work.takes(0).then_some(())));
        let was_prepared = timeout(patience, plain)
            .await
            .is_ok_and(|done| done.is_ok());
        is_held.store(false, Ordering::SeqCst);
        assert!(has_begun, "the places for schemas were not all taken");
        assert!(was_prepared, "a request without a schema waited");
        for task in tasks {
            assert!(timeout(patience, task).await.unwrap().unwrap());
        }
    }

    #[tokio::test]
    async fn what_requests_hold_is_bounded_and_small_ones_are_never_refused() {
        let limiter = PrepareLimiter::new();
        let patience = Duration::from_millis(50);
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(limiter.keep(16 << 20, patience).await.unwrap().unwrap());
        }
        let error = limiter.keep(LARGE_BYTES + 1, patience).await.unwrap_err();
        assert_eq!(error.code.as_deref(), Some("large_requests"));
        assert!(limiter.keep(LARGE_BYTES, patience).await.unwrap().is_none());
        // A request that needs more than there is takes all of it.
        let whole = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.keep(1 << 30, 200 * patience).await.is_ok() }
        });
        drop(held);
        assert!(whole.await.unwrap());
    }
}
