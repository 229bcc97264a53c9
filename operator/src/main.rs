//! `hearth`: serves InferenceDeployments, on this machine or as the operator of a cluster, and shows what runs and why.
//! Called `kubectl-hearth` it is kubectl's plugin, which shows a cluster.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

mod apply;
mod cluster;
mod commands;
mod controller;
mod environment;
mod exposition;
mod http;
mod services;
mod signals;
mod telemetry;
mod terminal;
mod up;

use commands::{chat, cluster as remote, convert, logs, models, plan, probe, status, trace};
use environment::Environment;
use terminal::ui;
use up::interrupts::{STOPPED, Stopped};

/// Allocator that halves memory use here: the operator holds many small long-lived objects next to large short-lived
/// ones. `.cargo/config.toml` configures it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let environment = Environment::read(|name| std::env::var_os(name));
    let called = std::env::args_os().next().unwrap_or_default();
    let outcome = if is_plugin(&called) {
        let plugin = parsed::<Plugin>(Plugin::command());
        remote::run(&plugin.args, remote::PLUGIN, &environment)
    } else {
        let command = Cli::command().mut_subcommand("cluster", in_own_name);
        parsed::<Cli>(command).run(&environment)
    };
    match outcome {
        Ok(code) => code,
        Err(error) if error.is::<Stopped>() => {
            ui::say(error);
            ExitCode::from(STOPPED)
        }
        Err(error) => {
            ui::print_error(&error);
            up::worker::exit_code(&error)
        }
    }
}

/// Whether the program was found by kubectl, or called as kubectl would.
fn is_plugin(called: &OsStr) -> bool {
    Path::new(called).file_name() == Some(OsStr::new("kubectl-hearth"))
}

/// Parses the arguments of the process; ends it with 2 if they are wrong.
fn parsed<A: FromArgMatches>(mut command: clap::Command) -> A {
    let arguments_alone = without_variables(command.clone());
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let matches = matches.unwrap_or_else(|error| {
        // The usage of an error has every argument that is given, by a variable, too, as if it had to be.
        let alone = arguments_alone.try_get_matches_from(std::env::args_os());
        let same = alone.err().filter(|alone| alone.kind() == error.kind());
        hinted(same.unwrap_or(error), &command).exit()
    });
    A::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
}

/// The same command, which reads no argument from the environment.
fn without_variables(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| argument.env(None::<&str>));
    command.mut_subcommands(without_variables)
}

/// The error with a hint, if the plugin has what this machine's commands do not: `hearth top`, `hearth plan --why`.
fn hinted(mut error: clap::Error, command: &clap::Command) -> clap::Error {
    let Some(cluster) = command.find_subcommand("cluster") else {
        return error;
    };
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(name)) => name.clone(),
        _ => String::new(),
    };
    let (name, option) = match error.kind() {
        ErrorKind::InvalidSubcommand => (named(ContextKind::InvalidSubcommand), None),
        ErrorKind::UnknownArgument => (
            std::env::args_os()
                .nth(1)
                .and_then(|name| name.into_string().ok())
                .unwrap_or_default(),
            Some(named(ContextKind::InvalidArg)),
        ),
        _ => return error,
    };
    let Some(found) = cluster.find_subcommand(&name) else {
        return error;
    };
    let is_option = |option: &str| {
        let mut options = found.get_arguments().filter_map(clap::Arg::get_long);
        options.any(|long| option.strip_prefix("--") == Some(long))
    };
    if option.as_deref().is_some_and(|option| !is_option(option)) {
        return error;
    }
    let needed = found.get_positionals().filter(|it| it.is_required_set());
    let needed = needed.map(|it| it.get_id().as_str().to_uppercase());
    let words: Vec<String> = [name].into_iter().chain(needed).chain(option).collect();
    let (words, plugin, own) = (words.join(" "), remote::PLUGIN, remote::OWN);
    let hint = format!("{own} {words} shows this of a cluster, and so does {plugin} {words}");
    let hint = match words.starts_with("plan ") {
        true => format!("hearth plan -f FILE says why by itself; {hint}"),
        false => hint,
    };
    let hints = ContextValue::StyledStrs(vec![hint.into()]);
    error.insert(ContextKind::Suggested, hints);
    error
}

/// The plugin's commands under the program's own name: their examples are written for the plugin.
fn in_own_name(command: clap::Command) -> clap::Command {
    let examples = command.get_after_help().map(ToString::to_string);
    let command = match examples {
        Some(examples) => command.after_help(examples.replace(remote::PLUGIN, remote::OWN)),
        None => command,
    };
    command.mut_subcommands(in_own_name)
}

/// Shows the InferenceDeployments of a Kubernetes cluster: what runs where, why, and how fast.
#[derive(Parser)]
#[command(
    name = "kubectl-hearth", bin_name = "kubectl hearth", version, arg_required_else_help = true,
    after_help = remote::EXAMPLES
)]
struct Plugin {
    #[command(flatten)]
    args: remote::ClusterArgs,
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
    /// Fetch, list and remove the models in this user's cache
    Models(models::ModelsArgs),
    /// Show the deployments of a Kubernetes cluster: the same as kubectl hearth
    #[command(arg_required_else_help = true, after_help = remote::EXAMPLES)]
    Cluster(Box<remote::ClusterArgs>),
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
            Command::Models(args) => return models::run(&args, environment),
            Command::Cluster(args) => return remote::run(&args, remote::OWN, environment),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `check` with each command that has none below it, and its path.
    fn each(command: &clap::Command, path: &str, check: &mut impl FnMut(&str, &clap::Command)) {
        if !command.has_subcommands() {
            check(path, command);
        }
        for below in command.get_subcommands() {
            each(below, &format!("{path} {}", below.get_name()), check);
        }
    }

    #[test]
    fn the_plugin_is_known_by_its_name() {
        for (called, is) in [
            ("kubectl-hearth", true),
            ("/usr/local/bin/kubectl-hearth", true),
            ("hearth", false),
            ("/opt/kubectl-hearth/hearth", false),
            ("", false),
        ] {
            assert_eq!(is_plugin(OsStr::new(called)), is, "{called}");
        }
    }

    #[test]
    fn the_arguments_are_consistent() {
        Plugin::command().debug_assert();
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_of_the_cluster_has_two_examples_in_the_words_of_its_caller() {
        let own = Cli::command().mut_subcommand("cluster", in_own_name);
        let own = own.find_subcommand("cluster").unwrap().clone();
        for (command, name, other) in [
            (Plugin::command(), remote::PLUGIN, remote::OWN),
            (own, remote::OWN, remote::PLUGIN),
        ] {
            each(&command, "", &mut |path, command| {
                let help = command.get_after_help().map(ToString::to_string);
                let help = help.unwrap_or_default();
                assert_eq!(help.matches(&format!("{name}{path}")).count(), 2, "{help}");
                assert!(!help.contains(other), "{help}");
            });
        }
    }

    #[test]
    fn the_cluster_is_named_before_or_after_the_command() {
        for line in [
            "kubectl-hearth -n team --context home status",
            "kubectl-hearth status -n team --context home",
        ] {
            let parsed = Plugin::try_parse_from(line.split(' '));
            assert!(parsed.is_ok(), "{line}");
        }
        let wrong = Plugin::try_parse_from("kubectl-hearth status demo -A".split(' '));
        assert_eq!(wrong.err().map(|error| error.exit_code()), Some(2));
    }
}
