//! The device's memory: a budget, what is taken from it, and the most that ever was.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::KernelError;
use hearth_kernels::ops::DeviceMemory;

/// Memory of one device.
#[derive(Debug)]
pub(crate) struct Memory {
    budget_bytes: u64,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    bytes: u64,
    peak_bytes: u64,
}

impl Memory {
    pub(crate) fn new(budget_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            budget_bytes,
            used: Mutex::default(),
        })
    }

    /// Takes memory until the returned value is dropped; `what` names it in the error.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] if so much is not left.
    pub(crate) fn take(
        self: &Arc<Self>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Held, KernelError> {
        let mut used = self.used();
        let after = used.bytes.saturating_add(bytes as u64);
        if after > self.budget_bytes {
            return Err(KernelError::OutOfMemory {
                device: format!(
                    "virtual (budget {} bytes, {} in use)",
                    self.budget_bytes, used.bytes
                ),
                what: what.to_owned(),
                needed_bytes: bytes as u64,
            });
        }
        used.bytes = after;
        used.peak_bytes = used.peak_bytes.max(after);
        Ok(Held {
            memory: Arc::clone(self),
            bytes: bytes as u64,
        })
    }

    pub(crate) fn read(&self) -> DeviceMemory {
        let used = self.used();
        DeviceMemory {
            used_bytes: used.bytes,
            peak_bytes: used.peak_bytes,
            budget_bytes: self.budget_bytes,
        }
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // The counters are consistent whenever the lock is free.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that was taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.used().bytes -= self.bytes;
    }
}
