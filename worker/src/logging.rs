//! Logs go to standard error, data to standard output.

use std::io::{IsTerminal, Write};

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::environment::Environment;

/// Starts logging; `RUST_LOG` chooses what, `info` of Hearth's own crates by default.
pub(crate) fn init(environment: &Environment) {
    let asked = environment.log_filter.as_deref();
    let filter = asked
        .and_then(|text| EnvFilter::try_new(text).ok())
        .unwrap_or_else(|| EnvFilter::new("warn,hearth=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It would tell of a line that cannot be written by `eprintln!`, which panics where that cannot be written either.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && environment.has_colour)
        .init();
}

/// Writes a line to standard error. Where the disk behind it is full the line is lost, and nothing else.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints data to standard output. A reader that has gone (`| head`) is no error: nobody wants the rest.
///
/// # Errors
/// Another fault of standard output, such as a full disk.
pub(crate) fn print_data(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => outcome.context("standard output cannot be written"),
    }
}

/// An error as one message.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    hearth_crds::sentence(&error.to_string(), &error.root_cause().to_string())
}
