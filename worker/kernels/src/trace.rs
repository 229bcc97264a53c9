//! Record of what happened when: on the lanes of a device, in modules that came and went, and on the CPUs beside it.
//!
//! A [`Trace`] is off until [`Trace::begin`]; as long as it is, whoever could record something reads one flag. All lanes
//! share its clock: nanoseconds since it was made, by the machine's clock, or modelled ones.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Where something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceLane {
    /// What the device computes.
    Compute,
    /// Copies to the device.
    Copy,
    /// Copies of stored KV to the host.
    KvExport,
    /// What the host waits for: a pass.
    Host,
    /// Routed experts that the host's CPUs compute beside the device.
    HostExperts,
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

/// What a recording has at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Events in the order in which they were recorded.
    pub events: Vec<TraceEvent>,
    /// Number of earlier events that were dropped for them.
    pub dropped: u64,
}

/// A record of events that is kept while somebody wants it.
pub struct Trace {
    made: Instant,
    /// Seconds of the machine's clock that one of this clock takes.
    stretch: f64,
    is_on: AtomicBool,
    recordings: AtomicU64,
    record: Mutex<Record>,
    /// Tells times that a device has not told yet.
    settle: Mutex<Option<Settle>>,
}

/// Tells times that were not known when events were reserved.
type Settle = Box<dyn Fn() + Send + Sync>;

/// An event whose times follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved(u64);

/// A running recording; dropping it ends it.
#[derive(Debug)]
pub struct Recording {
    /// Taken by the end alone.
    trace: Option<Arc<Trace>>,
}

#[derive(Default)]
struct Record {
    events: VecDeque<Entry>,
    /// Number of the first of them; numbers are never used again.
    first: u64,
    /// Copies before this number have the names of their modules.
    named: u64,
    /// Number of the last operation of the device.
    computed: Option<u64>,
    /// Whether a recording has begun and its events were not taken yet.
    is_running: bool,
    /// Most events that are kept.
    most: usize,
    dropped: u64,
}

struct Entry {
    lane: TraceLane,
    name: Cow<'static, str>,
    when: When,
}

#[derive(Clone, Copy)]
enum When {
    /// Begin and end, ns.
    Known(u64, u64),
    /// Not told yet.
    Reserved,
    /// The end of the event of this number.
    EndOf(u64),
}

impl Trace {
    /// Creates a trace by the machine's clock, which is off.
    pub fn new() -> Self {
        Self::stretched(1.0)
    }

    /// Creates a trace by a clock of which a second takes `stretch` seconds.
    pub fn stretched(stretch: f64) -> Self {
        Self {
            made: Instant::now(),
            stretch,
            is_on: AtomicBool::new(false),
            recordings: AtomicU64::new(0),
            record: Mutex::default(),
            settle: Mutex::default(),
        }
    }

    /// Begins to record the last `most` events; `None` if a recording runs.
    pub fn begin(self: &Arc<Self>, most: usize) -> Option<Recording> {
        let mut record = self.lock();
        if record.is_running {
            return None;
        }
        record.clear();
        record.is_running = true;
        record.most = most.max(1);
        self.recordings.fetch_add(1, Ordering::Relaxed);
        self.is_on.store(true, Ordering::Release);
        drop(record);
        Some(Recording {
            trace: Some(Arc::clone(self)),
        })
    }

    /// Whether events are recorded.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Number of recordings that have begun.
    pub fn recordings(&self) -> u64 {
        self.recordings.load(Ordering::Relaxed)
    }

    /// A moment by this clock, ns; 0 for one before the trace was made.
    pub fn ns_at(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.made);
        (since.as_nanos() as f64 / self.stretch) as u64
    }

    /// Adds an event.
    pub fn record(&self, event: TraceEvent) {
        let TraceEvent {
            lane,
            name,
            begin_ns,
            end_ns,
        } = event;
        self.push(lane, name, When::Known(begin_ns, end_ns));
    }

    /// Adds an event whose times are told later, by [`Trace::resolve`]; without them it is left out.
    pub fn reserve(&self, lane: TraceLane, name: Cow<'static, str>) -> Reserved {
        Reserved(self.push(lane, name, When::Reserved))
    }

    /// Tells the times of a reserved event, ns; of no effect if it is no longer kept.
    pub fn resolve(&self, event: Reserved, begin_ns: u64, end_ns: u64) {
        if let Some(entry) = self.lock().entry(event.0) {
            entry.when = When::Known(begin_ns, end_ns);
        }
    }

    /// Lets `settle` be called at the end of a recording, to tell the times that are still missing.
    pub fn settle_with(&self, settle: impl Fn() + Send + Sync + 'static) {
        *lock(&self.settle) = Some(Box::new(settle));
    }

    /// Gives the copies that no module was named for yet to `module`: it is ready (ON) at the end of the last one.
    pub fn loaded(&self, module: &str) {
        if !self.is_on() {
            return;
        }
        let mut record = self.lock();
        let from = record.named.saturating_sub(record.first) as usize;
        let first = record.first;
        let mut last = None;
        for (index, entry) in record.events.iter_mut().enumerate().skip(from) {
            if entry.lane == TraceLane::Copy {
                entry.name = Cow::Owned(module.to_owned());
                last = Some(first + index as u64);
            }
        }
        if let Some(copy) = last {
            record.push(instant(format!("{module} ON"), copy));
        }
        record.named = record.next();
    }

    /// Records that nothing reads `module` any more (OFF) after the operations that were recorded so far.
    pub fn released(&self, module: &str) {
        if !self.is_on() {
            return;
        }
        let mut record = self.lock();
        if let Some(operation) = record.computed {
            record.push(instant(format!("{module} OFF"), operation));
        }
    }

    fn push(&self, lane: TraceLane, name: Cow<'static, str>, when: When) -> u64 {
        let mut record = self.lock();
        let number = record.push(Entry { lane, name, when });
        if lane == TraceLane::Compute {
            record.computed = Some(number);
        }
        number
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        lock(&self.record)
    }
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Trace");
        fields.field("is_on", &self.is_on()).finish_non_exhaustive()
    }
}

impl Recording {
    /// Ends the recording and returns its events.
    pub fn end(mut self) -> Recorded {
        let Some(trace) = self.trace.take() else {
            return Recorded::default();
        };
        trace.is_on.store(false, Ordering::Relaxed);
        if let Some(settle) = &*lock(&trace.settle) {
            settle();
        }
        trace.lock().take()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(trace) = &self.trace {
            trace.is_on.store(false, Ordering::Relaxed);
            trace.lock().clear();
        }
    }
}

impl Record {
    /// Number of the next event.
    fn next(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    fn push(&mut self, entry: Entry) -> u64 {
        if self.events.len() >= self.most && self.events.pop_front().is_some() {
            self.first += 1;
            self.dropped += 1;
        }
        self.events.push_back(entry);
        self.next() - 1
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let index = number.checked_sub(self.first)?;
        self.events.get_mut(index as usize)
    }

    /// The events whose times are known.
    fn take(&mut self) -> Recorded {
        let when: Vec<When> = self.events.iter().map(|entry| entry.when).collect();
        let end_of = |number: u64| {
            let index = number.checked_sub(self.first)?;
            match when.get(index as usize)? {
                When::Known(_, end_ns) => Some(*end_ns),
                When::Reserved | When::EndOf(_) => None,
            }
        };
        let times = |when: When| match when {
            When::Known(begin_ns, end_ns) => Some((begin_ns, end_ns)),
            When::Reserved => None,
            When::EndOf(number) => end_of(number).map(|end_ns| (end_ns, end_ns)),
        };
        let known = self.events.iter_mut().filter_map(|entry| {
            let (begin_ns, end_ns) = times(entry.when)?;
            Some(TraceEvent {
                lane: entry.lane,
                name: std::mem::take(&mut entry.name),
                begin_ns,
                end_ns,
            })
        });
        let recorded = Recorded {
            events: known.collect(),
            dropped: self.dropped,
        };
        self.clear();
        recorded
    }

    fn clear(&mut self) {
        *self = Self {
            first: self.next(),
            named: self.next(),
            ..Self::default()
        };
    }
}

fn instant(name: String, end_of: u64) -> Entry {
    Entry {
        lane: TraceLane::Modules,
        name: Cow::Owned(name),
        when: When::EndOf(end_of),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn event(lane: TraceLane, begin_ns: u64, end_ns: u64) -> TraceEvent {
        TraceEvent {
            lane,
            name: Cow::Borrowed("some"),
            begin_ns,
            end_ns,
        }
    }

    fn ends(recorded: &Recorded) -> Vec<(&str, u64)> {
        let events = recorded.events.iter();
        events.map(|e| (&*e.name, e.end_ns)).collect()
    }

    #[test]
    fn only_the_last_events_are_kept_and_the_others_are_counted() {
        let trace = Arc::new(Trace::new());
        let recording = trace.begin(3).unwrap();
        for copy in 0..50 {
            trace.record(event(TraceLane::Copy, copy, copy + 1));
            trace.loaded("a");
            assert!(trace.lock().events.len() <= 3);
        }
        trace.record(event(TraceLane::Copy, 50, 51));
        trace.loaded("b");
        let recorded = recording.end();
        // The copy that the first ON refers to is gone, and with it the ON.
        assert_eq!(ends(&recorded), [("b", 51), ("b ON", 51)]);
        assert_eq!(recorded.dropped, 99);
    }

    #[test]
    fn one_recording_runs_at_a_time_and_none_leaves_anything_to_the_next() {
        let trace = Arc::new(Trace::new());
        assert!(!trace.is_on());
        let first = trace.begin(9).unwrap();
        assert!(trace.is_on() && trace.begin(9).is_none());
        let late = trace.reserve(TraceLane::Compute, Cow::Borrowed("late"));
        drop(first);
        assert!(!trace.is_on());
        let second = trace.begin(9).unwrap();
        trace.record(event(TraceLane::Compute, 1, 2));
        trace.resolve(late, 7, 8);
        assert_eq!(ends(&second.end()), [("some", 2)]);
        assert_eq!(trace.begin(9).unwrap().end(), Recorded::default());
    }

    #[test]
    fn copies_get_their_module_and_its_two_instants() {
        let trace = Arc::new(Trace::new());
        let recording = trace.begin(100).unwrap();
        trace.record(event(TraceLane::Copy, 0, 10));
        trace.record(event(TraceLane::Copy, 10, 30));
        trace.loaded("a");
        trace.record(event(TraceLane::Copy, 30, 50));
        trace.record(event(TraceLane::Compute, 30, 70));
        trace.released("a");
        trace.loaded("b");
        let recorded = recording.end();
        let events = [
            ("a", 10),
            ("a", 30),
            ("a ON", 30),
            ("b", 50),
            ("some", 70),
            ("a OFF", 70),
            ("b ON", 50),
        ];
        assert_eq!(ends(&recorded), events);
    }

    #[test]
    fn times_that_are_told_later_are_those_of_their_modules_too() {
        let trace = Arc::new(Trace::new());
        let recording = trace.begin(100).unwrap();
        let copy = trace.reserve(TraceLane::Copy, Cow::Borrowed("copy"));
        trace.loaded("a");
        let operation = trace.reserve(TraceLane::Compute, Cow::Borrowed("linear"));
        trace.released("a");
        trace.reserve(TraceLane::Compute, Cow::Borrowed("never told"));
        trace.released("b");
        trace.resolve(operation, 20, 40);
        let settled = Arc::downgrade(&trace);
        trace.settle_with(move || settled.upgrade().unwrap().resolve(copy, 5, 15));
        let recorded = recording.end();
        let events = [("a", 15), ("a ON", 15), ("linear", 40), ("a OFF", 40)];
        assert_eq!(ends(&recorded), events);
    }

    #[test]
    fn a_stretched_clock_is_slower() {
        let trace = Trace::stretched(10.0);
        let moment = trace.made + Duration::from_micros(30);
        assert_eq!(trace.ns_at(moment), 3000);
    }
}
