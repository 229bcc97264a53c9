//! Slots for weights that come and go, copied while the GPU computes.
//!
//! Copies have a stream of their own, and marks are events in one of the two streams: a copy into a slot waits on the device
//! for the last kernel that reads it, and a kernel for the copy. Only `computed` and `after` are steps of the thread that
//! computes; any thread may load. A recorded step is launched before it is marked, and before it waits: what is queued later
//! then runs behind the wait, and the mark lies behind what was queued before.

use std::sync::Arc;

use hearth_kernels::ops::LoadOps;
use hearth_kernels::trace::TraceLane;
use hearth_kernels::{HostMatrix, KernelError, checks};

use super::tensor::{WeightBytes, WeightData};
use super::weights::{WeightLayout, bytes_of, close, nan_found};
use super::{CudaBackend, CudaWeight};
use crate::compile::Variant;
use crate::driver::Mark;
use crate::memory::{Buffer, Source, Uploader};

/// Alignment of the parts of a slot.
const ALIGN_BYTES: usize = 256;

/// A point in the order of a stream.
#[derive(Clone)]
pub struct CudaMark(Mark);

/// Memory that weights are loaded into, again and again.
pub struct CudaSlot {
    memory: Arc<SlotMemory>,
    bytes: usize,
}

/// A slot's memory, which lives as long as the slot and the weights in it.
pub(super) struct SlotMemory {
    buffer: Buffer,
    loader: Arc<Uploader>,
}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        // Whoever gets the buffer next is ordered behind the kernels, and not behind copies.
        // An error here cannot be handled.
        let _ = self.loader.stream().synchronize();
    }
}

/// Where the parts of a matrix lie in a slot, counted from its first byte.
struct SlotLayout {
    weight: WeightLayout,
    scales: usize,
    end: usize,
}

impl SlotLayout {
    fn of(matrix: &HostMatrix) -> Self {
        let weight = WeightLayout::of(matrix);
        let scale_bytes = matrix.scales().map_or(0, |s| size_of_val(&*s.values));
        let scales = weight.bytes().next_multiple_of(ALIGN_BYTES);
        Self {
            end: (scales + scale_bytes).next_multiple_of(ALIGN_BYTES),
            weight,
            scales,
        }
    }
}

impl LoadOps for CudaBackend {
    type Mark = CudaMark;
    type Slot = CudaSlot;

    fn slots(&self, bytes: usize, count: usize) -> Result<Vec<CudaSlot>, KernelError> {
        let slot = |_| {
            Ok(CudaSlot {
                memory: Arc::new(SlotMemory {
                    buffer: self.buffer(bytes, "a slot of the experts' ring")?,
                    loader: Arc::clone(&self.loader),
                }),
                bytes,
            })
        };
        let slots = (0..count).map(slot).collect::<Result<_, KernelError>>()?;
        // Copies are not ordered behind the allocation, nor behind what used the memory before.
        self.queue.synchronize()?;
        self.modules
            .prepare(["route", "route_sort", "experts_combine"].map(Variant::plain));
        Ok(slots)
    }

    fn give_back(&self, slots: Vec<CudaSlot>) -> Result<(), KernelError> {
        // The pool orders its buffers in the stream that computes.
        self.after(&self.copied()?)?;
        drop(slots);
        Ok(())
    }

    fn slot_bytes(&self, matrix: &HostMatrix) -> usize {
        SlotLayout::of(matrix).end
    }

    fn reuse(&self, _slot: &CudaSlot, free: Option<&CudaMark>) -> Result<(), KernelError> {
        match free {
            Some(CudaMark(free)) => free.hold_back(self.loader.stream()),
            None => Ok(()),
        }
    }

    fn prepare(&self, matrix: &HostMatrix) -> Result<bool, KernelError> {
        if matrix.has_nan() {
            return Err(nan_found(matrix.rows(), matrix.cols()));
        }
        self.loader.prepare(matrix.data()).map(|()| true)
    }

    fn load(
        &self,
        matrix: &HostMatrix,
        slot: &CudaSlot,
        at: usize,
    ) -> Result<CudaWeight, KernelError> {
        let layout = SlotLayout::of(matrix);
        let fits = at.is_multiple_of(ALIGN_BYTES)
            && at
                .checked_add(layout.end)
                .is_some_and(|end| end <= slot.bytes);
        checks::ensure(fits, "load", || {
            format!(
                "{} bytes at byte {at} of a slot of {} bytes, in parts of {ALIGN_BYTES}",
                layout.end, slot.bytes
            )
        })?;
        if matrix.has_nan() {
            return Err(nan_found(matrix.rows(), matrix.cols()));
        }
        let part = |offset: usize| WeightBytes::Slot {
            address: slot.memory.buffer.address() + (at + offset) as u64,
            _memory: Arc::clone(&slot.memory),
        };
        let data = part(0);
        let to = layout.weight.at(data.address());
        let scales = matrix.scales().map(|scales| {
            let part = part(layout.scales);
            (part, bytes_of(&scales.values))
        });
        let lane = (TraceLane::Copy, self.loader.stream());
        let copies = || {
            self.loader.queue(Source::Shared(matrix.data()), to)?;
            if let Some((part, bytes)) = &scales {
                let to = close(part.address(), bytes.len());
                self.loader.queue(Source::Own(bytes), to)?;
            }
            Ok(true)
        };
        self.recorder.around(lane, || "copy".into(), copies)?;
        let scales = scales.map(|(part, _)| part);
        self.modules
            .prepare(self.matrix_variants_of("experts", matrix.dtype()));
        Ok(CudaWeight(Arc::new(WeightData::new(matrix, data, scales))))
    }

    fn copied(&self) -> Result<CudaMark, KernelError> {
        self.marks.record(self.loader.stream()).map(CudaMark)
    }

    fn computed(&self) -> Result<CudaMark, KernelError> {
        self.queue.mark(&self.marks).map(CudaMark)
    }

    fn after(&self, mark: &CudaMark) -> Result<(), KernelError> {
        self.queue.wait_for(&mark.0)
    }

    fn wait(&self, mark: &CudaMark) -> Result<(), KernelError> {
        mark.0.wait()
    }

    fn ns_between(&self, from: &CudaMark, to: &CudaMark) -> Option<u64> {
        from.0.elapsed_ns(&to.0)
    }
}
