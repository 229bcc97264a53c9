//! Host bytes on their way to the GPU.
//!
//! Pages of mapped files are registered with the driver (`regions`), so that the GPU reads them directly. Other bytes, and
//! those of files where the driver refuses (no support for read-only pages, a file system that cannot pin) or where it is
//! measured to be faster (`ways`), go through a ring of pinned buffers.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use hearth_kernels::KernelError;

use super::Pinned;
use super::regions::{Reads, RegisteredFiles};
use super::ways::CopyWays;
use crate::driver::sys::{self, CUDA_MEMCPY2D, CUdeviceptr, CUmemorytype};
use crate::driver::{Event, Stream, check};

/// Buffers in the staging ring: one is filled while others are copied.
const STAGES: usize = 4;
/// Size of each buffer of files' bytes.
const STAGE_BYTES: usize = 8 << 20;
/// Alignment of what shares a buffer.
const STAGED_ALIGN_BYTES: usize = 256;
/// Shorter bytes that are copied once are staged: registering pages costs more than it saves.
const REGISTERED_FROM_BYTES: usize = 1 << 20;
/// Shorter bytes tell nothing about rates.
const TIMED_FROM_BYTES: usize = 1 << 20;

/// Rows on the device that may lie further apart than they are long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pitched {
    pub(crate) address: CUdeviceptr,
    pub(crate) rows: usize,
    /// Bytes per row.
    pub(crate) row_bytes: usize,
    /// Bytes from one row to the next on the device; on the host, rows are contiguous.
    pub(crate) pitch_bytes: usize,
}

/// Bytes to copy.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Bytes that may belong to a mapped file.
    Shared(&'a Bytes),
    /// The caller's own.
    Own(&'a [u8]),
}

impl<'a> Source<'a> {
    fn bytes(self) -> &'a [u8] {
        match self {
            Self::Shared(bytes) => bytes,
            Self::Own(bytes) => bytes,
        }
    }
}

/// Copies host bytes to the device, in the order of its own stream.
pub(crate) struct Uploader {
    stream: Stream,
    /// Recorded when the destination may be written.
    ready: Event,
    files: Arc<RegisteredFiles>,
    ring: Mutex<Option<Ring>>,
    ways: OnceLock<CopyWays>,
}

impl Uploader {
    pub(crate) fn new(stream: Stream, files: &Arc<RegisteredFiles>) -> Result<Self, KernelError> {
        Ok(Self {
            ready: Event::new(stream.device())?,
            files: Arc::clone(files),
            stream,
            ring: Mutex::new(None),
            ways: OnceLock::new(),
        })
    }

    /// The stream in whose order bytes are copied.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn files(&self) -> &RegisteredFiles {
        &self.files
    }

    /// Rates of the two ways that bytes of mapped files can take, once they were measured.
    pub(crate) fn ways(&self) -> Option<CopyWays> {
        self.ways.get().copied()
    }

    /// Copies `rows × row_bytes` bytes after the work queued in `before`, zeroes the rest of each pitch, and returns when
    /// everything has arrived.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn copy(
        &self,
        from: Source<'_>,
        to: Pitched,
        before: &Stream,
    ) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        self.ready.record(before)?;
        self.stream.wait_for(&self.ready)?;
        self.zero_padding(to)?;
        if let Source::Shared(host) = from
            && host.len() >= REGISTERED_FROM_BYTES
            && let Some(readable) = self.files.readable(host, Reads::Once)?
        {
            self.copy_pieces(host, to, &readable.ends)?;
            // The pages stay registered until then.
            return self.stream.synchronize();
        }
        self.stage(from.bytes(), to)?;
        self.stream.synchronize()
    }

    /// Registers the pages of bytes that will be copied again and again, where that is the way.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the device is lost.
    pub(crate) fn prepare(&self, host: &Bytes) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        self.files.readable(host, Reads::Often).map(drop)
    }

    /// Queues the copy of `rows × row_bytes` bytes that will be copied again, and of zeros to the rest of each pitch. Shared
    /// bytes must not change; the caller's own may once this has returned.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn queue(&self, from: Source<'_>, to: Pitched) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        self.zero_padding(to)?;
        let Source::Shared(host) = from else {
            return self.stage(from.bytes(), to);
        };
        if host.len() >= TIMED_FROM_BYTES
            && self.ways.get().is_none()
            && let Some(ways) = self.time_ways(host, to)?
            && self.ways.set(ways).is_ok()
            && ways.prefers_ring()
        {
            self.files.give_up()?;
        }
        match self.copy_registered(host, to)? {
            true => Ok(()),
            false => self.stage(host, to),
        }
    }

    /// Queues copies of bytes that are copied again and again from their registered pages; returns false if they are not.
    fn copy_registered(&self, host: &Bytes, to: Pitched) -> Result<bool, KernelError> {
        match self.files.readable(host, Reads::Often)? {
            Some(readable) => self.copy_pieces(host, to, &readable.ends).map(|()| true),
            None => Ok(false),
        }
    }

    /// Copies page-locked bytes, and returns when they have arrived.
    pub(crate) fn copy_pinned(&self, host: &Pinned, to: Pitched) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        copy_rows(&self.stream, host.as_ptr(), to)?;
        self.stream.synchronize()
    }

    fn zero_padding(&self, to: Pitched) -> Result<(), KernelError> {
        if to.row_bytes == to.pitch_bytes || to.rows == 0 {
            return Ok(());
        }
        // SAFETY: the range is the caller's buffer.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to.address, 0, to.rows * to.pitch_bytes, self.stream.raw())
        })
    }

    /// Queues copies from registered pages, none of them across the end of a piece.
    pub(super) fn copy_pieces(
        &self,
        host: &[u8],
        to: Pitched,
        ends: &[usize],
    ) -> Result<(), KernelError> {
        let mut from = 0;
        for &end in ends {
            for part in parts(to, from..end) {
                let bytes = host[part.host_offset..].as_ptr().cast();
                copy_rows(&self.stream, bytes, part.to)?;
            }
            from = end;
        }
        Ok(())
    }

    /// Queues copies through the ring; waits for the oldest ones if it is full.
    pub(super) fn stage(&self, host: &[u8], to: Pitched) -> Result<(), KernelError> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *ring {
            Some(ring) => ring,
            empty => empty.insert(Ring::new(&self.stream, STAGE_BYTES)?),
        };
        ring.stage(host, to, &self.stream)
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        // Copies in flight still read the pages and buffers that are dropped with this. An error here cannot be handled.
        let _ = self.stream.synchronize();
    }
}

/// Pinned buffers that are filled one after the other. To be dropped after its copies have ended.
pub(crate) struct Ring {
    stages: Vec<Stage>,
    /// Size of each in bytes.
    stage_bytes: usize,
    /// The stage that is being filled, and how far.
    current: usize,
    filled: usize,
}

struct Stage {
    host: Pinned,
    /// Recorded after the last copy from it.
    done: Event,
}

impl Ring {
    /// Buffers of `stage_bytes` bytes each for copies in `stream`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver has no such memory.
    pub(crate) fn new(stream: &Stream, stage_bytes: usize) -> Result<Self, KernelError> {
        let stage = |_| {
            let device: &Arc<_> = stream.device();
            Ok(Stage {
                host: Pinned::new(device, stage_bytes)?,
                done: Event::new(device)?,
            })
        };
        Ok(Self {
            stages: (0..STAGES).map(stage).collect::<Result<_, KernelError>>()?,
            stage_bytes,
            current: 0,
            filled: 0,
        })
    }

    /// Queues the copy of bytes that may change once this has returned; waits for the oldest copies if the ring is full. All
    /// of a ring's copies are in one stream.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn stage(
        &mut self,
        host: &[u8],
        to: Pitched,
        stream: &Stream,
    ) -> Result<(), KernelError> {
        let stage_bytes = self.stage_bytes;
        let mut from = 0;
        while from < host.len() {
            let (stage, first) = self.room(host.len() - from)?;
            let bytes = (host.len() - from).min(stage_bytes - first);
            let staged = &mut stage.host.bytes_mut()[first..first + bytes];
            staged.copy_from_slice(&host[from..from + bytes]);
            for part in parts(to, from..from + bytes) {
                let bytes = staged[part.host_offset - from..].as_ptr().cast();
                copy_rows(stream, bytes, part.to)?;
            }
            stage.done.record(stream)?;
            from += bytes;
        }
        Ok(())
    }

    /// Returns a stage, and its first byte from which on `bytes` bytes have room, or as many as a stage has.
    fn room(&mut self, bytes: usize) -> Result<(&mut Stage, usize), KernelError> {
        if bytes > self.stage_bytes - self.filled && self.filled > 0 {
            self.current = (self.current + 1) % STAGES;
            self.filled = 0;
            self.stages[self.current].done.wait()?;
        }
        let first = self.filled;
        let taken = bytes.next_multiple_of(STAGED_ALIGN_BYTES);
        self.filled = taken.saturating_add(first).min(self.stage_bytes);
        Ok((&mut self.stages[self.current], first))
    }
}

/// Part of a copy.
#[derive(Debug)]
struct CopyPart {
    host_offset: usize,
    to: Pitched,
}

/// Divides the bytes `bytes` of a copy into parts of one row and parts of whole rows.
fn parts(to: Pitched, bytes: Range<usize>) -> Vec<CopyPart> {
    let rows = if to.row_bytes == to.pitch_bytes {
        // Rows without gaps are one.
        let bytes = to.rows * to.row_bytes;
        Pitched {
            rows: 1,
            row_bytes: bytes,
            pitch_bytes: bytes,
            ..to
        }
    } else {
        to
    };
    let mut out = Vec::new();
    let mut at = bytes.start;
    while at < bytes.end {
        let (row, column) = (at / rows.row_bytes, at % rows.row_bytes);
        let address = rows.address + (row * rows.pitch_bytes + column) as u64;
        let left = bytes.end - at;
        let part = if column == 0 && left >= rows.row_bytes {
            Pitched {
                address,
                rows: left / rows.row_bytes,
                ..rows
            }
        } else {
            let row_bytes = left.min(rows.row_bytes - column);
            Pitched {
                address,
                rows: 1,
                row_bytes,
                pitch_bytes: row_bytes,
            }
        };
        out.push(CopyPart {
            host_offset: at,
            to: part,
        });
        at += part.rows * part.row_bytes;
    }
    out
}

/// Queues one copy of rows that are contiguous on the host.
fn copy_rows(stream: &Stream, host: *const c_void, to: Pitched) -> Result<(), KernelError> {
    if to.rows == 0 || to.row_bytes == 0 {
        return Ok(());
    }
    if to.row_bytes == to.pitch_bytes {
        // SAFETY: registered pages stay, and a stage is filled again when the event behind this copy has passed.
        return check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address, host, to.rows * to.row_bytes, stream.raw())
        });
    }
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host,
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: to.row_bytes,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to.address,
        dstArray: std::ptr::null_mut(),
        dstPitch: to.pitch_bytes,
        WidthInBytes: to.row_bytes,
        Height: to.rows,
    };
    // SAFETY: as above; the descriptor is only read during the call.
    check("cuMemcpy2DAsync", unsafe {
        sys::cuMemcpy2DAsync_v2(&raw const copy, stream.raw())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device address of every byte, in the host's order.
    fn addresses(to: Pitched, ranges: &[Range<usize>]) -> Vec<u64> {
        let mut out = Vec::new();
        for part in ranges.iter().flat_map(|range| parts(to, range.clone())) {
            assert_eq!(part.host_offset, out.len());
            for byte in 0..part.to.rows * part.to.row_bytes {
                let (row, column) = (byte / part.to.row_bytes, byte % part.to.row_bytes);
                out.push(part.to.address + (row * part.to.pitch_bytes + column) as u64);
            }
        }
        out
    }

    #[test]
    fn parts_cover_every_byte_wherever_a_copy_is_divided() {
        for (rows, row_bytes, pitch_bytes) in [(7, 10, 16), (7, 16, 16), (1, 40, 64), (3, 1, 8)] {
            let to = Pitched {
                address: 1 << 40,
                rows,
                row_bytes,
                pitch_bytes,
            };
            let bytes = rows * row_bytes;
            let want: Vec<u64> = (0..bytes)
                .map(|i| (1 << 40) + (i / row_bytes * pitch_bytes + i % row_bytes) as u64)
                .collect();
            for first in 0..=bytes {
                for second in first..=bytes {
                    let ranges = [0..first, first..second, second..bytes];
                    assert_eq!(addresses(to, &ranges), want, "{to:?}, {ranges:?}");
                }
            }
            assert!(parts(to, 0..bytes).len() == 1);
        }
        for (rows, row_bytes) in [(0, 5), (3, 0)] {
            let to = Pitched {
                address: 1 << 40,
                rows,
                row_bytes,
                pitch_bytes: 8,
            };
            assert!(parts(to, 0..rows * row_bytes).is_empty());
        }
    }
}
