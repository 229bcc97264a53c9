//! What the GPU's streams do, for a trace: marks around launches and copies, whose times are told once the GPU has reached
//! them. What is launched is the same with and without a recording; a graph is one event.
//!
//! The driver tells times between two marks. One of them, the anchor, is waited for when a recording begins, so that its time
//! by the host's clock is known too.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hearth_kernels::KernelError;
use hearth_kernels::trace::{Reserved, Trace, TraceLane};

use crate::driver::{Mark, Marks, Stream};

/// Events whose times are asked for together, at least.
const LEAST_PENDING: usize = 256;
/// Time since the anchor from which on a later mark takes its place: the driver tells times as `f32` milliseconds, whose
/// steps are then as long as those of its clock.
const ANCHOR_NS: u64 = 8_000_000_000;

/// Records what streams do while its trace is on.
pub(crate) struct Recorder {
    trace: Arc<Trace>,
    marks: Arc<Marks>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of the recording that the rest belongs to.
    recording: u64,
    anchor: Option<Anchor>,
    /// Events whose ends the GPU may not have reached.
    pending: Vec<Pending>,
    /// Number of them from which on their times are asked for.
    settled_from: usize,
}

/// A mark with its time by the trace's clock.
struct Anchor {
    mark: Mark,
    at_ns: u64,
}

struct Pending {
    event: Reserved,
    begin: Mark,
    end: Mark,
}

impl Recorder {
    pub(crate) fn new(trace: Arc<Trace>, marks: &Arc<Marks>) -> Arc<Self> {
        let recorder = Arc::new(Self {
            trace: Arc::clone(&trace),
            marks: Arc::clone(marks),
            state: Mutex::default(),
        });
        let settled = Arc::downgrade(&recorder);
        trace.settle_with(move || {
            if let Some(recorder) = settled.upgrade() {
                recorder.settle(&mut recorder.lock());
            }
        });
        recorder
    }

    /// Lets `work` queue something in `stream`, and records it if it says that it did.
    ///
    /// # Errors
    /// Those of `work`; [`KernelError::Device`] if the driver fails.
    pub(crate) fn around(
        &self,
        (lane, stream): (TraceLane, &Stream),
        name: impl FnOnce() -> Cow<'static, str>,
        work: impl FnOnce() -> Result<bool, KernelError>,
    ) -> Result<bool, KernelError> {
        if !self.trace.is_on() {
            return work();
        }
        self.anchored(stream)?;
        let begin = self.marks.record(stream)?;
        let has_queued = work()?;
        if !has_queued {
            return Ok(false);
        }
        let end = self.marks.record(stream)?;
        let event = self.trace.reserve(lane, name());
        let mut state = self.lock();
        state.pending.push(Pending { event, begin, end });
        if state.pending.len() >= state.settled_from {
            self.settle(&mut state);
        }
        Ok(true)
    }

    /// Makes sure that the running recording has an anchor: what is queued in `stream` is waited for once.
    fn anchored(&self, stream: &Stream) -> Result<(), KernelError> {
        let mut state = self.lock();
        let recording = self.trace.recordings();
        if state.recording == recording {
            return Ok(());
        }
        self.marks.record(stream)?.wait()?;
        let before_ns = self.trace.ns_at(Instant::now());
        let mark = self.marks.record(stream)?;
        mark.wait()?;
        let after_ns = self.trace.ns_at(Instant::now());
        *state = State {
            recording,
            anchor: Some(Anchor {
                mark,
                at_ns: before_ns.midpoint(after_ns),
            }),
            pending: Vec::new(),
            settled_from: LEAST_PENDING,
        };
        Ok(())
    }

    /// Tells the times of the events whose ends the GPU has reached.
    fn settle(&self, state: &mut State) {
        let Some(anchor) = &mut state.anchor else {
            return;
        };
        let mut last: Option<(Mark, u64)> = None;
        state.pending.retain(|Pending { event, begin, end }| {
            let since = |mark: &Mark| anchor.mark.elapsed_ns(mark);
            let (Some(begin_ns), Some(end_ns)) = (since(begin), since(end)) else {
                return true;
            };
            let at = |since_ns| anchor.at_ns + since_ns;
            self.trace.resolve(*event, at(begin_ns), at(end_ns));
            if last.as_ref().is_none_or(|(_, latest)| end_ns > *latest) {
                last = Some((end.clone(), end_ns));
            }
            false
        });
        if let Some((mark, since_ns)) = last.filter(|(_, since_ns)| *since_ns > ANCHOR_NS) {
            *anchor = Anchor {
                mark,
                at_ns: anchor.at_ns + since_ns,
            };
        }
        state.settled_from = LEAST_PENDING.max(2 * state.pending.len());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
