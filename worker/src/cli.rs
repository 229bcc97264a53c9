//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use hearth_crds::PlanMlaForm;
use hearth_kernels::{CpuOptions, Isa, KvDType};

use crate::device::{
    ActivationsArg, DeviceArg, DeviceOptions, GpuOptions, HostOptions, KernelDirectories,
};
use crate::environment::Environment;
use crate::{roles, tools};

/// One process of a Hearth plan, and the tools that work on a model.
#[derive(Parser)]
#[command(name = "hearth-worker", version, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:\n  \
    hearth-worker generate --model models/hearth-demo --prompt '<|user|>What is Hearth?<|assistant|>' --max-tokens 64\n  \
    hearth-worker bench --model models/hearth-demo --prefill 512 --decode 64 --json";

#[derive(Subcommand)]
enum Command {
    /// Serve the OpenAI API and route requests to the plan's workers
    Gateway(roles::GatewayArgs),
    /// Compute the KV of prompts for decode workers
    Prefill(roles::RankArgs),
    /// Decode streams of tokens
    Decode(roles::RankArgs),
    /// Compute some layers of a model for the decode worker that is the head of their ring
    Stage(roles::RankArgs),
    /// Run several workers of a plan, each as a process of its own, for a container that they share
    Supervise(roles::SuperviseArgs),
    /// Record what the lanes of running workers do, without a restart
    Trace(roles::TraceArgs),
    /// Measure a node and hold its models, for the operator
    Agent(roles::AgentArgs),
    /// Offer a node's virtual device to its kubelet, as a device plugin does GPUs
    DevicePlugin(roles::DevicePluginArgs),
    /// Lower the power limits of a node's GPUs while they have no work, and in quiet hours
    Power(roles::PowerArgs),
    /// Write the logits of every position of a token sequence to a safetensors file
    Logits(tools::LogitsArgs),
    /// Compile the kernels of a GPU architecture ahead of time
    #[cfg(feature = "cuda")]
    CudaCompile(tools::CudaCompileArgs),
    /// Continue a prompt, greedily unless asked otherwise
    Generate(tools::GenerateArgs),
    /// Time prefill and decode, and set them beside this machine's read bandwidth
    Bench(tools::BenchArgs),
    /// Write a random-weight checkpoint of a supported architecture
    Random(tools::RandomArgs),
    /// Measure this machine: CPUs, NUMA nodes, memory, disk
    Profile(tools::ProfileArgs),
    /// Print a model's facts: parameters, bytes by kind of module, KV bytes per token
    Facts(tools::FactsArgs),
    /// Fetch a model from an archive behind a URL, or from a hub, into a cache
    Fetch(tools::FetchArgs),
    /// List the models of a cache, or remove one
    Models(tools::ModelsArgs),
    /// Check that a model can be served and leave its facts in a file
    Inspect(tools::InspectArgs),
    /// Change the owner of a directory, as an agent's Pod does before it starts
    Own(tools::OwnArgs),
    /// Wait, so that traffic leaves a process before it is told to end
    Linger(roles::LingerArgs),
}

impl Cli {
    /// Runs the chosen command.
    pub(crate) fn run(self, environment: &Environment) -> anyhow::Result<()> {
        match self.command {
            Command::Gateway(args) => roles::gateway(&args, environment),
            Command::Prefill(args) => roles::prefill(&args, environment),
            Command::Decode(args) => roles::decode(&args, environment),
            Command::Stage(args) => roles::stage(&args, environment),
            Command::Supervise(args) => roles::supervise(&args),
            Command::Trace(args) => roles::trace(&args),
            Command::Agent(args) => roles::agent(&args, environment),
            Command::DevicePlugin(args) => roles::device_plugin(&args),
            Command::Power(args) => roles::power(&args),
            #[cfg(feature = "cuda")]
            Command::CudaCompile(args) => tools::cuda_compile(&args, environment),
            Command::Logits(args) => tools::logits(&args, environment),
            Command::Generate(args) => tools::generate(&args, environment),
            Command::Bench(args) => tools::bench(&args, environment),
            Command::Random(args) => tools::random(&args),
            Command::Profile(args) => tools::profile(&args, environment),
            Command::Facts(args) => tools::facts(&args),
            Command::Fetch(args) => tools::fetch(&args, environment),
            Command::Models(args) => tools::models(&args),
            Command::Inspect(args) => tools::inspect(&args),
            Command::Own(args) => tools::own(&args),
            Command::Linger(args) => roles::linger(&args),
        }
    }
}

/// The model and how it is run; shared by the tools.
#[derive(Args, Clone)]
pub(crate) struct ModelArgs {
    /// Directory with config.json and safetensors
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Element type of the KV cache (default: bf16, and f32 with --isa scalar)
    #[arg(long, value_enum)]
    pub(crate) kv_dtype: Option<KvDTypeArg>,
    /// How weights live in memory
    #[arg(long, value_enum, default_value = "resident")]
    pub(crate) residency: ResidencyArg,
    /// Slots of the ring with --residency stream-loading, at least 2 (default: the experts of a layer, or as many as a
    /// quarter of the memory beside the dense modules can hold)
    #[arg(long, value_name = "EXPERTS", value_parser = ring_slots)]
    pub(crate) ring_slots: Option<u32>,
    /// Let attention, dense and shared feed-forward blocks pass through two slots of their own with --residency
    /// stream-loading, instead of staying on the device
    #[arg(long)]
    pub(crate) stream_dense: bool,
    /// Bytes of weights in memory at a time with --residency mmap-prefetch (default: half of the weights), or of experts
    /// with host-experts (default: all of them)
    #[arg(long, value_name = "BYTES")]
    pub(crate) residency_budget: Option<u64>,
    /// How experts within --residency-budget are read with --residency host-experts
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) expert_reads: ExpertReadsArg,
    /// What computes the experts with --residency host-experts: cpu, or for bench a virtual device with mode=modelled
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) host: DeviceArg,
    /// Experts that are cached on the device with --residency host-experts: those that are used most
    #[arg(long, value_name = "EXPERTS", default_value_t = 0)]
    pub(crate) cache_slots: u32,
    /// How latent attention is computed (models of DeepSeek's and Kimi's kind)
    #[arg(long, value_enum, default_value = "absorbed")]
    pub(crate) mla_form: MlaFormArg,
    /// Decode several sequences as two half batches with --residency host-experts: one is in attention while the other is
    /// in its experts
    #[arg(long)]
    pub(crate) dual_batch: bool,
}

impl ModelArgs {
    /// Refuses devices that compute nothing, for a tool whose result would mean nothing.
    ///
    /// # Errors
    /// An error that says what to use.
    pub(crate) fn must_compute(&self, tool: &str) -> anyhow::Result<()> {
        self.compute.device.must_compute("--device", tool)?;
        self.host.must_compute("--host", tool)
    }

    /// What computes routed experts beside a device.
    ///
    /// # Errors
    /// An error if it is neither the CPUs nor modelled.
    pub(crate) fn host_options(&self) -> anyhow::Result<HostOptions> {
        let cpu = self.compute.cpu_options();
        match &self.host {
            DeviceArg::Cpu => Ok(HostOptions::Cpu(cpu)),
            DeviceArg::Virtual(device) if device.is_modelled() => {
                Ok(HostOptions::Modelled(device.options(cpu)))
            }
            DeviceArg::Virtual(_) | DeviceArg::Cuda(_) => anyhow::bail!(
                "--host takes cpu, or a virtual device with mode=modelled\n  leave it out: the CPUs compute the experts"
            ),
        }
    }

    /// The cache's element type: what was asked, else exact with the exact kernels.
    pub(crate) fn kv_dtype(&self) -> KvDType {
        match (self.kv_dtype, self.compute.isa) {
            (Some(KvDTypeArg::Bf16), _) => KvDType::Bf16,
            (Some(KvDTypeArg::F32), _) | (None, IsaArg::Scalar) => KvDType::F32,
            (None, _) => KvDType::Bf16,
        }
    }
}

/// Parses a number of slots.
fn ring_slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(slots) if slots >= 2 => Ok(slots),
        _ => Err("write 2 or more: one expert computes while the next is copied".to_owned()),
    }
}

/// Which device computes, with which kernels, on how many threads.
#[derive(Args, Clone)]
pub(crate) struct ComputeArgs {
    /// cpu, cuda (the first GPU), cuda:UUID, or virtual:memory=8Gi (a device of that memory, computed by the CPU; docs/gpu.md
    /// has its other properties)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceArg,
    /// Instruction set; auto takes the best that the CPU has
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) isa: IsaArg,
    /// Compute threads (default: the CPUs this process may use)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Bytes of the GPU's memory that may be used (default: what is free)
    #[arg(long, value_name = "BYTES")]
    device_memory: Option<u64>,
    /// How activations enter products; routers always take f32
    #[arg(long, value_enum, default_value = "auto")]
    activations: ActivationsArg,
    #[command(flatten)]
    gpu: GpuArgs,
}

/// What every use of a GPU needs.
#[derive(Args, Clone)]
pub(crate) struct GpuArgs {
    /// Directory with compiled kernels, filled at first use (default: ~/.cache/hearth/kernels)
    #[arg(long, value_name = "DIR", env = "HEARTH_KERNEL_CACHE")]
    kernel_cache: Option<PathBuf>,
    /// Directory with kernels that were compiled ahead
    #[arg(long, value_name = "DIR", env = "HEARTH_KERNELS", hide = true)]
    kernels: Option<PathBuf>,
    #[command(flatten)]
    nvrtc: NvrtcArgs,
}

impl GpuArgs {
    /// The options for a GPU.
    pub(crate) fn options(
        &self,
        environment: &Environment,
        uuid: Option<String>,
        budget_bytes: Option<u64>,
    ) -> GpuOptions {
        GpuOptions {
            uuid,
            or_any: false,
            budget_bytes,
            activations: ActivationsArg::Auto,
            kernels: KernelDirectories {
                image: self.kernels.clone().or_else(kernels_of_image),
                cache: self
                    .kernel_cache
                    .clone()
                    .or_else(|| environment.in_cache("kernels")),
                nvrtc: self.nvrtc.directory(environment),
            },
            trace: None,
        }
    }
}

/// Where the compiler of kernels lies.
#[derive(Args, Clone)]
pub(crate) struct NvrtcArgs {
    /// Directory with libnvrtc.so.12 (or 13, for drivers from 580 on), if the system does not find it (default: ~/.cache/hearth/nvrtc)
    #[arg(long, value_name = "DIR", env = "HEARTH_NVRTC")]
    nvrtc: Option<PathBuf>,
}

impl NvrtcArgs {
    /// The directory that was named, or the cache's.
    pub(crate) fn directory(&self, environment: &Environment) -> Option<PathBuf> {
        self.nvrtc.clone().or_else(|| environment.in_cache("nvrtc"))
    }
}

/// Where the image has kernels that were compiled ahead.
fn kernels_of_image() -> Option<PathBuf> {
    let directory = PathBuf::from("/usr/share/hearth/kernels");
    directory.is_dir().then_some(directory)
}

impl ComputeArgs {
    /// The device with all that these arguments say of it; no pinning.
    ///
    /// # Errors
    /// An option that the device has no use for; `uses_cpus`: CPUs compute beside a GPU.
    pub(crate) fn device_options(
        &self,
        environment: &Environment,
        uses_cpus: bool,
    ) -> anyhow::Result<DeviceOptions> {
        self.refuse_idle_options(uses_cpus)?;
        let cpu = self.cpu_options();
        Ok(match &self.device {
            DeviceArg::Cpu => DeviceOptions::Cpu(cpu),
            DeviceArg::Cuda(uuid) => DeviceOptions::Gpu(GpuOptions {
                activations: self.activations,
                ..self
                    .gpu
                    .options(environment, uuid.clone(), self.device_memory)
            }),
            DeviceArg::Virtual(device) => DeviceOptions::Virtual(device.options(cpu)),
        })
    }

    /// Kernels and threads of the CPUs; no pinning.
    pub(crate) fn cpu_options(&self) -> CpuOptions {
        CpuOptions {
            isa: self.isa.isa(),
            threads: self.threads(),
            numa_cpus: Vec::new(),
        }
    }

    /// What would be without effect is more likely a mistake than meant.
    fn refuse_idle_options(&self, uses_cpus: bool) -> anyhow::Result<()> {
        let (here, is_gpu, has_cpu) = match &self.device {
            DeviceArg::Cpu => ("cpu", false, true),
            DeviceArg::Cuda(_) => ("cuda", true, uses_cpus),
            DeviceArg::Virtual(device) if device.is_modelled() => {
                ("virtual and mode=modelled", false, uses_cpus)
            }
            DeviceArg::Virtual(_) => ("virtual", false, true),
        };
        let given = [
            ("--isa", !has_cpu && self.isa != IsaArg::Auto),
            ("--threads", !has_cpu && self.threads.is_some()),
            ("--device-memory", !is_gpu && self.device_memory.is_some()),
        ];
        let rounds = match self.activations {
            ActivationsArg::Auto | ActivationsArg::F32 => None,
            ActivationsArg::Bf16 => Some("bf16"),
            ActivationsArg::Fp8 => Some("fp8"),
        };
        if let (Some(name), false) = (rounds, is_gpu) {
            anyhow::bail!(
                "--activations {name} is for GPUs, and --device {here} computes with f32: its kernels round nothing\n  leave it out, or use --device cuda"
            );
        }
        let there = if has_cpu { "cuda" } else { "cpu" };
        match given.iter().find(|(_, is_idle)| *is_idle) {
            Some((option, _)) => anyhow::bail!(
                "{option} has no effect with --device {here}\n  leave it out, or use --device {there}"
            ),
            None => Ok(()),
        }
    }

    /// Threads asked for, else all that the process may use.
    pub(crate) fn threads(&self) -> usize {
        match self.threads {
            Some(threads) => threads as usize,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Instruction sets by name.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IsaArg {
    /// The reference kernels: exact and slow
    Scalar,
    /// AVX2 with FMA
    Avx2,
    /// AVX-512 with VBMI
    Avx512,
    /// The best that the CPU has
    Auto,
}

impl IsaArg {
    /// The kernels' own name, `None` for auto.
    pub(crate) fn isa(self) -> Option<Isa> {
        match self {
            Self::Scalar => Some(Isa::Scalar),
            Self::Avx2 => Some(Isa::Avx2),
            Self::Avx512 => Some(Isa::Avx512),
            Self::Auto => None,
        }
    }
}

/// Element types of the KV cache by name.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum KvDTypeArg {
    /// bfloat16
    Bf16,
    /// float32
    F32,
}

/// Forms of latent attention by name.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum MlaFormArg {
    /// Queries meet the cached latents
    Absorbed,
    /// Keys and values of all heads are computed from the latents once a pass: fewer operations for long prompts
    Expanded,
}

impl From<MlaFormArg> for PlanMlaForm {
    fn from(form: MlaFormArg) -> Self {
        match form {
            MlaFormArg::Absorbed => Self::Absorbed,
            MlaFormArg::Expanded => Self::Expanded,
        }
    }
}

/// Residency policies by name.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ResidencyArg {
    /// All weights stay in memory
    Resident,
    /// Weights are read ahead and dropped after use, within a budget
    MmapPrefetch,
    /// On a GPU or a virtual device: routed experts pass through a ring of slots in its memory, all else stays there
    StreamLoading,
    /// On a device: routed experts stay in the machine's memory and are computed by its CPUs, all else on the device
    HostExperts,
}

/// Ways to read experts of which not all are in memory.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertReadsArg {
    /// Directly if the memory that is available cannot hold all experts and the file system allows it, else cached
    Auto,
    /// By the page cache, which keeps what it has room for
    Cached,
    /// Past the page cache, into buffers of the budget
    Direct,
}

impl ResidencyArg {
    /// The name that the option takes.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::MmapPrefetch => "mmap-prefetch",
            Self::StreamLoading => "stream-loading",
            Self::HostExperts => "host-experts",
        }
    }
}
