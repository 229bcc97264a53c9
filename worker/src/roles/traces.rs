//! Traces of a running worker, recorded for as long as a caller wants.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_kernels::trace::{Recording, Trace};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::trace_file::{self, TracedProcess};

/// Events that are kept, some 20 MB with their names: the last ones.
const KEPT_EVENTS: usize = 1 << 17;
/// Longest recording in seconds.
const MAX_SECONDS: u32 = 3600;

/// What a worker can record.
pub(super) struct Traces {
    trace: Arc<Trace>,
    /// Its name, with its device.
    process: String,
    /// One at a time, until its events are sent: they take memory.
    turn: Arc<Semaphore>,
    /// When the recording that was begun last ends at the latest.
    until: Mutex<Instant>,
}

impl Traces {
    pub(super) fn new(trace: Arc<Trace>, process: String) -> Self {
        Self {
            trace,
            process,
            turn: Arc::new(Semaphore::new(1)),
            until: Mutex::new(Instant::now()),
        }
    }

    /// Begins a recording that its caller ends after `seconds` seconds, or before. Its turn is over when the caller drops it,
    /// once its events are sent.
    ///
    /// # Errors
    /// A time out of range, or a recording that runs.
    pub(super) fn begin(&self, seconds: u32) -> Result<(Recording, OwnedSemaphorePermit), Status> {
        if !(1..=MAX_SECONDS).contains(&seconds) {
            return Err(Status::invalid_argument(format!(
                "a trace of {seconds} seconds was asked for\n  ask for 1 to {MAX_SECONDS}"
            )));
        }
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = Arc::clone(&self.turn).try_acquire_owned().ok();
        match turn.and_then(|turn| Some((self.trace.begin(KEPT_EVENTS)?, turn))) {
            Some(begun) => {
                *until = Instant::now() + Duration::from_secs(seconds.into());
                Ok(begun)
            }
            None => {
                let left = until.saturating_duration_since(Instant::now());
                Err(Status::already_exists(format!(
                    "a trace is being recorded for somebody else, for {} s at most\n  wait for its end, or end it there",
                    left.as_secs() + 1
                )))
            }
        }
    }

    /// Ends a recording; returns its events as JSON, in pieces, and the number of earlier ones that were dropped.
    pub(super) fn end(
        &self,
        recording: Recording,
    ) -> (impl Iterator<Item = Vec<u8>> + Send + use<>, u64) {
        let recorded = recording.end();
        let now = clock_gettime(ClockId::Monotonic);
        let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let process = TracedProcess {
            name: self.process.clone(),
            id: std::process::id(),
            from_ns: now_ns.saturating_sub(self.trace.ns_at(Instant::now())),
        };
        tracing::info!(
            events = recorded.events.len(),
            dropped = recorded.dropped,
            "a trace was recorded"
        );
        let dropped = recorded.dropped;
        (trace_file::pieces(process, recorded), dropped)
    }
}
