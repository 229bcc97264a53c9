//! Writes traces in the format of chrome://tracing and ui.perfetto.dev (Trace Event Format), an event at a time: a recording
//! is large, and a worker has little memory to spare.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use hearth_kernels::trace::{Recorded, TraceEvent, TraceLane};
use serde_json::{Value, json};

/// Lanes from top to bottom.
const LANES: [(TraceLane, &str); 6] = [
    (TraceLane::Host, "host"),
    (TraceLane::Modules, "modules"),
    (TraceLane::Copy, "copy"),
    (TraceLane::Compute, "compute"),
    (TraceLane::KvExport, "kv export"),
    (TraceLane::HostExperts, "host experts"),
];

/// The process whose lanes these are.
pub(crate) struct TracedProcess {
    /// Its name, with its device.
    pub(crate) name: String,
    /// Tells its lanes from those of other processes.
    pub(crate) id: u32,
    /// Time at which its trace was made, ns; 0 for a trace of one process.
    pub(crate) from_ns: u64,
}

/// Size from which a piece of a trace is passed on.
const PIECE_BYTES: usize = 1 << 20;

/// Writes what one process has recorded to a file.
///
/// # Errors
/// An error that names the file.
pub(crate) fn write(path: &Path, device: &str, recorded: Recorded) -> anyhow::Result<()> {
    let process = TracedProcess {
        name: device.to_owned(),
        id: 1,
        from_ns: 0,
    };
    let dropped = recorded.dropped;
    let write = || {
        let mut trace = TraceWriter::new(File::create(path)?)?;
        for piece in pieces(process, recorded) {
            trace.events(&piece)?;
        }
        trace.end(dropped)
    };
    write().with_context(|| format!("{} cannot be written", path.display()))
}

/// A trace that is being written.
pub(crate) struct TraceWriter<W> {
    to: W,
    has_events: bool,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// Those of `to`.
    pub(crate) fn new(mut to: W) -> io::Result<Self> {
        to.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(Self {
            to,
            has_events: false,
        })
    }

    /// Adds a piece of events, as [`pieces`] has them.
    ///
    /// # Errors
    /// Those of the writer.
    pub(crate) fn events(&mut self, piece: &[u8]) -> io::Result<()> {
        if std::mem::replace(&mut self.has_events, true) {
            self.to.write_all(b",\n")?;
        }
        self.to.write_all(piece)
    }

    /// Ends the trace; `dropped`: earlier events that it does not have.
    ///
    /// # Errors
    /// Those of the writer.
    pub(crate) fn end(mut self, dropped: u64) -> io::Result<()> {
        let other = json!({ "droppedEvents": dropped });
        writeln!(self.to, "],\"otherData\":{other}}}")?;
        self.to.flush()
    }
}

/// What a process has recorded, with the lanes that have events: JSON objects with commas between them, in pieces of about
/// a MiB that begin and end with whole ones.
pub(crate) fn pieces(
    process: TracedProcess,
    recorded: Recorded,
) -> impl Iterator<Item = Vec<u8>> + Send {
    let mut objects = {
        let names = names(&process, &recorded);
        let events = recorded.events.into_iter();
        let events = events.map(move |event| object(&process, &event));
        names.into_iter().chain(events)
    };
    std::iter::from_fn(move || {
        let mut piece = objects.next()?.to_string();
        while piece.len() < PIECE_BYTES {
            let Some(object) = objects.next() else { break };
            piece.push_str(",\n");
            piece.push_str(&object.to_string());
        }
        Some(piece.into_bytes())
    })
}

/// Names of the process and of its lanes.
fn names(process: &TracedProcess, recorded: &Recorded) -> Vec<Value> {
    let pid = process.id;
    let mut all = vec![
        json!({ "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": { "name": process.name } }),
    ];
    for (index, (lane, name)) in LANES.iter().enumerate() {
        if recorded.events.iter().any(|event| event.lane == *lane) {
            let tid = index + 1;
            all.push(json!({ "ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": { "name": name } }));
            all.push(json!({ "ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": { "sort_index": tid } }));
        }
    }
    all
}

fn object(process: &TracedProcess, event: &TraceEvent) -> Value {
    let pid = process.id;
    let lane = LANES.iter().position(|(lane, _)| *lane == event.lane);
    let tid = lane.map_or(0, |index| index + 1);
    let begin_us = (process.from_ns + event.begin_ns) as f64 / 1e3;
    match event.lane {
        TraceLane::Modules => {
            json!({ "ph": "i", "s": "t", "name": event.name, "pid": pid, "tid": tid, "ts": begin_us })
        }
        TraceLane::Host
        | TraceLane::Copy
        | TraceLane::Compute
        | TraceLane::KvExport
        | TraceLane::HostExperts => {
            let took_us = event.end_ns.saturating_sub(event.begin_ns) as f64 / 1e3;
            json!({ "ph": "X", "name": event.name, "pid": pid, "tid": tid, "ts": begin_us, "dur": took_us })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(process: TracedProcess, recorded: Recorded) -> Value {
        let dropped = recorded.dropped;
        let mut text = Vec::new();
        let mut trace = TraceWriter::new(&mut text).unwrap();
        for piece in pieces(process, recorded) {
            assert!(piece.len() < PIECE_BYTES + 1000);
            trace.events(&piece).unwrap();
        }
        trace.end(dropped).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    #[test]
    fn a_long_recording_comes_in_pieces_and_loses_nothing() {
        let event = |index: u64| TraceEvent {
            lane: TraceLane::Compute,
            name: format!("operation \"{index}\"").into(),
            begin_ns: index,
            end_ns: index + 1,
        };
        let process = || TracedProcess {
            name: "gpu".to_owned(),
            id: 1,
            from_ns: 0,
        };
        for (count, least_pieces) in [(0, 1), (1, 1), (30_000, 2)] {
            let recorded = || Recorded {
                events: (0..count).map(event).collect(),
                dropped: 0,
            };
            assert!(pieces(process(), recorded()).count() >= least_pieces);
            let trace = written(process(), recorded());
            let events = trace["traceEvents"].as_array().unwrap();
            let timed = events.iter().filter(|event| event["ph"] == "X");
            assert_eq!(timed.count() as u64, count);
        }
    }

    #[test]
    fn events_have_a_lane_with_a_name_and_microseconds() {
        let event = |lane, name: &'static str, begin_ns, end_ns| TraceEvent {
            lane,
            name: name.into(),
            begin_ns,
            end_ns,
        };
        let recorded = Recorded {
            events: vec![
                event(TraceLane::Copy, "layer 1 expert 2", 1500, 4000),
                event(TraceLane::Modules, "layer 1 expert 2 ON", 4000, 4000),
            ],
            dropped: 3,
        };
        let process = TracedProcess {
            name: "virtual".to_owned(),
            id: 7,
            from_ns: 1_000_000,
        };
        let trace = written(process, recorded);
        let events = trace["traceEvents"].as_array().unwrap();
        let is_name = |e: &&Value| e["name"] == "thread_name";
        let names: Vec<&Value> = events.iter().filter(is_name).collect();
        assert_eq!(names.len(), 2, "lanes without events are left out");
        let named = |tid: &Value| {
            let of_lane = names.iter().find(|e| e["tid"] == *tid).unwrap();
            of_lane["args"]["name"].clone()
        };
        let [copy, on] = &events[events.len() - 2..] else {
            panic!("two events");
        };
        assert_eq!(named(&copy["tid"]), "copy");
        assert_eq!((&copy["ts"], &copy["dur"]), (&json!(1001.5), &json!(2.5)));
        assert_eq!(named(&on["tid"]), "modules");
        assert_eq!((&on["ph"], &on["ts"]), (&json!("i"), &json!(1004.0)));
        assert!(events.iter().all(|event| event["pid"] == 7));
        assert_eq!(trace["otherData"]["droppedEvents"], 3);
    }
}
