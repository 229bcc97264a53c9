//! Opens a model directory as a model that is ready to run.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{Backend, CpuBackend, KvDType};
use hearth_model::{Model, Residency, modules};
use hearth_residency::{
    LoadProgress, MmapPrefetch, MmapPrefetchOptions, Placing, Resident, ResidentOptions,
};
use hearth_virtual::VirtualBackend;

use crate::cli::{ModelArgs, ResidencyArg};
use crate::device::{DeviceOptions, GpuBackend, OnDevice};
use crate::environment::Environment;

/// Number of modules beyond the running one that `MmapPrefetch` requests from the kernel.
const PREFETCH_MODULES: usize = 8;

/// Options for opening a model.
pub(crate) struct LoadOptions<'a> {
    /// The device, with its kernels, threads and pinning.
    pub(crate) device: DeviceOptions,
    /// Residency policy, with the bytes of weights that may be in memory at a time.
    pub(crate) residency: ResidencyPolicy,
    /// NUMA nodes for weights that stay in the machine's memory; `None` leaves their placement to the system.
    pub(crate) placing: Option<Placing<'a>>,
}

/// Policy for keeping weights in memory.
pub(crate) enum ResidencyPolicy {
    /// All weights stay in memory.
    Resident,
    /// Weights are read ahead of use and dropped after it.
    MmapPrefetch {
        /// Bytes of weights in memory at a time; `None` means half of them.
        budget_bytes: Option<u64>,
    },
}

/// A model on a device, with the data that the tools report about it.
pub(crate) struct LoadedOn<B: Backend> {
    /// The model, ready to run.
    pub(crate) model: Model<B>,
    /// Residency policy of its weights, for statistics.
    pub(crate) residency: Arc<dyn Residency<B>>,
    /// The mapped files.
    pub(crate) checkpoint: Checkpoint,
}

/// A model on the requested device.
pub(crate) type Loaded =
    OnDevice<LoadedOn<CpuBackend>, LoadedOn<GpuBackend>, LoadedOn<VirtualBackend>>;

impl LoadOptions<'_> {
    /// Converts the tools' arguments to options, without pinning.
    ///
    /// # Errors
    /// An error if options conflict.
    pub(crate) fn from_args(args: &ModelArgs, environment: &Environment) -> anyhow::Result<Self> {
        let residency = match args.residency {
            ResidencyArg::Resident if args.residency_budget.is_some() => anyhow::bail!(
                "--residency-budget has no effect with --residency resident\n  leave it out, or use --residency mmap-prefetch"
            ),
            ResidencyArg::Resident => ResidencyPolicy::Resident,
            ResidencyArg::MmapPrefetch => ResidencyPolicy::MmapPrefetch {
                budget_bytes: args.residency_budget,
            },
        };
        Ok(Self {
            device: args.compute.device_options(environment)?,
            residency,
            placing: None,
        })
    }
}

/// Opens the model in `directory`; with `Resident`, its pages are read or copied to the GPU. `progress` receives
/// updates.
///
/// # Errors
/// An error that names the faulty file in the directory, or a device that cannot be opened.
pub(crate) fn open(
    directory: &Path,
    options: LoadOptions<'_>,
    progress: &mut dyn FnMut(LoadProgress),
) -> anyhow::Result<Loaded> {
    let touch_threads = options.device.touch_threads();
    let config = ModelConfig::read(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    let files = Files {
        directory,
        config,
        checkpoint,
    };
    let resident = ResidentOptions {
        touch_threads,
        placing: options.placing,
    };
    let policy = &options.residency;
    let device = options.device.open()?;
    if let (ResidencyPolicy::MmapPrefetch { .. }, OnDevice::Gpu(_) | OnDevice::Virtual(_)) =
        (policy, &device)
    {
        anyhow::bail!(
            "--residency mmap-prefetch applies to the CPU only: on a device of its own memory the weights stay there\n  use --residency resident, or --device cpu"
        );
    }
    Ok(match device {
        OnDevice::Cpu(backend) => {
            OnDevice::Cpu(files.open_on(backend, policy, resident, progress)?)
        }
        OnDevice::Gpu(backend) => {
            OnDevice::Gpu(files.open_on(backend, policy, resident, progress)?)
        }
        OnDevice::Virtual(backend) => {
            OnDevice::Virtual(files.open_on(backend, policy, resident, progress)?)
        }
    })
}

/// A model's files, opened and mapped.
struct Files<'a> {
    directory: &'a Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
}

impl Files<'_> {
    fn open_on<B: Backend>(
        self,
        backend: Arc<B>,
        policy: &ResidencyPolicy,
        resident: ResidentOptions<'_>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> anyhow::Result<LoadedOn<B>> {
        let Self {
            directory,
            config,
            checkpoint,
        } = self;
        let modules = modules(&config)?;
        let residency: Arc<dyn Residency<B>> = match policy {
            ResidencyPolicy::Resident => Arc::new(Resident::open_with(
                &checkpoint,
                modules,
                Arc::clone(&backend),
                resident,
                progress,
            )?),
            ResidencyPolicy::MmapPrefetch { budget_bytes } => {
                let budget_bytes = budget_bytes.unwrap_or_else(|| checkpoint.total_bytes() / 2);
                Arc::new(MmapPrefetch::open(
                    &checkpoint,
                    modules,
                    Arc::clone(&backend),
                    MmapPrefetchOptions {
                        budget_bytes,
                        lookahead: PREFETCH_MODULES,
                        ..MmapPrefetchOptions::default()
                    },
                )?)
            }
        };
        let model = Model::new(config, backend, Arc::clone(&residency))
            .with_context(|| format!("{} cannot be run", directory.display()))?;
        Ok(LoadedOn {
            model,
            residency,
            checkpoint,
        })
    }
}

/// Identifies everything that must be equal for two workers to compute the same bits: kernels, cache type and form of
/// latent attention, but not threads.
pub(crate) fn numerics<B: Backend>(model: &Model<B>, kv_dtype: KvDType) -> String {
    let is_latent = model.kv_layout(1, kv_dtype).value_in_key;
    let form = if is_latent { " mla=absorbed" } else { "" };
    format!("{} kv={kv_dtype:?}{form}", model.backend().numerics())
}
