//! `hearth-worker profile`: measures this machine.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use hearth_crds::{GpuProfile, IsaProfile};
use hearth_profiler::{
    CpuMeter, Gflops, Measured, Meter, ProfileOptions, Scope, measure, measure_once,
};

use crate::cli::GpuArgs;
#[cfg(not(feature = "cuda"))]
use crate::device::WITHOUT_GPUS;
#[cfg(feature = "cuda")]
use crate::device::{DeviceOptions, OnDevice};
use crate::device::{GpuOptions, KernelDirectories};
use crate::environment::Environment;
use crate::logging::{self, print_data};
use crate::signals;
#[cfg(feature = "cuda")]
use crate::tools::rates;
use crate::tools::virtual_device::VirtualDevice;

/// Arguments of `profile`.
#[derive(Args)]
pub(crate) struct ProfileArgs {
    /// Print the profile as JSON (the status of a NodeProfile)
    #[arg(long)]
    json: bool,
    /// Measure the disk that holds DIR, such as the directory of a model: the GB/s at which the largest files in DIR are read, past
    /// the page cache and through it, up to 256 MiB or 0.4 s each way; where DIR itself has less than 1 MiB of files, those in up
    /// to three levels of directories below. Without it no disk is measured
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Where DIR itself has less than 1 MiB of files, write one of 128 MiB there, read it and remove it; needs 1 GiB free
    #[arg(long, requires = "disk")]
    probe_disk: bool,
    /// What to measure: what this process may use, or the whole node around its container
    #[arg(long, value_enum, default_value = "process")]
    scope: ScopeArg,
    /// Name of the node (default: the host's)
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Reuse the rates that FILE has of a quiet moment, and keep new ones there
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
    /// Measure even if FILE has rates
    #[arg(long, requires = "keep")]
    anew: bool,
    /// Report on standard error what is being measured, one line each
    #[arg(long)]
    progress: bool,
    /// End when the parent process ends, which is this one
    #[arg(long, value_name = "PID", hide = true)]
    with_parent: Option<u32>,
    /// Measure this virtual device too, such as virtual:memory=8Gi, and let it stand for the machine's GPUs
    #[arg(long, value_name = "DEVICE")]
    virtual_device: Option<VirtualDevice>,
    #[command(flatten)]
    gpu: GpuArgs,
}

/// Meter for this machine's CPUs and GPUs.
struct DeviceMeter<'a> {
    gpu: &'a GpuArgs,
    environment: &'a Environment,
    /// Whether a virtual device stands in for the GPUs.
    has_stand_in: bool,
    /// Whether it prints a line for each measurement.
    tells: bool,
}

impl Meter for DeviceMeter<'_> {
    fn isa(&self) -> IsaProfile {
        CpuMeter.isa()
    }

    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> Result<f64, String> {
        CpuMeter.read_gbps(cpus, bytes)
    }

    fn gflops(&self, cpus: &[u32]) -> Result<Gflops, String> {
        CpuMeter.gflops(cpus)
    }

    fn gpu(&self, gpu: &GpuProfile) -> Option<Result<GpuProfile, String>> {
        if self.has_stand_in || gpu_obstacle(self.gpu, self.environment).is_some() {
            return None;
        }
        self.tell(&format!("copies and arithmetic of {}", gpu.name));
        let memory_bytes = MOST_GPU_BYTES.min(gpu.free_bytes / 2);
        let uuid = Some(gpu.uuid.clone());
        let options = self.gpu.options(self.environment, uuid, Some(memory_bytes));
        Some(measured(options, memory_bytes).map_err(|error| format!("{error:#}")))
    }

    fn tell(&self, what: &str) {
        if self.tells {
            logging::say(format_args!("{PROGRESS}{what}"));
        }
    }
}

/// Memory that measuring a GPU takes at most.
const MOST_GPU_BYTES: u64 = 4 << 30;

/// Start of each line printed with `--progress`.
const PROGRESS: &str = "measuring ";

#[derive(Clone, Copy, ValueEnum)]
enum ScopeArg {
    /// What this process's CPU set, CPU quota and memory limit allow
    Process,
    /// All CPUs and all memory of the node
    Node,
}

/// Measures and prints the profile.
pub(crate) fn run(args: &ProfileArgs, environment: &Environment) -> anyhow::Result<()> {
    if let Some(parent) = args.with_parent {
        signals::end_with_parent(parent)?;
    }
    let options = ProfileOptions {
        node: args.node.clone(),
        scope: match args.scope {
            ScopeArg::Process => Scope::Process,
            ScopeArg::Node => Scope::Node,
        },
        disk: args.disk.clone(),
        probe_disk: args.probe_disk,
        ..ProfileOptions::default()
    };
    let meter = &DeviceMeter {
        gpu: &args.gpu,
        environment,
        has_stand_in: args.virtual_device.is_some(),
        tells: args.progress,
    };
    let Measured {
        mut profile,
        warnings,
    } = match &args.keep {
        Some(file) => measure_once(&options, meter, file, args.anew)?,
        None => measure(&options, meter)?,
    };
    for warning in warnings {
        tracing::warn!("profile: {warning}");
    }
    if let Some(device) = &args.virtual_device {
        meter.tell("the virtual device");
        device.stand_in(&device.measure()?, &mut profile);
    } else if matches!(args.scope, ScopeArg::Process) && !profile.gpus.is_empty() {
        let obstacle = gpu_obstacle(&args.gpu, environment);
        profile
            .gpus
            .iter_mut()
            .for_each(|gpu| gpu.obstacle.clone_from(&obstacle));
    }
    if args.json {
        print_data(&format!("{}\n", serde_json::to_string_pretty(&profile)?))
    } else {
        print_data(&hearth_profiler::summary(&profile))
    }
}

/// Reason this program cannot compute on the GPUs that NVML reports.
#[cfg(feature = "cuda")]
fn gpu_obstacle(args: &GpuArgs, environment: &Environment) -> Option<String> {
    let KernelDirectories { image, nvrtc, .. } = args.options(environment, None, None).kernels;
    hearth_cuda::obstacle(image.as_slice(), nvrtc.as_deref())
}

/// Opens a GPU and measures it.
#[cfg(feature = "cuda")]
fn measured(options: GpuOptions, memory_bytes: u64) -> anyhow::Result<GpuProfile> {
    match DeviceOptions::Gpu(options).open()? {
        OnDevice::Gpu(backend) => Ok(rates::of_gpu(&backend, memory_bytes)?),
        OnDevice::Cpu(_) | OnDevice::Virtual(_) => anyhow::bail!("no GPU was opened"),
    }
}

#[cfg(not(feature = "cuda"))]
fn measured(_options: GpuOptions, _memory_bytes: u64) -> anyhow::Result<GpuProfile> {
    anyhow::bail!(WITHOUT_GPUS)
}

#[cfg(not(feature = "cuda"))]
fn gpu_obstacle(_args: &GpuArgs, _environment: &Environment) -> Option<String> {
    Some("this hearth-worker was built without GPUs".to_owned())
}
