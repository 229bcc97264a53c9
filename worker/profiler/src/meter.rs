//! Rates of the CPUs, which must be measured rather than read.

use std::sync::Barrier;

use hearth_crds::{GpuProfile, IsaProfile};
use hearth_kernels::{Isa, PeakGflops, peak_gflops, read_bandwidth_gbps};

/// Arithmetic rates in GFLOP/s; a multiply-add counts as two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gflops {
    /// Products of bfloat16 weights and f32 activations, as in prefill.
    pub bf16: f64,
    /// Peak of f32 multiply-adds.
    pub f32: f64,
    /// Products of FP8 weights with a scale per 128×128 block.
    pub fp8: f64,
    /// Products of float16 weights.
    pub f16: f64,
    /// Products of float32 weights.
    pub f32_weights: f64,
}

/// Measures rates on given CPUs, one thread per CPU.
pub trait Meter {
    /// Instruction sets of the CPUs.
    fn isa(&self) -> IsaProfile;

    /// Measures read bandwidth over `bytes` of memory in GB/s (10⁹ bytes per second).
    ///
    /// # Errors
    /// The reason it could not be measured.
    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> Result<f64, String>;

    /// Measures the arithmetic rates of all given CPUs together.
    ///
    /// # Errors
    /// The reason it could not be measured.
    fn gflops(&self, cpus: &[u32]) -> Result<Gflops, String>;

    /// Measures the rates of a GPU that nobody uses; `None` if this program cannot compute on it.
    ///
    /// # Errors
    /// The reason it could not be measured.
    fn gpu(&self, _gpu: &GpuProfile) -> Option<Result<GpuProfile, String>> {
        None
    }

    /// Called with what is measured next, such as `arithmetic with 2 threads`.
    fn tell(&self, _what: &str) {}
}

/// Memory that a read probe uses, in bytes: more than the last-level cache of `cache_bytes` holds, a small part of
/// what is available, and at most half of what this process may still allocate.
pub(crate) fn probe_bytes(available_bytes: u64, own_bytes: Option<u64>, cache_bytes: u64) -> usize {
    const LEAST: u64 = 8 << 20;
    const MOST: u64 = 512 << 20;
    let several_caches = cache_bytes.saturating_mul(4).clamp(MOST / 4, MOST);
    let own_bytes = own_bytes.unwrap_or(u64::MAX);
    let bytes = several_caches
        .min(available_bytes / 8)
        .min(own_bytes / 2)
        .max(LEAST);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Runs `measure` on a thread bound to `cpus`, as are the threads that it starts; their memory comes from the NUMA
/// node that they run on. If binding is not allowed, the system's choice of CPUs is measured.
fn on_cpus<T: Send>(
    cpus: &[u32],
    measure: impl FnOnce() -> Result<T, String> + Send,
) -> Result<T, String> {
    std::thread::scope(|scope| {
        let measuring = std::thread::Builder::new().spawn_scoped(scope, move || {
            bind(cpus);
            measure()
        });
        let measuring = measuring.map_err(|error| format!("a thread: {error}"))?;
        measuring
            .join()
            .unwrap_or_else(|_| Err("the measuring thread panicked".to_owned()))
    })
}

fn bind(cpus: &[u32]) {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        if (cpu as usize) < rustix::thread::CpuSet::MAX_CPU {
            set.set(cpu as usize);
        }
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::debug!("measuring without binding to CPUs {cpus:?}: {error}");
    }
}

/// Meter for the CPUs of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuMeter;

impl Meter for CpuMeter {
    fn isa(&self) -> IsaProfile {
        detect_isa()
    }

    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> Result<f64, String> {
        let threads = cpus.len();
        on_cpus(cpus, || {
            read_bandwidth_gbps(threads, bytes).map_err(|e| e.to_string())
        })
    }

    /// All CPUs at once, since they share power and, as siblings, execution units.
    fn gflops(&self, cpus: &[u32]) -> Result<Gflops, String> {
        let isa = Isa::detect();
        let together = Barrier::new(cpus.len());
        let peaks: Vec<Result<PeakGflops, String>> = std::thread::scope(|scope| {
            let together = &together;
            let start = |&cpu: &u32| {
                scope.spawn(move || {
                    bind(&[cpu]);
                    together.wait();
                    peak_gflops(isa).map_err(|e| e.to_string())
                })
            };
            let threads: Vec<_> = cpus.iter().map(start).collect();
            let panicked = || Err("the measuring thread panicked".to_owned());
            let joined = threads
                .into_iter()
                .map(|t| t.join().ok().unwrap_or_else(panicked));
            joined.collect()
        });
        let mut sum = Gflops::default();
        for peak in peaks {
            let peak = peak?;
            sum.f32 += peak.f32;
            sum.bf16 += peak.bf16;
            sum.fp8 += peak.fp8;
            sum.f16 += peak.f16;
            sum.f32_weights += peak.f32_weights;
        }
        Ok(sum)
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
        // Its detection is not stable in std: the caller reads it from the kernel's flags.
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
