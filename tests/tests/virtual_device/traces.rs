//! Traces of running workers, on request.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use hearth_tests::{Up, hearth, run, worker};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{answer, streaming};

fn trace(up: &Up, arguments: &[&str]) -> Command {
    let mut command = hearth();
    command.arg("trace").args(arguments);
    command.arg("--state-dir").arg(up.state_dir());
    command
}

/// Starts a trace, and returns once it records.
fn begun(command: &mut Command) -> Child {
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .expect("hearth trace");
    let stderr = child.stderr.as_mut().expect("piped");
    let mut line = String::new();
    BufReader::new(stderr).read_line(&mut line).expect("a line");
    assert!(line.starts_with("recording prefill-0"), "{line}");
    child
}

/// Names of the events of each lane of a process.
fn lanes(trace: &Value, process: &str) -> Vec<(String, Vec<String>)> {
    let events = trace["traceEvents"].as_array().expect("events");
    let meta = |kind: &'static str| events.iter().filter(move |event| event["name"] == kind);
    let name = |event: &Value| event["args"]["name"].as_str().expect("a name").to_owned();
    let pid = meta("process_name").find(|event| name(event).starts_with(process));
    let pid = &pid.unwrap_or_else(|| panic!("no {process}: {trace}"))["pid"];
    let of_lane = |lane: &Value| {
        let is_here = |event: &&Value| {
            event["pid"] == *pid && event["tid"] == lane["tid"] && event.get("ts").is_some()
        };
        let here = events.iter().filter(is_here);
        here.map(|event| event["name"].as_str().expect("a name").to_owned())
            .collect()
    };
    meta("thread_name")
        .filter(|lane| lane["pid"] == *pid)
        .map(|lane| (name(lane), of_lane(lane)))
        .collect()
}

#[test]
fn running_workers_record_what_they_do_until_they_are_told_to_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let up = Up::start(&streaming(directory.path()));
    let file = directory.path().join("trace.json");
    let out = file.display().to_string();
    let mut child = begun(&mut trace(&up, &["--seconds", "600", "--out", &out]));
    // One at a time, and what somebody else records goes on.
    let (code, _, said) = run(&mut trace(&up, &["demo", "prefill-0", "--seconds", "1"]));
    assert_eq!(code, 1, "{said}");
    for part in [
        "prefill-0: a trace is being recorded",
        "at most",
        "wait for its end",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    answer(&up);
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::INT).expect("it runs");
    assert!(child.wait().expect("it ends").success());
    let text = std::fs::read_to_string(&file).expect("a trace");
    let whole: Value = serde_json::from_str(&text).expect("JSON");
    let prefill = lanes(&whole, "prefill-0: virtual");
    let names: Vec<&str> = prefill.iter().map(|(lane, _)| lane.as_str()).collect();
    assert_eq!(names, ["host", "modules", "copy", "compute"]);
    for ((lane, events), part) in prefill
        .iter()
        .zip(["step: ", " ON", " expert ", "attention"])
    {
        assert!(
            events.iter().any(|name| name.contains(part)),
            "{lane}: {events:?}"
        );
    }
    // CPUs have no lanes, and the steps are seen.
    let decode = lanes(&whole, "decode-0: cpu");
    assert_eq!(decode.len(), 1, "{decode:?}");
    assert!(decode[0].1.len() > 8, "{decode:?}");

    // The next one begins anew, of one worker, and ends by itself.
    let mut next = trace(&up, &["demo", "decode-0", "--seconds", "1"]);
    let (code, text, said) = run(&mut next);
    assert_eq!(code, 0, "{said}");
    let idle: Value = serde_json::from_str(&text).expect("JSON");
    assert!(lanes(&idle, "decode-0").is_empty(), "{idle}");
    // One that its caller gives up is over.
    let mut child = begun(&mut trace(&up, &["--seconds", "600", "--out", &out]));
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let again = || run(&mut trace(&up, &["--seconds", "1", "--out", &out])).0;
    assert!((0..20).any(|_| again() == 0), "{}", up.logs());
}

#[test]
fn traces_that_cannot_be_recorded_say_what_to_do() {
    let state = tempfile::tempdir().expect("a directory");
    let nothing = ["trace", "--state-dir", &state.path().display().to_string()].map(str::to_owned);
    let (code, _, said) = run(hearth().args(nothing));
    assert!(code == 1 && said.contains("hearth up -f"), "{said}");
    let (code, _, said) = run(worker().args(["trace", "--seconds", "1"]));
    assert!(code == 1 && said.contains("--plan FILE"), "{said}");
    let (code, _, said) = run(worker().args(["trace", "--seconds", "0"]));
    assert!(code == 2 && said.contains("--seconds"), "{said}");
}
