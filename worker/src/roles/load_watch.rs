//! Watchdog for loading: it may take hours, but not minutes without reading anything.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use crate::logging;

/// Ends the process if loading stalls; stops watching when dropped. A supervisor can see that a process has ended, but
/// cannot tell one that hangs in a read from one that makes progress.
pub(super) struct LoadWatch {
    last: Arc<Mutex<Last>>,
    task: AbortHandle,
}

/// Progress of loading, and its time.
#[derive(Clone, Copy)]
struct Last {
    percent: u32,
    at: Instant,
}

impl LoadWatch {
    /// Starts watching. Requires a tokio runtime with a thread other than the one that loads.
    pub(super) fn start(patience: Duration) -> Self {
        Self::with(patience, move |percent| {
            logging::say_last(format_args!(
                "no byte of the weights was read for {} s, at {percent} %\n  look at the disk or the share that the model lies on",
                patience.as_secs()
            ));
            std::process::exit(1);
        })
    }

    fn with(patience: Duration, end: impl FnOnce(u32) + Send + 'static) -> Self {
        let last = Arc::new(Mutex::new(Last {
            percent: 0,
            at: Instant::now(),
        }));
        let seen = Arc::clone(&last);
        let task = tokio::spawn(async move {
            loop {
                let Last { percent, at } = *lock(&seen);
                let Some(left) = patience.checked_sub(at.elapsed()) else {
                    return end(percent);
                };
                tokio::time::sleep(left + Duration::from_millis(1)).await;
            }
        });
        Self {
            last,
            task: task.abort_handle(),
        }
    }

    /// Records that bytes were read.
    pub(super) fn went_on(&self, percent: u32) {
        *lock(&self.last) = Last {
            percent,
            at: Instant::now(),
        };
    }
}

impl Drop for LoadWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(last: &Mutex<Last>) -> std::sync::MutexGuard<'_, Last> {
    last.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn loading_that_stands_still_is_given_up_and_slow_loading_is_not() {
        let (sender, ended) = mpsc::channel();
        let watch = LoadWatch::with(Duration::from_secs(2), move |percent| {
            let _ = sender.send(percent);
        });
        for percent in 1..=12 {
            tokio::time::sleep(Duration::from_millis(250)).await;
            watch.went_on(percent);
        }
        assert!(ended.try_recv().is_err(), "it went on");
        let percent = ended.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(percent, 12);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_loaded_is_watched_no_more() {
        let (sender, ended) = mpsc::channel();
        drop(LoadWatch::with(Duration::from_secs(2), move |percent| {
            let _ = sender.send(percent);
        }));
        assert!(ended.recv_timeout(Duration::from_secs(4)).is_err());
    }
}
