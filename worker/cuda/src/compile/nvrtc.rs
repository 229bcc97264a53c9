//! NVRTC: from source to cubin for one architecture.

mod sys;

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;

use hearth_kernels::KernelError;

use self::sys::{nvrtcProgram, nvrtcResult};
use super::Variant;
use super::sources::{HEADERS, OPTIONS};
use crate::driver::fault;

/// Its major versions: what 12 compiles, every driver that Hearth takes accepts; what 13 compiles, drivers from 13.0 on.
const LIBRARIES: [&str; 2] = ["libnvrtc.so.12", "libnvrtc.so.13"];
/// The oldest architecture that supports the kernels' instructions.
const LEAST_ARCHITECTURE: i32 = 80;

/// Where the library is looked for: in a named directory, which takes precedence, then where the system looks. A name
/// without a version is not: it may be of any.
fn candidates(directory: Option<&Path>, driver: Option<i32>) -> Vec<PathBuf> {
    let count = if driver >= Some(13_000) { 2 } else { 1 };
    let named = |directory: Option<&Path>| {
        let in_it = |name: &&str| directory.map_or_else(|| name.into(), |at| at.join(name));
        LIBRARIES[..count].iter().map(in_it).collect::<Vec<_>>()
    };
    let mut all = directory.map_or_else(Vec::new, |directory| named(Some(directory)));
    all.extend(named(None));
    all
}

/// NVRTC, found and able to compile for an architecture.
pub(super) struct Compiler {
    architecture: String,
}

impl Compiler {
    /// A compiler whose kernels drivers from `driver` on take; `None`: the oldest that Hearth does. `directory` may have
    /// the library.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the library is missing or does not know the architecture.
    pub(super) fn new(
        architecture: &str,
        directory: Option<&Path>,
        driver: Option<i32>,
    ) -> Result<Self, KernelError> {
        sys::load(&candidates(directory, driver)).map_err(|refusals| {
            fault(format!(
                "kernels must be compiled, and NVRTC is missing: libnvrtc.so.12 cannot be loaded; {}\n  install it (Debian: libnvrtc12; PyPI: nvidia-cuda-nvrtc-cu12, its lib directory named with --nvrtc or HEARTH_NVRTC), or use an image whose kernels were compiled ahead with `hearth-worker cuda-compile`",
                refusals.join("; ")
            ))
        })?;
        let known = supported()?;
        let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
        if !architecture.starts_with("sm_") || !known.iter().any(|k| k.to_string() == number) {
            let list: Vec<String> = known
                .iter()
                .filter(|&&k| k >= LEAST_ARCHITECTURE)
                .map(|k| format!("sm_{k}"))
                .collect();
            return Err(fault(format!(
                "this NVRTC cannot compile for {architecture:?}, only for {}\n  name one of those, or install a newer NVRTC",
                list.join(", ")
            )));
        }
        if number.parse().is_ok_and(|n: i32| n < LEAST_ARCHITECTURE) {
            return Err(fault(format!(
                "kernels need sm_{LEAST_ARCHITECTURE} or newer, and {architecture} was asked for\n  use a GPU of the RTX 30 series or newer"
            )));
        }
        Ok(Self {
            architecture: architecture.to_owned(),
        })
    }

    /// Returns the cubin of a variant.
    ///
    /// # Errors
    /// [`KernelError::Device`] with the compiler's log.
    pub(super) fn compile(&self, variant: &Variant) -> Result<Vec<u8>, KernelError> {
        self.run(variant, &[]).map(|(cubin, _)| cubin)
    }

    /// Compiles as [`Compiler::compile`] does, and also returns the assembler's report of registers and spills.
    pub(super) fn compile_verbose(
        &self,
        variant: &Variant,
    ) -> Result<(Vec<u8>, String), KernelError> {
        self.run(variant, &["--ptxas-options=-v"])
    }

    fn run(&self, variant: &Variant, extra: &[&str]) -> Result<(Vec<u8>, String), KernelError> {
        let program = Program::new(variant)?;
        let mut options: Vec<String> = OPTIONS.iter().map(|&o| o.to_owned()).collect();
        options.push(format!("--gpu-architecture={}", self.architecture));
        options.extend(variant.options());
        options.extend(extra.iter().map(|&o| o.to_owned()));
        let result = program.compile(&options)?;
        let log = program.log();
        if result != nvrtcResult::NVRTC_SUCCESS {
            return Err(fault(format!(
                "kernel {} does not compile for {} (error {}):\n{log}\n  this is a fault of Hearth or of the NVRTC that is installed",
                variant.file, self.architecture, result.0
            )));
        }
        Ok((program.cubin()?, log))
    }
}

/// Architectures that the library compiles for, as numbers such as 89.
fn supported() -> Result<Vec<i32>, KernelError> {
    let mut count = 0;
    // SAFETY: the library is loaded, the out-pointer valid.
    check("nvrtcGetNumSupportedArchs", unsafe {
        sys::nvrtcGetNumSupportedArchs(&raw mut count)
    })?;
    let mut archs = vec![0; count.max(0) as usize];
    // SAFETY: the vector holds as many as the library just said.
    check("nvrtcGetSupportedArchs", unsafe {
        sys::nvrtcGetSupportedArchs(archs.as_mut_ptr())
    })?;
    Ok(archs)
}

fn check(call: &str, result: nvrtcResult) -> Result<(), KernelError> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        nvrtcResult(code) => Err(fault(format!(
            "{call}: error {code}\n  check the installed NVRTC"
        ))),
    }
}

/// A program of the library, destroyed when dropped.
struct Program(nvrtcProgram);

impl Program {
    fn new(variant: &Variant) -> Result<Self, KernelError> {
        let source = text(variant.source())?;
        let name = text(&format!("{}.cu", variant.file))?;
        let texts = HEADERS
            .iter()
            .map(|(_, t)| text(t))
            .collect::<Result<Vec<_>, _>>()?;
        let names = HEADERS
            .iter()
            .map(|(n, _)| text(n))
            .collect::<Result<Vec<_>, _>>()?;
        let text_pointers: Vec<*const c_char> = texts.iter().map(|t| t.as_ptr()).collect();
        let name_pointers: Vec<*const c_char> = names.iter().map(|n| n.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: all strings are null-terminated and live through the call, which copies them; the counts match.
        check("nvrtcCreateProgram", unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as i32,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        })?;
        Ok(Self(program))
    }

    fn compile(&self, options: &[String]) -> Result<nvrtcResult, KernelError> {
        let options = options
            .iter()
            .map(|o| text(o))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program lives; the strings live through the call.
        Ok(unsafe { sys::nvrtcCompileProgram(self.0, pointers.len() as i32, pointers.as_ptr()) })
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program lives, the out-pointer is valid.
        let sized = unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut size) };
        let mut log = vec![0_u8; size];
        if sized != nvrtcResult::NVRTC_SUCCESS || size == 0 {
            return String::new();
        }
        // SAFETY: the vector holds as many bytes as the library just said.
        unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .trim_end()
            .to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, KernelError> {
        let mut size = 0;
        // SAFETY: the program lives, the out-pointer is valid.
        check("nvrtcGetCUBINSize", unsafe {
            sys::nvrtcGetCUBINSize(self.0, &raw mut size)
        })?;
        let mut cubin = vec![0_u8; size];
        // SAFETY: the vector holds as many bytes as the library just said.
        check("nvrtcGetCUBIN", unsafe {
            sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast())
        })?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn text(text: &str) -> Result<CString, KernelError> {
    CString::new(text).map_err(|_| fault("a kernel's source or option holds a zero byte"))
}
