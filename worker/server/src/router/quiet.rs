//! When something was decoded last: prompts are read by all peers of a prefill worker while nothing is.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time of the last token that any worker is known to have decoded; `None` before the first.
#[derive(Default)]
pub(super) struct LastDecoded(Mutex<Option<Instant>>);

impl LastDecoded {
    /// Notes that a worker decodes now.
    pub(super) fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether nothing was decoded for as long as `window`.
    pub(super) fn is_longer_ago(&self, window: Duration) -> bool {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_none_or(|last| last.elapsed() >= window)
    }
}
