//! State shared by the handle and the engine's thread.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use hearth_model::StreamedStats;

use crate::{EngineError, EngineStats, Health};

/// State shared between threads. No lock is held while the model computes or a callback runs.
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    draining: AtomicBool,
}

struct State {
    stats: EngineStats,
    health: Health,
    /// What became of the group of ranks that run the model; empty: it has lost no member.
    group: String,
    /// Since when requests have waited for it to be complete again.
    apart_since: Option<Instant>,
    /// Accepted requests that have not ended.
    open: usize,
    /// Number of requests that have ended.
    ended: usize,
}

impl Shared {
    pub(crate) fn new(stats: EngineStats) -> Self {
        Self {
            state: Mutex::new(State {
                stats,
                health: Health::Healthy,
                group: String::new(),
                apart_since: None,
                open: 0,
                ended: 0,
            }),
            changed: Condvar::new(),
            draining: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            draining: self.is_draining(),
            ..self.state().stats
        }
    }

    pub(crate) fn set_stats(&self, stats: EngineStats) {
        self.state().stats = stats;
    }

    /// Updates what was streamed, while a pass runs.
    pub(crate) fn set_streamed(&self, streamed: StreamedStats) {
        self.state().stats.streamed = streamed;
    }

    pub(crate) fn health(&self) -> Health {
        self.state().health.clone()
    }

    pub(crate) fn set_health(&self, health: Health) {
        self.state().health = health;
    }

    pub(crate) fn group(&self) -> String {
        self.state().group.clone()
    }

    pub(crate) fn set_group(&self, group: String) {
        self.state().group = group;
    }

    pub(crate) fn apart_for(&self) -> Option<Duration> {
        self.state().apart_since.map(|since| since.elapsed())
    }

    pub(crate) fn set_apart(&self, since: Option<Instant>) {
        self.state().apart_since = since;
        self.changed.notify_all();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    pub(crate) fn begin_drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Number of accepted requests that have not ended, and of those that have.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.open, state.ended)
    }

    /// Waits until no request is open; returns false if `grace` runs out first, or requests have waited for the group for as long as
    /// `group_patience`.
    pub(crate) fn wait_until_idle(&self, grace: Duration, group_patience: Duration) -> bool {
        let deadline = Instant::now().checked_add(grace);
        let mut state = self.state();
        while state.open > 0 {
            let apart_since = state.apart_since;
            let given_up = apart_since.and_then(|since| since.checked_add(group_patience));
            let left = match deadline.into_iter().chain(given_up).min() {
                Some(at) => at.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// An accepted request's place in the engine; dropping it gives the place back, wherever the request ends.
pub(crate) struct Slot {
    shared: Arc<Shared>,
}

impl Slot {
    /// Takes a place.
    pub(crate) fn take(shared: &Arc<Shared>, limit: usize) -> Result<Self, EngineError> {
        if shared.is_draining() {
            return Err(EngineError::Draining);
        }
        let mut state = shared.state();
        if state.open >= limit {
            return Err(EngineError::QueueFull {
                waiting: state.open,
                limit,
            });
        }
        state.open += 1;
        Ok(Self {
            shared: shared.clone(),
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.open -= 1;
        state.ended += 1;
        self.shared.changed.notify_all();
    }
}
