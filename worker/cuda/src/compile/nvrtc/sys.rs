//! NVRTC's functions, whose results are any number (`driver/sys.rs`).
#![allow(non_snake_case, non_camel_case_types)] // the library's own names

use std::ffi::{c_char, c_int, c_uint};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library;

pub(super) use cudarc::nvrtc::sys::nvrtcProgram;

use crate::driver::functions;

/// What a function of NVRTC returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct nvrtcResult(pub(super) c_uint);

impl nvrtcResult {
    pub(super) const NVRTC_SUCCESS: Self = Self(0);

    /// The result of a function that the library does not have: NVRTC_ERROR_INTERNAL_ERROR.
    const MISSING: Self = Self(11);
}

/// The library, once it is loaded; it stays so.
static LIBRARY: OnceLock<Library> = OnceLock::new();

/// Loads the first of these that can be loaded, unless one is already.
///
/// # Errors
/// Why each of them cannot.
pub(super) fn load(candidates: &[PathBuf]) -> Result<(), Vec<String>> {
    let mut refusals = Vec::new();
    for candidate in candidates {
        if LIBRARY.get().is_some() {
            return Ok(());
        }
        // SAFETY: only loads the library, whose initialisers are NVIDIA's.
        match unsafe { Library::new(candidate) } {
            // Another thread may have been faster, with the same list.
            Ok(library) => drop(LIBRARY.set(library)),
            Err(error) => refusals.push(error.to_string()),
        }
    }
    LIBRARY.get().map(drop).ok_or(refusals)
}

/// The library.
///
/// # Panics
/// If it is not loaded.
fn library() -> &'static Library {
    LIBRARY.get().expect("NVRTC is called before it is loaded")
}

functions! { library, nvrtcResult;
    fn nvrtcCompileProgram(program: nvrtcProgram, count: c_int, options: *const *const c_char);
    fn nvrtcCreateProgram(
        program: *mut nvrtcProgram, source: *const c_char, name: *const c_char, headers: c_int, texts: *const *const c_char,
        names: *const *const c_char,
    );
    fn nvrtcDestroyProgram(program: *mut nvrtcProgram);
    fn nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char);
    fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetNumSupportedArchs(count: *mut c_int);
    fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char);
    fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize);
    fn nvrtcGetSupportedArchs(architectures: *mut c_int);
}
