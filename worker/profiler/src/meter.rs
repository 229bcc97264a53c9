//! What must be measured rather than read: rates of the CPUs.

use hearth_crds::IsaProfile;

/// Element type of a dot product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// bfloat16, accumulated in f32.
    Bf16,
    /// float32.
    F32,
}

/// Measures rates on given CPUs, one thread a CPU.
pub trait Meter {
    /// Instruction sets of the CPUs.
    fn isa(&self) -> IsaProfile;
    /// Read bandwidth over `bytes` of memory in GB/s (10⁹ bytes a second); 0 when it cannot be measured.
    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> f64;
    /// Multiply-adds in GFLOP/s, each counted as two; 0 without an instruction for the element.
    fn gflops(&self, cpus: &[u32], element: Element) -> f64;
}

/// How much memory a read probe uses: far more than caches hold, and little of what is available.
pub(crate) fn probe_bytes(available_bytes: u64) -> usize {
    const MOST: u64 = 512 << 20;
    const LEAST: u64 = 8 << 20;
    usize::try_from((available_bytes / 8).clamp(LEAST, MOST)).unwrap_or(usize::MAX)
}

/// Runs `measure` on a thread that is bound to `cpus`, and so are the threads that it starts; their memory comes
/// from the NUMA node that they run on. Where binding is not allowed, the system's choice of CPUs is measured.
fn on_cpus<T: Send>(cpus: &[u32], measure: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let measuring = scope.spawn(move || {
            let mut set = rustix::thread::CpuSet::new();
            for &cpu in cpus {
                if (cpu as usize) < rustix::thread::CpuSet::MAX_CPU {
                    set.set(cpu as usize);
                }
            }
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::debug!("measuring without binding to CPUs {cpus:?}: {error}");
            }
            measure()
        });
        measuring.join().ok()
    })
}

/// The CPUs of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuMeter;

impl Meter for CpuMeter {
    fn isa(&self) -> IsaProfile {
        detect_isa()
    }

    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> f64 {
        let threads = cpus.len();
        on_cpus(cpus, || hearth_kernels::read_bandwidth_gbps(threads, bytes)).unwrap_or(0.0)
    }

    fn gflops(&self, cpus: &[u32], element: Element) -> f64 {
        let threads = cpus.len();
        let peak = match element {
            Element::Bf16 => hearth_kernels::peak_bf16_gflops,
            Element::F32 => hearth_kernels::peak_f32_gflops,
        };
        on_cpus(cpus, || peak(threads)).unwrap_or(0.0)
    }
}

#[cfg(target_arch = "x86_64")]
fn detect_isa() -> IsaProfile {
    IsaProfile {
        avx2: is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        avx512f: is_x86_feature_detected!("avx512f"),
        avx512bw: is_x86_feature_detected!("avx512bw"),
        avx512vbmi: is_x86_feature_detected!("avx512vbmi"),
        avx512bf16: is_x86_feature_detected!("avx512bf16"),
        avx512vnni: is_x86_feature_detected!("avx512vnni"),
        // Detecting it is not stable in std: the caller reads it from the kernel's flags.
        amx: false,
        neon: false,
    }
}

#[cfg(target_arch = "aarch64")]
fn detect_isa() -> IsaProfile {
    IsaProfile {
        neon: std::arch::is_aarch64_feature_detected!("neon"),
        ..IsaProfile::default()
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect_isa() -> IsaProfile {
    IsaProfile::default()
}
