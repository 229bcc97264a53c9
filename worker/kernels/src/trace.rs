//! Record of what the lanes of a device did when, and of the modules that came and went.
//!
//! A device that was given a [`Trace`] records its operations and copies in it; a device that was given none spends
//! nothing on it. Times are nanoseconds since the device was opened, by the clock of that device.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceLane {
    /// What the device computes.
    Compute,
    /// Copies to the device.
    Copy,
    /// What the host waits for: a pass.
    Host,
    /// Modules: when they are ready on the device, and when nothing reads them any more.
    Modules,
}

/// Something that took time on a lane, or an instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Where it happened.
    pub lane: TraceLane,
    /// Name of an operation or module.
    pub name: Cow<'static, str>,
    /// Begin, ns.
    pub begin_ns: u64,
    /// End, ns; the begin of an instant.
    pub end_ns: u64,
}

/// Events in the order in which they were recorded.
#[derive(Debug, Default)]
pub struct Trace {
    record: Mutex<Record>,
    /// Number of events that are kept; `None`: all.
    most: Option<usize>,
}

#[derive(Debug, Default)]
struct Record {
    events: Vec<TraceEvent>,
    /// Events before this one that are copies have the names of their modules.
    named: usize,
    computed_ns: u64,
}

impl Trace {
    /// Creates an empty trace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty trace of the last `events` events, at most twice as many.
    pub fn of_last(events: usize) -> Self {
        Self {
            most: Some(events.max(1)),
            ..Self::default()
        }
    }

    /// Adds an event of a lane.
    pub fn record(&self, event: TraceEvent) {
        let mut record = self.lock();
        if event.lane == TraceLane::Compute {
            record.computed_ns = record.computed_ns.max(event.end_ns);
        }
        record.events.push(event);
        if let Some(most) = self.most
            && record.events.len() >= 2 * most
        {
            let old = record.events.len() - most;
            record.events.drain(..old);
            record.named = record.named.saturating_sub(old);
        }
    }

    /// Gives the copies that no module was named for yet to `module`: it is ready (ON) at the end of the last one.
    pub fn loaded(&self, module: &str) {
        let mut record = self.lock();
        let Record { events, named, .. } = &mut *record;
        let mut on_ns = None;
        for event in &mut events[*named..] {
            if event.lane == TraceLane::Copy {
                event.name = Cow::Owned(module.to_owned());
                on_ns = Some(event.end_ns);
            }
        }
        if let Some(at_ns) = on_ns {
            events.push(instant(format!("{module} ON"), at_ns));
        }
        *named = events.len();
    }

    /// Records that nothing reads `module` any more (OFF) after the operations that were recorded so far.
    pub fn released(&self, module: &str) {
        let mut record = self.lock();
        let event = instant(format!("{module} OFF"), record.computed_ns);
        record.events.push(event);
    }

    /// Takes the events, all or the last.
    pub fn take(&self) -> Vec<TraceEvent> {
        let mut events = std::mem::take(&mut *self.lock()).events;
        if let Some(most) = self.most {
            events.drain(..events.len().saturating_sub(most));
        }
        events
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        // Each change is complete before anything can panic.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn instant(name: String, at_ns: u64) -> TraceEvent {
    TraceEvent {
        lane: TraceLane::Modules,
        name: Cow::Owned(name),
        begin_ns: at_ns,
        end_ns: at_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(lane: TraceLane, begin_ns: u64, end_ns: u64) -> TraceEvent {
        TraceEvent {
            lane,
            name: Cow::Borrowed("some"),
            begin_ns,
            end_ns,
        }
    }

    #[test]
    fn a_trace_of_the_last_events_stays_short_and_names_its_copies() {
        let trace = Trace::of_last(4);
        for copy in 0..50 {
            trace.record(event(TraceLane::Copy, copy, copy + 1));
            trace.loaded("a");
            assert!(trace.lock().events.len() <= 8 + 1);
        }
        trace.record(event(TraceLane::Copy, 50, 51));
        trace.loaded("b");
        let events = trace.take();
        let names: Vec<_> = events.iter().map(|e| (&*e.name, e.end_ns)).collect();
        assert_eq!(names, [("a", 50), ("a ON", 50), ("b", 51), ("b ON", 51)]);
        assert_eq!(trace.take(), []);
    }

    #[test]
    fn copies_get_their_module_and_its_two_instants() {
        let trace = Trace::new();
        trace.record(event(TraceLane::Copy, 0, 10));
        trace.record(event(TraceLane::Copy, 10, 30));
        trace.loaded("a");
        trace.record(event(TraceLane::Copy, 30, 50));
        trace.record(event(TraceLane::Compute, 30, 70));
        trace.released("a");
        trace.loaded("b");
        let events: Vec<_> = trace.take();
        let of = |lane| {
            let of_lane = events.iter().filter(move |event| event.lane == lane);
            of_lane
                .map(|event| (&*event.name, event.end_ns))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(TraceLane::Copy), [("a", 10), ("a", 30), ("b", 50)]);
        assert_eq!(of(TraceLane::Compute), [("some", 70)]);
        assert_eq!(
            of(TraceLane::Modules),
            [("a ON", 30), ("a OFF", 70), ("b ON", 50)]
        );
        assert_eq!(trace.take(), []);
    }
}
