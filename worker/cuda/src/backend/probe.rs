//! Measures of the device itself.

use std::time::Instant;

use hearth_kernels::KernelError;

use super::{CudaBackend, Kernel};
use crate::compile::Variant;
use crate::queue::{Args, Command};

/// Passes over the buffer that are timed, after one that is not.
const PASSES: u32 = 5;

impl CudaBackend {
    /// Best of several passes over a buffer of zeros, GB/s.
    pub(super) fn measure_read_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        let bytes = (bytes as u64).min(self.memory.room_bytes() / 2) as usize / 16 * 16;
        let buffer = self.buffer(bytes, "a measurement")?;
        let sink = self.buffer(4, "a measurement")?;
        for (address, bytes) in [(buffer.address(), bytes), (sink.address(), 4)] {
            self.queue.push(Command::Zero { address, bytes })?;
        }
        let variant = Variant::plain("read_bandwidth");
        let blocks = 4 * self.device.info.multiprocessors as usize;
        let mut best = f64::INFINITY;
        for pass in 0..=PASSES {
            self.queue.synchronize()?;
            let args = Args::new()
                .with(buffer.address())
                .with((bytes / 16) as i64)
                .with(sink.address());
            let began = Instant::now();
            let kernel = Kernel::new(&variant, "read_bandwidth").threads(512);
            self.launch(kernel, [blocks, 1, 1], args)?;
            self.queue.synchronize()?;
            if pass > 0 {
                best = best.min(began.elapsed().as_secs_f64());
            }
        }
        Ok(bytes as f64 / best / 1e9)
    }
}
