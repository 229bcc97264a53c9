//! Prefill and decode ranks: a model served over gRPC.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{
    InferencePlanSpec, PlanKv, PlanKvType, PlanRank, PlanResidency, PlanRingLength, PlanRole,
    ResidencyPolicy as PlanPolicy, WorkerReport,
};
use hearth_engine::{Engine, EngineOptions, GrammarTokenizer, Health as EngineHealth, KvBudget};
use hearth_formats::{Checkpoint, ModelConfig, Tokenizer};
use hearth_kernels::trace::Trace;
use hearth_kernels::{Backend, CpuOptions, KvDType};
use hearth_residency::{Placing, RingLength, RingSlots};
use hearth_transport::tonic::service::Routes;
use hearth_transport::{ClientOptions, Clients, Health, Listener, ServerOptions, Tls, server};
use hearth_virtual::VirtualOptions;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::binding::Binding;
use super::control::ControlService;
use super::decode::DecodeService;
use super::layers::Layers;
use super::load_watch::LoadWatch;
use super::prefill::PrefillService;
use super::process::ProcessArgs;
use super::report::{report_streams, send_report, stay_alive};
use super::traces::Traces;
use super::turn::Turn;
use crate::cli::{ExpertReadsArg, GpuArgs, IsaArg};
use crate::device::{DeviceArg, DeviceOptions, GpuOptions, HostOptions, on_device};
use crate::environment::Environment;
use crate::load::{self, ExpertBudget, LoadOptions, LoadedOn, ResidencyPolicy, Rings};
use crate::lost::DeviceLost;
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
    gpu: GpuArgs,
    /// Instruction set of a rank that computes on CPUs; auto takes the best that they have
    #[arg(long, value_enum, default_value = "auto")]
    isa: IsaArg,
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
}

/// Runs a decode worker until it is told to stop.
pub(crate) fn decode(args: &RankArgs, environment: &Environment) -> anyhow::Result<()> {
    run(args, PlanRole::Decode, environment)
}

/// Runs a prefill worker until it is told to stop.
pub(crate) fn prefill(args: &RankArgs, environment: &Environment) -> anyhow::Result<()> {
    run(args, PlanRole::Prefill, environment)
}

fn run(args: &RankArgs, role: PlanRole, environment: &Environment) -> anyhow::Result<()> {
    let (plan, rank) = args.process.find(role)?;
    let binding = args.process.bind(&rank)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_stack_size(STACK_BYTES)
        .enable_all()
        .build()?;
    let host = host_options(args, &rank, &binding);
    let device = device_options(args, environment, &rank, host.clone())?;
    runtime.block_on(serve(args, &plan, &rank, binding, (device, host)))
}

async fn serve(
    args: &RankArgs,
    plan: &InferencePlanSpec,
    rank: &PlanRank,
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
    let watch = LoadWatch::start(Duration::from_secs(args.load_patience));
    // Other workers wait for the turn as long as the weights are in memory.
    let (worker, device, _turn) =
        tokio::task::block_in_place(|| open(plan, rank, binding, device, &watch))?;
    drop(watch);
    let routes = routes(&worker, Routes::new(health.service()), tls.clone());
    health.set_ready(true).await;
    send_report(&WorkerReport::Ready {
        endpoint: endpoint.to_owned(),
        device: device.clone(),
    });
    tracing::info!(rank = rank.name, endpoint, device, "serving");

    let grace = Duration::from_secs(u64::from(args.process.grace));
    let engine = worker.engine.clone();
    let ending = health.clone();
    let (has_drained, drained) = oneshot::channel();
    let shutdown = async move {
        signals::termination().await;
        let until = Instant::now() + grace;
        send_report(&WorkerReport::Draining);
        ending.end().await;
        if let Ok(report) = tokio::task::spawn_blocking(move || engine.drain(grace)).await {
            tracing::info!(ended = report.ended, cut_off = report.cut_off, "drained");
        }
        let _ = has_drained.send(until);
    };
    let options = ServerOptions {
        tls,
        ..ServerOptions::default()
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

fn routes(worker: &Arc<Worker>, routes: Routes, tls: Option<Tls>) -> Routes {
    let routes = routes.add_service(server::control(ControlService::new(Arc::clone(worker))));
    match worker.role {
        PlanRole::Prefill => {
            routes.add_service(server::prefill(PrefillService::new(Arc::clone(worker))))
        }
        PlanRole::Decode | PlanRole::Gateway => {
            let clients = Clients::new(ClientOptions {
                tls,
                ..ClientOptions::default()
            });
            routes.add_service(server::decode(DecodeService::new(
                Arc::clone(worker),
                clients,
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
}

fn open(
    plan: &InferencePlanSpec,
    rank: &PlanRank,
    binding: Arc<Binding>,
    (mut device, host): (DeviceOptions, CpuOptions),
    watch: &LoadWatch,
) -> anyhow::Result<(Arc<Worker>, String, Turn)> {
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
        load_options(rank, device, HostOptions::Cpu(host), placing)?,
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
    let (worker, device) =
        on_device!(loaded, loaded => start(plan, (rank, kv), loaded, binding, trace))?;
    Ok((worker, device, turn))
}

/// Starts a rank's engine on a loaded model; also returns a description of the device.
fn start<B: Backend>(
    plan: &InferencePlanSpec,
    (rank, kv): (&PlanRank, &PlanKv),
    loaded: LoadedOn<B>,
    binding: Arc<Binding>,
    trace: Arc<Trace>,
) -> anyhow::Result<(Arc<Worker>, String)> {
    binding.take(loaded.model.backend(), loaded.host.as_ref());
    let directory = Path::new(&plan.model.path);
    let kv_dtype = kv_dtype(kv)?;
    let device = loaded.model.backend().describe();
    let layout = loaded.model.kv_layout(kv.block_tokens as usize, kv_dtype);
    let numerics = load::numerics(&loaded.model, kv_dtype);
    let options = EngineOptions {
        numerics: numerics.clone(),
        kv: KvBudget::Bytes(kv.memory_bytes),
        block_tokens: kv.block_tokens as usize,
        kv_dtype,
        max_batch: rank.max_batch as usize,
        chunk_tokens: rank.chunk_tokens as usize,
        // Each pass takes the experts over the link.
        whole_prompts: streams_experts(rank),
        context_length: plan.model.context_length as usize,
        max_queue: WORKER_QUEUE,
        steps_in_flight: STEPS_IN_FLIGHT,
        grammar_tokenizer: grammar_tokenizer(directory, rank.role, loaded.model.config())?,
        trace: Some(Arc::clone(&trace)),
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
    };
    Ok((Arc::new(worker), device))
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
        PlanRole::Prefill | PlanRole::Gateway => return Ok(None),
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

fn load_options<'a>(
    rank: &PlanRank,
    device: DeviceOptions,
    host: HostOptions,
    placing: Option<Placing<'a>>,
) -> anyhow::Result<LoadOptions<'a>> {
    let residency = rank
        .residency
        .as_ref()
        .with_context(|| format!("the plan gives {} no residency", rank.name))?;
    if !rank.mla_form.is_absorbed() && rank.role != PlanRole::Prefill {
        bail!(
            "the plan has {} expand latents (mlaForm), and it writes answers: each token would expand all before it\n  plan again with this version of hearth",
            rank.name
        );
    }
    Ok(LoadOptions {
        device,
        host,
        mla_form: rank.mla_form,
        is_dual_batch: rank.dual_batch,
        residency: match residency.policy {
            PlanPolicy::Resident => ResidencyPolicy::Resident,
            PlanPolicy::MmapPrefetch => ResidencyPolicy::MmapPrefetch {
                budget_bytes: Some(residency.budget_bytes),
            },
            PlanPolicy::StreamLoading => ResidencyPolicy::StreamLoading(Rings {
                slots: ring_slots(residency)?,
                streams_dense: residency.streams_dense,
            }),
            PlanPolicy::HostExperts => ResidencyPolicy::HostExperts {
                budget: residency.host_budget_bytes.map(|bytes| ExpertBudget {
                    bytes,
                    reads: ExpertReadsArg::Auto,
                }),
                cache_slots: residency.cache_slots.unwrap_or(0) as usize,
            },
        },
        placing,
    })
}

/// Slots of the ring as the plan shares memory between ring and prompts.
fn ring_slots(residency: &PlanResidency) -> anyhow::Result<RingSlots> {
    let length = |length: &PlanRingLength| RingLength {
        rows: length.prompt_tokens as usize,
        slots: length.slots as usize,
    };
    Ok(
        match (residency.ring_lengths.is_empty(), residency.ring_slots) {
            (false, _) => RingSlots::ByRows(residency.ring_lengths.iter().map(length).collect()),
            (true, Some(slots)) => RingSlots::Fixed(slots as usize),
            (true, None) => anyhow::bail!(
                "the plan streams this rank's experts and names no ring slots\n  make a new plan"
            ),
        },
    )
}

/// Kernels and threads of the rank's CPUs.
fn host_options(args: &RankArgs, rank: &PlanRank, binding: &Binding) -> CpuOptions {
    CpuOptions {
        isa: args.isa.isa(),
        threads: rank.threads as usize,
        numa_cpus: binding.numa_cpus(),
    }
}

/// Returns the device that the plan names: a GPU or the CPUs.
fn device_options(
    args: &RankArgs,
    environment: &Environment,
    rank: &PlanRank,
    host: CpuOptions,
) -> anyhow::Result<DeviceOptions> {
    let rounds = !rank.activations.is_exact();
    if rounds && (rank.virtual_device.is_some() || !rank.is_on_gpu()) {
        bail!(
            "the plan rounds the activations of {}, and kernels of CPUs round nothing\n  plan again with this version of hearth",
            rank.name
        );
    }
    if let Some(text) = &rank.virtual_device {
        return virtual_options(text, rank, host);
    }
    if let Some(uuid) = rank.device().gpu_uuid() {
        let options = args.gpu.options(
            environment,
            Some(uuid.to_owned()),
            Some(rank.gpu_budget_bytes()),
        );
        return Ok(DeviceOptions::Gpu(GpuOptions {
            activations: rank.activations.into(),
            // A device plugin may assign another GPU of the node, and the plan is valid for each; a claim names its
            // GPU.
            or_any: (rank.gpus > 0 || rank.in_pod_of.is_some()) && !rank.claims_gpus,
            ..options
        }));
    }
    Ok(DeviceOptions::Cpu(host))
}

/// Returns the virtual device that the plan names, with the rank's share of its memory.
fn virtual_options(text: &str, rank: &PlanRank, cpu: CpuOptions) -> anyhow::Result<DeviceOptions> {
    match text.parse() {
        Ok(DeviceArg::Virtual(arg)) if arg.is_modelled() => bail!(
            "the plan gives {} the virtual device {text:?}, which computes nothing: its answers would mean nothing\n  plan with mode=exact",
            rank.name
        ),
        Ok(DeviceArg::Virtual(arg)) => Ok(DeviceOptions::Virtual(VirtualOptions {
            memory_bytes: rank.gpu_budget_bytes(),
            ..arg.options(cpu)
        })),
        Ok(_) => bail!(
            "the plan gives {} the virtual device {text:?}, which is a real one\n  plan again with this version of hearth",
            rank.name
        ),
        Err(why) => bail!(
            "the plan gives {} the virtual device {text:?}: {why}\n  plan again with this version of hearth",
            rank.name
        ),
    }
}

impl Worker {
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
