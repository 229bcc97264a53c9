//! Small results on their way to the host while it prepares the next step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::KernelError;

use crate::driver::sys::{self, CUdeviceptr};
use crate::driver::{Device, Mark, Marks, Stream, check};
use crate::memory::Pinned;

/// Size from which pinned buffers begin.
const LEAST_BYTES: usize = 4 << 10;

/// Pinned buffers that are used again.
pub(super) struct Landings {
    device: Arc<Device>,
    unused: Mutex<Vec<Pinned>>,
}

/// Bytes on their way to the host.
pub(crate) struct Landing {
    /// Taken by the drop alone.
    host: Option<Pinned>,
    bytes: usize,
    there: Mark,
    home: Arc<Landings>,
}

impl Landings {
    pub(super) fn new(device: &Arc<Device>) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::clone(device),
            unused: Mutex::default(),
        })
    }

    /// Queues a copy of device bytes.
    pub(super) fn land(
        self: &Arc<Self>,
        stream: &Stream,
        address: CUdeviceptr,
        bytes: usize,
        marks: &Arc<Marks>,
    ) -> Result<Landing, KernelError> {
        self.device.bind()?;
        let unused = self.unused().pop().filter(|host| host.len() >= bytes);
        let mut host = match unused {
            Some(host) => host,
            None => Pinned::new(&self.device, bytes.next_power_of_two().max(LEAST_BYTES))?,
        };
        if bytes > 0 {
            // SAFETY: the caller's range lies in a live buffer, whose memory only later commands of this stream use again;
            // the pinned one is as large, and is read, used again or freed only after the mark.
            check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr(), address, bytes, stream.raw())
            })?;
        }
        match marks.record(stream) {
            Ok(there) => Ok(Landing {
                host: Some(host),
                bytes,
                there,
                home: Arc::clone(self),
            }),
            Err(error) => {
                // Nothing tells when the copy ends: the stream as a whole does, or the memory is never freed.
                if stream.synchronize().is_err() {
                    std::mem::forget(host);
                }
                Err(error)
            }
        }
    }

    fn unused(&self) -> MutexGuard<'_, Vec<Pinned>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Landing {
    /// Waits until the bytes are there.
    pub(crate) fn bytes(&self) -> Result<&[u8], KernelError> {
        self.there.wait()?;
        Ok(self
            .host
            .as_ref()
            .map_or(&[], |host| &host.bytes()[..self.bytes]))
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if let Some(host) = self.host.take() {
            match self.there.wait() {
                Ok(()) => self.home.unused().push(host),
                // The copy may still be on its way, and nothing tells when it ends.
                Err(_) => std::mem::forget(host),
            }
        }
    }
}
