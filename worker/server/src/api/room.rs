//! Memory for large bodies that are being read.
//!
//! A body takes a share of it as its bytes arrive, so one that was announced and does not arrive takes nothing. When
//! all of it is taken by incomplete bodies, one at a time may be read to its end beyond the limit, but quickly.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of large bodies that are being read or wait to be prepared, without the one that is read beyond the limit.
const SHARED_BYTES: usize = 16 << 20;
/// Bytes that a body takes at a time.
const STEP_BYTES: usize = 256 << 10;
/// Time for the rest of a body that is read beyond the limit, and for one that was read to wait until others are
/// answered.
pub(super) const LAST_WITHIN: Duration = Duration::from_secs(10);

/// The memory of one gateway; clones share it.
#[derive(Clone)]
pub(super) struct MemoryBudget {
    /// Permits in [`STEP_BYTES`].
    steps: Arc<Semaphore>,
    last: Arc<Semaphore>,
}

/// One body's share, released when dropped.
pub(super) struct Room {
    rooms: MemoryBudget,
    steps: Option<OwnedSemaphorePermit>,
    last: Option<OwnedSemaphorePermit>,
}

impl MemoryBudget {
    pub(super) fn new() -> Self {
        Self {
            steps: Arc::new(Semaphore::new(SHARED_BYTES / STEP_BYTES)),
            last: Arc::new(Semaphore::new(1)),
        }
    }

    /// Creates an empty share.
    pub(super) fn room(&self) -> Room {
        Room {
            rooms: self.clone(),
            steps: None,
            last: None,
        }
    }
}

impl Room {
    /// Waits until there is memory for `bytes` in all; true if for everything that may arrive, within [`LAST_WITHIN`].
    pub(super) async fn grow(&mut self, bytes: usize) -> bool {
        loop {
            let held = self
                .steps
                .as_ref()
                .map_or(0, OwnedSemaphorePermit::num_permits);
            if self.last.is_some() || held * STEP_BYTES >= bytes {
                return self.last.is_some();
            }
            tokio::select! {
                biased;
                Ok(step) = self.rooms.steps.clone().acquire_owned() => match &mut self.steps {
                    Some(steps) => steps.merge(step),
                    None => self.steps = Some(step),
                },
                Ok(last) = self.rooms.last.clone().acquire_owned() => self.last = Some(last),
                // The semaphores are never closed.
                else => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn all_bodies_come_to_their_end_one_after_another_when_there_is_no_more_memory() {
        let rooms = MemoryBudget::new();
        let whole = 8 << 20;
        let reading = (0..20).map(|_| {
            let mut room = rooms.room();
            async move {
                // All have a part before any is complete.
                for part in 1..=8 {
                    room.grow(part * whole / 8).await;
                    tokio::task::yield_now().await;
                }
            }
        });
        let all = futures::future::join_all(reading);
        timeout(Duration::from_secs(10), all).await.unwrap();
    }

    #[tokio::test]
    async fn what_does_not_come_takes_no_memory() {
        let rooms = MemoryBudget::new();
        let mut stalled = Vec::new();
        for _ in 0..8 {
            let mut room = rooms.room();
            assert!(!room.grow(400 << 10).await);
            stalled.push(room);
        }
        let mut honest = rooms.room();
        assert!(!honest.grow(8 << 20).await);
    }
}
