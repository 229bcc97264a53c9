//! Selection of the device: the only place that connects backends with the rest of the worker.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use hearth_crds::PlanActivations;
use hearth_kernels::trace::Trace;
use hearth_kernels::{CpuBackend, CpuOptions};
use hearth_virtual::{VirtualBackend, VirtualOptions};

pub(crate) use crate::virtual_device::VirtualArg;

/// A device by name, as accepted by `--device`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum DeviceArg {
    /// This machine's CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU: the one with this UUID, or the first.
    Cuda(Option<String>),
    /// A virtual device.
    Virtual(VirtualArg),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", uuid)) if !uuid.is_empty() => Ok(Self::Cuda(Some(uuid.to_owned()))),
            Some(("virtual", properties)) => properties.parse().map(Self::Virtual),
            None if text == "virtual" => "".parse().map(Self::Virtual),
            _ => Err(
                "write cpu, cuda, cuda:UUID as `nvidia-smi -L` prints it, or virtual:memory=8Gi"
                    .to_owned(),
            ),
        }
    }
}

impl DeviceArg {
    /// Refuses a device that computes nothing, for a tool whose result would mean nothing.
    ///
    /// # Errors
    /// An error that says what to use.
    pub(crate) fn must_compute(&self, option: &str, tool: &str) -> anyhow::Result<()> {
        match self {
            Self::Virtual(virtual_device) if virtual_device.is_modelled() => anyhow::bail!(
                "{option} virtual with mode=modelled computes nothing, so the result of {tool} would mean nothing\n  use mode=exact, or hearth-worker bench"
            ),
            _ => Ok(()),
        }
    }
}

/// Options for opening a GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct GpuOptions {
    /// UUID of the GPU; `None` means the first.
    pub(crate) uuid: Option<String>,
    /// Whether to use another GPU if that one is not visible.
    pub(crate) or_any: bool,
    /// Bytes of its memory that may be used; `None` means all free memory.
    pub(crate) budget_bytes: Option<u64>,
    /// Representation of activations in products.
    pub(crate) activations: ActivationsArg,
    /// Directories of compiled kernels.
    pub(crate) kernels: KernelDirectories,
    /// Receives what it does.
    pub(crate) trace: Option<Arc<Trace>>,
}

/// Directories with compiled kernels: the image's is read, the cache is read and written.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelDirectories {
    /// Kernels compiled ahead of time.
    pub(crate) image: Option<PathBuf>,
    /// Kernels compiled at first use.
    pub(crate) cache: Option<PathBuf>,
    /// Directory of the kernel compiler, if the system does not find it.
    pub(crate) nvrtc: Option<PathBuf>,
}

/// How activations enter products, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ActivationsArg {
    /// bf16 on a GPU, f32 on every other device
    #[default]
    Auto,
    /// Unrounded: what every device computes
    F32,
    /// Rounded to bfloat16, on a GPU: a third of the work
    Bf16,
    /// Quantised to FP8 for FP8 weights, on a GPU: the least work, and the least exact
    Fp8,
}

impl From<PlanActivations> for ActivationsArg {
    fn from(planned: PlanActivations) -> Self {
        match planned {
            PlanActivations::F32 => Self::F32,
            PlanActivations::BF16 => Self::Bf16,
        }
    }
}

/// A device and the options for opening it.
pub(crate) enum DeviceOptions {
    /// The CPU.
    Cpu(CpuOptions),
    /// A GPU.
    Gpu(GpuOptions),
    /// A virtual device.
    Virtual(VirtualOptions),
}

/// What computes routed experts beside a device.
pub(crate) enum HostOptions {
    /// This machine's CPUs.
    Cpu(CpuOptions),
    /// Nothing: a model of the time that they take.
    Modelled(VirtualOptions),
}

/// A value that belongs to one of the devices that this build supports.
pub(crate) enum OnDevice<C, G, V> {
    /// Value on the CPU.
    Cpu(C),
    /// Value on a GPU.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Gpu(G),
    /// Value on a virtual device.
    Virtual(V),
}

/// The GPU backend of this build.
#[cfg(feature = "cuda")]
pub(crate) type GpuBackend = hearth_cuda::CudaBackend;
/// Placeholder in a build without GPU support: it is never created.
#[cfg(not(feature = "cuda"))]
pub(crate) type GpuBackend = CpuBackend;

/// A backend of any kind.
pub(crate) type AnyBackend = OnDevice<Arc<CpuBackend>, Arc<GpuBackend>, Arc<VirtualBackend>>;

/// Evaluates an expression with the value on the device, whichever device it is.
macro_rules! on_device {
    ($value:expr, $name:ident => $body:expr) => {
        match $value {
            $crate::device::OnDevice::Cpu($name) => $body,
            $crate::device::OnDevice::Gpu($name) => $body,
            $crate::device::OnDevice::Virtual($name) => $body,
        }
    };
}
pub(crate) use on_device;

impl DeviceOptions {
    /// Number of threads that read files into memory.
    pub(crate) fn touch_threads(&self) -> usize {
        match self {
            Self::Cpu(options) => options.threads,
            // Weights are copied to the device, which loads the pages.
            Self::Gpu(_) | Self::Virtual(_) => 0,
        }
    }

    /// Gives the device a trace by its clock, which is off and returned; the CPU has no lanes of its own to record.
    pub(crate) fn traced(&mut self) -> Arc<Trace> {
        match self {
            Self::Cpu(_) => Arc::default(),
            Self::Gpu(options) => Arc::clone(options.trace.insert(Arc::default())),
            Self::Virtual(options) => {
                let trace = Trace::stretched(options.mode.stretch().unwrap_or(1.0));
                Arc::clone(options.trace.insert(Arc::new(trace)))
            }
        }
    }

    /// The trace that the device was given.
    pub(crate) fn trace(&self) -> Option<&Arc<Trace>> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(options) => options.trace.as_ref(),
            Self::Virtual(options) => options.trace.as_ref(),
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// An error that says what is missing, with the remedy.
    pub(crate) fn open(self) -> anyhow::Result<AnyBackend> {
        match self {
            Self::Cpu(options) => Ok(OnDevice::Cpu(Arc::new(CpuBackend::new(options)?))),
            Self::Gpu(options) => open_gpu(options),
            Self::Virtual(options) => {
                Ok(OnDevice::Virtual(Arc::new(VirtualBackend::new(options)?)))
            }
        }
    }
}

#[cfg(feature = "cuda")]
fn open_gpu(options: GpuOptions) -> anyhow::Result<AnyBackend> {
    use hearth_cuda::{Activations, CudaBackend, CudaOptions};
    let KernelDirectories {
        image,
        cache,
        nvrtc,
    } = options.kernels;
    let mut uuid = options.uuid;
    if let (Some(planned), true) = (&uuid, options.or_any) {
        let seen = hearth_cuda::devices()?;
        if !seen.iter().any(|gpu| gpu.uuid == *planned) {
            tracing::info!(
                planned,
                "the GPU handed out is not the one that the plan names"
            );
            uuid = None;
        }
    }
    let options = CudaOptions {
        uuid,
        budget_bytes: options.budget_bytes,
        activations: match options.activations {
            ActivationsArg::Auto => Activations::default(),
            ActivationsArg::F32 => Activations::F32,
            ActivationsArg::Bf16 => Activations::Bf16,
            ActivationsArg::Fp8 => Activations::Fp8,
        },
        kernel_cache: image.into_iter().chain(cache).collect(),
        nvrtc,
        sentinels: None,
        without_wgmma: false,
        trace: options.trace,
    };
    let backend = CudaBackend::new(options)?;
    Ok(OnDevice::Gpu(Arc::new(backend)))
}

/// Why this build opens no GPU.
#[cfg(not(feature = "cuda"))]
pub(crate) const WITHOUT_GPUS: &str = "this hearth-worker was built without GPUs\n  build it with the feature `cuda` (the default), or use --device cpu";

#[cfg(not(feature = "cuda"))]
fn open_gpu(_options: GpuOptions) -> anyhow::Result<AnyBackend> {
    anyhow::bail!(WITHOUT_GPUS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named() {
        let parse = |text: &str| text.parse::<DeviceArg>();
        assert_eq!(parse("cpu"), Ok(DeviceArg::Cpu));
        assert_eq!(parse("cuda"), Ok(DeviceArg::Cuda(None)));
        assert_eq!(
            parse("cuda:GPU-1a"),
            Ok(DeviceArg::Cuda(Some("GPU-1a".to_owned())))
        );
        for (wrong, says) in [
            ("gpu", "cuda:UUID"),
            ("cuda:", "cuda:UUID"),
            ("cpu:0", "cuda:UUID"),
            ("", "cuda:UUID"),
            ("virtual", "needs memory"),
            ("virtual:memory=0", "0 bytes"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
