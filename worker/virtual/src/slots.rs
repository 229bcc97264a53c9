//! Slots for weights that come and go, and the marks that keep copies and operations in order.
//!
//! A slot owns the bytes of its weights, and a weight refers to them: once the slot is released, or given to others, the bytes
//! are gone, so that a weight of before reads nothing rather than what luck left there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use hearth_kernels::ops::LoadOps;
use hearth_kernels::trace::TraceLane;
use hearth_kernels::{HostMatrix, KernelError};

use crate::device::{Computer, fault};
use crate::lanes::{Lane, Times, VirtualMark};
use crate::memory::Held;
use crate::options::CopyModel;
use crate::tensor::Storage;
use crate::{VirtualBackend, VirtualWeight};

/// Bytes that a real copy makes between two looks at the clock.
const COPY_CHUNK_BYTES: usize = 256 << 10;

/// Memory that weights are loaded into, again and again.
pub struct VirtualSlot {
    bytes: usize,
    shared: Arc<Shared>,
    _held: Held,
}

/// What a slot shares with the weights in it.
#[derive(Default)]
struct Shared {
    /// Number of times that it was taken from its weights.
    uses: AtomicU64,
    /// Serial of the last operation that read it.
    last_read: AtomicU64,
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    matrices: Vec<Arc<HostMatrix>>,
    /// Where real copies of modelled mode go.
    copied: Vec<u8>,
}

impl Shared {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Each change is complete before anything can panic.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time for which a slot is a weight's own.
#[derive(Clone)]
pub(crate) struct Tenancy {
    slot: Arc<Shared>,
    use_index: u64,
    /// Serial of the weight's copy.
    copy: u64,
}

impl Tenancy {
    /// Checks that the slot was not released or given to other weights.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        match self.slot.uses.load(Ordering::Acquire) == self.use_index {
            true => Ok(()),
            false => Err(fault(
                "a weight was used after its slot was released, or given to another one",
            )),
        }
    }

    /// Lets the operation `serial` read the slot, where computation has waited for copies up to `waited`.
    pub(crate) fn read(&self, serial: u64, waited: u64) -> Result<(), KernelError> {
        self.check()?;
        if waited < self.copy {
            return Err(fault("a weight was used before its copy was waited for"));
        }
        self.slot.last_read.fetch_max(serial, Ordering::AcqRel);
        Ok(())
    }
}

impl LoadOps for VirtualBackend {
    type Mark = VirtualMark;
    type Slot = VirtualSlot;

    fn slots(&self, bytes: usize, count: usize) -> Result<Vec<VirtualSlot>, KernelError> {
        let slot = |_| {
            Ok(VirtualSlot {
                bytes,
                shared: Arc::default(),
                _held: self.memory.take(bytes, "a slot of the experts' ring")?,
            })
        };
        let slots = (0..count).map(slot).collect::<Result<_, KernelError>>()?;
        // What was computed in that memory before.
        let computed = self.lanes.mark(Lane::Compute);
        self.lanes.wait_for(&computed);
        self.lanes.wait_in(Lane::Copy, &computed);
        Ok(slots)
    }

    /// Frees the slots' bytes; weights that were in them read nothing from now on.
    fn give_back(&self, slots: Vec<VirtualSlot>) -> Result<(), KernelError> {
        let copied = self.lanes.mark(Lane::Copy);
        self.lanes.wait_in(Lane::Compute, &copied);
        slots.iter().for_each(|slot| self.vacate(slot));
        Ok(())
    }

    fn slot_bytes(&self, matrix: &HostMatrix) -> usize {
        let scales = matrix.scales().map_or(0, |scales| scales.values.len() * 4);
        matrix.size_bytes() + scales
    }

    /// Frees the bytes of the slot's weights.
    ///
    /// # Errors
    /// [`KernelError::Device`] if copies have not waited for an operation that reads the slot: a GPU would overwrite
    /// what it reads.
    fn reuse(&self, slot: &VirtualSlot, free: Option<&VirtualMark>) -> Result<(), KernelError> {
        if let Some(mark) = free {
            self.lanes.wait_in(Lane::Copy, mark);
        }
        if self.lanes.waited(Lane::Copy) < slot.shared.last_read.load(Ordering::Acquire) {
            return Err(fault(
                "a slot was given to another weight before the operations that read it were waited for",
            ));
        }
        self.vacate(slot);
        Ok(())
    }

    /// Frees the bytes of the slot's weights: what was queued before has read them.
    fn vacate(&self, slot: &VirtualSlot) {
        slot.shared.uses.fetch_add(1, Ordering::AcqRel);
        slot.shared.contents().matrices.clear();
    }

    fn load(
        &self,
        matrix: &HostMatrix,
        slot: &VirtualSlot,
        at: usize,
    ) -> Result<VirtualWeight, KernelError> {
        self.answers()?;
        let bytes = self.slot_bytes(matrix);
        let end = at.saturating_add(bytes);
        hearth_kernels::checks::ensure(end <= slot.bytes, "load", || {
            format!("bytes {at} to {end} of a slot of {} bytes", slot.bytes)
        })?;
        let (copy, mut times) = self.lanes.queue(Lane::Copy, self.link_us(bytes));
        let contents = match &self.computer {
            Computer::Exact {
                copy_bytes_per_s, ..
            } => {
                let own = Arc::new(matrix.copied()?);
                if let Some(rate) = copy_bytes_per_s {
                    self.lanes
                        .wait_until(times.begin_ns + (bytes as f64 / *rate * 1e9) as u64);
                }
                times.end_ns = self.lanes.now_ns();
                slot.shared.contents().matrices.push(Arc::clone(&own));
                Arc::downgrade(&own)
            }
            Computer::Modelled(modelled) => {
                if modelled.copies == CopyModel::Real {
                    self.copy_in_time(matrix.data(), slot, at, times);
                }
                Weak::new()
            }
        };
        self.lanes.trace(TraceLane::Copy, times, || "copy".into());
        let tenancy = Tenancy {
            slot: Arc::clone(&slot.shared),
            use_index: slot.shared.uses.load(Ordering::Acquire),
            copy,
        };
        Ok(VirtualWeight::new(
            matrix,
            bytes,
            Storage::Slot { tenancy, contents },
        ))
    }

    fn copied(&self) -> Result<VirtualMark, KernelError> {
        Ok(self.lanes.mark(Lane::Copy))
    }

    fn computed(&self) -> Result<VirtualMark, KernelError> {
        Ok(self.lanes.mark(Lane::Compute))
    }

    fn after(&self, mark: &VirtualMark) -> Result<(), KernelError> {
        self.lanes.wait_in(Lane::Compute, mark);
        Ok(())
    }

    fn wait(&self, mark: &VirtualMark) -> Result<(), KernelError> {
        self.lanes.wait_for(mark);
        Ok(())
    }

    fn ns_between(&self, from: &VirtualMark, to: &VirtualMark) -> Option<u64> {
        self.lanes.elapsed_between(from, to)
    }
}

impl VirtualBackend {
    /// Copies bytes to a slot, each chunk when the link would begin with it. Between them the thread sleeps: a GPU's copies
    /// take no processor's time.
    fn copy_in_time(&self, from: &[u8], slot: &VirtualSlot, at: usize, times: Times) {
        let mut contents = slot.shared.contents();
        contents.copied.resize(slot.bytes, 0);
        let to = &mut contents.copied[at..at + from.len()];
        let total_bytes = from.len() as f64;
        let took_ns = (times.end_ns - times.begin_ns) as f64;
        let mut done = 0;
        for (from, to) in from
            .chunks(COPY_CHUNK_BYTES)
            .zip(to.chunks_mut(COPY_CHUNK_BYTES))
        {
            let part = done as f64 / total_bytes;
            self.lanes
                .sleep_until(times.begin_ns + (took_ns * part) as u64);
            to.copy_from_slice(from);
            done += from.len();
        }
        self.lanes.copied_late(times.end_ns);
    }
}
