//! Slots for weights that come and go.
//!
//! Both lanes run where they are called: a copy is done when its call returns, and so is an operation. A mark is reached
//! when it is made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_kernels::ops::LoadOps;
use hearth_kernels::{HostMatrix, KernelError};

use crate::memory::Held;
use crate::tensor::Storage;
use crate::{VirtualBackend, VirtualWeight};

/// Memory that weights are loaded into, again and again.
pub struct VirtualSlot {
    bytes: usize,
    /// Number of times that it was given to other weights.
    uses: Arc<AtomicU64>,
    _held: Held,
}

/// The time for which a slot is a weight's own.
#[derive(Clone)]
pub(crate) struct Tenancy {
    uses: Arc<AtomicU64>,
    use_index: u64,
}

impl Tenancy {
    pub(crate) fn lasts(&self) -> bool {
        self.uses.load(Ordering::Acquire) == self.use_index
    }
}

impl LoadOps for VirtualBackend {
    type Mark = ();
    type Slot = VirtualSlot;

    fn slots(&self, bytes: usize, count: usize) -> Result<Vec<VirtualSlot>, KernelError> {
        let slot = |_| {
            Ok(VirtualSlot {
                bytes,
                uses: Arc::default(),
                _held: self.memory.take(bytes, "a slot of the experts' ring")?,
            })
        };
        (0..count).map(slot).collect()
    }

    fn slot_bytes(&self, matrix: &HostMatrix) -> usize {
        let scales = matrix.scales().map_or(0, |scales| scales.values.len() * 4);
        matrix.size_bytes() + scales
    }

    fn reuse(&self, slot: &VirtualSlot, _free: Option<&()>) -> Result<(), KernelError> {
        slot.uses.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn load(
        &self,
        matrix: &HostMatrix,
        slot: &VirtualSlot,
        at: usize,
    ) -> Result<VirtualWeight, KernelError> {
        let end = at.saturating_add(self.slot_bytes(matrix));
        hearth_kernels::checks::ensure(end <= slot.bytes, "load", || {
            format!("bytes {at} to {end} of a slot of {} bytes", slot.bytes)
        })?;
        Ok(VirtualWeight {
            matrix: matrix.copied()?,
            storage: Storage::Slot(Tenancy {
                uses: Arc::clone(&slot.uses),
                use_index: slot.uses.load(Ordering::Acquire),
            }),
        })
    }

    fn copied(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn computed(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn after(&self, _mark: &()) -> Result<(), KernelError> {
        Ok(())
    }
}
