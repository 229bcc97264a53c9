//! The device itself: its thread, its description, and its measured speed.

use std::time::Instant;

use bytes::Bytes;
use hearth_kernels::ops::{DeviceMemory, DeviceOps};
use hearth_kernels::{DType, KernelError};

use super::{Activations, CudaBackend, Kernel, MOST_RECORDED_ROWS};
use crate::compile::Variant;
use crate::memory::{CopyWays, Pinned, Pitched, Source};
use crate::queue::{Args, Command};

/// Number of timed passes over the buffer, after one that is not timed.
const PASSES: u32 = 5;

impl DeviceOps for CudaBackend {
    fn bind_thread(&self) -> Result<(), KernelError> {
        // The thread owns the steps even if the driver refuses it: they then fail with the driver's message.
        let bound = self.device.bind();
        self.queue.bind_thread()?;
        bound?;
        // Tried here once, and not in the first prompt.
        self.multiplies_by_wgmma(DType::F8E4m3);
        Ok(())
    }

    fn gpu_uuid(&self) -> Option<String> {
        Some(self.device.info.uuid.clone())
    }

    fn describe(&self) -> String {
        let info = &self.device.info;
        format!("cuda {} {} activations", info.name, self.activations_name())
    }

    fn numerics(&self) -> String {
        let architecture = self.device.info.architecture();
        let activations = self.activations_name();
        let wgmma = if self.has_wgmma() { " wgmma" } else { "" };
        // Versions before this wording rounded a router's activations too, and split those of f32 otherwise.
        format!("cuda {architecture} activations={activations} router=f32{wgmma}")
    }

    /// Best of several passes over a buffer of zeros, GB/s.
    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
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
            let kernel = Kernel::new(&variant, "read_bandwidth");
            self.launch(kernel, [blocks, 1, 1], args)?;
            self.queue.synchronize()?;
            if pass > 0 {
                best = best.min(began.elapsed().as_secs_f64());
            }
        }
        Ok(bytes as f64 / best / 1e9)
    }

    fn queues_operations(&self) -> bool {
        true
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        Some(DeviceMemory {
            used_bytes: self.memory.used_bytes(),
            peak_bytes: self.memory.peak_bytes(),
            budget_bytes: self.memory.budget_bytes(),
        })
    }

    fn begin_pass(&self, rows: usize) -> Result<(), KernelError> {
        self.files.release_read()?;
        self.queue.begin_step(rows <= MOST_RECORDED_ROWS)
    }

    fn submit(&self) -> Result<(), KernelError> {
        self.queue.flush()
    }

    fn finish(&self) -> Result<(), KernelError> {
        self.queue.flush()
    }
}

/// Transfer rates from host to device, GB/s.
#[derive(Clone, Copy, Debug)]
pub struct CopyRates {
    /// Rate from the bytes' own location: registered if the driver supports it, otherwise through the staging ring.
    pub mapped_gbps: f64,
    /// Rate from page-locked memory: the limit of the link.
    pub pinned_gbps: f64,
}

impl CudaBackend {
    fn activations_name(&self) -> &'static str {
        match self.activations {
            Activations::F32 => "f32",
            Activations::Bf16 => "bf16",
            Activations::Fp8 => "fp8",
        }
    }

    /// Rates of the two ways that streamed weights can take to this GPU; `None` until the first large one was copied, and where
    /// the driver registers no pages.
    pub fn copy_ways(&self) -> Option<CopyWays> {
        self.loader.ways()
    }

    /// Copies `host` to the device both ways, best of several passes.
    ///
    /// # Errors
    /// [`KernelError`] if there is no room for the bytes, or the driver fails.
    pub fn measure_copies(&self, host: &Bytes) -> Result<CopyRates, KernelError> {
        let buffer = self.buffer(host.len(), "a measurement")?;
        let to = Pitched {
            address: buffer.address(),
            rows: 1,
            row_bytes: host.len(),
            pitch_bytes: host.len(),
        };
        let mut pinned = Pinned::new(&self.device, host.len())?;
        pinned.bytes_mut().copy_from_slice(host);
        let (mut mapped_s, mut pinned_s) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..PASSES {
            let began = Instant::now();
            self.send(Source::Shared(host), to)?;
            mapped_s = mapped_s.min(began.elapsed().as_secs_f64());
            let began = Instant::now();
            self.uploader.copy_pinned(&pinned, to)?;
            pinned_s = pinned_s.min(began.elapsed().as_secs_f64());
        }
        let gbps = |seconds: f64| host.len() as f64 / seconds / 1e9;
        Ok(CopyRates {
            mapped_gbps: gbps(mapped_s),
            pinned_gbps: gbps(pinned_s),
        })
    }
}
