//! `hearth logs`: output of a deployment's processes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;

use crate::environment::Environment;
use crate::terminal::ui;
use crate::up::state::StateArgs;
use crate::up::state::StateDir;

const EXAMPLES: &str = "Examples:\n  hearth logs\n  hearth logs demo decode-0 --follow";

/// Arguments of `hearth logs`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LogsArgs {
    /// Which deployment (default: the one that runs, or ran last)
    name: Option<String>,
    /// Which process, such as decode-0 (default: all)
    rank: Option<String>,
    /// Keep printing as more is written, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Lines from the end of each log
    #[arg(short = 'n', long, default_value_t = 100)]
    lines: usize,
    #[command(flatten)]
    state: StateArgs,
}

/// Prints the logs.
pub(crate) fn run(args: &LogsArgs, environment: &Environment) -> anyhow::Result<()> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => latest(&state)?,
    };
    let directory = state.deployment(&name).logs();
    let Ok(entries) = std::fs::read_dir(&directory) else {
        return Err(never_ran(&name, &state.known()?));
    };
    let mut logs: Vec<(String, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let rank = entry.file_name().to_str()?.strip_suffix(".log")?.to_owned();
            Some((rank, entry.path()))
        })
        .collect();
    logs.sort();
    if let Some(rank) = &args.rank {
        let names: Vec<String> = logs.iter().map(|(name, _)| name.clone()).collect();
        logs.retain(|(name, _)| name == rank);
        if logs.is_empty() {
            bail!("{name} has no process {rank}; it has {}", names.join(", "));
        }
    }
    let mut open = Vec::new();
    for (rank, path) in logs {
        let mut file = File::open(&path).with_context(|| format!("{}", path.display()))?;
        print_tail(&rank, &mut file, args.lines)?;
        open.push((rank, file));
    }
    if !args.follow {
        return Ok(());
    }
    loop {
        std::thread::sleep(Duration::from_millis(200));
        for (rank, file) in &mut open {
            print_tail(rank, file, usize::MAX)?;
        }
    }
}

/// Returns the deployment that runs, or if none does, the one that ran last.
fn latest(state: &StateDir) -> anyhow::Result<String> {
    if state.running()?.is_empty()
        && let Some(name) = state.latest()?
    {
        ui::say(format_args!("{name} no longer runs; it ran last"));
        return Ok(name);
    }
    Ok(state.choose(None)?.name)
}

fn never_ran(name: &str, known: &[String]) -> anyhow::Error {
    match known {
        [] => anyhow!(
            "{name} has never run here, nor has any other deployment\n  start one: hearth up -f manifests/examples/demo.yaml"
        ),
        known => anyhow!(
            "{name} has never run here\n  there are logs of {}",
            known.join(", ")
        ),
    }
}

/// Prints the last lines of the unread part of a file, each prefixed with its process.
fn print_tail(rank: &str, file: &mut File, lines: usize) -> anyhow::Result<()> {
    let position = file.stream_position()?;
    if file.metadata()?.len() < position {
        file.seek(SeekFrom::Start(0))?;
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    let shown = &all[all.len().saturating_sub(lines)..];
    let shown: String = shown.iter().map(|line| prefixed(rank, line)).collect();
    ui::print_data(&shown)
}

/// A line of the process `rank`.
pub(crate) fn prefixed(rank: &str, line: &str) -> String {
    format!("{rank:<10} {line}\n")
}
