//! `hearth`: serves InferenceDeployments, on this machine or as the operator of a cluster, and shows what runs and why.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

mod apply;
mod cluster;
mod commands;
mod controller;
mod environment;
mod http;
mod services;
mod signals;
mod telemetry;
mod terminal;
mod up;

use commands::{chat, convert, logs, plan, probe, status, trace};
use environment::Environment;
use terminal::ui;

/// Allocator that halves memory use here: the operator holds many small long-lived objects next to large short-lived
/// ones. `.cargo/config.toml` configures it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let environment = Environment::read(|name| std::env::var_os(name));
    match Cli::parse().run(&environment) {
        Ok(code) => code,
        Err(error) => {
            ui::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Serves large language models on machines that people already own.
#[derive(Parser)]
#[command(name = "hearth", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
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
    /// Record what the devices of a deployment's workers do, for chrome://tracing
    Trace(trace::TraceArgs),
    /// Serve the InferenceDeployments of a Kubernetes cluster: runs in the cluster, installed by the chart
    Operator(Box<controller::OperatorArgs>),
    /// Check that an HTTP endpoint is healthy
    Probe(probe::ProbeArgs),
    /// Convert InferenceDeployments, in a cluster or a file, to this version's field names; run before helm upgrade
    Convert(convert::ConvertArgs),
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

impl Cli {
    /// Runs the chosen command.
    fn run(self, environment: &Environment) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Up(args) => return up::run(&args, environment),
            Command::Plan(args) => plan::run(&args, environment)?,
            Command::Status(args) => return status::run(&args, environment),
            Command::Chat(args) => chat::run(&args, environment)?,
            Command::Logs(args) => logs::run(&args, environment)?,
            Command::Trace(args) => trace::run(&args, environment)?,
            Command::Probe(args) => probe::run(&args)?,
            Command::Operator(args) => return controller::run(&args, environment),
            Command::Convert(args) => convert::run(&args)?,
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
