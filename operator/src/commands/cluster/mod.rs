//! `kubectl hearth`, which is `hearth cluster` too: the deployments of a Kubernetes cluster, with the rights of whoever asks.
//!
//! Everything is read from the API server, and gateways are reached through it: nothing has to be exposed, and the operator is
//! asked nothing.

mod access;
mod chat;
mod forward;
mod held;
mod load;
mod logs;
mod models;
mod nodes;
mod plan;
mod status;
mod top;
mod usage;

use std::process::ExitCode;

use clap::{Args, Subcommand};

use access::{Access, AccessArgs};

use crate::environment::Environment;

/// The program as kubectl's plugin, as the examples of the commands have it.
pub(crate) const PLUGIN: &str = "kubectl hearth";
/// The same commands of the program under its own name.
pub(crate) const OWN: &str = "hearth cluster";

/// Examples of the program as a whole.
pub(crate) const EXAMPLES: &str =
    "Examples:\n  kubectl hearth status\n  kubectl hearth plan demo --why";

/// Arguments of `kubectl hearth`.
#[derive(Args)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
    #[command(flatten)]
    access: AccessArgs,
}

#[derive(Subcommand)]
enum ClusterCommand {
    /// Show the deployments, or one of them with its conditions, workers and recent events
    Status(status::StatusArgs),
    /// Show a deployment's plan in force: its ranks, and predicted against measured latencies
    Plan(plan::PlanArgs),
    /// Show what each node has, who holds what of it, what is free, and the models that it stores
    Nodes(nodes::NodesArgs),
    /// Show the deployments' models: what nodes have of them and when it was used, their size, and how far a fetch is
    Models(models::ModelsArgs),
    /// Show the logs of a deployment's workers and gateways
    Logs(logs::LogsArgs),
    /// Talk to a deployment
    Chat(chat::ChatArgs),
    /// Start the workers of a deployment that has none for want of requests, before the next one
    #[command(after_help = load::EXAMPLES_OF_LOAD)]
    Load(load::LoadArgs),
    /// End the workers of a deployment that may be without them, until the next request
    #[command(after_help = load::EXAMPLES_OF_UNLOAD)]
    Unload(load::LoadArgs),
    /// Show requests, tokens per second, latencies and KV use by deployment, until Ctrl-C
    Top(top::TopArgs),
}

/// Runs the chosen command; `program` is [`PLUGIN`] or [`OWN`].
pub(crate) fn run(
    args: &ClusterArgs,
    program: &'static str,
    environment: &Environment,
) -> anyhow::Result<ExitCode> {
    // A conversation waits for its input while a forwarded port is served.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let access = Access::open(&args.access, program).await?;
        match &args.command {
            ClusterCommand::Status(args) => return status::run(args, &access).await,
            ClusterCommand::Models(args) => return models::run(args, &access).await,
            ClusterCommand::Top(args) => return top::run(args, &access, environment).await,
            ClusterCommand::Plan(args) => plan::run(args, &access).await?,
            ClusterCommand::Nodes(args) => nodes::run(args, &access).await?,
            ClusterCommand::Logs(args) => logs::run(args, &access).await?,
            ClusterCommand::Chat(args) => chat::run(args, &access).await?,
            ClusterCommand::Load(args) => load::run(load::Call::Load, args, &access).await?,
            ClusterCommand::Unload(args) => load::run(load::Call::Unload, args, &access).await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}
