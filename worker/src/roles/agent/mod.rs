//! The agent of a node: it measures the node and its links to others, and stores the models fetched for it, from a server or from
//! the agent of another node. It has no rights in the
//! cluster, and a token that proves to the operator which Pod it is; the operator calls it.
//!
//! Work that needs much memory (measuring, reading a model) is done by child processes, which return all of it.

mod held;
mod identity;
mod limits;
mod link;
mod metrics;
mod models;
mod node;
mod port;
mod request;
mod seed;
mod spare;
mod tool;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hearth_crds::WorkerReport;
use hearth_fetch::{Cache, Egress};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{Health, Listener, ServerOptions, Tls, TlsFiles, TlsNames, server, v1};
use ipnet::IpNet;
use tonic::{Request, Response, Status};

use super::report::send_report;
use super::stand_ins::StandInArgs;
use crate::environment::Environment;
use crate::signals;
use crate::tools::StoreArgs;
use held::Held;
use identity::Identity;
use limits::Limits;
use link::Links;
use models::Models;
use node::Node;
use port::WaitingPort;
use seed::{Place, Seeds};

/// Time to wait for open connections at the end; calls are answered at once, so a lingering connection is idle.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Arguments of `agent`.
#[derive(Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    stand_in: StandInArgs,
    /// A device plugin offers the virtual device, so that each container has one to itself
    // Set through the environment, so that older images start with a newer chart.
    #[arg(long, env = "HEARTH_FROM_DEVICE_PLUGIN")]
    from_device_plugin: bool,
    /// Address of the Agent service
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9400")]
    listen: String,
    /// Address of plain gRPC health for probes: service "" is ready, "live" is alive
    #[arg(long, value_name = "ADDRESS")]
    health: Option<String>,
    /// Directory with tls.crt, tls.key and ca.crt: only the operator of that authority may call. Reloaded when it changes
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// File with this Pod's token for the operator, which gives this agent a certificate of its own for it
    // Set through the environment, so that older images start with a newer chart.
    #[arg(
        long,
        value_name = "FILE",
        env = "HEARTH_IDENTITY_TOKEN",
        requires = "tls_dir"
    )]
    identity_token: Option<PathBuf>,
    /// Directory for models, parts of them, and what was measured
    #[arg(long, value_name = "DIR", default_value = "/var/lib/hearth")]
    cache_dir: PathBuf,
    /// Percent of the disk that models leave free: more than the kubelet's threshold, below which it evicts Pods
    #[arg(long, value_name = "PERCENT", default_value_t = 17,
        value_parser = clap::value_parser!(u8).range(0..=99))]
    disk_reserve: u8,
    #[command(flatten)]
    store: StoreArgs,
    /// Address of /metrics, over plain HTTP [default: none]
    // Set through the environment, so that older images start with a newer chart.
    #[arg(long, value_name = "ADDRESS", env = "HEARTH_AGENT_METRICS")]
    metrics: Option<String>,
    /// Range of addresses that may be fetched from although it is the node's own, link-local or the cluster's; may be repeated
    #[arg(long = "allow-range", value_name = "CIDR")]
    allow_ranges: Vec<IpNet>,
    /// Hours that a fetched model is kept once no deployment names it, unless its space is needed
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    keep_models: u32,
    /// Seconds that a server with a private address is tried, and after which each of its failures is told, whatever it is
    // Set through the environment, so that older images start with a newer chart.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, env = "HEARTH_PRIVATE_PATIENCE",
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    private_patience: u32,
}

impl AgentArgs {
    fn limits(&self, egress: Egress) -> Limits {
        Limits {
            egress,
            node: self.stand_in.node.clone(),
            quota_bytes: self.store.quota_bytes(),
            recent: self.store.recent(),
            throttle: self.store.throttle(),
            disk_reserve: self.disk_reserve,
            allow_ranges: self.allow_ranges.clone(),
            keep: Duration::from_secs(3600 * u64::from(self.keep_models)),
            private_patience: Duration::from_secs(self.private_patience.into()),
        }
    }
}

/// Serves until told to stop.
pub(crate) fn run(args: &AgentArgs, environment: &Environment) -> anyhow::Result<()> {
    let limits = args.limits(environment.egress()?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve(args, limits));
    // A model being unpacked is not worth waiting for: the next agent starts that step again.
    runtime.shutdown_background();
    outcome
}

async fn serve(args: &AgentArgs, limits: Limits) -> anyhow::Result<()> {
    let health = Health::starting().await;
    let address = args.health.as_deref();
    let _probes = address.map(|address| health.listen(address)).transpose()?;
    let tls = args.tls_dir.as_deref().map(read_tls).transpose()?;
    let identity = match (&tls, &args.identity_token) {
        (Some(tls), Some(token)) => Some(Identity::new(&args.stand_in.node, tls.clone(), token)?),
        _ => None,
    };
    let listener = Listener::bind(&args.listen)?;
    let endpoint = listener.address().to_string();

    let cache = Cache::new(&args.cache_dir);
    if let Err(error) = cache.create() {
        tracing::error!("no model can be kept on this node: {error}");
    }
    let models = Arc::new(Models::new(cache, limits));
    let _metrics = match args.metrics.as_deref().filter(|it| !it.is_empty()) {
        Some(address) => Some(metrics::serve(address, Arc::clone(&models))?),
        None => None,
    };
    let port = Arc::new(WaitingPort::new(&args.listen));
    let service = AgentService {
        node: Node::start(
            &args.stand_in.node,
            models.cache(),
            args.stand_in.device(),
            args.from_device_plugin,
        ),
        seeds: Seeds::new(
            Arc::clone(&port),
            models.cache().clone(),
            Arc::clone(models.counters()),
        ),
        held: Held::of(&models),
        models,
        links: Links::new(port),
        identity,
    };
    let routes = Routes::new(health.service()).add_service(server::agent(service));
    health.set_ready(true).await;
    send_report(&WorkerReport::Ready {
        endpoint: endpoint.clone(),
        device: "agent".to_owned(),
    });
    tracing::info!(node = args.stand_in.node, endpoint, cache = %args.cache_dir.display(), "serving");

    let ending = health.clone();
    let shutdown = async move {
        signals::termination().await;
        ending.end().await;
    };
    let options = ServerOptions {
        tls,
        ..ServerOptions::default()
    };
    let overdue = async {
        signals::termination().await;
        tokio::time::sleep(END_PATIENCE).await;
    };
    tokio::select! {
        served = hearth_transport::serve(listener, routes, &options, shutdown) => Ok(served?),
        () = overdue => Ok(()),
    }
}

/// Reads the certificate that all agents start with. Only the operator may call.
fn read_tls(directory: &Path) -> anyhow::Result<Tls> {
    let files = TlsFiles {
        cert: directory.join("tls.crt"),
        key: directory.join("tls.key"),
        ca: directory.join("ca.crt"),
        names: TlsNames::for_operator(),
    };
    Ok(Tls::read(&files)?)
}

/// Implements `hearth.v1.Agent`.
struct AgentService {
    node: Arc<Node>,
    models: Arc<Models>,
    held: Arc<Held>,
    links: Links,
    seeds: Seeds,
    identity: Option<Identity>,
}

impl AgentService {
    fn identity(&self) -> Result<&Identity, Status> {
        let why =
            "this agent was started without --identity-token, so it cannot prove its identity";
        let identity = self.identity.as_ref();
        identity.ok_or_else(|| Status::failed_precondition(why))
    }

    /// Checks that nothing else that this agent does would be measured with a link.
    fn check_quiet(&self) -> Result<(), Status> {
        self.node.check_quiet()?;
        self.seeds.check_quiet()
    }
}

#[tonic::async_trait]
impl v1::agent_server::Agent for AgentService {
    async fn identify(
        &self,
        _: Request<v1::IdentifyRequest>,
    ) -> Result<Response<v1::IdentifyResponse>, Status> {
        Ok(Response::new(self.identity()?.tell().await?))
    }

    async fn certify(
        &self,
        request: Request<v1::CertifyRequest>,
    ) -> Result<Response<v1::CertifyResponse>, Status> {
        let taken = self.identity()?.take(request.into_inner())?;
        Ok(Response::new(taken))
    }

    async fn profile(
        &self,
        _: Request<v1::ProfileRequest>,
    ) -> Result<Response<v1::ProfileResponse>, Status> {
        let mut profile = self.node.profile().await?;
        self.held.add(&mut profile).await;
        let node_profile_json =
            serde_json::to_string(&profile).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::ProfileResponse { node_profile_json }))
    }

    async fn model(
        &self,
        request: Request<v1::ModelRequest>,
    ) -> Result<Response<v1::ModelResponse>, Status> {
        let mut request = request.into_inner();
        let seed = request.seed.take();
        let seed = seed.map(|place| Place::checked(place, self.identity()?));
        let answer = self.models.model(&request, seed.transpose()?)?;
        Ok(Response::new(answer))
    }

    async fn retain(
        &self,
        request: Request<v1::RetainRequest>,
    ) -> Result<Response<v1::RetainResponse>, Status> {
        let removed = self.models.retain(&request.into_inner().keys).await?;
        Ok(Response::new(v1::RetainResponse { removed }))
    }

    async fn await_link(
        &self,
        request: Request<v1::AwaitLinkRequest>,
    ) -> Result<Response<v1::AwaitLinkResponse>, Status> {
        self.check_quiet()?;
        let awaited = self.links.wait_for(request.into_inner(), self.identity()?);
        let port = awaited.await?.into();
        Ok(Response::new(v1::AwaitLinkResponse { port }))
    }

    async fn measure_link(
        &self,
        request: Request<v1::MeasureLinkRequest>,
    ) -> Result<Response<v1::MeasureLinkResponse>, Status> {
        self.check_quiet()?;
        let measured = self.links.measure(request.into_inner(), self.identity()?);
        Ok(Response::new(measured.await?))
    }

    async fn seed(
        &self,
        request: Request<v1::SeedRequest>,
    ) -> Result<Response<v1::SeedResponse>, Status> {
        let given = self.seeds.give(request.into_inner(), self.identity()?);
        let port = given.await?.into();
        Ok(Response::new(v1::SeedResponse { port }))
    }
}
