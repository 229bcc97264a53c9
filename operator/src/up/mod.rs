//! `hearth up`: dereference → validate → plan → build → apply → report, with processes instead of Pods.

mod ask;
mod boxes;
pub(crate) mod fetched;
mod files;
mod hint;
pub(crate) mod interrupts;
mod ports;
mod prepare;
mod process;
mod profiles;
mod source;
pub(crate) mod state;
mod supervise;
pub(crate) mod worker;

pub(crate) use prepare::{plan, plan_for_nodes};

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::UnknownArgumentValueParser;
use clap::{Arg, Args};

use crate::environment::Environment;
use crate::up::state::StateArgs;

const EXAMPLES: &str = "Examples:\n  \
    hearth up -f manifests/examples/demo.yaml\n  \
    hearth up -f manifests/examples/demo.yaml --port 9000 --ask 'What is Hearth?' --once";

/// `--profiles`, which is an argument of `hearth plan` alone.
fn profiles_elsewhere() -> Arg {
    let said = UnknownArgumentValueParser::suggest(
        "'hearth up' runs on this machine; 'hearth plan --profiles FILE' plans for other nodes, and '--node' lets parts of this one stand for some",
    );
    Arg::new("profiles")
        .long("profiles")
        .value_name("FILE")
        .hide(true)
        .value_parser(said)
}

/// Arguments of `hearth up`.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg = profiles_elsewhere())]
pub(crate) struct UpArgs {
    /// The InferenceDeployment; - reads standard input
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Port of the OpenAI endpoint; 0 picks a free one
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// Address of the OpenAI endpoint; :: serves the network by IPv6 and IPv4, 0.0.0.0 by IPv4 (then give --api-keys)
    #[arg(long, default_value = "127.0.0.1", value_parser = ip_address)]
    pub(crate) host: IpAddr,
    /// Address of /metrics, separate from the endpoint; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub(crate) metrics: SocketAddr,
    /// File with one API key per line; clients must send one of them
    #[arg(long, value_name = "FILE")]
    pub(crate) api_keys: Option<PathBuf>,
    /// PEM certificate chain of the OpenAI endpoint, leaf first; enables HTTPS
    #[arg(long, value_name = "FILE", requires = "https_key")]
    pub(crate) https_cert: Option<PathBuf>,
    /// PEM private key of --https-cert
    #[arg(long, value_name = "FILE", requires = "https_cert")]
    pub(crate) https_key: Option<PathBuf>,
    /// Origin whose web pages may use the endpoint, such as http://localhost:3000; may be repeated, * is any
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    pub(crate) cors_origins: Vec<String>,
    /// Directory with tls.crt, tls.key and ca.crt: workers and gateway speak mutual TLS with each other
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_dir: Option<PathBuf>,
    /// Seconds that streams in flight get to finish after Ctrl-C
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub(crate) grace: u32,
    /// Seconds that a client's connection is kept for its next request [default: 120]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep_alive: Option<u32>,
    /// Seconds after which a client that reads nothing of its answer is disconnected [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) client_stall: Option<u32>,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    /// Question to ask once the model is ready; the answer is printed
    #[arg(long, value_name = "QUESTION")]
    pub(crate) ask: Option<String>,
    /// Exit after answering --ask
    #[arg(long, requires = "ask")]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) state: StateArgs,
}

/// What is measured of this machine.
#[derive(Args)]
pub(crate) struct MachineArgs {
    /// Measure this machine even if saved rates exist
    #[arg(long)]
    pub(crate) measure: bool,
    /// A device of that memory, computed by the CPUs, in place of this machine's GPUs, such as virtual:memory=8Gi
    #[arg(long, value_name = "DEVICE", env = "HEARTH_VIRTUAL_DEVICE")]
    pub(crate) virtual_device: Option<String>,
    /// A node that a part of this machine stands for, such as attic:memory=2Gi,cpus=0-1; may be repeated. Plans are made over
    /// these nodes, and all workers run here: to try a ring of several machines on one. With gpus=1 it has the next of the
    /// machine's GPUs, or of the virtual devices in their place
    #[arg(long = "node", value_name = "NODE")]
    pub(crate) nodes: Vec<boxes::BoxArg>,
}

fn ip_address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| "write an IP address, such as 127.0.0.1 or ::".to_owned())
}

/// Serves until Ctrl-C, or with `--once` until the answer.
pub(crate) fn run(args: &UpArgs, environment: &Environment) -> anyhow::Result<ExitCode> {
    let prepared = prepare::prepare(args, environment)?;
    // Single-threaded: children ask the kernel to kill them when the thread that started them ends.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(supervise::supervise(args, prepared, environment))
}
