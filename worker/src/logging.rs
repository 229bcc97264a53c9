//! Logs go to standard error, data to standard output.

use std::io::{IsTerminal, Write};

use tracing_subscriber::EnvFilter;

/// Starts logging; `RUST_LOG` chooses what, `info` of Hearth's own crates by default.
pub(crate) fn init() {
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,hearth=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It would tell of a line that cannot be written by `eprintln!`, which panics where that cannot be written either.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .init();
}

/// Writes a line to standard error. Where the disk behind it is full the line is lost, and nothing else.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// An error as one message.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    hearth_crds::sentence(&error.to_string(), &error.root_cause().to_string())
}
