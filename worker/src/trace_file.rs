//! Writes a trace in the format of chrome://tracing and ui.perfetto.dev (Trace Event Format).

use std::path::Path;

use anyhow::Context;
use hearth_kernels::trace::{TraceEvent, TraceLane};
use serde_json::{Value, json};

/// Lanes from top to bottom.
const LANES: [(TraceLane, &str); 4] = [
    (TraceLane::Host, "host"),
    (TraceLane::Modules, "modules"),
    (TraceLane::Copy, "copy"),
    (TraceLane::Compute, "compute"),
];

/// Writes events to a file.
///
/// # Errors
/// An error that names the file.
pub(crate) fn write(path: &Path, device: &str, events: &[TraceEvent]) -> anyhow::Result<()> {
    let text = serde_json::to_string(&chrome(device, events))?;
    std::fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

fn chrome(device: &str, events: &[TraceEvent]) -> Value {
    let mut all = vec![
        json!({ "ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": { "name": device } }),
    ];
    for (index, (_, name)) in LANES.iter().enumerate() {
        let tid = index + 1;
        all.push(json!({ "ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": { "name": name } }));
        all.push(json!({ "ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": { "sort_index": tid } }));
    }
    all.extend(events.iter().map(|event| {
        let lane = LANES.iter().position(|(lane, _)| *lane == event.lane);
        let tid = lane.map_or(0, |index| index + 1);
        let begin_us = event.begin_ns as f64 / 1e3;
        match event.lane {
            TraceLane::Modules => {
                json!({ "ph": "i", "s": "t", "name": event.name, "pid": 1, "tid": tid, "ts": begin_us })
            }
            TraceLane::Host | TraceLane::Copy | TraceLane::Compute => {
                let took_us = event.end_ns.saturating_sub(event.begin_ns) as f64 / 1e3;
                json!({ "ph": "X", "name": event.name, "pid": 1, "tid": tid, "ts": begin_us, "dur": took_us })
            }
        }
    }));
    json!({ "traceEvents": all, "displayTimeUnit": "ms" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_a_lane_with_a_name_and_microseconds() {
        let event = |lane, name: &'static str, begin_ns, end_ns| TraceEvent {
            lane,
            name: name.into(),
            begin_ns,
            end_ns,
        };
        let trace = chrome(
            "virtual",
            &[
                event(TraceLane::Copy, "layer 1 expert 2", 1500, 4000),
                event(TraceLane::Modules, "layer 1 expert 2 ON", 4000, 4000),
            ],
        );
        let events = trace["traceEvents"].as_array().unwrap();
        let named = |tid: &Value| {
            let is_name = |e: &&Value| e["name"] == "thread_name" && e["tid"] == *tid;
            events.iter().find(is_name).unwrap()["args"]["name"].clone()
        };
        let [copy, on] = &events[events.len() - 2..] else {
            panic!("two events");
        };
        assert_eq!(named(&copy["tid"]), "copy");
        assert_eq!((&copy["ts"], &copy["dur"]), (&json!(1.5), &json!(2.5)));
        assert_eq!(named(&on["tid"]), "modules");
        assert_eq!((&on["ph"], &on["ts"]), (&json!("i"), &json!(4.0)));
    }
}
