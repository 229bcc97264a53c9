//! Queue of due reconciles: each deployment is at most once in the queue and at most once in progress.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_controller_core::key::Key;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Deployments ordered by due time.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    due: HashMap<Key, Instant>,
    /// The entries of `due` whose deployment is not in progress.
    order: BTreeSet<(Instant, Key)>,
    at_work: HashSet<Key>,
}

impl Queue {
    /// Schedules `key` to be reconciled in `delay`, unless it is already due earlier.
    pub(crate) fn add(&self, key: Key, delay: Duration) {
        let at = Instant::now() + delay;
        let mut state = self.lock();
        let known = state.due.get(&key).copied();
        if known.is_some_and(|known| known <= at) {
            return;
        }
        if let Some(known) = known {
            state.order.remove(&(known, key.clone()));
        }
        if !state.at_work.contains(&key) {
            state.order.insert((at, key.clone()));
        }
        state.due.insert(key, at);
        drop(state);
        self.wake.notify_one();
    }

    /// Waits for the next deployment that is due. It is in progress until [`Queue::done`].
    pub(crate) async fn take(&self) -> Key {
        loop {
            let next = {
                let mut state = self.lock();
                match state.order.first().cloned() {
                    Some((at, key)) if at <= Instant::now() => {
                        state.order.remove(&(at, key.clone()));
                        state.due.remove(&key);
                        state.at_work.insert(key.clone());
                        return key;
                    }
                    Some((at, _)) => Some(at),
                    None => None,
                }
            };
            let woken = self.wake.notified();
            match next {
                Some(at) => {
                    let _ = tokio::time::timeout_at(at, woken).await;
                }
                None => woken.await,
            }
        }
    }

    /// Marks the work on `key` as finished.
    pub(crate) fn done(&self, key: &Key) {
        let mut state = self.lock();
        state.at_work.remove(key);
        if let Some(at) = state.due.get(key).copied() {
            state.order.insert((at, key.clone()));
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Number of deployments that are due now, and of those in progress.
    pub(crate) fn depth(&self) -> (usize, usize) {
        let state = self.lock();
        let now = Instant::now();
        let due = state.order.iter().take_while(|(at, _)| *at <= now).count();
        (due, state.at_work.len())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("default", name)
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_time_wins_and_a_key_is_there_once() {
        let queue = Queue::default();
        queue.add(key("a"), Duration::from_secs(60));
        queue.add(key("b"), Duration::from_secs(2));
        queue.add(key("a"), Duration::from_secs(1));
        queue.add(key("a"), Duration::from_secs(30));
        let start = Instant::now();
        assert_eq!(queue.take().await, key("a"));
        assert_eq!(start.elapsed().as_secs(), 1);
        queue.done(&key("a"));
        assert_eq!(queue.take().await, key("b"));
        queue.done(&key("b"));
        let more = tokio::time::timeout(Duration::from_secs(600), queue.take()).await;
        assert!(more.is_err(), "{more:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_at_work_is_not_taken_again_before_it_is_done() {
        let queue = Queue::default();
        queue.add(key("a"), Duration::ZERO);
        assert_eq!(queue.take().await, key("a"));
        queue.add(key("a"), Duration::ZERO);
        let early = tokio::time::timeout(Duration::from_secs(5), queue.take()).await;
        assert!(early.is_err(), "{early:?}");
        queue.done(&key("a"));
        assert_eq!(queue.take().await, key("a"));
        assert_eq!(queue.depth(), (0, 1));
    }
}
