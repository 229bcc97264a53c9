//! `hearth-worker trace`: has running workers record what their lanes do, without a restart.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{InferencePlanSpec, PLACE_DIRECTORY, PlanRank, PlanRole, tls_name};
use hearth_transport::{ClientOptions, Clients, Endpoint, v1};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};

use super::process::{TlsArgs, read_plan};
use crate::logging::say;
use crate::trace_file::TraceWriter;

const EXAMPLES: &str = "Examples:\n  \
    hearth trace --seconds 5 --out trace.json\n  \
    kubectl exec POD -- hearth-worker trace --seconds 5 > trace.json";

/// Arguments of `trace`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TraceArgs {
    /// The plan that the workers carry out, as JSON (default: that of this Pod)
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// A worker of the plan, such as decode-0; repeat it for several (default: all)
    #[arg(long = "rank", value_name = "NAME")]
    ranks: Vec<String>,
    /// How long to record; Ctrl-C ends it before and writes what there is
    #[arg(long, default_value = "10", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Where to write the trace, for chrome://tracing or ui.perfetto.dev (default: standard output)
    #[arg(long, value_name = "FILE.json")]
    out: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
}

/// Records and writes one trace of all the workers.
pub(crate) fn run(args: &TraceArgs) -> anyhow::Result<()> {
    if args.out.is_none() && std::io::stdout().is_terminal() {
        bail!("a trace is for a file\n  name one: --out trace.json");
    }
    let in_pod = Path::new(PLACE_DIRECTORY).join("plan.json");
    let (plan, tls) = match &args.plan {
        Some(file) => (read_plan(file)?, args.tls.read()?),
        None if in_pod.is_file() => {
            let plan = read_plan(&in_pod)?;
            let of = &plan.deployment;
            let tls = args.tls.or_in_pod(&tls_name(&of.name, &of.namespace));
            let tls = tls.read()?;
            (plan, tls)
        }
        None => bail!(
            "this is no Pod of a worker: there is no {}\n  name the plan, --plan FILE, or use hearth trace on the machine of a hearth up",
            in_pod.display()
        ),
    };
    let ranks = chosen(&plan, &args.ranks)?;
    let options = ClientOptions {
        tls,
        ..ClientOptions::default()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(record(args, &ranks, options))
}

/// The workers of the plan with these names, or all.
fn chosen<'p>(plan: &'p InferencePlanSpec, names: &[String]) -> anyhow::Result<Vec<&'p PlanRank>> {
    let workers = || {
        let ranks = plan.ranks.iter();
        ranks.filter(|rank| rank.role != PlanRole::Gateway)
    };
    if workers().next().is_none() {
        bail!(
            "the plan has no worker, which is how a gateway's Pod has it: there is nothing to record\n  use a Pod of a worker: kubectl get pods -l hearth.dev/role=decode"
        );
    }
    if names.is_empty() {
        return Ok(workers().collect());
    }
    let known = |name: &String| {
        workers().find(|rank| rank.name == *name).with_context(|| {
            let all: Vec<&str> = workers().map(|rank| rank.name.as_str()).collect();
            format!(
                "--rank is {name:?}, which is not a worker of the plan\n  it has {}",
                all.join(", ")
            )
        })
    };
    names.iter().map(known).collect()
}

async fn record(
    args: &TraceArgs,
    ranks: &[&PlanRank],
    options: ClientOptions,
) -> anyhow::Result<()> {
    let clients = Clients::new(options);
    let end = CancellationToken::new();
    let mut recordings = Vec::new();
    for rank in ranks {
        recordings.push(begin(&clients, rank, args.seconds, &end).await?);
    }
    // Not before: a refusal leaves what is there as it is. Not after: whether it can be written is known before the wait.
    let cannot = || match &args.out {
        Some(path) => format!("--out {} cannot be written", path.display()),
        None => "standard output cannot be written".to_owned(),
    };
    let file = args.out.as_ref().map(File::create);
    let file = file.transpose().with_context(cannot)?;
    let mut interrupts = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    tokio::spawn(async move {
        interrupts.recv().await;
        end.cancel();
    });
    let names: Vec<&str> = ranks.iter().map(|rank| rank.name.as_str()).collect();
    say(format_args!(
        "recording {} for {} s; Ctrl-C ends it and writes the trace",
        names.join(", "),
        args.seconds
    ));
    let to: Box<dyn Write> = match file {
        Some(file) => Box::new(file),
        None => Box::new(std::io::stdout().lock()),
    };
    let mut trace = TraceWriter::new(to).with_context(cannot)?;
    let mut dropped = 0;
    let mut cut_short = Vec::new();
    for (rank, mut recording) in ranks.iter().zip(recordings) {
        loop {
            let part = match recording.message().await {
                Ok(Some(part)) => part,
                Ok(None) => break,
                // What the others recorded is written all the same.
                Err(status) => {
                    cut_short.push(format!("{}: {}", rank.name, status.message()));
                    break;
                }
            };
            dropped += part.dropped;
            if !part.events_json.is_empty() {
                trace.events(&part.events_json).with_context(cannot)?;
            }
        }
    }
    trace.end(dropped).with_context(cannot)?;
    if let Some(path) = &args.out {
        say(format_args!("{} written", path.display()));
    }
    if dropped > 0 {
        say(format_args!(
            "more happened than a worker keeps: the first {dropped} events are not in it; record fewer seconds"
        ));
    }
    if !cut_short.is_empty() {
        bail!(
            "the trace is written, but not all of it: workers ended before theirs was complete; {}\n  their logs tell why; record again",
            cut_short.join("; ")
        );
    }
    Ok(())
}

/// Has a worker begin to record, until `seconds` are over or `end` is.
async fn begin(
    clients: &Clients,
    rank: &PlanRank,
    seconds: u32,
    end: &CancellationToken,
) -> anyhow::Result<Streaming<v1::TraceResponse>> {
    let address = rank
        .endpoint
        .as_deref()
        .with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
    let worker = clients.worker(&reached(address)?)?;
    let end = end.clone();
    let request = async_stream::stream! {
        yield v1::TraceRequest { seconds };
        end.cancelled().await;
    };
    let answer = worker.control().trace(request).await;
    let answer = answer.map_err(|status| match status.code() {
        Code::Unimplemented => anyhow::anyhow!(
            "{} is of a version that records nothing\n  start the deployment with this version",
            rank.name
        ),
        Code::AlreadyExists => anyhow::anyhow!("{}: {}", rank.name, status.message()),
        _ => anyhow::anyhow!("{}: {}", rank.name, worker.error(&status)),
    })?;
    Ok(answer.into_inner())
}

/// Where this machine reaches a worker that listens at an address.
fn reached(address: &str) -> anyhow::Result<Endpoint> {
    let endpoint: Endpoint = address.parse()?;
    Ok(match endpoint.host().parse::<std::net::IpAddr>() {
        Ok(ip) if ip.is_unspecified() => format!("localhost:{}", endpoint.port()).parse()?,
        _ => endpoint,
    })
}
