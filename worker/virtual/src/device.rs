//! The device itself.

use std::sync::Arc;

use hearth_kernels::ops::{DeviceMemory, DeviceOps, SampleOps};
use hearth_kernels::{CpuBackend, CpuOptions, KernelError};

use crate::memory::Memory;

/// Options of a virtual device.
#[derive(Clone, Debug)]
pub struct VirtualOptions {
    /// Bytes of its memory: for weights, KV and activations together.
    pub memory_bytes: u64,
    /// Kernels and threads that compute for it.
    pub cpu: CpuOptions,
}

/// A [`Backend`](hearth_kernels::Backend) with memory of a fixed size, computed by the CPU's kernels.
pub struct VirtualBackend {
    pub(crate) cpu: CpuBackend,
    pub(crate) memory: Arc<Memory>,
}

impl VirtualBackend {
    /// Starts the threads that compute.
    ///
    /// # Errors
    /// Same as [`CpuBackend::new`]; [`KernelError::Device`] for a device without memory.
    pub fn new(options: VirtualOptions) -> Result<Self, KernelError> {
        if options.memory_bytes == 0 {
            return Err(KernelError::Device {
                device: "virtual".to_owned(),
                detail: "its memory is 0 bytes\n  give it some: --device virtual:memory=8Gi"
                    .to_owned(),
            });
        }
        Ok(Self {
            cpu: CpuBackend::new(options.cpu)?,
            memory: Memory::new(options.memory_bytes),
        })
    }
}

impl DeviceOps for VirtualBackend {
    fn bind_thread(&self) -> Result<(), KernelError> {
        self.cpu.bind_thread()
    }

    fn bind_compute_threads(&self, cpus: &[usize]) -> Result<usize, KernelError> {
        self.cpu.bind_compute_threads(cpus)
    }

    fn describe(&self) -> String {
        let mib = self.memory.read().budget_bytes >> 20;
        format!("virtual {mib} MiB on {}", self.cpu.describe())
    }

    /// The CPU's: the same kernels compute.
    fn numerics(&self) -> String {
        self.cpu.numerics()
    }

    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        self.cpu.read_bandwidth_gbps(bytes)
    }

    fn longest_operation_products(&self) -> Option<u64> {
        self.cpu.longest_operation_products()
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        Some(self.memory.read())
    }
}

impl SampleOps for VirtualBackend {}
