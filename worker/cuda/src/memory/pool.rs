//! Stream-ordered device memory under a hard budget.
//!
//! All computation runs in one stream, so a buffer may be reused as soon as its owner drops it: work queued before
//! runs before work queued after. Returned buffers wait in free lists by size and are given back to the driver
//! only when the budget requires it; a decode step therefore allocates nothing and gets the same addresses each time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::KernelError;

use crate::driver::sys::{self, CUdeviceptr, CUresult};
use crate::driver::{Stream, check, fault};

/// Byte of the patterns around buffers.
const SENTINEL: u8 = 0xa5;
/// Unit and alignment of every buffer.
const GRAIN_BYTES: usize = 512;

/// Source of all device memory of a backend.
pub(crate) struct Memory {
    stream: Arc<Stream>,
    budget_bytes: u64,
    /// Size of the pattern before and after each buffer, if sentinels are on.
    sentinels: Option<usize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes allocated by the driver, including free buffers.
    held_bytes: u64,
    /// Largest number of bytes that were allocated by the driver at once.
    peak_bytes: u64,
    /// Free lists: reusable addresses, by size.
    free: BTreeMap<usize, Vec<CUdeviceptr>>,
    free_bytes: u64,
    /// Buffers with sentinels: all since the last check, by the address of their leading pattern.
    guarded: BTreeMap<CUdeviceptr, Guarded>,
}

/// A buffer between patterns.
struct Guarded {
    bytes: usize,
    /// Whether its owner is gone; it is freed after the next check.
    is_dropped: bool,
}

impl Memory {
    /// Allocates at most `budget_bytes`, including free buffers. With `sentinels`, patterns of that many bytes
    /// surround every buffer, which has exactly the requested size, and nothing is reused: for tests.
    pub(crate) fn new(
        stream: Arc<Stream>,
        budget_bytes: u64,
        sentinels: Option<usize>,
    ) -> Arc<Self> {
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

    /// Bytes in use: held and not free.
    pub(crate) fn used_bytes(&self) -> u64 {
        let state = self.state();
        state.held_bytes - state.free_bytes
    }

    /// Largest number of bytes that were held at once, free ones included.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.state().peak_bytes
    }

    /// Bytes that can still be allocated.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.used_bytes())
    }

    /// Allocates a buffer of at least `bytes` bytes with unspecified contents; `what` names it in the error. Before
    /// free buffers are given back, `launch` must queue in the stream all work that still uses them.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`] if it would exceed the budget, or the GPU has no more memory.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        bytes: usize,
        what: &'static str,
        launch: impl Fn() -> Result<(), KernelError>,
    ) -> Result<Buffer, KernelError> {
        if let Some(sentinel) = self.sentinels {
            return self.alloc_guarded(bytes.max(1), sentinel, what, launch);
        }
        let size = size_class(bytes, what);
        let reused = {
            let mut state = self.state();
            let found = state.free.get_mut(&size).and_then(Vec::pop);
            if found.is_some() {
                state.free_bytes -= size as u64;
            }
            found
        };
        let address = match reused {
            Some(address) => address,
            None => self.ask(size, what, launch)?,
        };
        Ok(Buffer {
            address,
            size,
            home: Arc::clone(self),
        })
    }

    /// Allocates from the driver, giving free buffers back first if the budget or the GPU has no room.
    fn ask(
        &self,
        size: usize,
        what: &'static str,
        launch: impl Fn() -> Result<(), KernelError>,
    ) -> Result<CUdeviceptr, KernelError> {
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
            launch()?;
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
                    launch()?;
                    self.trim()?;
                    self.stream.synchronize()?;
                }
                (CUresult::CUDA_ERROR_OUT_OF_MEMORY, _) => return Err(too_large()),
                (other, _) => check("cuMemAllocAsync", other)?,
            }
        }
        let mut state = self.state();
        state.held_bytes += size as u64;
        state.peak_bytes = state.peak_bytes.max(state.held_bytes);
        Ok(address)
    }

    /// Gives all free buffers back to the driver; all work that uses them must be in the stream.
    pub(crate) fn trim(&self) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        let mut state = self.state();
        for (size, addresses) in std::mem::take(&mut state.free) {
            for address in addresses {
                state.held_bytes -= size as u64;
                state.free_bytes -= size as u64;
                // SAFETY: no one holds the address any more, and work queued with it runs before.
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
        sentinel: usize,
        what: &'static str,
        launch: impl Fn() -> Result<(), KernelError>,
    ) -> Result<Buffer, KernelError> {
        let base = self.ask(bytes + 2 * sentinel, what, launch)?;
        let guarded = Guarded {
            bytes,
            is_dropped: false,
        };
        for at in guarded.patterns(base, sentinel) {
            // SAFETY: both patterns lie inside the allocation.
            check("cuMemsetD8Async", unsafe {
                sys::cuMemsetD8Async(at, SENTINEL, sentinel, self.stream.raw())
            })?;
        }
        self.state().guarded.insert(base, guarded);
        Ok(Buffer {
            address: base + sentinel as u64,
            size: bytes,
            home: Arc::clone(self),
        })
    }

    /// Checks all patterns, and frees the buffers whose owners are gone. Everything queued must be done.
    ///
    /// # Errors
    /// [`KernelError::Device`] naming the first buffer that was written past its bounds.
    pub(crate) fn check_sentinels(&self) -> Result<usize, KernelError> {
        self.stream.synchronize()?;
        let Some(sentinel) = self.sentinels else {
            return Ok(0);
        };
        let mut state = self.state();
        let count = state.guarded.len();
        for (&base, guarded) in &state.guarded {
            guarded.read(base, sentinel)?;
        }
        let (gone, kept) = std::mem::take(&mut state.guarded)
            .into_iter()
            .partition(|(_, guarded)| guarded.is_dropped);
        state.guarded = kept;
        for (base, guarded) in gone {
            state.held_bytes -= (guarded.bytes + 2 * sentinel) as u64;
            // SAFETY: no one holds the address any more, and work queued with it is done.
            check("cuMemFreeAsync", unsafe {
                sys::cuMemFreeAsync(base, self.stream.raw())
            })?;
        }
        Ok(count)
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
        for base in std::mem::take(&mut self.state().guarded).into_keys() {
            // SAFETY: the last buffer is gone, since each holds this; all queued work is done.
            unsafe { sys::cuMemFreeAsync(base, self.stream.raw()) };
        }
    }
}

impl Guarded {
    /// Addresses of the patterns before and after the buffer.
    fn patterns(&self, base: CUdeviceptr, sentinel: usize) -> [CUdeviceptr; 2] {
        [base, base + (sentinel + self.bytes) as u64]
    }

    /// Checks that both patterns are intact.
    fn read(&self, base: CUdeviceptr, sentinel: usize) -> Result<(), KernelError> {
        let mut seen = vec![0_u8; sentinel];
        for (side, at) in ["before", "after"]
            .into_iter()
            .zip(self.patterns(base, sentinel))
        {
            // SAFETY: the pattern lies inside a live allocation, and `seen` has its size.
            check("cuMemcpyDtoH", unsafe {
                sys::cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), at, sentinel)
            })?;
            if let Some(offset) = seen.iter().position(|&byte| byte != SENTINEL) {
                return Err(fault(format!(
                    "a kernel wrote {side} a buffer of {} bytes, at byte {offset} of the sentinel",
                    self.bytes
                )));
            }
        }
        Ok(())
    }
}

/// Bytes on the device. Queued work that uses them stays sound after the drop, as the stream is in order.
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
        let mut state = self.home.state();
        if let Some(sentinel) = self.home.sentinels {
            // Kept until its patterns have been checked.
            if let Some(guarded) = state.guarded.get_mut(&(self.address - sentinel as u64)) {
                guarded.is_dropped = true;
            }
            return;
        }
        state.free_bytes += self.size as u64;
        let free = state.free.entry(self.size).or_default();
        free.push(self.address);
    }
}

/// Allocations that last as long as the model: they take exactly their size.
const LASTING: [&str; 4] = [
    "weights",
    "scales of weights",
    "the KV cache",
    "a slot of the experts' ring",
];

/// Rounds up the sizes of temporary allocations so that similar ones can share buffers: at most a quarter too large.
fn size_class(bytes: usize, what: &str) -> usize {
    let bytes = bytes.max(1).next_multiple_of(GRAIN_BYTES);
    if LASTING.contains(&what) {
        return bytes;
    }
    bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(GRAIN_BYTES))
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn sizes_are_rounded_by_a_quarter_at_most_and_weights_not_at_all() {
        assert_eq!(size_class(0, "activations"), 512);
        assert_eq!(size_class(513, "activations"), 1024);
        for bytes in [5000, 70_000, 1_234_567, 40 << 20, 3 << 30] {
            let size = size_class(bytes, "activations");
            assert!(size >= bytes && size.is_multiple_of(512), "{bytes}");
            assert!(size as f64 <= bytes as f64 * 1.25 + 512.0, "{bytes}");
        }
        assert_eq!(size_class(1408 * 2048 * 2, "weights"), 1408 * 2048 * 2);
    }
}
