//! `hearth plan`: the plan that would run, its reasons, and the alternatives not chosen. It starts nothing.

use std::path::PathBuf;

use clap::Args;

use crate::environment::Environment;
use crate::terminal::table::OutputFormat;
use crate::terminal::ui::Steps;
use crate::terminal::{table, ui};
use crate::up::state::StateArgs;
use crate::up::state::StateDir;
use crate::up::{self, MachineArgs};

const EXAMPLES: &str =
    "Examples:\n  hearth plan -f manifests/examples/demo.yaml\n  hearth plan -f demo.yaml -o json";

/// Arguments of `hearth plan`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// The InferenceDeployment; - reads standard input
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    state: StateArgs,
}

/// Plans and prints the result.
pub(crate) fn run(args: &PlanArgs, environment: &Environment) -> anyhow::Result<()> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let planned = up::plan(
        &args.file,
        &state,
        &args.machine,
        environment,
        &Steps::new(environment),
    )?;
    match args.output {
        OutputFormat::Table => ui::print_data(&table::plan(&planned.plan)),
        OutputFormat::Json => ui::print_data(&format!(
            "{}\n",
            serde_json::to_string_pretty(&planned.plan)?
        )),
        OutputFormat::Yaml => ui::print_data(&serde_norway::to_string(&planned.plan)?),
    }
}
