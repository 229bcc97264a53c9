//! Pieces of mapped files that the GPU reads directly.
//!
//! A file is registered with the driver piece by piece, each when the first byte of it is copied. Pieces of which weights are
//! copied again and again stay registered: registering pages takes longer than copying from them. The others are registered
//! while they are read, since registered pages cannot leave memory. A registered piece keeps its file mapped.

use std::ffi::c_void;
use std::fs;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearth_kernels::KernelError;

use crate::driver::sys::{self, CUresult};
use crate::driver::{Device, check};

/// Size of a piece in bytes; the last one of a file is shorter.
const PIECE_BYTES: usize = 256 << 20;
/// Pieces that are registered at a time for weights that are copied once.
const PASSING: usize = 2;

/// How often bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Once: their pages are released when loading goes on elsewhere, or pauses.
    Once,
    /// Again and again: their pages stay registered.
    Often,
}

/// The registered pieces of a device's mapped files.
pub(crate) struct RegisteredFiles {
    device: Arc<Device>,
    state: Mutex<State>,
    /// Held while a piece is registered, which takes longer than the state may be locked.
    registering: Mutex<()>,
}

struct State {
    /// Whether the driver registers pages of files, as far as is known.
    registers: bool,
    /// In the order of their registration.
    pieces: Vec<Piece>,
    /// Bytes registered so far, and the time that took.
    registered_bytes: usize,
    registering: Duration,
}

struct Piece {
    range: Range<usize>,
    reads: Reads,
    /// The mapping that the range belongs to, so that it outlives the registration.
    _file: Bytes,
}

/// Bytes that the GPU can read. Those that are read once are readable until this is dropped.
pub(super) struct Readable<'a> {
    _state: MutexGuard<'a, State>,
    /// Where pieces end, counted from the first byte; the last one is the end of the bytes. No copy may cross one.
    pub(super) ends: Vec<usize>,
}

impl RegisteredFiles {
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        let registers = device.info.registers_read_only;
        if !registers {
            tracing::info!(
                "this GPU cannot read mapped files by itself: weights go through a staging ring"
            );
        }
        Self {
            device: Arc::clone(device),
            state: Mutex::new(State {
                registers,
                pieces: Vec::new(),
                registered_bytes: 0,
                registering: Duration::ZERO,
            }),
            registering: Mutex::default(),
        }
    }

    /// Registers the pieces that hold `host`, if they are not. `None` if the bytes belong to no mapped file, or the driver
    /// refuses, which is logged once: they are staged then. A context must be current, and no copy from bytes that are read
    /// once may be in flight.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the device is lost.
    pub(super) fn readable(
        &self,
        host: &Bytes,
        reads: Reads,
    ) -> Result<Option<Readable<'_>>, KernelError> {
        let wanted = host.as_ptr() as usize..host.as_ptr() as usize + host.len();
        let mut mapping = None;
        loop {
            let mut state = self.state();
            let (ends, missing) = state.ends(&wanted, reads);
            let Some(at) = missing else {
                return Ok(Some(Readable {
                    _state: state,
                    ends,
                }));
            };
            drop(state);
            // One at a time, and so that nobody waits who wants other pages.
            let _turn = lock(&self.registering);
            let mut state = self.state();
            if !state.registers {
                return Ok(None);
            }
            if state.pieces.iter().any(|piece| piece.range.contains(&at)) {
                continue;
            }
            if mapping.is_none() {
                let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
                mapping = mapping_of(&maps, &wanted);
            }
            let Some(mapping) = &mapping else {
                return Ok(None);
            };
            state.make_room(&wanted);
            drop(state);
            if !self.register(piece_at(mapping, at), reads, host)? {
                return Ok(None);
            }
        }
    }

    /// Rate at which pages were registered so far, GB/s; 0 if none were.
    pub(super) fn register_gbps(&self) -> f64 {
        let state = self.state();
        match state.registering {
            Duration::ZERO => 0.0,
            took => state.registered_bytes as f64 / took.as_secs_f64() / 1e9,
        }
    }

    /// Releases the pages of weights that are copied once: loading is over, or pauses. No copy of them may be in flight.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the device is lost.
    pub(crate) fn release_read(&self) -> Result<(), KernelError> {
        let mut state = self.state();
        if state.pieces.iter().any(|piece| piece.reads == Reads::Once) {
            self.device.bind()?;
            state.pieces.retain(|piece| piece.reads == Reads::Often);
        }
        Ok(())
    }

    /// Registers nothing from now on, and releases all pages. No copy of them may be in flight.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the device is lost.
    pub(super) fn give_up(&self) -> Result<(), KernelError> {
        let mut state = self.state();
        state.registers = false;
        self.device.bind()?;
        state.pieces.clear();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Releases the oldest pieces that were read once, except those with wanted bytes.
    fn make_room(&mut self, wanted: &Range<usize>) {
        let is_passed = |piece: &Piece| piece.reads == Reads::Once && !meets(&piece.range, wanted);
        let passing = self
            .pieces
            .iter()
            .filter(|p| p.reads == Reads::Once)
            .count();
        let mut excess = (passing + 1).saturating_sub(PASSING);
        self.pieces.retain(|piece| {
            let goes = excess > 0 && is_passed(piece);
            excess -= usize::from(goes);
            !goes
        });
    }

    /// Where pieces that hold `wanted` end, counted from its first byte, and the first address that none holds.
    fn ends(&mut self, wanted: &Range<usize>, reads: Reads) -> (Vec<usize>, Option<usize>) {
        let (mut ends, mut at) = (Vec::new(), wanted.start);
        while at < wanted.end {
            let Some(piece) = self.pieces.iter_mut().find(|p| p.range.contains(&at)) else {
                return (ends, Some(at));
            };
            if reads == Reads::Often {
                piece.reads = reads;
            }
            at = piece.range.end;
            ends.push(at.min(wanted.end) - wanted.start);
        }
        (ends, None)
    }
}

impl RegisteredFiles {
    /// Registers a piece of the mapping that holds `file`; returns false if the driver refuses, now and from now on. The state
    /// is not locked meanwhile.
    fn register(
        &self,
        range: Range<usize>,
        reads: Reads,
        file: &Bytes,
    ) -> Result<bool, KernelError> {
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_PORTABLE;
        let began = Instant::now();
        // SAFETY: the range lies in the mapping of a file, which the piece keeps until it is unregistered: files are
        // mapped whole, and bytes of one keep all of its mapping.
        let result =
            unsafe { sys::cuMemHostRegister_v2(range.start as *mut c_void, range.len(), flags) };
        let mut state = self.state();
        match result {
            CUresult::CUDA_SUCCESS => {
                state.registered_bytes += range.len();
                state.registering += began.elapsed();
                let piece = Piece {
                    range,
                    reads,
                    _file: file.clone(),
                };
                // Given up meanwhile, it is released again.
                if state.registers {
                    state.pieces.push(piece);
                }
                Ok(state.registers)
            }
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
            | CUresult::CUDA_ERROR_NOT_SUPPORTED
            | CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_OPERATING_SYSTEM
            | CUresult::CUDA_ERROR_NOT_PERMITTED
            | CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                state.registers = false;
                tracing::info!(
                    refusal = ?result,
                    registered_pieces = state.pieces.len(),
                    "pages of the model's files cannot be registered: weights go through a staging ring"
                );
                Ok(false)
            }
            other => check("cuMemHostRegister", other).map(|()| false),
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: registered when this was made; whoever drops it has awaited every copy from it.
        unsafe { sys::cuMemHostUnregister(self.range.start as *mut c_void) };
    }
}

impl Drop for RegisteredFiles {
    fn drop(&mut self) {
        // Pieces are unregistered while a context is current. An error here cannot be handled.
        let _ = self.device.bind();
        self.state().pieces.clear();
    }
}

fn meets(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Returns the piece of a mapping that holds an address.
fn piece_at(mapping: &Range<usize>, address: usize) -> Range<usize> {
    let start = address - (address - mapping.start) % PIECE_BYTES;
    start..mapping.end.min(start.saturating_add(PIECE_BYTES))
}

/// A line of `/proc/self/maps` that belongs to a file.
struct Line<'a> {
    range: Range<usize>,
    offset: usize,
    device: &'a str,
    inode: &'a str,
}

impl<'a> Line<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let hex = |text| usize::from_str_radix(text, 16).ok();
        // Addresses, permissions, offset, device, inode, and the path.
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let mut words = words.skip(1);
        let (offset, device, inode) = (hex(words.next()?)?, words.next()?, words.next()?);
        (inode != "0").then_some(Self {
            range: hex(start)?..hex(end)?,
            offset,
            device,
            inode,
        })
    }

    /// Whether this continues the mapping that ends with `last`: advice and policies for some of its pages divide it.
    fn continues(&self, last: &Self) -> bool {
        self.range.start == last.range.end
            && self.offset == last.offset + last.range.len()
            && (self.device, self.inode) == (last.device, last.inode)
    }
}

/// Finds the mapping of a file that holds all of `wanted`.
fn mapping_of(maps: &str, wanted: &Range<usize>) -> Option<Range<usize>> {
    let mut lines = maps.lines().filter_map(Line::read).peekable();
    while let Some(mut last) = lines.next() {
        let start = last.range.start;
        while let Some(next) = lines.next_if(|next| next.continues(&last)) {
            last = next;
        }
        if start <= wanted.start && wanted.end <= last.range.end {
            return Some(start..last.range.end);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]\n\
        7f0000000000-7f0010000000 r--s 00001000 fd:00 4711                       /models/a file.safetensors\n\
        7f0010000000-7f0020000000 r--s 10001000 fd:00 4711                       /models/a file.safetensors\n\
        7f0020000000-7f0030000000 r--s 00000000 fd:00 4711                       /models/a file.safetensors\n";

    #[test]
    fn a_mapping_is_that_of_one_file_however_it_is_divided() {
        let whole = Some(0x7f00_0000_0000..0x7f00_2000_0000);
        for wanted in [
            0x7f00_0000_1000..0x7f00_0000_2000,
            0x7f00_0fff_f000..0x7f00_1000_0001,
            0x7f00_0000_0000..0x7f00_2000_0000,
            0x7f00_1000_0001..0x7f00_1000_0002,
        ] {
            assert_eq!(mapping_of(MAPS, &wanted), whole, "{wanted:x?}");
        }
        for wanted in [
            0x55d0_c000_0000..0x55d0_c000_0010,
            0x7f00_1fff_f000..0x7f00_2000_0001,
            0x7f00_2fff_f000..0x7f00_3000_0001,
            0x6f00_0000_0000..0x6f00_0000_0001,
        ] {
            assert_eq!(mapping_of(MAPS, &wanted), None, "{wanted:x?}");
        }
    }

    #[test]
    fn pieces_are_adjacent_and_end_with_the_mapping() {
        let mapping = 0x1000..0x1000 + 2 * PIECE_BYTES + 4096;
        let mut at = mapping.start;
        for bytes in [PIECE_BYTES, PIECE_BYTES, 4096] {
            let piece = piece_at(&mapping, at);
            assert_eq!(piece, at..at + bytes);
            assert_eq!(piece_at(&mapping, at + bytes - 1), piece);
            at = piece.end;
        }
        assert_eq!(at, mapping.end);
    }
}
