//! Where requests are read and prepared: parsed, put through the chat template, tokenised, their schemas checked. All of
//! that is computation, and much of it for a large request.
//!
//! As many are prepared at a time as there are CPUs: the tokenizer keeps the words that it has seen once for each thread,
//! so that threads must be few. Large requests are prepared one at a time, so that they take no memory beyond what one
//! needs and leave places to the others. Of a client that has left nothing is prepared, and what was begun stops.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::body;
use crate::config::Limits;
use crate::error::ApiError;

/// Fewest and most requests that are prepared at a time.
const PLACES: (usize, usize) = (2, 8);
/// A request with a longer body is a large one.
const LARGE_BYTES: usize = 256 << 10;
/// Bytes of large bodies that are read or wait to be prepared.
const LARGE_BODIES_BYTES: usize = 24 << 20;
/// By which those are counted.
const UNIT_BYTES: usize = 1 << 10;

/// The places of one gateway; clones share them.
#[derive(Clone)]
pub(super) struct Desk {
    places: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// In [`UNIT_BYTES`].
    bodies: Arc<Semaphore>,
}

/// A request's body, and its share of the memory for large ones.
pub(super) struct Held {
    bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

/// A request that is being prepared.
pub(crate) struct Work {
    is_over: Arc<AtomicBool>,
}

impl Work {
    /// Whether the client is still there.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Asked between the steps.
    ///
    /// # Errors
    /// When the client has left; nobody reads it.
    pub(crate) fn go_on(&self) -> Result<(), ApiError> {
        match self.is_wanted() {
            true => Ok(()),
            false => Err(ApiError::internal("the client has left")),
        }
    }
}

impl Desk {
    /// A place for each CPU that this process may use, within [`PLACES`], and one for large requests.
    pub(super) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(PLACES.0, NonZero::get);
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            places: semaphore(cpus.clamp(PLACES.0, PLACES.1)),
            large: semaphore(1),
            bodies: semaphore(LARGE_BODIES_BYTES / UNIT_BYTES),
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
        let mut room = None;
        let make_room = async |bytes: usize| {
            let units = bytes
                .div_ceil(UNIT_BYTES)
                .min(LARGE_BODIES_BYTES / UNIT_BYTES);
            let units = u32::try_from(units).unwrap_or(u32::MAX);
            let permit = self.bodies.clone().acquire_many_owned(units).await;
            room = permit.ok();
        };
        let bytes = body::read(headers, body, limits, LARGE_BYTES, make_room).await?;
        Ok(Held { bytes, _room: room })
    }

    /// Does `work` for a body. Dropping the future tells the work to stop, and it keeps its place until it has.
    ///
    /// # Errors
    /// Those of the work; 500 when it panicked.
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        body: Held,
        work: impl FnOnce(Bytes, &Work) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let lost = || ApiError::internal("the request could not be prepared");
        let places = match body.bytes.len() > LARGE_BYTES {
            true => &self.large,
            false => &self.places,
        };
        let place = places.clone().acquire_owned().await.map_err(|_| lost())?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ending = Ending(is_over.clone());
        let work = move || {
            let _place = place;
            let Held { bytes, _room } = body;
            work(bytes, &Work { is_over })
        };
        let prepared = tokio::task::spawn_blocking(work).await;
        drop(ending);
        prepared.map_err(|_| lost())?
    }
}

/// Tells work that nobody waits for it.
struct Ending(Arc<AtomicBool>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn held(bytes: usize) -> Held {
        Held {
            bytes: Bytes::from(vec![b' '; bytes]),
            _room: None,
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn work_for_a_client_that_has_left_stops_and_gives_its_place_back() {
        let desk = Desk::new();
        let (began, stopped) = (mpsc::channel(), mpsc::channel());
        let preparing = tokio::spawn({
            let desk = desk.clone();
            async move {
                let work = move |_: Bytes, work: &Work| {
                    began.0.send(()).unwrap();
                    while work.is_wanted() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    stopped.0.send(()).unwrap();
                    work.go_on()
                };
                desk.prepare(held(LARGE_BYTES + 1), work).await
            }
        });
        began.1.recv_timeout(Duration::from_secs(10)).unwrap();
        // Small requests have places of their own meanwhile.
        let small = desk.prepare(held(10), |bytes, _| Ok(bytes.len()));
        assert_eq!(small.await.unwrap(), 10);
        preparing.abort();
        stopped.1.recv_timeout(Duration::from_secs(10)).unwrap();
        let next = desk.prepare(held(LARGE_BYTES + 1), |bytes, _| Ok(bytes.len()));
        assert_eq!(next.await.unwrap(), LARGE_BYTES + 1);
    }
}
