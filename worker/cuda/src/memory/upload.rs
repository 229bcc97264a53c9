//! Weights from a mapped file to the GPU.
//!
//! The pages of the mapping are registered with the driver (`regions`), so that the GPU reads them directly. If the
//! driver refuses (no support for read-only pages, a file system that cannot pin), the bytes go through a ring of
//! pinned buffers instead, which is logged once.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUdeviceptr, CUmemorytype};
use hearth_kernels::KernelError;

use super::Pinned;
use super::regions::RegisteredRegions;
use crate::driver::{Event, Stream, check};

/// Buffers in the staging ring: one is filled while others are copied.
const STAGES: usize = 4;
/// Size of each buffer in bytes.
const STAGE_BYTES: usize = 8 << 20;
/// Shorter copies are staged: registering pages costs more than it saves.
const REGISTERED_FROM_BYTES: usize = 1 << 20;

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

/// Copies host bytes to the device, in the order of its own stream.
pub(crate) struct Uploader {
    stream: Stream,
    /// Recorded when the destination may be written.
    ready: Event,
    registers: AtomicBool,
    regions: Mutex<RegisteredRegions>,
    ring: Mutex<Option<Ring>>,
}

struct Ring {
    stages: Vec<(Pinned, Event)>,
    next: usize,
}

impl Uploader {
    pub(crate) fn new(stream: Stream) -> Result<Self, KernelError> {
        let registers = stream.device().info.registers_read_only;
        if !registers {
            tracing::info!(
                "this GPU cannot read mapped files by itself: weights go through a staging ring"
            );
        }
        Ok(Self {
            ready: Event::new(stream.device())?,
            registers: AtomicBool::new(registers),
            regions: Mutex::default(),
            stream,
            ring: Mutex::new(None),
        })
    }

    /// Copies `host`, `rows × row_bytes` bytes, after the work queued in `before`, zeroes the rest of each pitch, and
    /// returns when everything has arrived.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(crate) fn copy(
        &self,
        host: &[u8],
        to: Pitched,
        before: &Stream,
    ) -> Result<(), KernelError> {
        debug_assert_eq!(host.len(), to.rows * to.row_bytes);
        self.stream.device().bind()?;
        self.ready.record(before)?;
        self.stream.wait_for(&self.ready)?;
        if to.row_bytes != to.pitch_bytes {
            // SAFETY: the range is the caller's buffer.
            check("cuMemsetD8Async", unsafe {
                sys::cuMemsetD8Async(to.address, 0, to.rows * to.pitch_bytes, self.stream.raw())
            })?;
        }
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if host.len() >= REGISTERED_FROM_BYTES && self.is_readable(&mut regions, host)? {
            copy_rows(&self.stream, host.as_ptr().cast(), to)?;
            return self.stream.synchronize();
        }
        drop(regions);
        self.stage(host, to)
    }

    /// Releases the registered pages of files: loading is over, or pauses.
    pub(crate) fn release(&self) -> Result<(), KernelError> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if !regions.is_empty() {
            self.stream.device().bind()?;
            regions.clear();
        }
        Ok(())
    }

    /// Copies page-locked bytes, and returns when they have arrived.
    pub(crate) fn copy_pinned(&self, host: &Pinned, to: Pitched) -> Result<(), KernelError> {
        self.stream.device().bind()?;
        copy_rows(&self.stream, host.as_ptr(), to)?;
        self.stream.synchronize()
    }

    /// Whether the GPU can read these bytes directly; a refusal by the driver is logged once.
    fn is_readable(
        &self,
        regions: &mut RegisteredRegions,
        host: &[u8],
    ) -> Result<bool, KernelError> {
        if !self.registers.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match regions.cover(host)? {
            Ok(()) => Ok(true),
            Err(None) => Ok(false),
            Err(Some(refusal)) => {
                if self.registers.swap(false, Ordering::Relaxed) {
                    tracing::info!(
                        ?refusal,
                        "pages of the model's files cannot be registered: weights go through a staging ring"
                    );
                }
                Ok(false)
            }
        }
    }

    /// Copies through the ring: rows are cut into chunks that fit a buffer.
    fn stage(&self, host: &[u8], to: Pitched) -> Result<(), KernelError> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *ring {
            Some(ring) => ring,
            empty => empty.insert(Ring::new(&self.stream)?),
        };
        for chunk in chunks(to) {
            let (stage, done) = &mut ring.stages[ring.next];
            done.wait()?;
            let (from, len) = (chunk.host_offset, chunk.to.rows * chunk.to.row_bytes);
            stage.bytes_mut()[..len].copy_from_slice(&host[from..from + len]);
            copy_rows(&self.stream, stage.as_ptr(), chunk.to)?;
            done.record(&self.stream)?;
            ring.next = (ring.next + 1) % STAGES;
        }
        self.stream.synchronize()
    }
}

impl Ring {
    fn new(stream: &Stream) -> Result<Self, KernelError> {
        let stage = |_| {
            let device: &Arc<_> = stream.device();
            Ok((Pinned::new(device, STAGE_BYTES)?, Event::new(device)?))
        };
        Ok(Self {
            stages: (0..STAGES).map(stage).collect::<Result<_, KernelError>>()?,
            next: 0,
        })
    }
}

/// Part of a copy that fits one buffer.
#[derive(Debug)]
struct CopyChunk {
    host_offset: usize,
    to: Pitched,
}

/// Cuts a copy into chunks of whole rows, or parts of a row that is longer than a buffer.
fn chunks(to: Pitched) -> Vec<CopyChunk> {
    let mut out = Vec::new();
    if to.row_bytes == 0 {
        return out;
    }
    if to.row_bytes > STAGE_BYTES {
        for row in 0..to.rows {
            for from in (0..to.row_bytes).step_by(STAGE_BYTES) {
                let row_bytes = STAGE_BYTES.min(to.row_bytes - from);
                out.push(CopyChunk {
                    host_offset: row * to.row_bytes + from,
                    to: Pitched {
                        address: to.address + (row * to.pitch_bytes + from) as u64,
                        rows: 1,
                        row_bytes,
                        pitch_bytes: row_bytes,
                    },
                });
            }
        }
        return out;
    }
    let rows_each = STAGE_BYTES / to.row_bytes;
    for first in (0..to.rows).step_by(rows_each) {
        out.push(CopyChunk {
            host_offset: first * to.row_bytes,
            to: Pitched {
                address: to.address + (first * to.pitch_bytes) as u64,
                rows: rows_each.min(to.rows - first),
                ..to
            },
        });
    }
    out
}

/// Queues one copy of rows that are contiguous on the host.
fn copy_rows(stream: &Stream, host: *const c_void, to: Pitched) -> Result<(), KernelError> {
    if to.rows == 0 || to.row_bytes == 0 {
        return Ok(());
    }
    if to.row_bytes == to.pitch_bytes {
        // SAFETY: the caller keeps the host bytes until the stream is synchronised or the stage's event has passed.
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

    fn covered(to: Pitched) -> Vec<(usize, u64)> {
        let bytes = chunks(to).into_iter().flat_map(|chunk| {
            (0..chunk.to.rows * chunk.to.row_bytes)
                .step_by(1 << 20)
                .map(move |i| {
                    let (row, column) = (i / chunk.to.row_bytes, i % chunk.to.row_bytes);
                    let device = chunk.to.address + (row * chunk.to.pitch_bytes + column) as u64;
                    (chunk.host_offset + i, device)
                })
        });
        bytes.collect()
    }

    #[test]
    fn pieces_cover_every_row_and_fit_a_stage() {
        for (rows, row_bytes, pitch_bytes) in [
            (3, 20 << 20, 21 << 20),
            (40, 1 << 20, 2 << 20),
            (0, 5, 8),
            (3, 0, 8),
        ] {
            let to = Pitched {
                address: 1 << 40,
                rows,
                row_bytes,
                pitch_bytes,
            };
            assert!(
                chunks(to)
                    .iter()
                    .all(|p| p.to.rows * p.to.row_bytes <= STAGE_BYTES)
            );
            let total: usize = chunks(to).iter().map(|p| p.to.rows * p.to.row_bytes).sum();
            assert_eq!(total, rows * row_bytes);
            for (host, device) in covered(to) {
                let (row, column) = (host / row_bytes, host % row_bytes);
                assert_eq!(device, (1 << 40) + (row * pitch_bytes + column) as u64);
            }
        }
    }
}
