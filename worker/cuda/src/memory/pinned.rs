//! Host memory that the GPU reads and writes directly.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use hearth_kernels::KernelError;

use crate::driver::sys::{self, CUdeviceptr};
use crate::driver::{Device, check, fault};

/// Page-locked bytes, initially zero; cached by the CPU, so reading them is as fast as any other memory.
pub(crate) struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory that this value owns.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, KernelError> {
        device.bind()?;
        let mut start: *mut c_void = std::ptr::null_mut();
        // Not write-combined: the CPU reads logits and KV from here.
        // SAFETY: a context is current, the out-pointer valid.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&raw mut start, bytes.max(1), 0)
        })?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| fault("cuMemHostAlloc gave no memory"))?;
        // SAFETY: the memory is ours and of this length; no reference to it exists yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self {
            device: Arc::clone(device),
            start,
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: owned, initialised, and no copy from the device into it is in flight while this is called.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    pub(crate) fn as_ptr(&self) -> *const c_void {
        self.start.as_ptr().cast()
    }

    /// Address at which kernels see this memory.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver does not map it.
    pub(crate) fn device_address(&self) -> Result<CUdeviceptr, KernelError> {
        self.device.bind()?;
        let mut address = 0;
        // SAFETY: a context is current, the memory is this value's, the out-pointer valid.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.start.as_ptr().cast(), 0)
        })?;
        Ok(address)
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`; every queued copy has been waited for.
            unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}
