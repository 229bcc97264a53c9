//! Kernels from source to functions: NVRTC at first use, a cache on disk, and ahead-of-time compilation for an image.

mod cache;
mod modules;
mod nvrtc;
mod sources;

use std::path::{Path, PathBuf};

use hearth_kernels::KernelError;

pub(crate) use modules::{Function, Modules};
pub(crate) use sources::AttentionShape;
pub(crate) use sources::BY_WGMMA;
pub use sources::{SOURCES, Variant, all_variants};

use cache::Cache;

/// Outcome of compiling everything ahead of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileReport {
    /// Kernels now in the cache, for one architecture.
    pub kernels: usize,
    /// Number of those newly compiled; the others were already there.
    pub compiled: usize,
    /// Total size in bytes.
    pub bytes: u64,
}

/// Compiles every variant that models without unusual dimensions need, for one architecture (`sm_89`), into
/// `directory`. `nvrtc`: NVRTC's directory if the system does not find it.
///
/// # Errors
/// [`KernelError::Device`] if NVRTC is missing or does not know the architecture, or a file cannot be written.
pub fn compile_all(
    directory: &Path,
    architecture: &str,
    nvrtc: Option<&Path>,
) -> Result<CompileReport, KernelError> {
    let compiler = nvrtc::Compiler::new(architecture, nvrtc, None)?;
    let cache = Cache::new(vec![directory.to_owned()]);
    let mut report = CompileReport {
        kernels: 0,
        compiled: 0,
        bytes: 0,
    };
    for variant in all_variants() {
        if !variant.runs_on(architecture) {
            continue;
        }
        let key = variant.cache_key(architecture);
        let cubin = match cache.read(&key) {
            Some(cubin) => cubin,
            None => {
                let cubin = compiler.compile(&variant)?;
                cache.write(&key, &cubin)?;
                report.compiled += 1;
                cubin
            }
        };
        report.kernels += 1;
        report.bytes += cubin.len() as u64;
    }
    Ok(report)
}

/// Reason workers on this machine cannot compute on its GPUs; `None` if they can. `ahead`:
/// directories of kernels compiled ahead of time.
pub fn obstacle(ahead: &[PathBuf], nvrtc: Option<&Path>) -> Option<String> {
    let is_usable = || -> Result<(), KernelError> {
        let gpus = crate::driver::devices()?;
        let has_kernels = |directory: &PathBuf| {
            std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
        };
        match gpus.first() {
            Some(gpu) if !ahead.iter().any(has_kernels) => {
                let driver = crate::driver::version();
                nvrtc::Compiler::new(&gpu.architecture(), nvrtc, driver).map(drop)
            }
            _ => Ok(()),
        }
    };
    let error = is_usable().err()?;
    // The remedy is on the next line.
    let text = match error {
        KernelError::Device { detail, .. } => detail,
        other => other.to_string(),
    };
    text.lines().next().map(str::to_owned)
}

/// Compiles one variant without a cache; the text is the compiler's log, with registers and spills.
///
/// # Errors
/// As [`compile_all`].
pub fn compile_one(
    variant: &Variant,
    architecture: &str,
) -> Result<(Vec<u8>, String), KernelError> {
    nvrtc::Compiler::new(architecture, None, None)?.compile_verbose(variant)
}
