//! Tools of this program, run as child processes: their memory is returned, and a crash affects only them.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::process::Command;
use tokio::time::timeout;

/// This program, even if its file was replaced in the meantime.
const OURSELVES: &str = "/proc/self/exe";

/// Runs a tool that prints one JSON object. Dropping the future kills the child.
///
/// # Errors
/// The tool's error message, or the reason it could not be run.
pub(super) async fn ask<T: DeserializeOwned>(
    arguments: &[&OsStr],
    patience: Duration,
) -> Result<T, String> {
    let tool = arguments.first().map_or_else(String::new, |tool| {
        format!("hearth-worker {}", tool.to_string_lossy())
    });
    let child = Command::new(OURSELVES)
        .arg0("hearth-worker")
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match timeout(patience, child).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(format!("{tool} cannot be run: {error}")),
        Err(_) => return Err(format!("{tool} did not finish within {patience:?}")),
    };
    let words = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let own = words
            .rsplit_once("error: ")
            .map_or(words.trim(), |(_, message)| message.trim());
        return Err(match own {
            "" => format!("{tool} exited with {} and no message", output.status),
            own => own.to_owned(),
        });
    }
    for line in words.lines() {
        tracing::debug!("{tool}: {line}");
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("{tool}: {error}"))
}
