//! The driver: its presence, its errors, and its devices.
//!
//! libcuda is loaded when it is first needed; a machine without it loses only the time of a failed `dlopen`.

mod device;
mod marks;
mod stream;
pub(crate) mod sys;

use std::ffi::CStr;
use std::sync::OnceLock;

use hearth_kernels::KernelError;

use self::sys::CUresult;
pub(crate) use device::Device;
pub use device::{DeviceInfo, devices};
pub(crate) use marks::{Mark, Marks};
pub(crate) use stream::{Event, Stream};
pub(crate) use sys::functions;

/// The oldest driver API version that has every call made here: CUDA 12.0, driver 525.
const OLDEST_DRIVER: i32 = 12_000;

/// Initialises the driver, once.
///
/// # Errors
/// [`KernelError::Device`] if there is no driver, it is too old, or it does not start.
pub(crate) fn init() -> Result<(), KernelError> {
    static STATE: OnceLock<Result<(), String>> = OnceLock::new();
    let state = STATE.get_or_init(try_init);
    state.clone().map_err(fault)
}

fn try_init() -> Result<(), String> {
    // SAFETY: only loads the library, whose initialisers are NVIDIA's.
    if !unsafe { sys::is_culib_present() } {
        // SAFETY: as above; loading the library has just failed.
        let why = unsafe { libloading::Library::new("libcuda.so.1") }.err();
        let why = why.map_or_else(String::new, |error| format!(" ({error})"));
        return Err(format!(
            "no NVIDIA driver: libcuda.so.1 cannot be loaded{why}\n  install the driver (525 or later), or compute on the CPU (--device cpu; in a deployment spec.prefill.gpusPerWorker: 0)"
        ));
    }
    let mut version = 0;
    // SAFETY: the library is loaded; both calls take no memory except a valid out-pointer.
    let (started, asked) = unsafe { (sys::cuInit(0), sys::cuDriverGetVersion(&raw mut version)) };
    if asked == CUresult::CUDA_SUCCESS && version < OLDEST_DRIVER {
        return Err(format!(
            "the NVIDIA driver supports CUDA {}.{}, and 12.0 is needed\n  update the driver to 525 or later, or compute on the CPU (--device cpu; in a deployment spec.prefill.gpusPerWorker: 0)",
            version / 1000,
            version % 1000 / 10
        ));
    }
    match started {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(
            "the NVIDIA driver sees no GPU\n  check that `nvidia-smi` lists it and that CUDA_VISIBLE_DEVICES does not hide it, or compute on the CPU (--device cpu; in a deployment spec.prefill.gpusPerWorker: 0)"
                .to_owned(),
        ),
        other => Err(format!(
            "the NVIDIA driver does not start: {}\n  check `nvidia-smi` and the kernel's log, or compute on the CPU (--device cpu; in a deployment spec.prefill.gpusPerWorker: 0)",
            describe(other)
        )),
    }
}

/// A device fault that is not a shape error.
pub(crate) fn fault(detail: impl Into<String>) -> KernelError {
    KernelError::Device {
        device: "cuda".to_owned(),
        detail: detail.into(),
    }
}

/// Converts a driver result to our error, naming the call and the remedy.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), KernelError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let remedy = match result {
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS => {
            "a kernel faulted, and this process can no longer use the GPU: the worker must restart"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            "other processes hold the GPU's memory: see `nvidia-smi`, and free some"
        }
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE => {
            "the GPU's memory is damaged: reset the GPU, and replace it if this happens again"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_IMAGE => {
            "a compiled kernel does not fit this GPU or driver: remove the kernel cache"
        }
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process holds the GPU for itself: check its compute mode with `nvidia-smi -q`"
        }
        _ => "check `nvidia-smi` and the kernel's log",
    };
    Err(fault(format!("{call}: {}\n  {remedy}", describe(result))))
}

/// Formats a result as `CUDA_ERROR_X (what it means)`, or as its number if the driver does not know it either.
fn describe(result: CUresult) -> String {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the library is loaded, and the out-pointers are valid.
    let known = unsafe {
        (
            sys::cuGetErrorName(result, &raw mut name),
            sys::cuGetErrorString(result, &raw mut text),
        )
    };
    if known != (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS) || name.is_null() || text.is_null()
    {
        return format!("error {}, which this driver does not name", result.0);
    }
    // SAFETY: the driver's texts end with a zero byte and have static lifetime.
    let [name, text] = [name, text].map(|chars| unsafe { CStr::from_ptr(chars) }.to_string_lossy());
    format!("{name} ({text})")
}
