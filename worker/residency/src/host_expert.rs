//! A routed expert in the host's memory, and its copy in a slot of the device's.

use std::sync::Arc;

use hearth_formats::Checkpoint;
use hearth_kernels::ops::LoadOps;
use hearth_kernels::{Backend, HostMatrix};
use hearth_model::{ModuleId, ModuleSpec, ModuleWeights, ResidencyError, TensorShape};

/// An expert in the host's memory.
pub(crate) struct HostExpert {
    id: ModuleId,
    matrices: Vec<(&'static str, HostMatrix)>,
    bytes: u64,
}

/// An expert in a slot.
pub(crate) struct Streamed<B: Backend + LoadOps> {
    pub(crate) weights: Arc<ModuleWeights<B>>,
    /// The begin of its copy.
    pub(crate) begun: B::Mark,
    /// The end of its copy.
    pub(crate) copied: B::Mark,
}

impl HostExpert {
    pub(crate) fn new(spec: &ModuleSpec, checkpoint: &Checkpoint) -> Result<Self, ResidencyError> {
        let mut matrices = Vec::new();
        for tensor in &spec.tensors {
            if let TensorShape::Matrix { rows, cols } = tensor.shape {
                matrices.push((tensor.field, checkpoint.matrix(&tensor.name, rows, cols)?));
            }
        }
        Ok(Self {
            id: spec.id,
            matrices,
            bytes: spec.stored_bytes(checkpoint),
        })
    }

    /// Bytes as stored.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a slot that it takes.
    pub(crate) fn slot_bytes<B: LoadOps>(&self, backend: &B) -> usize {
        let matrices = self.matrices.iter();
        matrices.map(|(_, m)| backend.slot_bytes(m)).sum()
    }

    /// Queues its copy into a slot, behind `free`.
    pub(crate) fn load<B: Backend + LoadOps>(
        &self,
        backend: &B,
        slot: &B::Slot,
        free: Option<&B::Mark>,
    ) -> Result<Streamed<B>, ResidencyError> {
        let module = self.id;
        let failed = |source| ResidencyError::Kernel { module, source };
        backend.reuse(slot, free).map_err(failed)?;
        let begun = backend.copied().map_err(failed)?;
        let (mut at, mut matrices) = (0, Vec::with_capacity(self.matrices.len()));
        for (field, matrix) in &self.matrices {
            matrices.push((*field, backend.load(matrix, slot, at).map_err(failed)?));
            at += backend.slot_bytes(matrix);
        }
        let weights = ModuleWeights::of_matrices(module, matrices, self.bytes);
        Ok(Streamed {
            weights: Arc::new(weights),
            begun,
            copied: backend.copied().map_err(failed)?,
        })
    }
}
