//! The device itself.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hearth_kernels::ops::{DeviceMemory, DeviceOps};
use hearth_kernels::{CpuBackend, KernelError};

use crate::lanes::{LaneUse, Lanes};
use crate::memory::Memory;
use crate::options::{Modelled, RoutingModel, VirtualMode, VirtualOptions};
use crate::routing::Routings;

/// A [`Backend`](hearth_kernels::Backend) with memory of a fixed size and lanes, computed by the CPU's kernels or, in
/// modelled mode, by nobody.
pub struct VirtualBackend {
    pub(crate) computer: Computer,
    pub(crate) memory: Arc<Memory>,
    pub(crate) lanes: Lanes,
    pub(crate) routings: Routings,
    /// Weights that were taken, without those in slots.
    pub(crate) weights: AtomicU64,
    fault: Option<PathBuf>,
    /// Why the device was lost, once it was: like a GPU's, a context does not recover.
    lost: OnceLock<String>,
}

/// What stands behind the operations.
pub(crate) enum Computer {
    /// The CPU's kernels.
    Exact {
        cpu: CpuBackend,
        copy_bytes_per_s: Option<f64>,
    },
    /// Nothing but the time that they take.
    Modelled(Modelled),
}

impl VirtualBackend {
    /// Starts the threads that compute.
    ///
    /// # Errors
    /// Same as [`CpuBackend::new`]; [`KernelError::Device`] for a device without memory, or a rate that is not positive;
    /// [`KernelError::DeviceLost`] if it is lost.
    pub fn new(options: VirtualOptions) -> Result<Self, KernelError> {
        if options.memory_bytes == 0 {
            return Err(fault(
                "its memory is 0 bytes\n  give it some: --device virtual:memory=8Gi",
            ));
        }
        options.mode.check()?;
        if let Some(cause) = options.fault.as_deref().and_then(cause_of_loss) {
            return Err(lost(cause));
        }
        let (computer, stretch) = match options.mode {
            VirtualMode::Exact { copy_bytes_per_s } => {
                let cpu = CpuBackend::new(options.cpu)?;
                let exact = Computer::Exact {
                    cpu,
                    copy_bytes_per_s,
                };
                (exact, None)
            }
            VirtualMode::Modelled(modelled) => {
                (Computer::Modelled(modelled), Some(modelled.stretch))
            }
        };
        Ok(Self {
            computer,
            memory: Memory::new(options.memory_bytes),
            lanes: Lanes::new(stretch, options.trace),
            routings: Routings::default(),
            weights: AtomicU64::new(0),
            fault: options.fault,
            lost: OnceLock::new(),
        })
    }

    /// Checks that the device still answers.
    ///
    /// # Errors
    /// [`KernelError::DeviceLost`] if it does not.
    pub(crate) fn answers(&self) -> Result<(), KernelError> {
        let Some(fault) = &self.fault else {
            return Ok(());
        };
        while hangs(fault) {
            std::thread::sleep(HANG_PERIOD);
        }
        if self.lost.get().is_none()
            && let Some(cause) = cause_of_loss(fault)
        {
            let _ = self.lost.set(cause);
        }
        match self.lost.get() {
            None => Ok(()),
            Some(cause) => Err(lost(cause.clone())),
        }
    }

    /// Time since the device was opened, by its clock, ns.
    pub fn elapsed_ns(&self) -> u64 {
        self.lanes.elapsed_ns()
    }

    /// What the lanes have done since the device was opened; `None` in exact mode, which claims no times.
    pub fn lane_use(&self) -> Option<LaneUse> {
        self.lanes.read()
    }
}

/// What the file of a fault says where the device is not lost, but computes nothing as long as the file is there.
const HANGS: &str = "hang";
/// Time between two looks at whether it still hangs.
const HANG_PERIOD: Duration = Duration::from_millis(20);

fn hangs(fault: &Path) -> bool {
    std::fs::read_to_string(fault).is_ok_and(|text| text.trim() == HANGS)
}

/// Cause in the file whose existence means that a virtual device is lost; `None` if there is no such file.
pub fn cause_of_loss(fault: &Path) -> Option<String> {
    let text = match std::fs::read_to_string(fault) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(_) => String::new(),
    };
    let line = text.lines().next().unwrap_or_default().trim();
    if line == HANGS {
        return None;
    }
    Some(match line {
        "" => format!("{} exists", fault.display()),
        line => line.to_owned(),
    })
}

fn lost(detail: String) -> KernelError {
    KernelError::DeviceLost {
        device: "virtual".to_owned(),
        detail,
    }
}

/// A fault that the device reports.
pub(crate) fn fault(detail: &str) -> KernelError {
    KernelError::Device {
        device: "virtual".to_owned(),
        detail: detail.to_owned(),
    }
}

impl DeviceOps for VirtualBackend {
    fn bind_thread(&self) -> Result<(), KernelError> {
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.bind_thread(),
            Computer::Modelled(_) => Ok(()),
        }
    }

    fn bind_compute_threads(&self, cpus: &[usize]) -> Result<usize, KernelError> {
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.bind_compute_threads(cpus),
            Computer::Modelled(_) => Ok(0),
        }
    }

    fn describe(&self) -> String {
        let mib = self.memory.read().budget_bytes >> 20;
        match &self.computer {
            Computer::Exact { cpu, .. } => format!("virtual {mib} MiB on {}", cpu.describe()),
            Computer::Modelled(modelled) => format!(
                "virtual {mib} MiB, modelled: copy {} GB/s, read {} GB/s, compute {} TFLOPS, launch {} us, times stretched {}×",
                modelled.copy_bytes_per_s / 1e9,
                modelled.read_bytes_per_s / 1e9,
                modelled.compute_flops / 1e12,
                modelled.launch_us,
                modelled.stretch,
            ),
        }
    }

    /// The CPU's in exact mode: the same kernels compute. Equal to no other in modelled mode, where tokens mean nothing.
    fn numerics(&self) -> String {
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.numerics(),
            Computer::Modelled(modelled) => {
                let routing = match modelled.routing {
                    RoutingModel::Uniform => "uniform".to_owned(),
                    RoutingModel::Zipf { exponent } => format!("zipf:{exponent}"),
                };
                let seed = modelled.seed;
                format!("virtual modelled (meaningless tokens) routing={routing} seed={seed}")
            }
        }
    }

    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.read_bandwidth_gbps(bytes),
            Computer::Modelled(modelled) => Ok(modelled.read_bytes_per_s / 1e9),
        }
    }

    fn longest_operation_products(&self) -> Option<u64> {
        match &self.computer {
            Computer::Exact { cpu, .. } => cpu.longest_operation_products(),
            Computer::Modelled(_) => None,
        }
    }

    fn queues_operations(&self) -> bool {
        matches!(self.computer, Computer::Modelled(_))
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        Some(self.memory.read())
    }

    fn begin_pass(&self, _rows: usize) -> Result<(), KernelError> {
        self.lanes.begin_pass();
        Ok(())
    }

    /// Waits until everything was computed.
    fn finish(&self) -> Result<(), KernelError> {
        self.lanes.wait_for_compute();
        Ok(())
    }
}
