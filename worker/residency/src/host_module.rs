//! A module in the host's memory, and its copy in a slot of the device's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_formats::Checkpoint;
use hearth_kernels::ops::LoadOps;
use hearth_kernels::{Backend, HostMatrix};
use hearth_model::{ModuleId, ModuleSpec, ModuleWeights, ResidencyError, TensorShape, TensorSpec};

/// A module whose matrices are in the host's memory. Vectors, which are small, stay on the device.
pub(crate) struct HostModule<B: Backend> {
    id: ModuleId,
    matrices: Vec<(&'static str, HostMatrix)>,
    vectors: Vec<(&'static str, B::Vector)>,
    bytes: u64,
    vector_bytes: u64,
    /// Whether it was prepared, or copied once.
    is_prepared: AtomicBool,
}

/// A module in a slot.
pub(crate) struct Streamed<B: Backend + LoadOps> {
    pub(crate) weights: Arc<ModuleWeights<B>>,
    /// The begin of its copy.
    pub(crate) begun: B::Mark,
    /// The end of its copy.
    pub(crate) copied: B::Mark,
}

/// A vector of a module, which stays where the backend computes.
pub(crate) fn vector<B: Backend>(
    (module, name, len): (ModuleId, &str, usize),
    checkpoint: &Checkpoint,
    backend: &B,
) -> Result<B::Vector, ResidencyError> {
    let vector = backend.vector(&checkpoint.vector(name, len)?);
    vector.map_err(|source| ResidencyError::Kernel { module, source })
}

impl<B: Backend + LoadOps> HostModule<B> {
    /// Finds the matrices in the mapped files, and copies the vectors to the device.
    pub(crate) fn new(
        spec: &ModuleSpec,
        checkpoint: &Checkpoint,
        backend: &B,
    ) -> Result<Self, ResidencyError> {
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        let mut vector_bytes = 0;
        for TensorSpec { field, name, shape } in &spec.tensors {
            match *shape {
                TensorShape::Matrix { rows, cols } => {
                    matrices.push((*field, checkpoint.matrix(name, rows, cols)?));
                }
                TensorShape::Vector { len } => {
                    let vector = vector((spec.id, name, len), checkpoint, backend)?;
                    vectors.push((*field, vector));
                    vector_bytes += checkpoint.stored_bytes(name).unwrap_or(0);
                }
            }
        }
        Ok(Self {
            id: spec.id,
            matrices,
            vectors,
            bytes: spec.stored_bytes(checkpoint),
            vector_bytes,
            is_prepared: AtomicBool::new(false),
        })
    }

    /// Whether a copy is nothing but a copy, on a device that prepares.
    pub(crate) fn is_prepared(&self) -> bool {
        self.is_prepared.load(Ordering::Relaxed)
    }

    /// Bytes as stored.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of its matrices as stored, which cross the link.
    pub(crate) fn matrix_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.vector_bytes)
    }

    /// Bytes of a slot that it takes.
    pub(crate) fn slot_bytes(&self, backend: &B) -> usize {
        let matrices = self.matrices.iter();
        matrices.map(|(_, m)| backend.slot_bytes(m)).sum()
    }

    /// Does what its first copy would do beside copying, and returns its bytes; `None` if that is nothing, or fails: whoever
    /// copies it says why.
    pub(crate) fn prepare(&self, backend: &B) -> Option<u64> {
        for (_, matrix) in &self.matrices {
            backend
                .prepare(matrix)
                .ok()
                .filter(|is_needed| *is_needed)?;
        }
        self.is_prepared.store(true, Ordering::Relaxed);
        Some(self.bytes())
    }

    /// Queues its copy into a slot, behind `free`.
    pub(crate) fn load(
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
        self.is_prepared.store(true, Ordering::Relaxed);
        let weights = ModuleWeights::new(module, matrices, self.vectors.clone(), self.bytes);
        Ok(Streamed {
            weights: Arc::new(weights),
            begun,
            copied: backend.copied().map_err(failed)?,
        })
    }
}
