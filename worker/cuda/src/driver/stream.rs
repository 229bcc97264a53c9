//! Streams and events.

use std::sync::Arc;

use hearth_kernels::KernelError;

use super::sys::{self, CUevent, CUresult, CUstream};
use super::{Device, check};

/// A queue of work on the GPU, executed in order.
pub(crate) struct Stream {
    device: Arc<Device>,
    raw: CUstream,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not wait for the default one.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current, the out-pointer valid.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&raw mut raw, flags)
        })?;
        Ok(Self {
            device: Arc::clone(device),
            raw,
        })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until everything queued is done.
    pub(crate) fn synchronize(&self) -> Result<(), KernelError> {
        self.device.bind()?;
        self.device.count_wait();
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        })
    }

    /// Makes work queued from now on wait for `event`.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), KernelError> {
        self.device.bind()?;
        // SAFETY: stream and event live, and an event that was never recorded counts as done.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(self.raw, event.raw, 0)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`; the driver destroys it once its work is done.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A mark in a stream.
pub(crate) struct Event {
    device: Arc<Device>,
    raw: CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without timing.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
        Self::with_flags(device, flags as u32)
    }

    /// Creates an event that records its time.
    pub(crate) fn timed(device: &Arc<Device>) -> Result<Self, KernelError> {
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT;
        Self::with_flags(device, flags as u32)
    }

    fn with_flags(device: &Arc<Device>, flags: u32) -> Result<Self, KernelError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current, the out-pointer valid.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&raw mut raw, flags)
        })?;
        Ok(Self {
            device: Arc::clone(device),
            raw,
        })
    }

    /// Marks the end of the work queued in `stream` so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), KernelError> {
        self.device.bind()?;
        // SAFETY: event and stream live and belong to one context.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, stream.raw)
        })
    }

    /// Whether the mark is reached; true if it was never recorded.
    pub(crate) fn is_reached(&self) -> Result<bool, KernelError> {
        self.device.bind()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits until the mark is reached; returns immediately if it was never recorded.
    pub(crate) fn wait(&self) -> Result<(), KernelError> {
        self.device.bind()?;
        self.device.count_wait();
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.raw)
        })
    }

    /// Time from this event to `to`, both timed, ns; `None` if one of them is not reached yet.
    pub(crate) fn elapsed_ns(&self, to: &Self) -> Option<u64> {
        let mut ms = 0.0;
        // SAFETY: both events live, and the out-pointer is valid.
        let answer = unsafe { sys::cuEventElapsedTime(&raw mut ms, self.raw, to.raw) };
        (answer == CUresult::CUDA_SUCCESS).then_some((f64::from(ms) * 1e6) as u64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `new`.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
