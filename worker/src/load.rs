//! From a model directory to a model that is ready to run.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{CpuBackend, CpuOptions, KvDType};
use hearth_model::{Model, Residency};
use hearth_residency::{LoadProgress, MmapPrefetch, Resident, ResidentOptions};

use crate::cli::{ModelArgs, ResidencyArg};

/// How many modules ahead of the running one `MmapPrefetch` asks the kernel for.
const PREFETCH_MODULES: usize = 8;

/// What decides how a model is opened.
pub(crate) struct LoadOptions {
    /// Kernels, threads and pinning.
    pub(crate) cpu: CpuOptions,
    /// Residency, with the bytes of weights that may be in memory at a time.
    pub(crate) residency: ResidencyPolicy,
}

/// How weights come to be where they are used.
pub(crate) enum ResidencyPolicy {
    /// All stay in memory.
    Resident,
    /// Read ahead and dropped behind.
    MmapPrefetch {
        /// Bytes of weights in memory at a time; `None`: half of them.
        budget_bytes: Option<u64>,
    },
}

/// A model on the CPU, with what the tools report about it.
pub(crate) struct Loaded {
    /// Ready to run.
    pub(crate) model: Model<CpuBackend>,
    /// Its weights' policy, for statistics.
    pub(crate) residency: Arc<dyn Residency<CpuBackend>>,
    /// The mapped files.
    pub(crate) checkpoint: Checkpoint,
}

impl LoadOptions {
    /// The tools' arguments as options; no pinning.
    pub(crate) fn from_args(args: &ModelArgs) -> Self {
        let residency = match args.residency {
            ResidencyArg::Resident => ResidencyPolicy::Resident,
            ResidencyArg::MmapPrefetch => ResidencyPolicy::MmapPrefetch {
                budget_bytes: args.residency_budget,
            },
        };
        let cpu = CpuOptions {
            isa: args.compute.isa.isa(),
            threads: args.compute.threads(),
            cpus: Vec::new(),
            numa_nodes: Vec::new(),
        };
        Self { cpu, residency }
    }
}

/// Opens the model in `directory`; with `Resident` its pages are read in, and `progress` hears how far that is.
///
/// # Errors
/// Whatever is wrong with the directory's files, by name; or a device that cannot be had.
pub(crate) fn open(
    directory: &Path,
    options: LoadOptions,
    progress: &mut dyn FnMut(LoadProgress),
) -> anyhow::Result<Loaded> {
    let config = ModelConfig::read(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    let touch_threads = options.cpu.threads;
    let backend = Arc::new(CpuBackend::new(options.cpu)?);
    let modules = Model::<CpuBackend>::modules(&config)?;
    let residency: Arc<dyn Residency<CpuBackend>> = match options.residency {
        ResidencyPolicy::Resident => Arc::new(Resident::open_with(
            &checkpoint,
            modules,
            Arc::clone(&backend),
            ResidentOptions { touch_threads },
            progress,
        )?),
        ResidencyPolicy::MmapPrefetch { budget_bytes } => {
            let budget_bytes = budget_bytes.unwrap_or_else(|| checkpoint.total_bytes() / 2);
            Arc::new(MmapPrefetch::open(
                &checkpoint,
                modules,
                Arc::clone(&backend),
                budget_bytes,
                PREFETCH_MODULES,
            )?)
        }
    };
    let model = Model::new(config, backend, Arc::clone(&residency))
        .with_context(|| format!("{} cannot be run", directory.display()))?;
    Ok(Loaded {
        model,
        residency,
        checkpoint,
    })
}

/// What two workers must share for their bits to be equal: kernels and cache type, not threads.
pub(crate) fn numerics(model: &Model<CpuBackend>, kv_dtype: KvDType) -> String {
    format!("cpu {} kv={kv_dtype:?}", model.backend().isa().name())
}
