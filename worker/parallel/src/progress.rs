//! What a follower computes now, as seen from other threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::pace::{Pace, Times};

/// What a follower computes now: one that hangs does not come to an end. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct StageProgress(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    present: Option<(PassPart, Instant)>,
    pace: Pace,
}

/// A part of a pass: layers of one flight, or of a peer's share of the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassPart {
    /// Number of the pass, as the head counts them.
    pub pass: u64,
    /// The layers.
    pub layers: Range<usize>,
    /// Rows of the flight, or of the pass.
    pub rows: usize,
}

impl StageProgress {
    /// Time that it has spent at its present part; `None` between two.
    pub fn at_window_for(&self) -> Option<Duration> {
        let state = self.lock();
        state.present.as_ref().map(|(_, since)| since.elapsed())
    }

    /// Its present part, and how long that takes; `None` between two.
    pub fn now(&self) -> Option<(PassPart, Times)> {
        let (state, now) = (self.lock(), Instant::now());
        let (part, since) = state.present.as_ref()?;
        let present = now.saturating_duration_since(*since);
        Some((part.clone(), state.pace.times(part.rows, present, now)))
    }

    /// Notes that it begins a part, after the one before.
    pub(crate) fn begin(&self, part: PassPart) {
        let (mut state, now) = (self.lock(), Instant::now());
        state.end(now);
        state.pace.begin(now);
        state.present = Some((part, now));
    }

    /// Notes that it is still at its part, and was waiting for others until now.
    pub(crate) fn begin_again(&self) {
        if let Some((_, since)) = &mut self.lock().present {
            *since = Instant::now();
        }
    }

    /// Notes that it computes nothing any more.
    pub(crate) fn end(&self) {
        self.lock().end(Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end(&mut self, now: Instant) {
        if let Some((part, since)) = self.present.take() {
            let took = now.saturating_duration_since(since);
            self.pace.end(part.rows, took, now);
        }
    }
}
