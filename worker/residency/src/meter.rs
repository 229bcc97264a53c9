//! What the link did while the device computed, by the device's own clock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_kernels::ops::LoadOps;
use hearth_model::StreamedStats;

/// Times that are kept until they are looked at: the device may be behind.
const LEAST_PENDING: usize = 256;

/// Times of copies, of computation that waited for them, and of passes.
pub(crate) struct Meter<M>(Mutex<Times<M>>);

struct Times<M> {
    stats: StreamedStats,
    /// Begins and ends that the device may not have reached yet.
    copies: Vec<(M, M)>,
    waits: Vec<(M, M)>,
    passes: Vec<(M, M)>,
    /// The running pass: its begin, and the last end of an expert.
    pass: Option<(M, Option<M>)>,
    /// Number of times from which on they are looked at.
    settled_from: usize,
}

impl<M: Clone> Meter<M> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Times {
            stats: StreamedStats::default(),
            copies: Vec::new(),
            waits: Vec::new(),
            passes: Vec::new(),
            pass: None,
            settled_from: LEAST_PENDING,
        }))
    }

    /// A pass of `rows` rows begins.
    pub(crate) fn begin(&self, rows: usize, at: M) {
        let mut times = self.lock();
        times.count_pass();
        times.stats.passes += 1;
        times.stats.rows += rows as u64;
        times.pass = Some((at, None));
    }

    /// Bytes were copied.
    pub(crate) fn copied(&self, bytes: u64, begin: M, end: M) {
        let mut times = self.lock();
        times.stats.copied_bytes += bytes;
        times.copies.push((begin, end));
    }

    /// Computation waited for a copy.
    pub(crate) fn waited<B: LoadOps<Mark = M>>(&self, backend: &B, begin: M, end: M) {
        let mut times = self.lock();
        times.waits.push((begin, end));
        if times.waits.len() + times.copies.len() >= times.settled_from {
            times.settle(backend);
        }
    }

    /// The last operation that reads an expert was queued before `at`.
    pub(crate) fn released(&self, at: M) {
        if let Some((_, end)) = &mut self.lock().pass {
            *end = Some(at);
        }
    }

    /// Reads all that the device has done, that of the running pass included.
    pub(crate) fn read<B: LoadOps<Mark = M>>(&self, backend: &B) -> StreamedStats {
        let mut times = self.lock();
        times.count_pass();
        times.settle(backend);
        times.stats
    }

    fn lock(&self) -> MutexGuard<'_, Times<M>> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Clone> Times<M> {
    /// Counts the running pass up to its last expert; what follows counts from there on.
    fn count_pass(&mut self) {
        if let Some((begin, end)) = &mut self.pass
            && let Some(end) = end.take()
        {
            let begin = std::mem::replace(begin, end.clone());
            self.passes.push((begin, end));
        }
    }

    /// Adds up the times whose ends the device has reached.
    fn settle<B: LoadOps<Mark = M>>(&mut self, backend: &B) {
        let stats = &mut self.stats;
        for (spans, total_ns) in [
            (&mut self.copies, &mut stats.copy_ns),
            (&mut self.waits, &mut stats.wait_ns),
            (&mut self.passes, &mut stats.pass_ns),
        ] {
            spans.retain(|(begin, end)| match backend.ns_between(begin, end) {
                Some(ns) => {
                    *total_ns += ns;
                    false
                }
                None => true,
            });
        }
        let pending = self.waits.len() + self.copies.len();
        self.settled_from = LEAST_PENDING.max(2 * pending);
    }
}
