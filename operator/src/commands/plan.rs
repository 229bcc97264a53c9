//! `hearth plan`: the plan that would run, its reasons, and the alternatives not chosen. It starts nothing.

use std::path::PathBuf;

use clap::Args;

use crate::environment::Environment;
use crate::terminal::table::{self, OutputFormat};
use crate::terminal::ui::Steps;
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
    /// NodeProfiles as kubectl prints them, or what hearth-worker profile --json prints; - reads standard input. Of several
    /// files, one after each --profiles
    #[arg(long, value_name = "FILE", conflicts_with_all = ["measure", "virtual_device", "nodes"])]
    profiles: Vec<PathBuf>,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    state: StateArgs,
}

/// Plans and prints the result.
pub(crate) fn run(args: &PlanArgs, environment: &Environment) -> anyhow::Result<()> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let steps = Steps::new(environment);
    let planned = match &*args.profiles {
        [] => up::plan(&args.file, &state, &args.machine, environment, &steps)?,
        profiles => up::plan_for_nodes(&args.file, profiles, environment, &steps)?,
    };
    let plan = &planned.plan;
    args.output.print(plan, || table::plan(plan))
}
