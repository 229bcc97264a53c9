//! Rows that kernels of a small step read in the host's memory, without a copy.
//!
//! A layer whose experts the host computes waits for the device and then gives it their sum. A copy would be queued between
//! two graphs; a kernel that reads the rows where they are is part of the next one (docs/benchmarks.md has what each way costs).

use std::sync::Arc;

use hearth_kernels::KernelError;

use crate::driver::Device;
use crate::driver::sys::CUdeviceptr;
use crate::memory::Pinned;

/// Room for rows between two waits for the stream.
const ROOM_BYTES: usize = 2 << 20;
/// Alignment of a row's first element: kernels read four at a time.
const ALIGN_BYTES: usize = 16;

/// Pinned memory that is filled from its start after each wait for the stream.
#[derive(Default)]
pub(super) struct InPlace {
    pinned: Option<Pinned>,
    filled: usize,
}

impl InPlace {
    /// Puts bytes where a kernel reads them at the returned address, until [`Self::clear`]; `None` if there is no room.
    pub(super) fn put(
        &mut self,
        device: &Arc<Device>,
        bytes: &[u8],
    ) -> Result<Option<CUdeviceptr>, KernelError> {
        let (first, end) = (self.filled, self.filled + bytes.len());
        if end > ROOM_BYTES {
            return Ok(None);
        }
        let pinned = match &mut self.pinned {
            Some(pinned) => pinned,
            empty => empty.insert(Pinned::new(device, ROOM_BYTES)?),
        };
        pinned.bytes_mut()[first..end].copy_from_slice(bytes);
        self.filled = end.next_multiple_of(ALIGN_BYTES);
        Ok(Some(pinned.device_address()? + first as u64))
    }

    /// Everything that was queued has been waited for: nothing reads these bytes any more.
    pub(super) fn clear(&mut self) {
        self.filled = 0;
    }
}
