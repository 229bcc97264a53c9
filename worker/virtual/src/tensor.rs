//! What lives in the device's memory: activations, weights, vectors and the KV cache.

use std::sync::Arc;

use hearth_kernels::ops::{LoadOps, MemoryOps};
use hearth_kernels::{CpuBackend, CpuKv, CpuTensor, HostMatrix, KernelError};

use crate::VirtualBackend;
use crate::memory::Held;
use crate::slots::Tenancy;

/// f32 activations `[rows, cols]`.
pub struct VirtualTensor {
    pub(crate) values: CpuTensor,
    pub(crate) _held: Held,
}

/// A weight matrix; clones share it.
#[derive(Clone)]
pub struct VirtualWeight {
    pub(crate) matrix: HostMatrix,
    pub(crate) storage: Storage,
}

/// Memory of a weight.
#[derive(Clone)]
pub(crate) enum Storage {
    /// Of its own.
    Own { _held: Arc<Held> },
    /// A slot, until that is used again.
    Slot(Tenancy),
}

impl VirtualWeight {
    /// The matrix, for an operation.
    ///
    /// # Errors
    /// [`KernelError::Device`] if its slot was used again: a GPU would read another weight there.
    pub(crate) fn matrix(&self) -> Result<&HostMatrix, KernelError> {
        if let Storage::Slot(tenancy) = &self.storage
            && !tenancy.lasts()
        {
            return Err(KernelError::Device {
                device: "virtual".to_owned(),
                detail: "a weight was used after its slot was given to another one".to_owned(),
            });
        }
        Ok(&self.matrix)
    }
}

/// f32 parameters; clones share them.
#[derive(Clone)]
pub struct VirtualVector {
    pub(crate) values: Arc<[f32]>,
    pub(crate) _held: Arc<Held>,
}

/// Paged keys and values of all layers.
pub struct VirtualKv {
    pub(crate) kv: CpuKv,
    pub(crate) _held: Held,
}

impl VirtualBackend {
    /// Takes memory for activations `[rows, cols]`, and computes them.
    pub(crate) fn output(
        &self,
        (rows, cols): (usize, usize),
        compute: impl FnOnce(&CpuBackend) -> Result<CpuTensor, KernelError>,
    ) -> Result<VirtualTensor, KernelError> {
        let bytes = rows.saturating_mul(cols).saturating_mul(4);
        let held = self.memory.take(bytes, "activations")?;
        Ok(VirtualTensor {
            values: compute(&self.cpu)?,
            _held: held,
        })
    }
}

impl MemoryOps for VirtualBackend {
    type Tensor = VirtualTensor;
    type Weight = VirtualWeight;
    type Vector = VirtualVector;

    /// Copies the matrix, with its scales, to the device's memory.
    fn weight(&self, matrix: &HostMatrix) -> Result<VirtualWeight, KernelError> {
        let held = self.memory.take(self.slot_bytes(matrix), "weights")?;
        Ok(VirtualWeight {
            matrix: matrix.copied()?,
            storage: Storage::Own {
                _held: Arc::new(held),
            },
        })
    }

    fn vector(&self, values: &[f32]) -> Result<VirtualVector, KernelError> {
        let held = self.memory.take(size_of_val(values), "a vector")?;
        Ok(VirtualVector {
            values: self.cpu.vector(values)?,
            _held: Arc::new(held),
        })
    }

    fn upload(
        &self,
        rows: usize,
        cols: usize,
        values: &[f32],
    ) -> Result<VirtualTensor, KernelError> {
        self.output((rows, cols), |cpu| cpu.upload(rows, cols, values))
    }

    fn download(&self, x: &VirtualTensor) -> Result<Vec<f32>, KernelError> {
        self.cpu.download(&x.values)
    }

    fn shape(&self, x: &VirtualTensor) -> (usize, usize) {
        self.cpu.shape(&x.values)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<VirtualTensor, KernelError> {
        self.output((rows, cols), |cpu| cpu.zeros(rows, cols))
    }
}
