//! The clock of a benchmark, and what the lanes of a modelled device did meanwhile.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hearth_kernels::trace::{Trace, TraceEvent, TraceLane};
use hearth_virtual::{LaneUse, VirtualBackend};
use serde::Serialize;

/// Share of late operations above which a run says nothing.
const MAX_LATE_SHARE: f64 = 0.01;

/// The clock of the device: its own if it is virtual, else the machine's.
pub(crate) struct Clock {
    began: Instant,
    device: Option<Arc<VirtualBackend>>,
    /// What models experts beside the device.
    host: Option<Arc<VirtualBackend>>,
    trace: Option<Arc<Trace>>,
}

/// A reading of the clock.
#[derive(Clone, Copy)]
pub(crate) struct Reading {
    at_ns: u64,
    moment: Instant,
    lanes: Option<LaneUse>,
    host_lanes: Option<LaneUse>,
    unix_ms: f64,
}

impl Reading {
    /// Milliseconds since 1970, by the machine's clock.
    pub(crate) fn unix_ms(&self) -> f64 {
        self.unix_ms
    }
}

/// What the lanes of a modelled device did in a part of a run, and those of what models experts beside it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaneReports {
    pub(crate) device: Option<LaneReport>,
    pub(crate) host: Option<LaneReport>,
}

impl Clock {
    /// Creates the clock; what was timed is recorded in the trace, too.
    pub(crate) fn new(device: Option<Arc<VirtualBackend>>, trace: Option<Arc<Trace>>) -> Self {
        Self {
            began: Instant::now(),
            device,
            host: None,
            trace,
        }
    }

    /// The same clock beside what models experts.
    pub(crate) fn beside(self, host: Option<Arc<VirtualBackend>>) -> Self {
        Self { host, ..self }
    }

    /// Reads the clock.
    pub(crate) fn read(&self) -> Reading {
        let lanes = |backend: &Option<Arc<VirtualBackend>>| backend.as_ref()?.lane_use();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let moment = Instant::now();
        Reading {
            moment,
            at_ns: match &self.device {
                Some(device) => device.elapsed_ns(),
                None => (moment - self.began).as_nanos() as u64,
            },
            lanes: lanes(&self.device),
            host_lanes: lanes(&self.host),
            unix_ms: since_1970.map_or(0.0, |since| since.as_secs_f64() * 1e3),
        }
    }

    /// Milliseconds since a reading, and what the lanes did since; `name` is what took so long.
    pub(crate) fn since(&self, begin: &Reading, name: &'static str) -> (f64, LaneReports) {
        let end = self.read();
        if let Some(trace) = &self.trace {
            trace.record(TraceEvent {
                lane: TraceLane::Host,
                name: Cow::Borrowed(name),
                begin_ns: trace.ns_at(begin.moment),
                end_ns: trace.ns_at(end.moment),
            });
        }
        let wall_ms = (end.at_ns - begin.at_ns) as f64 / 1e6;
        let report = |end: Option<LaneUse>, begin: Option<LaneUse>| {
            Some(LaneReport::new(&end?.since(&begin?), wall_ms))
        };
        let reports = LaneReports {
            device: report(end.lanes, begin.lanes),
            host: report(end.host_lanes, begin.host_lanes),
        };
        (wall_ms, reports)
    }
}

/// What the lanes of a modelled device did in a part of a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LaneReport {
    /// Modelled time that passed.
    wall_ms: f64,
    /// Sum of the times of operations.
    compute_ms: f64,
    /// Sum of the times of copies.
    copy_ms: f64,
    /// `compute_ms / wall_ms`.
    compute_share: f64,
    /// `copy_ms / wall_ms`.
    copy_share: f64,
    /// `(compute_ms + copy_ms) / wall_ms`: 1 if the lanes take turns, 2 if both are always busy.
    overlap: f64,
    /// `wall_ms` over the larger of `compute_ms` and `copy_ms`: 1 is the least.
    over_bound: f64,
    operations: u64,
    late_operations: u64,
    /// Time for which a lane was idle because of this machine's threads, over `wall_ms`.
    host_idle_share: f64,
    /// Whether so many operations were late that the run says nothing about the device.
    is_void: bool,
}

impl LaneReport {
    fn new(used: &LaneUse, wall_ms: f64) -> Self {
        let LaneUse {
            compute_busy_ms,
            copy_busy_ms,
            operations,
            late_operations,
            host_idle_ms,
            ..
        } = *used;
        Self {
            wall_ms,
            compute_ms: compute_busy_ms,
            copy_ms: copy_busy_ms,
            compute_share: compute_busy_ms / wall_ms,
            copy_share: copy_busy_ms / wall_ms,
            overlap: (compute_busy_ms + copy_busy_ms) / wall_ms,
            over_bound: wall_ms / compute_busy_ms.max(copy_busy_ms),
            operations,
            late_operations,
            host_idle_share: host_idle_ms / wall_ms,
            is_void: late_operations as f64 > MAX_LATE_SHARE * operations as f64,
        }
    }
}

impl fmt::Display for LaneReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "compute {:.2}, copy {:.2}, overlap {:.2}; {:.3} of the busier lane; {} of {} operations late, host idle {:.3}{}",
            self.compute_share,
            self.copy_share,
            self.overlap,
            self.over_bound,
            self.late_operations,
            self.operations,
            self.host_idle_share,
            if self.is_void {
                ": VOID, measure again on an idle machine, or with a larger stretch"
            } else {
                ""
            }
        )
    }
}
