//! Opens a model directory as a model that is ready to run.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::LoadOps;
use hearth_kernels::{Backend, CpuBackend, KvDType};
use hearth_model::{Model, Residency, modules};
use hearth_residency::{
    LoadProgress, MmapPrefetch, MmapPrefetchOptions, Placing, Resident, ResidentOptions,
    StreamLoading, StreamLoadingOptions,
};
use hearth_virtual::VirtualBackend;

use crate::cli::{ModelArgs, ResidencyArg};
use crate::device::{DeviceOptions, GpuBackend, OnDevice};
use crate::environment::Environment;

/// Number of modules beyond the running one that `MmapPrefetch` requests from the kernel.
const PREFETCH_MODULES: usize = 8;

/// Rows of a tile where experts are streamed: prompts are long there, and the device's memory is short.
const STREAMED_TILE_ROWS: usize = 512;

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
    /// Routed experts pass through a ring of slots in the device's memory.
    StreamLoading {
        /// Number of slots; `None` leaves it to the memory that there is.
        slots: Option<usize>,
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
            ResidencyArg::Resident => ResidencyPolicy::Resident,
            ResidencyArg::MmapPrefetch => ResidencyPolicy::MmapPrefetch {
                budget_bytes: args.residency_budget,
            },
            ResidencyArg::StreamLoading => ResidencyPolicy::StreamLoading {
                slots: args.ring_slots.map(|slots| slots as usize),
            },
        };
        let idle = [
            (
                "--residency-budget",
                args.residency_budget.is_some(),
                ResidencyArg::MmapPrefetch,
            ),
            (
                "--ring-slots",
                args.ring_slots.is_some(),
                ResidencyArg::StreamLoading,
            ),
        ];
        for (option, is_given, of) in idle {
            if is_given && args.residency != of {
                let [here, there] = [args.residency, of].map(ResidencyArg::name);
                anyhow::bail!(
                    "{option} has no effect with --residency {here}\n  leave it out, or use --residency {there}"
                );
            }
        }
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
    let policy = options.residency;
    Ok(match options.device.open()? {
        OnDevice::Cpu(backend) => {
            let residency = match policy {
                ResidencyPolicy::Resident => files.resident(&backend, resident, progress)?,
                ResidencyPolicy::MmapPrefetch { budget_bytes } => {
                    files.prefetched(&backend, budget_bytes)?
                }
                ResidencyPolicy::StreamLoading { .. } => anyhow::bail!(
                    "--residency stream-loading has no effect on the CPU, which computes where the weights are\n  use --residency resident or mmap-prefetch, or --device virtual:memory=8Gi"
                ),
            };
            OnDevice::Cpu(files.model(backend, residency)?)
        }
        OnDevice::Gpu(backend) => {
            let (residency, tile_rows) = match policy {
                ResidencyPolicy::Resident => {
                    (files.resident(&backend, resident, progress)?, usize::MAX)
                }
                ResidencyPolicy::MmapPrefetch { .. } => anyhow::bail!(CPU_ONLY),
                ResidencyPolicy::StreamLoading { slots } => {
                    (files.streamed_to_gpu(&backend, slots)?, STREAMED_TILE_ROWS)
                }
            };
            let loaded = files.model(backend, residency)?;
            OnDevice::Gpu(LoadedOn {
                model: loaded.model.in_row_tiles(tile_rows),
                ..loaded
            })
        }
        OnDevice::Virtual(backend) => {
            let (residency, tile_rows) = match policy {
                ResidencyPolicy::Resident => {
                    let residency = files.resident(&backend, resident, progress);
                    (
                        residency.map_err(|error| files.or_stream(error))?,
                        usize::MAX,
                    )
                }
                ResidencyPolicy::MmapPrefetch { .. } => anyhow::bail!(CPU_ONLY),
                ResidencyPolicy::StreamLoading { slots } => {
                    (files.streamed(&backend, slots)?, STREAMED_TILE_ROWS)
                }
            };
            let loaded = files.model(backend, residency)?;
            OnDevice::Virtual(LoadedOn {
                model: loaded.model.in_row_tiles(tile_rows),
                ..loaded
            })
        }
    })
}

/// Why a device with memory of its own does not prefetch.
const CPU_ONLY: &str = "--residency mmap-prefetch applies to the CPU only: a device with memory of its own keeps the weights there\n  use --residency resident, or --device cpu";

/// A model's files, opened and mapped.
struct Files<'a> {
    directory: &'a Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
}

impl Files<'_> {
    /// Keeps all weights in memory.
    fn resident<B: Backend>(
        &self,
        backend: &Arc<B>,
        options: ResidentOptions<'_>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let (modules, backend) = (modules(&self.config)?, Arc::clone(backend));
        let policy = Resident::open_with(&self.checkpoint, modules, backend, options, progress)?;
        Ok(Arc::new(policy))
    }

    /// Reads weights ahead of use and drops them after it.
    fn prefetched<B: Backend>(
        &self,
        backend: &Arc<B>,
        budget_bytes: Option<u64>,
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let (modules, backend) = (modules(&self.config)?, Arc::clone(backend));
        let options = MmapPrefetchOptions {
            budget_bytes: budget_bytes.unwrap_or_else(|| self.checkpoint.total_bytes() / 2),
            lookahead: PREFETCH_MODULES,
            ..MmapPrefetchOptions::default()
        };
        let policy = MmapPrefetch::open(&self.checkpoint, modules, backend, options)?;
        Ok(Arc::new(policy))
    }

    /// Lets routed experts pass through a ring of slots.
    fn streamed<B: Backend + LoadOps>(
        &self,
        backend: &Arc<B>,
        slots: Option<usize>,
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let (modules, backend) = (modules(&self.config)?, Arc::clone(backend));
        let moe = self.config.moe.as_ref();
        let options = StreamLoadingOptions {
            slots,
            experts_per_token: moe.map_or(1, |moe| moe.experts_per_token),
            listener: None,
        };
        let policy = StreamLoading::open(&self.checkpoint, &modules, backend, options)?;
        tracing::info!(slots = policy.slots(), "experts are streamed");
        Ok(Arc::new(policy))
    }

    /// Lets routed experts pass through a ring of slots in a GPU's memory.
    #[cfg(feature = "cuda")]
    fn streamed_to_gpu(
        &self,
        backend: &Arc<GpuBackend>,
        slots: Option<usize>,
    ) -> anyhow::Result<Arc<dyn Residency<GpuBackend>>> {
        self.streamed(backend, slots)
    }

    /// The same in a build that opens no GPU.
    #[cfg(not(feature = "cuda"))]
    fn streamed_to_gpu(
        &self,
        _backend: &Arc<GpuBackend>,
        _slots: Option<usize>,
    ) -> anyhow::Result<Arc<dyn Residency<GpuBackend>>> {
        anyhow::bail!(crate::device::WITHOUT_GPUS)
    }

    /// Adds the remedy that a model with experts has where not all of it fits.
    fn or_stream(&self, error: anyhow::Error) -> anyhow::Error {
        match self.config.moe {
            Some(_) => {
                anyhow::anyhow!("{error}\n  or stream its experts: --residency stream-loading")
            }
            None => error,
        }
    }

    fn model<B: Backend>(
        self,
        backend: Arc<B>,
        residency: Arc<dyn Residency<B>>,
    ) -> anyhow::Result<LoadedOn<B>> {
        let model = Model::new(self.config, backend, Arc::clone(&residency))
            .with_context(|| format!("{} cannot be run", self.directory.display()))?;
        Ok(LoadedOn {
            model,
            residency,
            checkpoint: self.checkpoint,
        })
    }
}

/// Identifies everything that must be equal for two workers to compute the same bits: kernels, cache type, form of latent
/// attention and order of the experts' sum, but not threads.
pub(crate) fn numerics<B: Backend>(model: &Model<B>, kv_dtype: KvDType) -> String {
    let is_latent = model.kv_layout(1, kv_dtype).value_in_key;
    let form = if is_latent { " mla=absorbed" } else { "" };
    // Versions before the tree added experts by index, and are no match.
    let sum = match model.config().moe {
        Some(_) => " experts=tree",
        None => "",
    };
    format!("{} kv={kv_dtype:?}{form}{sum}", model.backend().numerics())
}
