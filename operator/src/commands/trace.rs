//! `hearth trace`: what the lanes of a running deployment's workers do, without a restart.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use clap::Args;

use crate::environment::Environment;
use crate::up::state::{StateArgs, StateDir};
use crate::up::worker;

const EXAMPLES: &str = "Examples:\n  \
    hearth trace --out trace.json\n  \
    hearth trace demo decode-0 --seconds 5 --out trace.json\n\n\
In a cluster:\n  \
    kubectl exec POD -- hearth-worker trace --seconds 5 > trace.json";

/// Arguments of `hearth trace`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TraceArgs {
    /// Which deployment, where several run
    name: Option<String>,
    /// Which worker, such as decode-0 (default: all)
    rank: Option<String>,
    /// How long to record; Ctrl-C ends it before and writes what there is
    #[arg(long, default_value = "10", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Where to write the trace, for chrome://tracing or ui.perfetto.dev (default: standard output)
    #[arg(long, value_name = "FILE.json")]
    out: Option<PathBuf>,
    #[command(flatten)]
    state: StateArgs,
}

/// Becomes the worker's own command, which asks the workers over their transport.
pub(crate) fn run(args: &TraceArgs, environment: &Environment) -> anyhow::Result<()> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let running = state.choose(args.name.as_deref())?;
    let program = worker::program(environment)?;
    let mut command = Command::new(&program);
    let plan = state.deployment(&running.name).plan_file();
    command.args(["trace", "--seconds", &args.seconds.to_string()]);
    command.arg("--plan").arg(plan);
    if let Some(rank) = &args.rank {
        command.args(["--rank", rank]);
    }
    for (flag, path) in [("--tls-dir", &running.tls_dir), ("--out", &args.out)] {
        if let Some(path) = path {
            command.arg(flag).arg(path);
        }
    }
    Err(command.exec()).with_context(|| {
        format!(
            "{} cannot be run\n  HEARTH_WORKER, or the directory of hearth, must hold the hearth-worker program",
            program.display()
        )
    })
}
