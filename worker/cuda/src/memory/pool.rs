//! Stream-ordered device memory under a hard budget.
//!
//! All computation runs in one stream, so a buffer may be used again as soon as its owner drops it: what was queued before
//! runs before what is queued after. Buffers that came back wait in a list by size and are given to the driver
//! only when the budget asks for it; a decode step therefore allocates nothing and finds the same addresses each time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use hearth_kernels::KernelError;

use crate::driver::{Stream, check, fault};

/// Bytes of the pattern before and after each buffer, where sentinels stand.
const SENTINEL_BYTES: usize = 256;
const SENTINEL: u8 = 0xa5;
/// Unit and alignment of every buffer.
const GRAIN_BYTES: usize = 512;

/// Where all device memory of a backend comes from.
pub(crate) struct Memory {
    stream: Arc<Stream>,
    budget_bytes: u64,
    sentinels: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes that the driver has given, waiting ones among them.
    held_bytes: u64,
    /// Addresses that wait to be used again, by size.
    waiting: BTreeMap<usize, Vec<CUdeviceptr>>,
    waiting_bytes: u64,
    /// With sentinels: every buffer since the last look, `(address of the leading pattern, bytes between the patterns)`.
    guarded: Vec<(CUdeviceptr, usize)>,
}

impl Memory {
    /// Gives out at most `budget_bytes`, buffers that wait among them. With `sentinels`, patterns stand around every buffer
    /// and nothing is used twice: for tests.
    pub(crate) fn new(stream: Arc<Stream>, budget_bytes: u64, sentinels: bool) -> Arc<Self> {
        Arc::new(Self {
            stream,
            budget_bytes,
            sentinels,
            state: Mutex::default(),
        })
    }

    /// The stream in whose order memory is used.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Bytes that are in use: held, and not waiting.
    pub(crate) fn used_bytes(&self) -> u64 {
        let state = self.state();
        state.held_bytes - state.waiting_bytes
    }

    /// Bytes that could still be had.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.used_bytes())
    }

    /// A buffer of at least `bytes` bytes with unspecified contents; `what` names it in the error.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] when it would pass the budget, or the GPU has no more.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Buffer, KernelError> {
        let size = size_class(bytes);
        if self.sentinels {
            return self.alloc_guarded(bytes.max(1), what);
        }
        let reused = {
            let mut state = self.state();
            let found = state.waiting.get_mut(&size).and_then(Vec::pop);
            if found.is_some() {
                state.waiting_bytes -= size as u64;
            }
            found
        };
        let address = match reused {
            Some(address) => address,
            None => self.ask(size, what)?,
        };
        Ok(Buffer {
            address,
            size,
            home: Arc::clone(self),
        })
    }

    /// Asks the driver, after giving waiting buffers back where the budget or the GPU has no room.
    fn ask(&self, size: usize, what: &'static str) -> Result<CUdeviceptr, KernelError> {
        self.stream.device().bind()?;
        let too_large = || KernelError::OutOfMemory {
            device: format!(
                "{} (budget {} bytes, {} in use)",
                self.stream.device().label(),
                self.budget_bytes,
                self.used_bytes()
            ),
            what: what.to_owned(),
            needed_bytes: size as u64,
        };
        let exceeds = |state: &State| state.held_bytes + size as u64 > self.budget_bytes;
        if exceeds(&self.state()) {
            self.trim()?;
            if exceeds(&self.state()) {
                return Err(too_large());
            }
        }
        let mut address = 0;
        for attempt in 0..2 {
            // SAFETY: a context is current, the out-pointer valid, the stream lives.
            let result = unsafe { sys::cuMemAllocAsync(&raw mut address, size, self.stream.raw()) };
            match (result, attempt) {
                (CUresult::CUDA_SUCCESS, _) => break,
                (CUresult::CUDA_ERROR_OUT_OF_MEMORY, 0) => {
                    self.trim()?;
                    self.stream.synchronize()?;
                }
                (CUresult::CUDA_ERROR_OUT_OF_MEMORY, _) => return Err(too_large()),
                (other, _) => check("cuMemAllocAsync", other)?,
            }
        }
        self.state().held_bytes += size as u64;
        Ok(address)
    }

    /// Gives the driver all buffers that wait.
    pub(crate) fn trim(&self) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        let mut state = self.state();
        for (size, addresses) in std::mem::take(&mut state.waiting) {
            for address in addresses {
                state.held_bytes -= size as u64;
                state.waiting_bytes -= size as u64;
                // SAFETY: nobody holds the address any more, and what was queued with it runs before.
                check("cuMemFreeAsync", unsafe {
                    sys::cuMemFreeAsync(address, self.stream.raw())
                })?;
            }
        }
        Ok(())
    }

    fn alloc_guarded(
        self: &Arc<Self>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Buffer, KernelError> {
        let base = self.ask(bytes + 2 * SENTINEL_BYTES, what)?;
        let trailing = base + (SENTINEL_BYTES + bytes) as u64;
        for at in [base, trailing] {
            // SAFETY: both patterns lie inside the allocation.
            check("cuMemsetD8Async", unsafe {
                sys::cuMemsetD8Async(at, SENTINEL, SENTINEL_BYTES, self.stream.raw())
            })?;
        }
        self.state().guarded.push((base, bytes));
        Ok(Buffer {
            address: base + SENTINEL_BYTES as u64,
            size: bytes,
            home: Arc::clone(self),
        })
    }

    /// Reads all patterns. Of use only where sentinels stand; everything queued must be done.
    ///
    /// # Errors
    /// [`KernelError::Device`] naming the first buffer that was written past its bounds.
    pub(crate) fn check_sentinels(&self) -> Result<usize, KernelError> {
        self.stream.synchronize()?;
        let state = self.state();
        let mut seen = [0_u8; SENTINEL_BYTES];
        for &(base, bytes) in &state.guarded {
            for (side, at) in [
                ("before", base),
                ("after", base + (SENTINEL_BYTES + bytes) as u64),
            ] {
                // SAFETY: the pattern lies inside a live allocation, `seen` holds as much.
                check("cuMemcpyDtoH", unsafe {
                    sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), at, SENTINEL_BYTES)
                })?;
                if let Some(offset) = seen.iter().position(|&byte| byte != SENTINEL) {
                    return Err(fault(format!(
                        "a kernel wrote {side} a buffer of {bytes} bytes, at byte {offset} of the sentinel"
                    )));
                }
            }
        }
        Ok(state.guarded.len())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() || self.trim().is_err() {
            return; // The context is lost, and its memory with it.
        }
        for (base, _) in std::mem::take(&mut self.state().guarded) {
            // SAFETY: the last buffer is gone, since each holds this; what was queued is done.
            unsafe { sys::cuMemFreeAsync(base, self.stream.raw()) };
        }
    }
}

/// Bytes on the device. What was queued with it stays sound after the drop, as the stream is in order.
pub(crate) struct Buffer {
    address: CUdeviceptr,
    size: usize,
    home: Arc<Memory>,
}

impl Buffer {
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.home.sentinels {
            return; // Kept until its patterns were read.
        }
        let mut state = self.home.state();
        state.waiting_bytes += self.size as u64;
        let waiting = state.waiting.entry(self.size).or_default();
        waiting.push(self.address);
    }
}

/// Sizes are rounded up so that like ones meet: at most an eighth too large.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(1).next_multiple_of(GRAIN_BYTES);
    let step = (bytes.next_power_of_two() / 8).max(GRAIN_BYTES);
    // Weights and KV caches are large, live long, and take what they need.
    if bytes >= 64 << 20 {
        return bytes.next_multiple_of(2 << 20);
    }
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn sizes_are_rounded_by_an_eighth_at_most() {
        assert_eq!(size_class(0), 512);
        assert_eq!(size_class(513), 1024);
        for bytes in [5000, 70_000, 1_234_567, 40 << 20, 3 << 30] {
            let size = size_class(bytes);
            assert!(size >= bytes && size.is_multiple_of(512), "{bytes}");
            assert!(size as f64 <= bytes as f64 * 1.26 + 512.0, "{bytes}");
        }
    }
}
