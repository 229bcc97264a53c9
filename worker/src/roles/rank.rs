//! Prefill and decode ranks, and the followers of groups: a model, or a part of one, served over gRPC.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{
    InferencePlanSpec, PlanKv, PlanKvType, PlanRank, PlanRole, ResidencyPolicy as PlanPolicy,
    WorkerReport,
};
use hearth_engine::{Engine, EngineOptions, GrammarTokenizer, Health as EngineHealth, KvBudget};
use hearth_fetch::Hold;
use hearth_formats::{Checkpoint, ModelConfig, Tokenizer};
use hearth_kernels::trace::Trace;
use hearth_kernels::{Backend, CpuOptions, KvDType};
use hearth_model::ExpertShare;
use hearth_parallel::LOST_PATIENCE;
use hearth_residency::Placing;
use hearth_transport::spans::Tracer;
use hearth_transport::tonic::service::Routes;
use hearth_transport::{ClientOptions, Clients, Health, Listener, ServerOptions, server};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::binding::Binding;
use super::control::ControlService;
use super::decode::DecodeService;
use super::group::{self, FollowerWorker, Head, Membership};
use super::layers::Layers;
use super::load_watch::LoadWatch;
use super::prefill::PrefillService;
use super::process::ProcessArgs;
use super::rank_options::{device_options, host_options, load_options};
use super::report::{report_streams, send_report, stay_alive};
use super::traces::Traces;
use super::turn::Turn;
use crate::cli::{GpuArgs, IsaArg};
use crate::device::{DeviceOptions, HostOptions, on_device};
use crate::environment::Environment;
use crate::load::{self, LoadOptions, LoadedOn};
use crate::lost::DeviceLost;
use crate::otlp::OtlpTraces;
use crate::signals;

/// Silence of a prefill worker after which it is asked whether it makes progress.
const PREFILL_SILENCE: Duration = Duration::from_secs(1);
/// Requests beyond the running ones that an engine accepts before it reports a full queue.
/// The gateway holds the real queue; this limits what one worker is sent at a time.
const WORKER_QUEUE: usize = 256;

/// Steps in flight at once on a device that queues them: one runs, and the next one is prepared meanwhile.
const STEPS_IN_FLIGHT: usize = 2;

/// Stack size for compiling grammars, which recurses over the request's schema; the gateway limits it to 500 levels.
const STACK_BYTES: usize = 32 << 20;

/// Time between two health checks of the engine: a worker whose device is lost ends before the gateway has tried a request
/// there for the last time.
const HEALTH_PERIOD: Duration = Duration::from_millis(50);
/// Time for which requests wait for a group before callers are told: a member that is back within it is no news.
const BLIP: Duration = Duration::from_secs(2);
/// Time for which a worker that is to end waits for a lost member of its group, before it leaves its requests to other workers: a member
/// that hangs is back after some 20 s, and 30 s are all the grace that `hearth up` gives.
const LOST_MEMBER_PATIENCE: Duration = Duration::from_secs(30);
/// Time that an engine may be unhealthy before the worker ends.
const FAULT_PATIENCE: Duration = Duration::from_secs(10);
/// Least time that callers have, once all is computed, to read the rest of it.
const LEAST_UNREAD_PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of `prefill` and `decode`.
#[derive(Args)]
pub(crate) struct RankArgs {
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    #[command(flatten)]
    pub(super) gpu: GpuArgs,
    /// Instruction set of a rank that computes on CPUs; auto takes the best that they have
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) isa: IsaArg,
    /// Address of plain gRPC health for probes, open while the model loads: service "" is ready, "live" is alive
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) health: Option<String>,
    /// Seconds without reading a byte of the weights after which loading is abandoned
    #[arg(
        long,
        hide = true,
        env = "HEARTH_LOAD_PATIENCE_S",
        default_value_t = 300
    )]
    load_patience: u64,
    /// Least seconds that a member of a group has for a part of a pass as it has computed before; what takes that long, and a thousand
    /// times as long as ever, is taken for lost
    #[arg(
        long,
        hide = true,
        env = "HEARTH_PART_PATIENCE_S",
        value_parser = clap::value_parser!(u64).range(1..),
        default_value_t = LOST_PATIENCE.as_secs()
    )]
    part_patience: u64,
    /// File with the addresses of a group's members, its head among them, for the head; read whenever the group forms. Without it,
    /// the plan says where they are
    #[arg(long, value_name = "FILE")]
    routes: Option<PathBuf>,
}

impl RankArgs {
    fn part_patience(&self) -> Duration {
        Duration::from_secs(self.part_patience)
    }

    fn grace(&self) -> Duration {
        Duration::from_secs(u64::from(self.process.grace))
    }
}

/// Runs a decode worker until it is told to stop.
pub(crate) fn decode(args: &RankArgs, environment: &Environment) -> anyhow::Result<()> {
    run(args, PlanRole::Decode, environment)
}

/// Runs a prefill worker until it is told to stop.
pub(crate) fn prefill(args: &RankArgs, environment: &Environment) -> anyhow::Result<()> {
    run(args, PlanRole::Prefill, environment)
}

/// Runs a follower of a group until it is told to stop.
pub(crate) fn stage(args: &RankArgs, environment: &Environment) -> anyhow::Result<()> {
    run(args, PlanRole::Stage, environment)
}

fn run(args: &RankArgs, role: PlanRole, environment: &Environment) -> anyhow::Result<()> {
    let (plan, rank) = args.process.find(role)?;
    // While this process lives, nothing removes the model from its store.
    let _hold = Hold::take(Path::new(&plan.model.path));
    let binding = args.process.bind(&rank)?;
    // Dropped after the runtime: requests that it ends are the last of their traces.
    let traces = match role {
        // Its head has the requests.
        PlanRole::Stage => None,
        PlanRole::Prefill | PlanRole::Decode | PlanRole::Gateway => {
            Some(OtlpTraces::start(environment, &plan, &rank)?)
        }
    };
    let tracer = traces.as_ref().map(OtlpTraces::tracer).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_stack_size(STACK_BYTES)
        .enable_all()
        .build()?;
    let host = host_options(args, &rank, &binding);
    let device = device_options(args, environment, &rank, host.clone())?;
    let place = (&plan, &rank, tracer);
    runtime.block_on(serve(args, place, binding, (device, host)))
}

async fn serve(
    args: &RankArgs,
    (plan, rank, tracer): (&InferencePlanSpec, &PlanRank, Tracer),
    binding: Arc<Binding>,
    device: (DeviceOptions, CpuOptions),
) -> anyhow::Result<()> {
    let endpoint = rank
        .endpoint
        .as_deref()
        .with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
    let health = Health::starting().await;
    let address = args.health.as_deref();
    let _probes = address.map(|address| health.listen(address)).transpose()?;
    let tls = args.process.tls.read()?;
    let listener = Listener::bind(endpoint)?;
    send_report(&WorkerReport::Loading { percent: 0 });
    // However long a percent takes.
    let alive = tokio::spawn(stay_alive());
    let watch = LoadWatch::start(Duration::from_secs(args.load_patience));
    let clients = Clients::new(ClientOptions {
        tls: tls.clone(),
        ..ClientOptions::default()
    });
    let calling = (clients.clone(), args.part_patience());
    // Other workers wait for the turn as long as the weights are in memory.
    let (opened, device, _turn) = tokio::task::block_in_place(|| {
        let placed = (plan, rank, args.routes.clone());
        open(placed, binding, device, (&watch, calling))
    })?;
    drop(watch);
    alive.abort();
    let options = ServerOptions {
        tls,
        ..ServerOptions::default()
    };
    let ready = async || {
        health.set_ready(true).await;
        send_report(&WorkerReport::Ready {
            endpoint: endpoint.to_owned(),
            device: device.clone(),
        });
        tracing::info!(rank = rank.name, endpoint, device, "serving");
    };
    let worker = match opened {
        Opened::Engine(worker) => worker,
        Opened::Follower(follower) => {
            ready().await;
            let limits = (args.grace(), args.part_patience());
            return follower.serve(listener, &health, &options, limits).await;
        }
    };
    let calls = (clients, tracer);
    let routes = routes(&worker, Routes::new(health.service()), calls);
    ready().await;

    let grace = args.grace();
    let ended = Arc::clone(&worker);
    let membership = worker.membership.clone();
    let ending = health.clone();
    let (has_drained, drained) = oneshot::channel();
    let shutdown = async move {
        signals::termination().await;
        let until = Instant::now() + grace;
        send_report(&WorkerReport::Draining { choices: None });
        ending.end().await;
        membership.iter().for_each(Membership::drain);
        // A panic of it is in the log.
        let _ = tokio::task::spawn_blocking(move || ended.drain(grace)).await;
        // Its streams would keep the listener open.
        membership.iter().for_each(Membership::leave);
        let _ = has_drained.send(until);
    };
    tokio::select! {
        served = hearth_transport::serve(listener, routes, &options, shutdown) => Ok(served?),
        () = unread(drained) => Ok(()),
        never = stay_alive() => match never {},
        never = report_streams(&worker.engine) => match never {},
        fault = lasting_fault(&worker.engine, &health) => Err(fault),
    }
}

/// Returns when callers that do not read to the end what was said to them have had their time: `drained` tells, once the
/// engine has nothing left to do, when the grace period ends.
async fn unread(drained: oneshot::Receiver<Instant>) {
    let Ok(until) = drained.await else {
        return std::future::pending().await;
    };
    sleep_until(until.max(Instant::now() + LEAST_UNREAD_PATIENCE)).await;
    tracing::warn!("callers have not read their answers to the end; the worker ends without them");
}

fn routes(worker: &Arc<Worker>, routes: Routes, (clients, tracer): (Clients, Tracer)) -> Routes {
    let mut routes = routes.add_service(server::control(ControlService::new(Arc::clone(worker))));
    if let Some(membership) = &worker.membership {
        routes = routes.add_service(server::group(membership.clone()));
    }
    match worker.role {
        PlanRole::Prefill => routes.add_service(server::prefill(PrefillService::new(
            Arc::clone(worker),
            tracer,
        ))),
        PlanRole::Decode | PlanRole::Gateway | PlanRole::Stage => {
            routes.add_service(server::decode(DecodeService::new(
                Arc::clone(worker),
                (clients, tracer),
                PREFILL_SILENCE,
            )))
        }
    }
}

/// Reports the engine's health to probes and to the supervisor; returns when it has been unhealthy for [`FAULT_PATIENCE`], or when its device is
/// lost.
async fn lasting_fault(engine: &Engine, health: &Health) -> anyhow::Error {
    let mut since = None;
    let mut layers = Layers::default();
    loop {
        tokio::time::sleep(HEALTH_PERIOD).await;
        layers.end_if_stuck(engine.at_layer_for());
        match engine.health() {
            // Requests wait until the group has formed anew; the log says which member is missing.
            EngineHealth::Apart(_) => {}
            EngineHealth::Healthy => {
                if since.take().is_some() {
                    health.set_ready(true).await;
                    send_report(&WorkerReport::Healthy);
                }
            }
            EngineHealth::Unhealthy(why) => {
                let began = *since.get_or_insert_with(|| {
                    send_report(&WorkerReport::Unhealthy);
                    std::time::Instant::now()
                });
                health.set_ready(false).await;
                if began.elapsed() >= FAULT_PATIENCE {
                    return anyhow::anyhow!(
                        "the engine does not recover: {why}\n  the supervisor restarts this worker"
                    );
                }
            }
            EngineHealth::DeviceLost(why) => {
                health.set_ready(false).await;
                return DeviceLost(why).into();
            }
        }
    }
}

/// State shared by the services of one worker.
pub(super) struct Worker {
    pub(super) engine: Engine,
    pub(super) name: String,
    pub(super) role: PlanRole,
    pub(super) plan_generation: u64,
    pub(super) max_batch: u32,
    pub(super) context_length: u32,
    pub(super) model_fingerprint: String,
    pub(super) kv_layout: String,
    pub(super) numerics: String,
    pub(super) binding: Arc<Binding>,
    pub(super) traces: Traces,
    /// Takes what the other ranks of its group send; `None` where there are none.
    pub(super) membership: Option<Membership>,
}

/// A rank whose model is open.
enum Opened {
    /// With an engine: where requests begin.
    Engine(Arc<Worker>),
    Follower(FollowerWorker),
}

fn open(
    (plan, rank, routes): (&InferencePlanSpec, &PlanRank, Option<PathBuf>),
    binding: Arc<Binding>,
    (mut device, host): (DeviceOptions, CpuOptions),
    (watch, calling): (&LoadWatch, (Clients, Duration)),
) -> anyhow::Result<(Opened, String, Turn)> {
    let group = group::Place::of(plan, rank)?;
    let part = group.as_ref().and_then(group::Place::part).cloned();
    let shares = |place: &group::Place| (place.share(), place.usual_share());
    let (share, prepared) = group
        .as_ref()
        .map_or((ExpertShare::ALL, ExpertShare::ALL), shares);
    let head = match group.clone().filter(group::Place::is_head) {
        Some(place) => Some(Head::of(plan, rank, place, routes)?),
        None => None,
    };
    let trace = device.traced();
    let directory = Path::new(&plan.model.path);
    let kv = rank
        .kv
        .as_ref()
        .with_context(|| format!("the plan gives {} no KV cache", rank.name))?;
    kv_dtype(kv)?;
    let limit_bytes = hearth_profiler::memory_limit_bytes(Path::new("/"));
    let numa_cpus = binding.numa_cpus();
    // Waiting for another worker does not count as a stall.
    let waits = || watch.went_on(0);
    let turn = Turn::take(directory, rank, limit_bytes, !numa_cpus.is_empty(), &waits);
    let is_misplaced = |checkpoint: &Checkpoint| {
        turn.is_alone() && binding.should_read_again(&weight_files(checkpoint))
    };
    let placing = (!numa_cpus.is_empty()).then_some(Placing {
        numa_cpus,
        is_misplaced: &is_misplaced,
    });
    let mut told = 0;
    let loaded = load::open(
        directory,
        LoadOptions {
            part,
            share,
            prepared,
            ..load_options(rank, device, HostOptions::Cpu(host), placing)?
        },
        &mut |progress| {
            let percent = (progress.bytes_done * 100 / progress.bytes.max(1)) as u32;
            watch.went_on(percent);
            if percent > told {
                told = percent;
                send_report(&WorkerReport::Loading { percent });
            }
        },
    )?;
    turn.loaded();
    let (opened, device) = match (head, group) {
        (None, Some(place)) => on_device!(loaded, loaded => {
            start_follower((place, kv), loaded, Arc::clone(&binding), calling.0)
        })?,
        (None, None) if rank.role == PlanRole::Stage => {
            bail!("the plan gives {} no place in a group", rank.name)
        }
        (head, _) => {
            let place = Place {
                plan,
                rank,
                kv,
                head,
                calling,
            };
            on_device!(loaded, loaded => start(place, loaded, binding, trace, &waits))?
        }
    };
    Ok((opened, device, turn))
}

/// A rank in its plan.
struct Place<'a> {
    plan: &'a InferencePlanSpec,
    rank: &'a PlanRank,
    kv: &'a PlanKv,
    /// The group that it is the head of.
    head: Option<Head>,
    /// Connections to other ranks, and the least time that these have for what they have done before.
    calling: (Clients, Duration),
}

/// Starts a follower on its part of a model; also returns a description of the device.
fn start_follower<B: Backend>(
    (place, kv): (group::Place, &PlanKv),
    loaded: LoadedOn<B>,
    binding: Arc<Binding>,
    clients: Clients,
) -> anyhow::Result<(Opened, String)> {
    binding.take(loaded.model.backend(), loaded.host.as_ref());
    let device = loaded.model.backend().describe();
    let cache = (kv.block_tokens as usize, kv_dtype(kv)?);
    let weights = weight_files(&loaded.checkpoint);
    let follower = FollowerWorker::start(place, loaded, cache, Arc::clone(&binding), clients)?;
    binding.loaded(&weights);
    Ok((Opened::Follower(follower), device))
}

/// Starts a rank's engine on a loaded model; also returns a description of the device.
fn start<B: Backend>(
    place: Place<'_>,
    mut loaded: LoadedOn<B>,
    binding: Arc<Binding>,
    trace: Arc<Trace>,
    waits: &dyn Fn(),
) -> anyhow::Result<(Opened, String)> {
    let Place {
        plan,
        rank,
        kv,
        head,
        calling,
    } = place;
    binding.take(loaded.model.backend(), loaded.host.as_ref());
    let directory = Path::new(&plan.model.path);
    let kv_dtype = kv_dtype(kv)?;
    let device = loaded.model.backend().describe();
    let layout = loaded.model.kv_layout(kv.block_tokens as usize, kv_dtype);
    let mut budget = KvBudget::Bytes(kv.memory_bytes);
    let mut membership = None;
    if let Some(head) = head {
        budget = KvBudget::Blocks(head.kv_blocks(&layout, layout.layers));
        membership = Some(head.lead(&mut loaded, &layout, calling, waits)?);
    }
    let numerics = load::numerics(&loaded.model, kv_dtype);
    let options = EngineOptions {
        numerics: numerics.clone(),
        kv: budget,
        block_tokens: kv.block_tokens as usize,
        kv_dtype,
        max_batch: rank.max_batch as usize,
        chunk_tokens: rank.chunk_tokens as usize,
        idle_chunk_tokens: rank.idle_chunk_tokens.map(|tokens| tokens as usize),
        // Each pass takes the experts over the link.
        whole_prompts: streams_experts(rank),
        context_length: plan.model.context_length as usize,
        max_queue: WORKER_QUEUE,
        steps_in_flight: STEPS_IN_FLIGHT,
        grammar_tokenizer: grammar_tokenizer(directory, rank.role, loaded.model.config())?,
        trace: Some(Arc::clone(&trace)),
        ..EngineOptions::default()
    };
    let model_fingerprint = loaded.checkpoint.fingerprint().to_owned();
    let weights = weight_files(&loaded.checkpoint);
    let engine = Engine::start(loaded.model, options)?;
    binding.loaded(&weights);
    let worker = Worker {
        engine,
        name: rank.name.clone(),
        role: rank.role,
        plan_generation: plan.generation,
        max_batch: rank.max_batch,
        context_length: plan.model.context_length,
        model_fingerprint,
        kv_layout: layout.fingerprint(),
        numerics,
        binding,
        traces: Traces::new(trace, format!("{}: {device}", rank.name)),
        membership,
    };
    Ok((Opened::Engine(Arc::new(worker)), device))
}

fn streams_experts(rank: &PlanRank) -> bool {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    policy == Some(PlanPolicy::StreamLoading)
}

fn weight_files(checkpoint: &Checkpoint) -> Vec<PathBuf> {
    let files = checkpoint.files().iter();
    files.map(|file| file.path.clone()).collect()
}

/// Opens the tokenizer for grammars, which need every token's text; prefill workers do not sample, so they need none.
fn grammar_tokenizer(
    directory: &Path,
    role: PlanRole,
    config: &ModelConfig,
) -> anyhow::Result<Option<Arc<GrammarTokenizer>>> {
    match role {
        PlanRole::Decode => {}
        PlanRole::Prefill | PlanRole::Gateway | PlanRole::Stage => return Ok(None),
    }
    let tokenizer = Tokenizer::open(directory)?;
    Ok(Some(Arc::new(GrammarTokenizer::new(
        &tokenizer,
        config.vocab_size,
        &config.eos_token_ids,
    )?)))
}

fn kv_dtype(kv: &PlanKv) -> anyhow::Result<KvDType> {
    if kv.key_type != kv.value_type {
        bail!(
            "the plan stores keys as {:?} and values as {:?}: this engine stores both in the same type",
            kv.key_type,
            kv.value_type
        );
    }
    Ok(match kv.key_type {
        PlanKvType::BF16 => KvDType::Bf16,
        PlanKvType::F32 => KvDType::F32,
    })
}

impl Worker {
    /// What became of its group, in words, and what is slow in it; empty: it has lost no member, or is in none.
    pub(super) fn group(&self) -> String {
        let told = self.engine.group();
        match self.membership.as_ref().and_then(Membership::slow) {
            None => told,
            Some(slow) if told.is_empty() => format!("complete; slow: {slow}"),
            Some(slow) => format!("{told}; slow: {slow}"),
        }
    }

    /// While requests have waited for its group for longer than [`BLIP`]: name of the member that is missing, or its own where
    /// that is not known.
    pub(super) fn waits_for(&self) -> Option<String> {
        let waited = self.engine.group_apart_for()?;
        let missing = || self.membership.as_ref().and_then(Membership::missing);
        (waited >= BLIP).then(|| missing().unwrap_or_else(|| self.name.clone()))
    }

    /// Lets requests in flight end, within `grace` and [`LOST_MEMBER_PATIENCE`]; the rest fail, so that they go on at other workers.
    /// Blocks.
    fn drain(&self, grace: Duration) {
        let report = self.engine.drain(grace, LOST_MEMBER_PATIENCE);
        let (ended, cut_off) = (report.ended, report.cut_off);
        if let Some(member) = self.waits_for().filter(|_| cut_off > 0) {
            tracing::warn!(
                member,
                requests = cut_off,
                "the group waits for a lost member, and this worker is to end: its requests are left to other workers"
            );
        }
        tracing::info!(ended, cut_off, "drained");
    }

    /// Rejects a request made for other weights.
    pub(super) fn check_fingerprint(&self, asked: &str) -> Result<(), tonic::Status> {
        if asked.is_empty() || asked == self.model_fingerprint {
            return Ok(());
        }
        Err(tonic::Status::failed_precondition(format!(
            "the request is for model {asked}, and this worker has {}: restart the workers of one plan together",
            self.model_fingerprint
        )))
    }

    /// Rejects a prompt that must be computed with other numerics than this worker's.
    pub(super) fn check_numerics(&self, asked: &str) -> Result<(), tonic::Status> {
        if asked.is_empty() || asked == self.numerics {
            return Ok(());
        }
        Err(tonic::Status::failed_precondition(format!(
            "the prompt is to be read with {asked}, and this worker computes with {}: a worker of those numerics must read it",
            self.numerics
        )))
    }
}
