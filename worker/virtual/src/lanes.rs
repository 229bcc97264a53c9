//! The lanes of a device: what it computes, weights and rows that are copied to it, and KV and rows that are copied out of it.
//!
//! An operation or copy has a serial in its lane, and a mark is the serial of the last one that was queued. In exact mode all
//! lanes run where they are called, so that nothing would ever go wrong; what the lanes have waited for is recorded all the
//! same, and a use of memory that nothing but luck put in order is an error.
//!
//! In modelled mode an operation begins when it was called, the one before it in its lane has ended, and the marks that the lane
//! waits for are reached; it ends after the time that the rates give it. Calls return at once. What reads results waits for
//! that deadline, so the host's thread meets the device as it would meet a GPU.
//!
//! **Late operations.** A host that computed nothing in no time would queue everything the moment a pass begins or a result
//! that it waited for is there. An operation whose lane stood idle for more than [`LATE_US`] modelled microseconds after that
//! moment is late: its begin says more about this machine's threads than about the device.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_kernels::trace::{Trace, TraceEvent, TraceLane};

use crate::link::{Cargo, Due, Link};

/// Idle time of a lane from which on an operation is late, modelled µs.
pub const LATE_US: f64 = 50.0;

/// How long before a deadline a waiting thread stops sleeping, since the system wakes threads late.
const SPIN: Duration = Duration::from_micros(120);

/// One of the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Compute,
    /// Copies of weights to the device.
    Copy,
    /// Copies of rows to the device, which take turns with those of weights on the link.
    Rows,
    /// Copies of KV and rows to the host: the link carries both directions at once.
    Export,
}

/// A point in the order of a lane.
#[derive(Clone, Debug)]
pub struct VirtualMark {
    lane: Lane,
    /// Operations or copies that were queued before it.
    serial: u64,
    /// When a modelled lane reaches it; 0 in exact mode.
    due: Due,
    /// When it was made, or the lane goes on, real ns: a lane that is idle reaches it then.
    made_ns: u64,
}

impl VirtualMark {
    /// When it is reached, real ns.
    fn at_ns(&self) -> u64 {
        self.made_ns.max(self.due.ns())
    }
}

/// What the lanes of a modelled device have done since it was opened. Times are modelled ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneUse {
    /// Time since the device was opened, ms.
    pub wall_ms: f64,
    /// Time for which it computed, ms.
    pub compute_busy_ms: f64,
    /// Time for which the link to the device was busy, ms.
    pub copy_busy_ms: f64,
    /// Operations and copies.
    pub operations: u64,
    /// Those that began late because of the host's threads.
    pub late_operations: u64,
    /// Time for which a lane was idle because of the host's threads, ms.
    pub host_idle_ms: f64,
}

impl LaneUse {
    /// What was done since an earlier reading.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            wall_ms: self.wall_ms - before.wall_ms,
            compute_busy_ms: self.compute_busy_ms - before.compute_busy_ms,
            copy_busy_ms: self.copy_busy_ms - before.copy_busy_ms,
            operations: self.operations - before.operations,
            late_operations: self.late_operations - before.late_operations,
            host_idle_ms: self.host_idle_ms - before.host_idle_ms,
        }
    }
}

/// The lanes of one device.
pub(crate) struct Lanes {
    opened: Instant,
    /// Real seconds of a modelled one; `None` in exact mode.
    stretch: Option<f64>,
    state: Mutex<State>,
    trace: Option<Arc<Trace>>,
}

#[derive(Default)]
struct State {
    compute: Queue,
    copy: Queue,
    rows: Queue,
    export: Queue,
    /// What the copies to the device share.
    link: Link,
    /// When the host last had no more to wait for, real ns.
    host_from_ns: u64,
}

#[derive(Default)]
struct Queue {
    queued: u64,
    /// Serial of copies of weights that computation has waited for, and of computation that the others have.
    waited: u64,
    /// End of the last one.
    busy_until: Due,
    not_before_ns: u64,
    busy_ns: u64,
    idle_ns: u64,
    late: u64,
}

/// Begin and end of a modelled operation, real ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

impl Lanes {
    pub(crate) fn new(stretch: Option<f64>, trace: Option<Arc<Trace>>) -> Self {
        Self {
            opened: Instant::now(),
            stretch,
            state: Mutex::default(),
            trace,
        }
    }

    /// Real time since the device was opened.
    pub(crate) fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    /// Time since the device was opened: modelled, or real in exact mode.
    pub(crate) fn elapsed_ns(&self) -> u64 {
        (self.now_ns() as f64 / self.stretch.unwrap_or(1.0)) as u64
    }

    /// Begins a pass: the host did nothing before.
    pub(crate) fn begin_pass(&self) {
        self.state().host_from_ns = self.now_ns();
    }

    /// Notes that what the host queues next waited for something beside the device.
    pub(crate) fn host_has_values(&self) {
        let now_ns = self.now_ns();
        let mut state = self.state();
        state.host_from_ns = state.host_from_ns.max(now_ns);
    }

    /// Queues an operation or copy of `took_us` modelled µs; its serial, and in modelled mode its times.
    pub(crate) fn queue(&self, lane: Lane, took_us: f64) -> (u64, Times) {
        let now_ns = self.now_ns();
        let mut state = self.state();
        let (host_from_ns, ahead_of) = (state.host_from_ns, state.compute.waited);
        let (queue, link) = state.queue(lane);
        queue.queued += 1;
        let Some(stretch) = self.stretch else {
            let times = Times {
                begin_ns: now_ns,
                end_ns: now_ns,
            };
            return (queue.queued, times);
        };
        let free_ns = queue.busy_until.ns().max(queue.not_before_ns);
        let ready_ns = free_ns.max(now_ns);
        let idle_ns = ready_ns - free_ns.max(host_from_ns).min(ready_ns);
        queue.idle_ns += idle_ns;
        queue.late += u64::from(idle_ns as f64 > LATE_US * 1e3 * stretch);
        let took_ns = (took_us * 1e3 * stretch) as u64;
        queue.busy_ns += took_ns;
        let cargo = match lane {
            Lane::Copy => Some(Cargo::Weights(queue.queued)),
            Lane::Rows => Some(Cargo::Rows { ahead_of }),
            Lane::Compute | Lane::Export => None,
        };
        let (begin_ns, due) = match cargo {
            Some(cargo) => link.take_turn(now_ns, cargo, (ready_ns, took_ns)),
            None => (ready_ns, Due::at(ready_ns + took_ns)),
        };
        let times = Times {
            begin_ns,
            end_ns: due.ns(),
        };
        queue.busy_until = due;
        (queue.queued, times)
    }

    /// Counts a copy that the host's memory made later than the link was to have it.
    pub(crate) fn copied_late(&self, end_ns: u64) {
        if let Some(stretch) = self.stretch {
            let over_ns = self.now_ns().saturating_sub(end_ns);
            let is_late = over_ns as f64 > LATE_US * 1e3 * stretch;
            self.state().copy.late += u64::from(is_late);
        }
    }

    /// A mark behind everything that was queued in a lane so far.
    pub(crate) fn mark(&self, lane: Lane) -> VirtualMark {
        let now_ns = self.now_ns();
        let mut state = self.state();
        let (queue, _) = state.queue(lane);
        VirtualMark {
            lane,
            serial: queue.queued,
            due: queue.busy_until.clone(),
            made_ns: now_ns.max(queue.not_before_ns),
        }
    }

    /// Time between two marks of a lane by the device's clock, ns; `None` if the second is not reached yet.
    pub(crate) fn elapsed_between(&self, from: &VirtualMark, to: &VirtualMark) -> Option<u64> {
        let took_ns = to.at_ns().saturating_sub(from.at_ns()) as f64 / self.stretch.unwrap_or(1.0);
        (to.at_ns() <= self.now_ns()).then_some(took_ns as u64)
    }

    /// Lets what is queued in `lane` from now on wait for a mark; one of the lane itself is always reached.
    pub(crate) fn wait_in(&self, lane: Lane, mark: &VirtualMark) {
        if mark.lane != lane {
            let mut state = self.state();
            let (queue, _) = state.queue(lane);
            if mark.lane != Lane::Rows {
                queue.waited = queue.waited.max(mark.serial);
            }
            queue.not_before_ns = queue.not_before_ns.max(mark.due.ns());
        }
    }

    /// Serial of the other lane that everything that is queued in `lane` from now on follows.
    pub(crate) fn waited(&self, lane: Lane) -> u64 {
        self.state().queue(lane).0.waited
    }

    /// Makes the host wait until the device has computed what was queued so far.
    pub(crate) fn wait_for_compute(&self) {
        self.wait_for_result(&self.mark(Lane::Compute));
    }

    /// Makes the host wait for what lies behind a mark, and has led to what the host queues next.
    pub(crate) fn wait_for_result(&self, mark: &VirtualMark) {
        self.wait_for(mark);
        let mut state = self.state();
        state.host_from_ns = state.host_from_ns.max(mark.due.ns());
    }

    /// Whether a mark is reached.
    pub(crate) fn is_reached(&self, mark: &VirtualMark) -> bool {
        mark.due.ns() <= self.now_ns()
    }

    /// Makes the host wait until a mark is reached.
    pub(crate) fn wait_for(&self, mark: &VirtualMark) {
        // A copy may be put off meanwhile.
        while !self.is_reached(mark) {
            self.wait_until(mark.due.ns());
        }
    }

    /// Sleeps until a moment, real ns since the device was opened.
    pub(crate) fn wait_until(&self, due_ns: u64) {
        loop {
            let left = Duration::from_nanos(due_ns.saturating_sub(self.now_ns()));
            match left.checked_sub(SPIN) {
                _ if left.is_zero() => return,
                Some(long) if !long.is_zero() => std::thread::sleep(long),
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// Sleeps until a moment, real ns since the device was opened, or as much later as the system wakes the thread.
    pub(crate) fn sleep_until(&self, due_ns: u64) {
        let left = Duration::from_nanos(due_ns.saturating_sub(self.now_ns()));
        if !left.is_zero() {
            std::thread::sleep(left);
        }
    }

    /// Records an event, if somebody wants it; times are real ns.
    pub(crate) fn trace(
        &self,
        lane: TraceLane,
        times: Times,
        name: impl FnOnce() -> Cow<'static, str>,
    ) {
        let Some(trace) = self.trace.as_ref().filter(|trace| trace.is_on()) else {
            return;
        };
        let at = |real_ns| trace.ns_at(self.opened + Duration::from_nanos(real_ns));
        trace.record(TraceEvent {
            lane,
            name: name(),
            begin_ns: at(times.begin_ns),
            end_ns: at(times.end_ns),
        });
    }

    /// What the lanes did; `None` in exact mode, which claims no times.
    pub(crate) fn read(&self) -> Option<LaneUse> {
        let stretch = self.stretch?;
        let modelled_ms = |real_ns: u64| real_ns as f64 / 1e6 / stretch;
        let state = self.state();
        let [compute, copy, rows] = [&state.compute, &state.copy, &state.rows];
        Some(LaneUse {
            wall_ms: modelled_ms(self.now_ns()),
            compute_busy_ms: modelled_ms(compute.busy_ns),
            copy_busy_ms: modelled_ms(copy.busy_ns + rows.busy_ns),
            operations: compute.queued + copy.queued + rows.queued,
            late_operations: compute.late + copy.late + rows.late,
            host_idle_ms: modelled_ms(compute.idle_ns + copy.idle_ns + rows.idle_ns),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn queue(&mut self, lane: Lane) -> (&mut Queue, &mut Link) {
        let queue = match lane {
            Lane::Compute => &mut self.compute,
            Lane::Copy => &mut self.copy,
            Lane::Rows => &mut self.rows,
            Lane::Export => &mut self.export,
        };
        (queue, &mut self.link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_in_order_and_waits_for_marks_of_the_other() {
        // Stretched so far that the test's own time is nothing beside it.
        let lanes = Lanes::new(Some(1e6), None);
        let (_, copy) = lanes.queue(Lane::Copy, 100.0);
        let copied = lanes.mark(Lane::Copy);
        let (_, other) = lanes.queue(Lane::Copy, 1000.0);
        assert_eq!(other.begin_ns, copy.end_ns);
        let (_, free) = lanes.queue(Lane::Compute, 1.0);
        assert!(free.begin_ns < copy.end_ns);
        lanes.wait_in(Lane::Compute, &copied);
        let (_, waits) = lanes.queue(Lane::Compute, 10.0);
        assert_eq!(waits.begin_ns, copy.end_ns);
        lanes.wait_in(Lane::Compute, &lanes.mark(Lane::Compute));
        let (serial, next) = lanes.queue(Lane::Compute, 10.0);
        assert_eq!((serial, next.begin_ns), (3, waits.end_ns));
        let used = lanes.read().unwrap();
        assert!((used.copy_busy_ms - 1.1).abs() < 1e-9, "{used:?}");
        assert!((used.compute_busy_ms - 0.021).abs() < 1e-9, "{used:?}");
    }

    #[test]
    fn an_operation_is_late_if_nothing_but_the_host_kept_it_waiting() {
        let lanes = Lanes::new(Some(100.0), None);
        let late = || lanes.read().unwrap().late_operations;
        std::thread::sleep(Duration::from_millis(20));
        lanes.begin_pass();
        lanes.queue(Lane::Compute, 200.0);
        assert_eq!(late(), 0, "nothing to do before the pass");
        lanes.wait_for_compute();
        std::thread::sleep(Duration::from_millis(20));
        lanes.queue(Lane::Compute, 1.0);
        assert_eq!(late(), 1, "20 ms after a result");
        assert!(lanes.read().unwrap().host_idle_ms >= 0.2);
    }
}
