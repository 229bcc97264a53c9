//! Copies of stored KV and of rows to the host, which run beside what is computed next.
//!
//! They have a stream of their own. A copy waits on the device for the kernel that gathers its bytes, and a mark behind it says
//! when they have landed in pinned memory; the gathered bytes' memory is used again behind that mark. The host waits where
//! somebody asks for bytes, and where copies that were dropped hold too much pinned memory to begin another one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::KernelError;
use hearth_kernels::trace::TraceLane;

use crate::driver::sys::{self, CUdeviceptr};
use crate::driver::{Mark, Marks, Stream, check, fault};
use crate::memory::{Buffer, Pinned};
use crate::recorder::Recorder;

/// Gathered bytes on the device that copies may still read, beside the next ones: while some leave, others are gathered.
const MOST_LEAVING_BYTES: usize = 4 << 20;
/// Pinned bytes that are kept for later copies.
const MOST_KEPT_BYTES: usize = 64 << 20;
/// Rows that are copied beside computation; more are waited for.
pub(super) const MOST_ROWS_BYTES: usize = MOST_KEPT_BYTES / 8;
/// Size of the smallest pinned piece.
const LEAST_PIECE_BYTES: usize = 64 << 10;

/// The stream of copies to the host, and the memory at both of its ends.
pub(super) struct Exports {
    stream: Stream,
    marks: Arc<Marks>,
    recorder: Arc<Recorder>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Copies that were queued.
    copies: u64,
    /// What they read on the device, in their order.
    leaving: VecDeque<Leaving>,
    unused: Vec<Pinned>,
    /// Pieces of copies that nobody wants any more, each until its mark is reached.
    abandoned: VecDeque<(Mark, Pinned)>,
}

/// Gathered bytes until their copy has ended.
struct Leaving {
    copy: u64,
    bytes: usize,
    mark: Mark,
    _gathered: Buffer,
}

/// A copy of bytes to the host.
pub struct CudaHostCopy {
    /// `None` if nothing is on its way; taken by the drop.
    landing: Option<Landing>,
    /// What was there from the start.
    here: Vec<u8>,
    home: Arc<Exports>,
}

struct Landing {
    host: Pinned,
    bytes: usize,
    /// Behind the copy.
    mark: Mark,
    copy: u64,
    has_landed: AtomicBool,
}

impl Exports {
    pub(super) fn new(stream: Stream, marks: &Arc<Marks>, recorder: &Arc<Recorder>) -> Arc<Self> {
        Arc::new(Self {
            stream,
            marks: Arc::clone(marks),
            recorder: Arc::clone(recorder),
            state: Mutex::default(),
        })
    }

    /// Gives gathered bytes back to the device's memory, all but the last [`MOST_LEAVING_BYTES`], for what is computed from now
    /// on: `wait` makes that wait for a mark.
    pub(super) fn make_room(
        &self,
        wait: impl FnOnce(&Mark) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        self.release(MOST_LEAVING_BYTES, wait)
    }

    /// As [`Self::make_room`], with all of them.
    pub(super) fn take_back(
        &self,
        wait: impl FnOnce(&Mark) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        self.release(0, wait)
    }

    fn release(
        &self,
        most_bytes: usize,
        wait: impl FnOnce(&Mark) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let mut state = self.state();
        let mut held: usize = state.leaving.iter().map(|leaving| leaving.bytes).sum();
        let exceeds = |leaving: &&Leaving| {
            let exceeds = held > most_bytes;
            held -= leaving.bytes;
            exceeds
        };
        let count = state.leaving.iter().take_while(exceeds).count();
        // Copies are in order: the last one's mark is behind all of them.
        let last = count.checked_sub(1).and_then(|at| state.leaving.get(at));
        if let Some(last) = last {
            wait(&last.mark)?;
        }
        state.leaving.drain(..count);
        Ok(())
    }

    /// Queues the copy of `bytes` gathered bytes behind a mark.
    pub(super) fn copy(
        self: &Arc<Self>,
        gathered: Buffer,
        bytes: usize,
        ready: &Mark,
    ) -> Result<CudaHostCopy, KernelError> {
        let landing = match bytes {
            0 => None,
            _ => Some(self.queue(gathered, bytes, ready)?),
        };
        Ok(CudaHostCopy {
            landing,
            here: Vec::new(),
            home: Arc::clone(self),
        })
    }

    /// A copy whose bytes are on the host.
    pub(super) fn landed_before(self: &Arc<Self>, here: Vec<u8>) -> CudaHostCopy {
        CudaHostCopy {
            landing: None,
            here,
            home: Arc::clone(self),
        }
    }

    fn queue(&self, gathered: Buffer, bytes: usize, ready: &Mark) -> Result<Landing, KernelError> {
        let mut state = self.state();
        let mut host = self.piece(&mut state, bytes)?;
        ready.hold_back(&self.stream)?;
        let queued = self.copy_to(&mut host, gathered.address(), bytes);
        let mark = match queued.and_then(|()| self.marks.record(&self.stream)) {
            Ok(mark) => mark,
            Err(error) => {
                // Nothing tells when the copy ends: the stream as a whole does, or the memory is never used again.
                if self.stream.synchronize().is_err() {
                    std::mem::forget(host);
                }
                return Err(error);
            }
        };
        state.copies += 1;
        let copy = state.copies;
        state.leaving.push_back(Leaving {
            copy,
            bytes,
            mark: mark.clone(),
            _gathered: gathered,
        });
        Ok(Landing {
            host,
            bytes,
            mark,
            copy,
            has_landed: AtomicBool::new(false),
        })
    }

    fn copy_to(
        &self,
        host: &mut Pinned,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<(), KernelError> {
        let lane = (TraceLane::KvExport, &self.stream);
        let name = || format!("{bytes} bytes").into();
        let queued = self.recorder.around(lane, name, || {
            // SAFETY: both ranges are as large, and are used again or freed behind the copy.
            check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr(), from, bytes, self.stream.raw())
            })?;
            Ok(true)
        });
        queued.map(drop)
    }

    /// The smallest unused piece of at least so many bytes, or a new one.
    fn piece(&self, state: &mut State, bytes: usize) -> Result<Pinned, KernelError> {
        while let Some((mark, _)) = state.abandoned.front() {
            let held: usize = state.abandoned.iter().map(|(_, host)| host.len()).sum();
            if held > MOST_KEPT_BYTES {
                mark.wait()?;
            } else if !mark.is_reached()? {
                break;
            }
            let landed = state.abandoned.pop_front();
            state.unused.extend(landed.map(|(_, host)| host));
        }
        let fitting = (0..state.unused.len()).filter(|&at| state.unused[at].len() >= bytes);
        match fitting.min_by_key(|&at| state.unused[at].len()) {
            Some(at) => Ok(state.unused.swap_remove(at)),
            None => {
                let size = bytes.next_power_of_two().max(LEAST_PIECE_BYTES);
                Pinned::new(self.stream.device(), size)
            }
        }
    }

    /// The bytes of this copy and of those before it have left the device.
    fn landed(&self, copy: u64) {
        let mut state = self.state();
        while state.leaving.front().is_some_and(|l| l.copy <= copy) {
            state.leaving.pop_front();
        }
    }

    fn give_back(&self, landing: Landing) {
        let mut state = self.state();
        if !landing.has_landed.into_inner() {
            state.abandoned.push_back((landing.mark, landing.host));
            return;
        }
        let kept: usize = state.unused.iter().map(Pinned::len).sum();
        if kept + landing.host.len() <= MOST_KEPT_BYTES {
            state.unused.push(landing.host);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        if self.stream.synchronize().is_err() {
            // Copies may still be on their way, and nothing tells when they end.
            std::mem::forget(std::mem::take(&mut self.state().abandoned));
        }
    }
}

impl CudaHostCopy {
    pub(super) fn is_done(&self) -> Result<bool, KernelError> {
        let Some(landing) = &self.landing else {
            return Ok(true);
        };
        let is_done = landing.has_landed.load(Ordering::Acquire) || landing.mark.is_reached()?;
        if is_done {
            self.note(landing);
        }
        Ok(is_done)
    }

    pub(super) fn wait(&self) -> Result<(), KernelError> {
        if let Some(landing) = &self.landing
            && !self.is_done()?
        {
            landing.mark.wait()?;
            self.note(landing);
        }
        Ok(())
    }

    pub(super) fn take(mut self) -> Result<Vec<u8>, KernelError> {
        let Some(landing) = &self.landing else {
            return Ok(std::mem::take(&mut self.here));
        };
        if !landing.has_landed.load(Ordering::Acquire) {
            return Err(fault(
                "what was on its way to the host was read before its copy was waited for",
            ));
        }
        Ok(landing.host.bytes()[..landing.bytes].to_vec())
    }

    fn note(&self, landing: &Landing) {
        if !landing.has_landed.swap(true, Ordering::AcqRel) {
            self.home.landed(landing.copy);
        }
    }
}

impl Drop for CudaHostCopy {
    fn drop(&mut self) {
        if let Some(landing) = self.landing.take() {
            self.home.give_back(landing);
        }
    }
}
