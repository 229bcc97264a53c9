//! Backends under test, and the references for their results.

use std::io::Write;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use hearth_cuda::{Activations, CudaBackend, CudaOptions};
use hearth_kernels::convert::{bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3};
use hearth_kernels::ops::*;
use hearth_kernels::{CpuBackend, DType, Isa};

use crate::common;

/// Memory budget of each backend in this process.
pub(crate) const BUDGET_BYTES: u64 = 1 << 30;

/// A backend that one test at a time uses, as one thread of a worker does.
/// Its buffers are checked when the test is done.
pub(crate) struct Gpu {
    backend: &'static CudaBackend,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Gpu {
    type Target = CudaBackend;

    fn deref(&self) -> &CudaBackend {
        self.backend
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.backend.check_sentinels().unwrap();
        }
    }
}

/// The backend with these activations.
pub(crate) fn gpu(activations: Activations) -> Gpu {
    static BACKENDS: [OnceLock<CudaBackend>; 3] = [const { OnceLock::new() }; 3];
    shared(
        &BACKENDS[activations as usize],
        CudaOptions {
            activations,
            ..options()
        },
    )
}

/// The backend with bf16 activations that goes by `mma.sync` on every GPU.
pub(crate) fn without_wgmma() -> Gpu {
    static BACKEND: OnceLock<CudaBackend> = OnceLock::new();
    shared(
        &BACKEND,
        CudaOptions {
            activations: Activations::Bf16,
            without_wgmma: true,
            ..options()
        },
    )
}

fn shared(backend: &'static OnceLock<CudaBackend>, options: CudaOptions) -> Gpu {
    let turn = take_turn();
    let backend = backend.get_or_init(|| {
        open(CudaOptions {
            // The host model sees every access past an allocation; only hardware needs patterns to detect it.
            // A sanitizer sees such accesses too, but would consider those into a pattern sound.
            sentinels: Some(if is_hardware() && !is_sanitized() {
                256
            } else {
                0
            }),
            ..options
        })
    });
    backend.bind_thread().unwrap();
    Gpu {
        backend,
        _turn: turn,
    }
}

/// The backend with unrounded activations, for operations without products with weights.
pub(crate) fn plain() -> Gpu {
    gpu(Activations::F32)
}

/// Runs `test` for all activations that the device supports, and prints those it lacks.
pub(crate) fn on_all_activations(test: impl Fn(&Gpu)) {
    for activations in [Activations::F32, Activations::Bf16, Activations::Fp8] {
        if activations == Activations::Fp8 && plain().info().capability < (8, 9) {
            skipped("FP8 activations wait for a GPU of compute capability 8.9 or newer");
            continue;
        }
        test(&gpu(activations));
    }
}

/// Whether a tool of the CUDA toolkit is watching.
fn is_sanitized() -> bool {
    std::env::var_os("HEARTH_TEST_SANITIZER").is_some()
}

/// Prints what was not tested, even where the test's own output is not shown.
pub(crate) fn skipped(what: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}");
}

/// A backend for one test alone, without sentinels; it is dropped before the test's turn ends.
pub(crate) struct Own {
    backend: CudaBackend,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Own {
    type Target = CudaBackend;

    fn deref(&self) -> &CudaBackend {
        &self.backend
    }
}

pub(crate) fn own(budget_bytes: u64) -> Own {
    let turn = take_turn();
    let backend = open(CudaOptions {
        budget_bytes: Some(budget_bytes),
        activations: Activations::F32,
        ..options()
    });
    backend.bind_thread().unwrap();
    Own {
        backend,
        _turn: turn,
    }
}

/// Leaves NaN where the next tensor of this shape will lie: without sentinels memory is reused.
pub(crate) fn leave_nan(gpu: &CudaBackend, rows: usize, cols: usize) {
    let nan = vec![f32::NAN; rows * cols];
    drop(gpu.upload(rows, cols, &nan).unwrap());
}

/// Options shared by all backends here.
fn options() -> CudaOptions {
    CudaOptions {
        budget_bytes: Some(BUDGET_BYTES),
        kernel_cache: vec![kernel_cache()],
        ..CudaOptions::default()
    }
}

/// Whether the real driver is tested.
pub(crate) fn is_hardware() -> bool {
    std::env::var_os("HEARTH_TEST_GPU").is_some_and(|value| value == "1")
}

/// The specification behind the same interface.
pub(crate) fn scalar() -> CpuBackend {
    common::backend(Isa::Scalar, 1)
}

fn open(options: CudaOptions) -> CudaBackend {
    if !is_hardware() {
        hearth_cuda_host::install();
    }
    let backend = match CudaBackend::new(options) {
        Ok(backend) => backend,
        Err(error) if is_hardware() => panic!("HEARTH_TEST_GPU=1 asks for a GPU: {error}"),
        Err(error) => panic!("{error}"),
    };
    let is_model = backend.info().name.contains("host model");
    assert_ne!(is_model, is_hardware(), "ran on {}", backend.info().name);
    backend
}

fn take_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The worker's own cache on hardware; the model's kernels are stored separately.
fn kernel_cache() -> PathBuf {
    if !is_hardware() {
        return hearth_cuda_host::kernel_cache();
    }
    let home = std::env::var_os("HOME").map_or_else(|| "/tmp".into(), PathBuf::from);
    std::env::var_os("HEARTH_CACHE")
        .map_or_else(|| home.join(".cache/hearth"), PathBuf::from)
        .join("kernels")
}

/// Activations `[rows, cols]` as used in products with weights of `dtype`.
pub(crate) fn seen(activations: Activations, dtype: DType, x: &[f32], cols: usize) -> Vec<f32> {
    match (activations, dtype) {
        (Activations::F32, _) => x.to_vec(),
        (Activations::Fp8, DType::F8E4m3) => x
            .chunks(cols.max(1))
            .flat_map(|row| row.chunks(128).flat_map(quantized))
            .collect(),
        _ => x.iter().map(|&v| bf16_to_f32(f32_to_bf16(v))).collect(),
    }
}

/// One row's columns that share a scale, as quantised by split.cu.
fn quantized(block: &[f32]) -> Vec<f32> {
    let most = block
        .iter()
        .filter(|v| v.is_finite())
        .fold(0f32, |most, v| most.max(v.abs()));
    let scale = match most {
        0.0 => 1.0,
        most => (most / 448.0).max(f32::MIN_POSITIVE),
    };
    let code = |v: &f32| e4m3_to_f32(f32_to_e4m3(v / scale)) * scale;
    block.iter().map(code).collect()
}
