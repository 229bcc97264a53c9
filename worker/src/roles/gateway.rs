//! The gateway: the OpenAI endpoint in front of the plan's workers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use hearth_crds::{InferencePlanSpec, PlanRole, PlanRouting, WorkerReport};
use hearth_formats::Checkpoint;
use hearth_server::{CorsOrigin, Gateway, GatewayConfig, HttpsFiles, Limits, Predicted, Routing};
use hearth_transport::Endpoint;
use tokio::net::TcpListener;

use super::process::ProcessArgs;
use super::report::{send_report, stay_alive};
use super::routes;
use crate::environment::Environment;
use crate::otlp::OtlpTraces;
use crate::signals;

/// Time for which a gateway of a cluster still answers new clients once it is told to stop: its address was withdrawn before, and a
/// busy node may learn of that later than `preStop` waits.
const LATE: Duration = Duration::from_secs(15);

/// Arguments of `gateway`.
#[derive(Args)]
pub(crate) struct GatewayArgs {
    #[command(flatten)]
    process: ProcessArgs,
    /// File with the workers as JSON, read again when it changes; it may be empty (default: the plan's ranks)
    #[arg(long, value_name = "FILE")]
    routes: Option<PathBuf>,
    /// Address of /metrics, on a port of its own (default: no metrics)
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
    /// File with one API key per line, or a directory of such files (default: no key is required)
    #[arg(long, value_name = "PATH")]
    api_keys: Option<PathBuf>,
    /// PEM certificate of the HTTPS endpoint (default: plain HTTP)
    #[arg(long, value_name = "FILE", requires = "https_key")]
    https_cert: Option<PathBuf>,
    /// PEM private key for --https-cert
    #[arg(long, value_name = "FILE", requires = "https_cert")]
    https_key: Option<PathBuf>,
    /// Origin whose web pages may use the endpoint, such as http://localhost:3000; may be repeated; * allows any
    #[arg(long = "cors-origin", value_name = "ORIGIN")]
    cors_origins: Vec<CorsOrigin>,
    /// Seconds that an idle connection is kept open: longer than proxies in front keep theirs
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
    keep_alive: u32,
    /// Seconds after which a client that reads no byte of its answer is cut off
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    client_stall: u32,
}

/// Serves until told to stop.
pub(crate) fn run(args: &GatewayArgs, environment: &Environment) -> anyhow::Result<()> {
    let (plan, rank) = args.process.find(PlanRole::Gateway)?;
    let _binding = args.process.bind(&rank)?;
    // Dropped after the runtime: requests that it ends are the last of their traces.
    let traces = OtlpTraces::start(environment, &plan, &rank)?;
    let endpoint = rank
        .endpoint
        .as_deref()
        .with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
    let mut config = config(args, &plan)?;
    config.tracer = traces.tracer();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(rank.threads.max(1) as usize)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = listen(endpoint)?;
        let gateway = Gateway::start(config)?;
        let metrics = match &args.metrics {
            Some(address) => Some(gateway.serve_metrics(listen(address)?)),
            None => None,
        };
        let metrics = async {
            match metrics {
                Some(metrics) => metrics.await,
                None => std::future::pending().await,
            }
        };
        send_report(&WorkerReport::Ready {
            endpoint: endpoint.to_owned(),
            device: "gateway".to_owned(),
        });
        tracing::info!(rank = rank.name, endpoint, "serving");
        let open = gateway.open_choices();
        let shutdown = async {
            signals::termination().await;
            let choices = Some(open());
            send_report(&WorkerReport::Draining { choices });
        };
        let pool = gateway.pool().clone();
        let follow_routes = async {
            match &args.routes {
                Some(path) => routes::follow(path.clone(), pool).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            served = gateway.serve(listener, shutdown) => {
                let answers = served?;
                if answers > 0 {
                    send_report(&WorkerReport::CutOff { answers });
                }
                Ok(())
            }
            never = stay_alive() => match never {},
            never = follow_routes => match never {},
            () = metrics => Ok(()),
        }
    })
}

fn listen(address: &str) -> anyhow::Result<TcpListener> {
    let listener = hearth_transport::listen(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    listener.with_context(|| {
        format!("{address} cannot be listened on\n  another process holds the port: choose another, or end that process")
    })
}

fn config(args: &GatewayArgs, plan: &InferencePlanSpec) -> anyhow::Result<GatewayConfig> {
    let (decode, prefill) = match args.routes {
        Some(_) => (Vec::new(), Vec::new()),
        None => (
            endpoints(plan, PlanRole::Decode)?,
            endpoints(plan, PlanRole::Prefill)?,
        ),
    };
    let mut config = GatewayConfig::new(&plan.model.served_name, &plan.model.path, decode);
    config.prefill = prefill;
    config.has_changing_members = args.routes.is_some();
    config.context_length = Some(plan.model.context_length);
    config.worker_tls = args.process.tls.read()?;
    config.api_keys.clone_from(&args.api_keys);
    config.https = match (&args.https_cert, &args.https_key) {
        (Some(cert), Some(key)) => Some(HttpsFiles {
            cert: cert.clone(),
            key: key.clone(),
        }),
        _ => None,
    };
    config.cors_origins.clone_from(&args.cors_origins);
    config.routing = Routing {
        chunked_below_tokens: plan.routing.chunked_below_tokens,
        together_after_quiet: plan
            .routing
            .together_after_quiet_ms
            .map(Duration::from_millis),
        max_queue: plan.routing.max_queue as usize,
        queued_per_slot: PlanRouting::QUEUED_PER_SLOT as usize,
        model_fingerprint: Some(Checkpoint::open(Path::new(&plan.model.path))?.fingerprint()),
        queue_timeout: Duration::from_millis(plan.routing.queue_timeout_ms),
        hold_timeout: plan.routing.hold_timeout_ms.map(Duration::from_millis),
        ..Routing::default()
    };
    config.limits = Limits {
        drain_grace: Duration::from_secs(u64::from(args.process.grace)),
        keep_alive: Duration::from_secs(u64::from(args.keep_alive)),
        client_stall: Duration::from_secs(u64::from(args.client_stall)),
        drain_late: args.routes.as_ref().map_or(Duration::ZERO, |_| LATE),
        ..Limits::default()
    };
    config.predicted = Predicted {
        ttft_seconds: Some(plan.predicted.ttft_ms / 1e3),
        tpot_seconds: Some(plan.predicted.tpot_ms / 1e3),
    };
    Ok(config)
}

fn endpoints(plan: &InferencePlanSpec, role: PlanRole) -> anyhow::Result<Vec<Endpoint>> {
    plan.ranks_of(role)
        .map(|rank| {
            let text = rank
                .endpoint
                .as_deref()
                .with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
            Ok(text.parse::<Endpoint>()?)
        })
        .collect()
}
