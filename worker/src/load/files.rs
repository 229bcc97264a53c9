//! Opens a model's files by each residency policy.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use hearth_crds::STREAMED_TILE_ROWS;
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::LoadOps;
use hearth_kernels::trace::Trace;
use hearth_kernels::{Backend, CpuBackend, KernelError};
use hearth_model::{ExpertCache, ExpertShare, Model, ModuleId, ModuleSpec, Residency};
use hearth_residency::{
    HotExperts, LoadProgress, MmapPrefetch, MmapPrefetchOptions, ReadAhead, Resident,
    ResidentOptions, StreamEvent, StreamListener, StreamLoading, StreamLoadingOptions,
};
use hearth_virtual::VirtualBackend;

use super::{ExpertBudget, LoadedOn, ResidencyPolicy, Rings};
use crate::device::{GpuBackend, HostOptions};

/// Number of modules beyond the running one that `MmapPrefetch` requests from the kernel.
const PREFETCH_MODULES: usize = 8;
/// Rows of a tile of a prompt where memory is too short to keep the weights: what a prompt is computed in is others' memory. They
/// cost 7 % of a prompt's time where its weights are at hand, since a core reads them more often, and half as many twice that.
const MAPPED_TILE_ROWS: usize = 64;

/// How weights stay in memory, and who is told of it.
pub(super) type Keep<'a, 'p> = (ResidentOptions<'a>, &'p mut dyn FnMut(LoadProgress));

/// How experts get into slots of a device's memory.
pub(super) struct Slots<S, C> {
    /// Opens the policy that streams them.
    pub(super) streamed: S,
    /// Opens the cache of those that are used most.
    pub(super) cached: C,
}

pub(super) type Policy<B> = anyhow::Result<Arc<dyn Residency<B>>>;
type Cache<B> = anyhow::Result<Arc<dyn ExpertCache<B>>>;

/// Why a device with memory of its own does not prefetch.
const CPU_ONLY: &str = "--residency mmap-prefetch applies to the CPU only: a device with memory of its own keeps the weights there\n  use --residency resident, or --device cpu";

/// A model's files, opened and mapped.
pub(super) struct Files<'a> {
    pub(super) directory: &'a Path,
    pub(super) config: ModelConfig,
    pub(super) modules: Vec<ModuleSpec>,
    /// The experts of each layer whose first copies are prepared ahead.
    pub(super) prepared: ExpertShare,
    pub(super) checkpoint: Checkpoint,
    /// Whether no other process of the node reads these modules, as a member of a ring does.
    pub(super) is_alone: bool,
    /// Bytes of the machine's memory that the process is to need beside weights.
    pub(super) beside_bytes: u64,
    /// Receives which experts come and go, and what the CPUs do beside the device.
    pub(super) trace: Option<Arc<Trace>>,
}

impl Files<'_> {
    /// The model on the CPUs, which compute where the weights are.
    pub(super) fn on_cpu(
        self,
        backend: Arc<CpuBackend>,
        policy: ResidencyPolicy,
        (resident, progress): Keep<'_, '_>,
    ) -> anyhow::Result<LoadedOn<CpuBackend>> {
        let residency = match policy {
            ResidencyPolicy::Resident => self.resident(&backend, resident, progress)?,
            ResidencyPolicy::MmapPrefetch {
                budget_bytes,
                read_ahead,
            } => {
                let reading = (budget_bytes, read_ahead);
                let residency = self.prefetched(&backend, self.modules.clone(), reading)?;
                let loaded = self.model(backend, residency)?;
                return Ok(in_row_tiles(loaded, MAPPED_TILE_ROWS));
            }
            ResidencyPolicy::StreamLoading(_) => anyhow::bail!(
                "--residency stream-loading has no effect on the CPU, which computes where the weights are\n  use --residency resident or mmap-prefetch, or --device virtual:memory=8Gi"
            ),
            ResidencyPolicy::HostExperts { .. } => anyhow::bail!(
                "--residency host-experts has no effect on the CPU, which computes the experts anyway\n  use --residency resident or mmap-prefetch, or --device virtual:memory=8Gi"
            ),
        };
        self.model(backend, residency)
    }

    /// The model on a device with memory of its own.
    pub(super) fn on_device<B: Backend>(
        self,
        backend: Arc<B>,
        policy: ResidencyPolicy,
        host: HostOptions,
        keep: Keep<'_, '_>,
        slots: Slots<
            impl FnOnce(&Self, &Arc<B>, Rings) -> Policy<B>,
            impl FnOnce(&Self, &Arc<B>, usize) -> Cache<B>,
        >,
    ) -> anyhow::Result<LoadedOn<B>> {
        match policy {
            ResidencyPolicy::Resident => {
                let residency = self.resident(&backend, keep.0, keep.1);
                let residency = residency.map_err(|error| self.or_elsewhere(error))?;
                self.model(backend, residency)
            }
            ResidencyPolicy::MmapPrefetch { .. } => anyhow::bail!(CPU_ONLY),
            ResidencyPolicy::StreamLoading(rings) => {
                let residency = (slots.streamed)(&self, &backend, rings)?;
                let loaded = self.model(backend, residency)?;
                Ok(in_row_tiles(loaded, STREAMED_TILE_ROWS as usize))
            }
            ResidencyPolicy::HostExperts {
                budget,
                cache_slots,
            } => {
                let open = |files: &Self, backend: &_| match cache_slots {
                    0 => Ok(None),
                    _ => (slots.cached)(files, backend, cache_slots).map(Some),
                };
                self.with_host_experts(backend, host, budget, keep, open)
            }
        }
    }

    /// Keeps all weights in memory.
    fn resident<B: Backend>(
        &self,
        backend: &Arc<B>,
        options: ResidentOptions<'_>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        self.keep(backend, self.modules.clone(), options, progress)
    }

    /// Keeps the weights of some modules in memory.
    fn keep<B: Backend>(
        &self,
        backend: &Arc<B>,
        modules: Vec<ModuleSpec>,
        options: ResidentOptions<'_>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let backend = Arc::clone(backend);
        let policy = Resident::open_with(&self.checkpoint, modules, backend, options, progress)?;
        Ok(Arc::new(policy))
    }

    /// Reads the weights of some modules ahead of use and drops them after it.
    pub(super) fn prefetched<B: Backend>(
        &self,
        backend: &Arc<B>,
        modules: Vec<ModuleSpec>,
        (budget_bytes, read_ahead): (Option<u64>, ReadAhead),
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let options = MmapPrefetchOptions {
            budget_bytes: budget_bytes.unwrap_or_else(|| self.checkpoint.total_bytes() / 2),
            lookahead: PREFETCH_MODULES,
            read_ahead,
            // Others may have asked for the same pages, and not mapped them yet.
            is_short: self.is_alone && self.is_short_for(&modules),
            ..MmapPrefetchOptions::default()
        };
        let backend = Arc::clone(backend);
        let policy = MmapPrefetch::open(&self.checkpoint, modules, backend, options)?;
        Ok(Arc::new(policy))
    }

    /// Whether memory is too short for some modules beside what else the process is to need.
    fn is_short_for(&self, modules: &[ModuleSpec]) -> bool {
        let available_bytes = hearth_profiler::available_memory_bytes(Path::new("/"));
        let sizes = modules
            .iter()
            .map(|spec| spec.stored_bytes(&self.checkpoint));
        available_bytes.is_some_and(|available_bytes| {
            is_short(sizes.sum(), self.beside_bytes, available_bytes)
        })
    }

    /// Threads that prepare weights for their first copies: half of the CPUs. `None` where memory does not hold all of the
    /// model: its files would be read for pages that are gone when they are needed.
    fn preparing_threads(&self) -> Option<usize> {
        let available_bytes = hearth_profiler::available_memory_bytes(Path::new("/"))?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        (self.checkpoint.total_bytes() <= available_bytes).then_some((cpus / 2).max(1))
    }

    /// Lets routed experts pass through a ring of slots.
    pub(super) fn streamed<B: Backend + LoadOps>(
        &self,
        backend: &Arc<B>,
        rings: Rings,
    ) -> anyhow::Result<Arc<dyn Residency<B>>> {
        let moe = self.config.moe.as_ref();
        let options = StreamLoadingOptions {
            slots: rings.slots,
            streams_dense: rings.streams_dense,
            experts: moe.map_or(0, |moe| moe.experts),
            experts_per_token: moe.map_or(1, |moe| moe.experts_per_token),
            listener: self.trace.clone().map(listener),
        };
        let backend = Arc::clone(backend);
        let mut policy = StreamLoading::open(&self.checkpoint, &self.modules, backend, options)?;
        if let Some(threads) = self.preparing_threads() {
            policy.prepare(threads, self.prepared);
        }
        tracing::info!(slots = policy.slots(), "experts are streamed");
        Ok(Arc::new(policy))
    }

    /// Lets routed experts pass through a ring of slots in a GPU's memory.
    #[cfg(feature = "cuda")]
    pub(super) fn streamed_to_gpu(
        &self,
        backend: &Arc<GpuBackend>,
        rings: Rings,
    ) -> anyhow::Result<Arc<dyn Residency<GpuBackend>>> {
        self.streamed(backend, rings)
    }

    /// The same in a build that opens no GPU.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn streamed_to_gpu(
        &self,
        _backend: &Arc<GpuBackend>,
        _rings: Rings,
    ) -> anyhow::Result<Arc<dyn Residency<GpuBackend>>> {
        anyhow::bail!(crate::device::WITHOUT_GPUS)
    }

    /// Slots for the experts that are used most.
    pub(super) fn cached<B: Backend + LoadOps>(&self, backend: &Arc<B>, slots: usize) -> Cache<B> {
        let backend = Arc::clone(backend);
        let mut cache = HotExperts::open(&self.checkpoint, &self.modules, backend, slots)?;
        if self.preparing_threads().is_some() {
            // One thread: the CPUs compute experts meanwhile, and need nearly all that memory can be read at.
            cache.prepare(1);
        }
        Ok(Arc::new(cache))
    }

    /// The same in a GPU's memory.
    #[cfg(feature = "cuda")]
    pub(super) fn cached_on_gpu(
        &self,
        backend: &Arc<GpuBackend>,
        slots: usize,
    ) -> Cache<GpuBackend> {
        self.cached(backend, slots)
    }

    /// The same in a build that opens no GPU.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn cached_on_gpu(
        &self,
        _backend: &Arc<GpuBackend>,
        _slots: usize,
    ) -> Cache<GpuBackend> {
        anyhow::bail!(crate::device::WITHOUT_GPUS)
    }

    /// Keeps routed experts in the machine's memory, where its CPUs compute them, and all else on the device.
    fn with_host_experts<B: Backend>(
        self,
        backend: Arc<B>,
        host: HostOptions,
        budget: Option<ExpertBudget>,
        (resident, progress): Keep<'_, '_>,
        cache: impl FnOnce(&Self, &Arc<B>) -> anyhow::Result<Option<Arc<dyn ExpertCache<B>>>>,
    ) -> anyhow::Result<LoadedOn<B>> {
        if self.config.moe.is_none() {
            anyhow::bail!(
                "--residency host-experts: the model has no routed experts\n  use --residency resident"
            );
        }
        let is_expert = |spec: &ModuleSpec| matches!(spec.id, ModuleId::Expert(..));
        let (experts, dense) = self.modules.iter().cloned().partition(is_expert);
        let residency = self.keep(&backend, dense, ResidentOptions::default(), &mut *progress)?;
        match host {
            HostOptions::Cpu(options) => {
                let resident = ResidentOptions {
                    touch_threads: options.threads,
                    ..resident
                };
                let host = Arc::new(CpuBackend::new(options)?);
                let experts = match budget {
                    Some(budget) => self.within(&host, experts, budget)?,
                    None => self.keep(&host, experts, resident, progress)?,
                };
                // Its pages are pinned once it prepares them: by then they are where the host wants them.
                let cache = cache(&self, &backend)?;
                let loaded =
                    self.beside(Arc::clone(&host), experts, cache, (backend, residency))?;
                Ok(LoadedOn {
                    host: Some(host),
                    ..loaded
                })
            }
            HostOptions::Modelled(options) => {
                let host = Arc::new(VirtualBackend::new(options)?);
                let experts = self.keep(&host, experts, ResidentOptions::default(), progress)?;
                let cache = cache(&self, &backend)?;
                let loaded =
                    self.beside(Arc::clone(&host), experts, cache, (backend, residency))?;
                Ok(LoadedOn {
                    modelled_host: Some(host),
                    ..loaded
                })
            }
        }
    }

    /// The model on a device, beside a host that computes its experts.
    fn beside<B: Backend, H: Backend>(
        self,
        host: Arc<H>,
        experts: Arc<dyn Residency<H>>,
        cache: Option<Arc<dyn ExpertCache<B>>>,
        (backend, residency): (Arc<B>, Arc<dyn Residency<B>>),
    ) -> anyhow::Result<LoadedOn<B>> {
        let trace = self.trace.clone();
        let loaded = self.model(backend, residency)?;
        let model = loaded.model.with_host_experts(host, experts, cache, trace);
        Ok(LoadedOn {
            model: model?,
            ..loaded
        })
    }

    /// Adds the remedies that a model with experts has to the error that not all of it fits.
    fn or_elsewhere(&self, error: anyhow::Error) -> anyhow::Error {
        let does_not_fit = error
            .chain()
            .any(|cause| matches!(cause.downcast_ref(), Some(KernelError::OutOfMemory { .. })));
        if !does_not_fit || self.config.moe.is_none() {
            return error;
        }
        anyhow::anyhow!(
            "{error}\n  or stream its experts (--residency stream-loading), or leave them to the CPUs (--residency host-experts)"
        )
    }

    fn model<B: Backend>(
        self,
        backend: Arc<B>,
        residency: Arc<dyn Residency<B>>,
    ) -> anyhow::Result<LoadedOn<B>> {
        let model = Model::new(self.config, backend, residency)
            .with_context(|| format!("{} cannot be run", self.directory.display()))?;
        Ok(LoadedOn {
            model,
            host: None,
            modelled_host: None,
            checkpoint: self.checkpoint,
        })
    }
}

/// Runs attention and dense feed-forward blocks in tiles of `rows` rows.
fn in_row_tiles<B: Backend>(loaded: LoadedOn<B>, rows: usize) -> LoadedOn<B> {
    LoadedOn {
        model: loaded.model.in_row_tiles(rows),
        ..loaded
    }
}

/// Tells a trace which experts come and go.
fn listener(trace: Arc<Trace>) -> StreamListener {
    Box::new(move |event| match event {
        _ if !trace.is_on() => {}
        StreamEvent::Loaded(id) => trace.loaded(&id.to_string()),
        StreamEvent::Released(id) => trace.released(&id.to_string()),
    })
}

/// Whether memory is too short for weights and what else the process is to need, in bytes.
fn is_short(weight_bytes: u64, beside_bytes: u64, available_bytes: u64) -> bool {
    weight_bytes.saturating_add(beside_bytes) > available_bytes
}

#[cfg(test)]
mod tests {
    use super::is_short;

    #[test]
    fn what_is_needed_beside_weights_may_make_memory_short() {
        assert!(!is_short(900, 0, 1000));
        assert!(!is_short(900, 100, 1000));
        assert!(is_short(900, 101, 1000), "with the KV cache");
        assert!(is_short(u64::MAX, 1, 1000));
    }
}
