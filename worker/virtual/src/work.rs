//! Operations of the compute lane: what they read, and what they cost.

use std::borrow::Cow;

use hearth_kernels::trace::TraceLane;
use hearth_kernels::{CpuBackend, CpuTensor, KernelError};

use crate::device::Computer;
use crate::lanes::{Lane, Times};
use crate::{VirtualBackend, VirtualTensor, VirtualWeight};

/// Most weights that an operation reads.
pub(crate) const MOST_WEIGHTS: usize = 3;

/// An operation.
pub(crate) struct Work<'a> {
    name: &'static str,
    /// Index that tells operations of this name apart in a trace.
    index: Option<u32>,
    weights: [Option<&'a VirtualWeight>; MOST_WEIGHTS],
    /// Bytes that are read or written in the device's memory.
    bytes: usize,
    /// Floating-point operations of products.
    flops: f64,
    /// Bytes that cross the link.
    link_bytes: usize,
}

impl<'a> Work<'a> {
    /// An operation that touches `elements` elements of activations.
    pub(crate) fn new(name: &'static str, elements: usize) -> Self {
        Self {
            name,
            index: None,
            weights: [None; MOST_WEIGHTS],
            bytes: elements.saturating_mul(4),
            flops: 0.0,
            link_bytes: 0,
        }
    }

    /// Names the operation by an index, too.
    pub(crate) fn indexed(mut self, index: u32) -> Self {
        self.index = Some(index);
        self
    }

    /// Reads some rows of a weight, all of them if there are so many.
    pub(crate) fn rows_of(mut self, weight: &'a VirtualWeight, rows: usize) -> Self {
        self.bytes += weight.bytes / weight.rows.max(1) * rows.min(weight.rows);
        self.reads(weight)
    }

    /// Multiplies `rows` rows of activations by a weight, which is read once.
    pub(crate) fn product(mut self, rows: usize, weight: &'a VirtualWeight) -> Self {
        self.bytes = self.bytes.saturating_add(weight.bytes);
        self.flops += 2.0 * rows as f64 * weight.rows as f64 * weight.cols as f64;
        self.reads(weight)
    }

    /// Adds floating-point operations of products.
    pub(crate) fn flops(mut self, flops: f64) -> Self {
        self.flops += flops;
        self
    }

    /// Adds bytes of the device's memory that are read or written.
    pub(crate) fn bytes(mut self, bytes: usize) -> Self {
        self.bytes = self.bytes.saturating_add(bytes);
        self
    }

    /// Adds bytes that cross the link.
    pub(crate) fn over_link(mut self, bytes: usize) -> Self {
        self.link_bytes = self.link_bytes.saturating_add(bytes);
        self
    }

    fn reads(mut self, weight: &'a VirtualWeight) -> Self {
        if let Some(free) = self.weights.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(weight);
        }
        self
    }

    fn title(&self) -> Cow<'static, str> {
        match self.index {
            None => Cow::Borrowed(self.name),
            Some(index) => Cow::Owned(format!("{} {index}", self.name)),
        }
    }
}

impl VirtualBackend {
    /// Queues an operation, and in exact mode computes it; `None` in modelled mode.
    pub(crate) fn run<T>(
        &self,
        work: &Work<'_>,
        compute: impl FnOnce(&CpuBackend) -> Result<T, KernelError>,
    ) -> Result<Option<T>, KernelError> {
        self.answers()?;
        let (serial, times) = self.lanes.queue(Lane::Compute, self.took_us(work));
        let weights = || work.weights.iter().flatten();
        let waited = self.lanes.waited(Lane::Compute);
        for weight in weights() {
            weight.read(serial, waited)?;
        }
        let Computer::Exact { cpu, .. } = &self.computer else {
            self.lanes.trace(TraceLane::Compute, times, || work.title());
            return Ok(None);
        };
        let computed = compute(cpu)?;
        // Its slot was not given away meanwhile.
        weights().try_for_each(|weight| weight.check())?;
        let times = Times {
            end_ns: self.lanes.now_ns(),
            ..times
        };
        self.lanes.trace(TraceLane::Compute, times, || work.title());
        Ok(Some(computed))
    }

    /// Takes memory for activations `[rows, cols]`, and runs the operation that computes them.
    pub(crate) fn output(
        &self,
        work: &Work<'_>,
        shape: (usize, usize),
        compute: impl FnOnce(&CpuBackend) -> Result<CpuTensor, KernelError>,
    ) -> Result<VirtualTensor, KernelError> {
        let bytes = shape.0.saturating_mul(shape.1).saturating_mul(4);
        let held = self.memory.take(bytes, "activations")?;
        Ok(VirtualTensor {
            shape,
            values: self.run(work, compute)?,
            product_of: None,
            _held: held,
        })
    }

    /// Time that bytes take over the link, modelled µs; 0 in exact mode.
    pub(crate) fn link_us(&self, bytes: usize) -> f64 {
        match &self.computer {
            Computer::Exact { .. } => 0.0,
            Computer::Modelled(modelled) => bytes as f64 / modelled.copy_bytes_per_s * 1e6,
        }
    }

    fn took_us(&self, work: &Work<'_>) -> f64 {
        let Computer::Modelled(modelled) = &self.computer else {
            return 0.0;
        };
        let memory_us = work.bytes as f64 / modelled.read_bytes_per_s * 1e6;
        let products_us = work.flops / modelled.compute_flops * 1e6;
        modelled.launch_us + memory_us.max(products_us) + self.link_us(work.link_bytes)
    }
}
