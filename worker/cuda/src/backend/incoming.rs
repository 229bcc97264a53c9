//! Activations whose rows come from the host while the GPU computes.
//!
//! They have a stream of their own, in which a copy waits on the device for whatever used their memory before; what reads them
//! waits for a mark behind the last copy.

use std::sync::Arc;

use hearth_kernels::trace::TraceLane;
use hearth_kernels::{KernelError, checks};

use super::weights::{bytes_of, close};
use super::{CudaBackend, CudaTensor};
use crate::driver::Mark;
use crate::memory::{Source, Uploader};

/// Activations whose rows come from the host, piece by piece.
pub struct CudaIncoming {
    /// Taken at the end; where it is left, copies may still write to it.
    tensor: Option<CudaTensor>,
    shape: checks::Shape,
    /// Behind what used their memory before.
    free: Mark,
    arrivals: Arc<Uploader>,
}

impl CudaBackend {
    pub(super) fn incoming(&self, rows: usize, cols: usize) -> Result<CudaIncoming, KernelError> {
        let tensor = self.tensor(rows, cols)?;
        Ok(CudaIncoming {
            shape: tensor.shape(),
            tensor: Some(tensor),
            free: self.queue.mark(&self.marks)?,
            arrivals: Arc::clone(&self.arrivals),
        })
    }

    pub(super) fn copy_rows(
        &self,
        incoming: &CudaIncoming,
        first: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        checks::rows_write(incoming.shape, first, values.len())?;
        let Some(tensor) = incoming.tensor.as_ref().filter(|_| !values.is_empty()) else {
            return Ok(());
        };
        let mut to = close(tensor.output(), size_of_val(values));
        to.address += (first * tensor.cols * 4) as u64;
        let stream = incoming.arrivals.stream();
        incoming.free.hold_back(stream)?;
        let copy = || {
            let from = Source::Own(bytes_of(values));
            incoming.arrivals.queue(from, to).map(|()| true)
        };
        let lane = (TraceLane::Copy, stream);
        let queued = self.recorder.around(lane, || "rows".into(), copy);
        queued.map(drop)
    }

    pub(super) fn arrived(&self, mut incoming: CudaIncoming) -> Result<CudaTensor, KernelError> {
        let last = self.marks.record(incoming.arrivals.stream())?;
        self.queue.wait_for(&last)?;
        match incoming.tensor.take() {
            Some(tensor) => Ok(tensor),
            None => self.tensor(incoming.shape.0, incoming.shape.1),
        }
    }
}

impl Drop for CudaIncoming {
    fn drop(&mut self) {
        if self.tensor.is_some() {
            // Whoever gets the memory next is ordered behind the kernels, and not behind copies. An error here cannot be
            // handled.
            let _ = self.arrivals.stream().synchronize();
        }
    }
}
