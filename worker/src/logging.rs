//! Logs go to standard error, data to standard output.

use std::io::{IsTerminal, Write};

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::environment::Environment;

/// Starts logging; `RUST_LOG` selects the logs, by default `info` of Hearth's own crates.
pub(crate) fn init(environment: &Environment) {
    let asked = environment.log_filter.as_deref();
    let filter = asked
        .and_then(|text| EnvFilter::try_new(text).ok())
        .unwrap_or_else(|| EnvFilter::new("warn,hearth=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It reports a failed write with `eprintln!`, which panics if that write fails too.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && environment.has_colour)
        .init();
}

/// Writes a line to standard error. If the write fails, as on a full disk, only the line is lost.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Kubernetes' default `terminationMessagePath`, a file of the container that the kubelet reads when the container has ended.
const TERMINATION_MESSAGE_PATH: &str = "/dev/termination-log";

/// Says the error with which this process ends, on standard error and, as the main process of a container, to the kubelet.
/// Without the second it would look for it in the last 2 KiB of the container's log, where the runtime may have put
/// standard output, which it reads separately, behind it.
pub(crate) fn say_last(error: impl std::fmt::Display) {
    let line = format!("error: {error}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    if std::process::id() == 1 {
        let to = std::fs::OpenOptions::new()
            .write(true)
            .open(TERMINATION_MESSAGE_PATH);
        let _ = to.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Writes a line to standard output. If the write fails, as when nobody reads it any more, only the line is lost.
pub(crate) fn print_line(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints data to standard output. A closed reader (`| head`) is not an error: the rest is not wanted.
///
/// # Errors
/// Any other failure of standard output, such as a full disk.
pub(crate) fn print_data(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => outcome.context("standard output cannot be written"),
    }
}

/// Formats an error as a single message.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    hearth_crds::sentence(&error.to_string(), &error.root_cause().to_string())
}
