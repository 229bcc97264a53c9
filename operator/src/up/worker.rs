//! Runs `hearth-worker` tools for tasks that need a model or a machine: the operator never sees a tensor.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;

use crate::environment::Environment;
use crate::up::interrupts::{Interrupts, Stopped};

/// Finds the worker's program: `HEARTH_WORKER`, otherwise next to this program, otherwise on the PATH.
///
/// # Errors
/// `HEARTH_WORKER` is not a file, or none of the three exists.
pub(crate) fn program(environment: &Environment) -> anyhow::Result<PathBuf> {
    const NAME: &str = "hearth-worker";
    if let Some(path) = &environment.worker {
        if path.is_file() {
            return Ok(path.clone());
        }
        bail!(
            "HEARTH_WORKER is {}, which is not a file\n  name the hearth-worker program, or unset it",
            path.display()
        );
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(|directory| directory.join(NAME)));
    if let Some(path) = beside.filter(|path| path.is_file()) {
        return Ok(path);
    }
    environment.program(NAME).context(
        "hearth-worker is neither beside hearth nor on the PATH\n  install both programs in one directory, or set HEARTH_WORKER",
    )
}

/// Prefix of a line in which a tool reports its progress.
const PROGRESS: &str = "measuring ";

/// Runs a tool of the worker that prints one JSON object. `hear` is called with its progress.
///
/// # Errors
/// The tool's own message if it fails; [`Stopped`].
pub(crate) fn ask<T: DeserializeOwned>(
    environment: &Environment,
    interrupts: &Interrupts,
    arguments: &[&OsStr],
    mut hear: impl FnMut(&str),
) -> anyhow::Result<T> {
    let program = program(environment)?;
    let mut command = Command::new(&program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = interrupts.spawn(&mut command).with_context(|| {
        format!(
            "{} cannot be run\n  HEARTH_WORKER, or the directory of hearth, must hold the hearth-worker program",
            program.display()
        )
    })?;
    // Read by another thread: a full pipe would block the child.
    let stdout = child.stdout.take();
    let answer = std::thread::spawn(move || {
        let mut answer = Vec::new();
        stdout.map(|mut stdout| stdout.read_to_end(&mut answer));
        answer
    });
    let mut words = String::new();
    let stderr = child.stderr.take().map(BufReader::new);
    let lines = stderr.into_iter().flat_map(|stderr| stderr.split(b'\n'));
    for line in lines.map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        match line.strip_prefix(PROGRESS) {
            Some(what) => hear(what),
            None => words.extend([&line, "\n"]),
        }
    }
    let status = interrupts.wait(&mut child)?;
    let answer = answer.join().unwrap_or_default();
    let tool = arguments.first().map(|tool| tool.to_string_lossy());
    let tool = tool.as_deref().unwrap_or_default();
    let Some(status) = status else {
        return Err(Stopped(format!("hearth-worker {tool} was stopped")).into());
    };
    if !status.success() {
        return Err(failure(&program, tool, status, words.as_bytes()));
    }
    serde_json::from_slice(&answer).with_context(|| misunderstood(tool))
}

/// Exit code of a program that was called in a wrong way.
const WRONG_CALL: u8 = 2;

/// An argument that a tool refuses, such as a virtual device that was written for it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct WrongCall(String);

/// Exit code for an error of this program: 2 if it was called in a wrong way that only a tool could see, else 1.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.is::<WrongCall>() {
        true => ExitCode::from(WRONG_CALL),
        false => ExitCode::FAILURE,
    }
}

/// Error from what a failed tool wrote to standard error.
pub(crate) fn failure(
    program: &Path,
    tool: &str,
    status: ExitStatus,
    stderr: &[u8],
) -> anyhow::Error {
    let words = String::from_utf8_lossy(stderr);
    let own = words
        .rsplit_once("error: ")
        .map_or(words.trim(), |(_, message)| message.trim());
    if own.is_empty() {
        return anyhow::anyhow!(
            "{} {tool} said nothing and ended with {status}\n  run it by hand to see why; it must be the hearth-worker of this version",
            program.display(),
        );
    }
    match status.code() {
        Some(code) if code == i32::from(WRONG_CALL) => WrongCall(own.to_owned()).into(),
        _ => anyhow::anyhow!("{own}"),
    }
}

/// Error message for an answer from another version.
pub(crate) fn misunderstood(tool: &str) -> String {
    format!(
        "hearth-worker {tool} answered what hearth does not understand; both must be of one version"
    )
}
