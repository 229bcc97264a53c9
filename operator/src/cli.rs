//! The command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

use crate::{chat, controller, logs, plan, probe, status, ui, up};

/// Serves large language models on machines that people already own.
#[derive(Parser)]
#[command(name = "hearth", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:\n  \
    hearth up -f manifests/examples/demo.yaml\n  \
    hearth chat --message 'What is Hearth?'";

#[derive(Subcommand)]
enum Command {
    /// Serve an InferenceDeployment on this machine until Ctrl-C
    Up(up::UpArgs),
    /// Show what would run on this machine, why, and what was not chosen
    Plan(plan::PlanArgs),
    /// Show what runs on this machine
    Status(status::StatusArgs),
    /// Talk to a running deployment
    Chat(chat::ChatArgs),
    /// Show the logs of a deployment's processes
    Logs(logs::LogsArgs),
    /// Serve the InferenceDeployments of a Kubernetes cluster: runs in the cluster, installed by the chart
    Operator(Box<controller::OperatorArgs>),
    /// Ask an HTTP address whether it is well
    Probe(probe::ProbeArgs),
    /// Print the CustomResourceDefinitions
    #[command(
        after_help = "Examples:\n  hearth crd > crds.yaml\n  hearth crd | kubectl apply -f -"
    )]
    Crd,
    /// Print a completion script for a shell
    #[command(
        after_help = "Examples:\n  hearth completion bash > /etc/bash_completion.d/hearth\n  source <(hearth completion zsh)"
    )]
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// How a table may be printed instead.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

/// Where state is kept; shared by all commands.
#[derive(clap::Args, Clone)]
pub(crate) struct StateArgs {
    /// Directory for plans, logs and the list of what runs
    #[arg(long, value_name = "DIR", env = "HEARTH_STATE_DIR", global = true)]
    pub(crate) state_dir: Option<PathBuf>,
}

impl Cli {
    /// Runs the chosen command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Up(args) => return up::run(&args),
            Command::Plan(args) => plan::run(&args)?,
            Command::Status(args) => return status::run(&args),
            Command::Chat(args) => chat::run(&args)?,
            Command::Logs(args) => logs::run(&args)?,
            Command::Probe(args) => probe::run(&args)?,
            Command::Operator(args) => return controller::run(&args),
            Command::Crd => ui::print_data(&hearth_crds::crd_yaml()?)?,
            Command::Completion { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Self::command(), "hearth", &mut script);
                ui::print_data(&String::from_utf8(script)?)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
