//! Modules made usable once, and the counters common to all policies.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_model::{ModuleId, ModuleSpec, ModuleWeights, ResidencyError, ResidencyStats};

/// A worker's modules by id.
pub(crate) struct Store<B: Backend> {
    modules: HashMap<ModuleId, Arc<ModuleWeights<B>>>,
    total_bytes: u64,
    acquired: AtomicU64,
    read_bytes: AtomicU64,
}

impl<B: Backend> Store<B> {
    /// Makes all modules usable; `loaded` is called after each with its size in bytes.
    pub(crate) fn open<'a>(
        checkpoint: &Checkpoint,
        specs: impl IntoIterator<Item = &'a ModuleSpec>,
        backend: &B,
        mut loaded: impl FnMut(u64),
    ) -> Result<Self, ResidencyError> {
        let mut modules = HashMap::new();
        let mut total_bytes = 0;
        let mut matrices = HashMap::new();
        for spec in specs {
            let tied = spec.tensors.iter();
            let tied = tied.filter(|tensor| matrices.contains_key(&tensor.name));
            let tied_bytes: u64 = tied
                .filter_map(|tensor| checkpoint.stored_bytes(&tensor.name).ok())
                .sum();
            let weights = ModuleWeights::load(spec, checkpoint, backend, &mut matrices)?;
            total_bytes += weights.bytes().saturating_sub(tied_bytes);
            loaded(weights.bytes());
            modules.insert(spec.id, Arc::new(weights));
        }
        Ok(Self {
            modules,
            total_bytes,
            acquired: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        })
    }

    /// Returns a module's weights, counting them as acquired and read.
    pub(crate) fn acquire(&self, id: ModuleId) -> Result<Arc<ModuleWeights<B>>, ResidencyError> {
        let weights = self.get(id)?;
        self.acquired.fetch_add(1, Ordering::Relaxed);
        // A token reads only one row of the embedding.
        if id != ModuleId::Embedding {
            self.read_bytes
                .fetch_add(weights.bytes(), Ordering::Relaxed);
        }
        Ok(weights.clone())
    }

    /// Returns a module's weights without counting.
    pub(crate) fn get(&self, id: ModuleId) -> Result<&Arc<ModuleWeights<B>>, ResidencyError> {
        let weights = self.modules.get(&id);
        weights.ok_or(ResidencyError::Unknown { module: id })
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Counters that do not depend on the policy.
    pub(crate) fn stats(&self) -> ResidencyStats {
        ResidencyStats {
            total_bytes: self.total_bytes,
            acquired: self.acquired.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            ..ResidencyStats::default()
        }
    }
}

/// Logs that a checkpoint holds more than the model needs: multi-token-prediction layers, or another model's tensors.
pub fn note_unused(checkpoint: &Checkpoint, specs: &[ModuleSpec]) {
    let tensors = specs.iter().flat_map(|spec| &spec.tensors);
    let used: HashSet<&str> = tensors.map(|tensor| tensor.name.as_str()).collect();
    let mut unused = checkpoint.unused(&used);
    if let Some(first) = unused.next() {
        let count = 1 + unused.count();
        tracing::info!(
            count,
            first,
            "the checkpoint holds tensors that this worker does not use"
        );
    }
}
