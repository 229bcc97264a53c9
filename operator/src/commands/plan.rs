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

const EXAMPLES: &str = "Examples:\n  hearth plan -f manifests/examples/demo.yaml\n  hearth plan -f demo.yaml -o json\n  \
     kubectl get nodeprofiles -o yaml | hearth plan -f demo.yaml --profiles -";

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
    /// Plan for the nodes of this file instead of this machine, as if nothing else ran there and all GPUs were offered:
    /// NodeProfiles as kubectl prints them, or what hearth-worker profile --json prints; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["measure", "virtual_device", "nodes"])]
    profiles: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    state: StateArgs,
}

/// Plans and prints the result.
pub(crate) fn run(args: &PlanArgs, environment: &Environment) -> anyhow::Result<()> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let steps = Steps::new(environment);
    let planned = match &args.profiles {
        Some(profiles) => up::plan_for_nodes(&args.file, profiles, environment, &steps)?,
        None => up::plan(&args.file, &state, &args.machine, environment, &steps)?,
    };
    match args.output {
        OutputFormat::Table => ui::print_data(&table::plan(&planned.plan)),
        OutputFormat::Json => ui::print_data(&format!(
            "{}\n",
            serde_json::to_string_pretty(&planned.plan)?
        )),
        OutputFormat::Yaml => ui::print_data(&serde_norway::to_string(&planned.plan)?),
    }
}
