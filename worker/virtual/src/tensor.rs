//! What lives in the device's memory: activations, weights, vectors and the KV cache.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use hearth_kernels::ops::{LoadOps, MemoryOps};
use hearth_kernels::trace::TraceLane;
use hearth_kernels::{CpuKv, CpuTensor, HostMatrix, KernelError, KvLayout, checks};

use crate::VirtualBackend;
use crate::device::{Computer, fault};
use crate::lanes::{Lane, VirtualMark};
use crate::memory::Held;
use crate::slots::Tenancy;
use crate::work::Work;

/// f32 activations `[rows, cols]`.
pub struct VirtualTensor {
    pub(crate) shape: (usize, usize),
    /// `None` if they were modelled.
    pub(crate) values: Option<CpuTensor>,
    /// The weight that it is a product with, if it is one: a router's logits tell their layer by it.
    pub(crate) product_of: Option<WeightId>,
    pub(crate) _held: Held,
}

/// Tells the device's own weights apart: the number of those that were taken before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightId(pub(crate) u64);

impl VirtualTensor {
    pub(crate) fn values(&self) -> Result<&CpuTensor, KernelError> {
        self.values.as_ref().ok_or_else(no_values)
    }

    pub(crate) fn values_mut(&mut self) -> Result<&mut CpuTensor, KernelError> {
        self.values.as_mut().ok_or_else(no_values)
    }

    pub(crate) fn into_values(self) -> Result<CpuTensor, KernelError> {
        self.values.ok_or_else(no_values)
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.0.saturating_mul(self.shape.1)
    }
}

/// A device that computes was given what another one modelled.
pub(crate) fn no_values() -> KernelError {
    fault("a device with mode=exact cannot use what a device with mode=modelled made")
}

/// A weight matrix; clones share it.
#[derive(Clone)]
pub struct VirtualWeight {
    /// First row of the stored matrix that is its own.
    first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// With scales.
    pub(crate) bytes: usize,
    storage: Storage,
}

/// Memory of a weight. There is no matrix in modelled mode.
#[derive(Clone)]
pub(crate) enum Storage {
    /// Of its own.
    Own {
        id: WeightId,
        matrix: Option<HostMatrix>,
        _held: Arc<Held>,
    },
    /// A slot, until that is released.
    Slot {
        tenancy: Tenancy,
        contents: Weak<HostMatrix>,
    },
}

impl VirtualWeight {
    pub(crate) fn new(matrix: &HostMatrix, bytes: usize, storage: Storage) -> Self {
        Self {
            first: 0,
            rows: matrix.rows(),
            cols: matrix.cols(),
            bytes,
            storage,
        }
    }

    /// Some of its rows.
    fn part(&self, first: usize, rows: usize) -> Self {
        Self {
            first: self.first + first,
            rows,
            bytes: self.bytes / self.rows.max(1) * rows,
            ..self.clone()
        }
    }

    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Which of the device's own weights it is; `None` for one in a slot.
    pub(crate) fn id(&self) -> Option<WeightId> {
        match &self.storage {
            Storage::Own { id, .. } => Some(*id),
            Storage::Slot { .. } => None,
        }
    }

    /// The matrix, for the CPU's kernels; it shares the weight's bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if its slot was released or used again: a GPU would read another weight there.
    pub(crate) fn matrix(&self) -> Result<HostMatrix, KernelError> {
        self.check()?;
        let matrix = match &self.storage {
            Storage::Own { matrix, .. } => matrix.clone(),
            Storage::Slot { contents, .. } => contents.upgrade().map(|matrix| (*matrix).clone()),
        };
        let matrix = matrix.ok_or_else(no_values)?;
        matrix.row_slice(self.first, self.rows)
    }

    /// Lets the operation `serial` read it, where computation has waited for copies up to `waited`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if its slot was released or used again, or nothing has waited for its copy.
    pub(crate) fn read(&self, serial: u64, waited: u64) -> Result<(), KernelError> {
        match &self.storage {
            Storage::Own { .. } => Ok(()),
            Storage::Slot { tenancy, .. } => tenancy.read(serial, waited),
        }
    }

    /// Checks that its slot was not released or used again.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        match &self.storage {
            Storage::Own { .. } => Ok(()),
            Storage::Slot { tenancy, .. } => tenancy.check(),
        }
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
    pub(crate) layout: KvLayout,
    pub(crate) blocks: usize,
    /// `None` in modelled mode.
    kv: Option<CpuKv>,
    _held: Held,
}

/// A copy of bytes to the host.
pub struct VirtualHostCopy {
    pub(crate) bytes: Vec<u8>,
    pub(crate) landed: VirtualMark,
    /// Whether somebody has asked if it has landed.
    pub(crate) was_asked: AtomicBool,
    /// Whether somebody knows that it has.
    pub(crate) has_landed: AtomicBool,
}

/// Activations whose rows come from the host.
pub struct VirtualIncoming(VirtualTensor);

impl VirtualKv {
    pub(crate) fn new(layout: KvLayout, blocks: usize, kv: Option<CpuKv>, held: Held) -> Self {
        Self {
            layout,
            blocks,
            kv,
            _held: held,
        }
    }

    pub(crate) fn values(&self) -> Result<&CpuKv, KernelError> {
        self.kv.as_ref().ok_or_else(no_values)
    }

    pub(crate) fn values_mut(&mut self) -> Result<&mut CpuKv, KernelError> {
        self.kv.as_mut().ok_or_else(no_values)
    }
}

impl MemoryOps for VirtualBackend {
    type Tensor = VirtualTensor;
    type Weight = VirtualWeight;
    type Vector = VirtualVector;
    type HostCopy = VirtualHostCopy;
    type Incoming = VirtualIncoming;

    /// Copies the matrix, with its scales, to the device's memory.
    fn weight(&self, matrix: &HostMatrix) -> Result<VirtualWeight, KernelError> {
        let bytes = self.slot_bytes(matrix);
        let held = Arc::new(self.memory.take(bytes, "weights")?);
        let own = match &self.computer {
            Computer::Exact { .. } => Some(matrix.copied()?),
            Computer::Modelled(_) => None,
        };
        let storage = Storage::Own {
            id: WeightId(self.weights.fetch_add(1, Ordering::Relaxed)),
            matrix: own,
            _held: held,
        };
        Ok(VirtualWeight::new(matrix, bytes, storage))
    }

    fn weight_rows(
        &self,
        w: &VirtualWeight,
        first: usize,
        rows: usize,
    ) -> Result<VirtualWeight, KernelError> {
        checks::weight_rows(first, rows, w.rows)?;
        Ok(w.part(first, rows))
    }

    fn vector(&self, values: &[f32]) -> Result<VirtualVector, KernelError> {
        let held = self.memory.take(size_of_val(values), "a vector")?;
        Ok(VirtualVector {
            values: values.into(),
            _held: Arc::new(held),
        })
    }

    fn upload(
        &self,
        rows: usize,
        cols: usize,
        values: &[f32],
    ) -> Result<VirtualTensor, KernelError> {
        checks::upload((rows, cols), values.len())?;
        // The host had no values before, whatever made them.
        self.lanes.host_has_values();
        let work = Work::new("upload", 0).over_link(size_of_val(values));
        self.output(&work, (rows, cols), |cpu| cpu.upload(rows, cols, values))
    }

    /// Waits until the activations were computed; zeros in modelled mode.
    fn download(&self, x: &VirtualTensor) -> Result<Vec<f32>, KernelError> {
        let work = Work::new("download", 0).over_link(x.elements().saturating_mul(4));
        let values = self.run(&work, |cpu| cpu.download(x.values()?))?;
        self.lanes.wait_for_compute();
        Ok(values.unwrap_or_else(|| vec![0.0; x.elements()]))
    }

    fn rows_read_begin(
        &self,
        x: &VirtualTensor,
        rows: Range<usize>,
    ) -> Result<VirtualHostCopy, KernelError> {
        checks::rows_read(x.shape, &rows)?;
        let elements = rows.len() * x.shape.1;
        let work = Work::new("rows_read", 2 * elements);
        let read = self.run(&work, |cpu| cpu.rows_read_begin(x.values()?, rows))?;
        Ok(self.export(read.unwrap_or_else(|| vec![0; 4 * elements])))
    }

    /// In exact mode, which has no time, a copy is late for the first who asks: callers meet one that is not there yet.
    fn host_copy_is_done(&self, copy: &VirtualHostCopy) -> Result<bool, KernelError> {
        self.answers()?;
        let is_reached = match &self.computer {
            Computer::Exact { .. } => copy.was_asked.swap(true, Ordering::AcqRel),
            Computer::Modelled(_) => self.lanes.is_reached(&copy.landed),
        };
        Ok(copy.has_landed.fetch_or(is_reached, Ordering::AcqRel) || is_reached)
    }

    fn host_copy_wait(&self, copy: &VirtualHostCopy) -> Result<(), KernelError> {
        self.answers()?;
        self.lanes.wait_for_result(&copy.landed);
        copy.has_landed.store(true, Ordering::Release);
        Ok(())
    }

    fn host_copy_end(&self, copy: VirtualHostCopy) -> Result<Vec<u8>, KernelError> {
        match copy.has_landed.into_inner() {
            true => Ok(copy.bytes),
            false => Err(fault(
                "what was on its way to the host was read before its copy was waited for",
            )),
        }
    }

    fn rows_write_begin(&self, rows: usize, cols: usize) -> Result<VirtualIncoming, KernelError> {
        self.answers()?;
        let bytes = rows.saturating_mul(cols).saturating_mul(4);
        let held = self.memory.take(bytes, "activations")?;
        let values = match &self.computer {
            Computer::Exact { cpu, .. } => Some(cpu.rows_write_begin(rows, cols)?),
            Computer::Modelled(_) => None,
        };
        // What was computed in that memory before.
        self.lanes
            .wait_in(Lane::Rows, &self.lanes.mark(Lane::Compute));
        Ok(VirtualIncoming(VirtualTensor {
            shape: (rows, cols),
            values,
            product_of: None,
            _held: held,
        }))
    }

    fn rows_write(
        &self,
        VirtualIncoming(x): &mut VirtualIncoming,
        first: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        self.answers()?;
        checks::rows_write(x.shape, first, values.len())?;
        // The host had no values before, whatever made them.
        self.lanes.host_has_values();
        let us = self.link_us(size_of_val(values));
        let (_, times) = self.lanes.queue(Lane::Rows, us);
        self.lanes.trace(TraceLane::Copy, times, || "rows".into());
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.rows_write(x.values_mut()?, first, values),
            Computer::Modelled(_) => Ok(()),
        }
    }

    fn rows_write_end(
        &self,
        VirtualIncoming(x): VirtualIncoming,
    ) -> Result<VirtualTensor, KernelError> {
        self.lanes
            .wait_in(Lane::Compute, &self.lanes.mark(Lane::Rows));
        Ok(x)
    }

    fn shape(&self, x: &VirtualTensor) -> (usize, usize) {
        x.shape
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<VirtualTensor, KernelError> {
        let work = Work::new("zeros", rows.saturating_mul(cols));
        self.output(&work, (rows, cols), |cpu| cpu.zeros(rows, cols))
    }
}

impl VirtualBackend {
    /// Queues the copy of bytes to the host that the last operation has gathered.
    pub(crate) fn export(&self, bytes: Vec<u8>) -> VirtualHostCopy {
        let gathered = self.lanes.mark(Lane::Compute);
        self.lanes.wait_in(Lane::Export, &gathered);
        self.lanes.queue(Lane::Export, self.link_us(bytes.len()));
        VirtualHostCopy {
            bytes,
            landed: self.lanes.mark(Lane::Export),
            was_asked: AtomicBool::new(false),
            has_landed: AtomicBool::new(false),
        }
    }
}
