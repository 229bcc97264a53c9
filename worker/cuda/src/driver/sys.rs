//! The driver's functions, on cudarc's types.
//!
//! cudarc declares their results as an enum. A driver may be newer than that and return a number that is none of its
//! values, which would be undefined behaviour; here a result is any number. The same holds for NVRTC
//! (`compile/nvrtc.rs`).
#![allow(non_snake_case, clippy::too_many_arguments)] // the driver's own names and functions

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

pub(crate) use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY, CUDA_KERNEL_NODE_PARAMS,
    CUDA_MEMCPY2D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUevent_flags_enum, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec,
    CUgraphNode, CUmemorytype, CUmodule, CUstream, CUstream_flags_enum, CUuuid, culib,
    is_culib_present,
};

/// What a function of the driver returns: any number, some of which have names here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct CUresult(pub(crate) c_uint);

impl CUresult {
    pub(crate) const CUDA_SUCCESS: Self = Self(0);
    pub(crate) const CUDA_ERROR_INVALID_VALUE: Self = Self(1);
    pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const CUDA_ERROR_DEVICE_UNAVAILABLE: Self = Self(46);
    pub(crate) const CUDA_ERROR_NO_DEVICE: Self = Self(100);
    pub(crate) const CUDA_ERROR_INVALID_IMAGE: Self = Self(200);
    pub(crate) const CUDA_ERROR_NO_BINARY_FOR_GPU: Self = Self(209);
    pub(crate) const CUDA_ERROR_ECC_UNCORRECTABLE: Self = Self(214);
    pub(crate) const CUDA_ERROR_NVLINK_UNCORRECTABLE: Self = Self(220);
    pub(crate) const CUDA_ERROR_OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const CUDA_ERROR_NOT_FOUND: Self = Self(500);
    pub(crate) const CUDA_ERROR_NOT_READY: Self = Self(600);
    pub(crate) const CUDA_ERROR_ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const CUDA_ERROR_MISALIGNED_ADDRESS: Self = Self(716);
    pub(crate) const CUDA_ERROR_LAUNCH_FAILED: Self = Self(719);
    pub(crate) const CUDA_ERROR_NOT_PERMITTED: Self = Self(800);
    pub(crate) const CUDA_ERROR_NOT_SUPPORTED: Self = Self(801);
    pub(crate) const CUDA_ERROR_UNKNOWN: Self = Self(999);

    /// The result of a function that the driver does not have.
    const MISSING: Self = Self::CUDA_ERROR_NOT_FOUND;
}

/// Declares functions of a library that is loaded at run time, each looked up at its first call; a missing one returns
/// `MISSING`.
macro_rules! functions {
    ($library:ident, $result:ident; $(fn $name:ident($($argument:ident: $kind:ty),* $(,)?);)*) => {$(
        /// As in the library's documentation.
        ///
        /// # Safety
        /// The library is present, and the arguments are what its documentation asks for.
        pub(crate) unsafe fn $name($($argument: $kind),*) -> $result {
            type Function = unsafe extern "C" fn($($kind),*) -> $result;
            static FUNCTION: std::sync::OnceLock<Option<Function>> = std::sync::OnceLock::new();
            let function = FUNCTION.get_or_init(|| {
                let name = concat!(stringify!($name), "\0");
                // SAFETY: the type is that of the library's header; its result is an enum of the same size in C, where
                // any number is a value of it.
                let symbol = unsafe { $library().get::<Function>(name.as_bytes()) };
                symbol.ok().map(|symbol| *symbol)
            });
            match function {
                // SAFETY: the caller answers for the arguments, and the library is never unloaded.
                Some(function) => unsafe { function($($argument),*) },
                None => $result::MISSING,
            }
        }
    )*};
}
pub(crate) use functions;

functions! { culib, CUresult;
    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventElapsedTime(ms: *mut f32, begin: CUevent, end: CUevent);
    fn cuEventQuery(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventSynchronize(event: CUevent);
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    fn cuGetErrorName(error: CUresult, name: *mut *const c_char);
    fn cuGetErrorString(error: CUresult, text: *mut *const c_char);
    fn cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS,
    );
    fn cuGraphAddMemsetNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, params: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    );
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuGraphExecDestroy(exec: CUgraphExec);
    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS);
    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    fn cuInit(flags: c_uint);
    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void,
    );
    fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    fn cuMemFreeHost(start: *mut c_void);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, start: *mut c_void, flags: c_uint);
    fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemHostUnregister(start: *mut c_void);
    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
}
