//! Small host data of a step (tokens, positions, tables) on its way to the device.
//!
//! Each step has a pinned buffer and a place on the device of the same size. Pieces are appended to the one and copied to the
//! other in one go before the first command that reads them. Several such pairs take turns, so that a step can be prepared while the last one runs.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use hearth_kernels::KernelError;

use crate::driver::{Event, Stream, check};
use crate::memory::{Buffer, Memory, Pinned};

/// Pairs that take turns.
const TURNS: usize = 3;
/// Bytes of a pair at first.
const FIRST_BYTES: usize = 1 << 20;
/// Alignment of a piece: tables of structs with pointers are among them.
const ALIGN_BYTES: usize = 16;

pub(super) struct Staging {
    memory: Arc<Memory>,
    pairs: Vec<Pair>,
    turn: usize,
    /// Pairs of this step that became too small; what lies in them is still read.
    outgrown: Vec<Pair>,
    /// Bytes of the current pair that are filled, and those of them that are on their way.
    filled: usize,
    sent: usize,
    /// Where equal pieces of this step lie.
    known: HashMap<Vec<u8>, CUdeviceptr>,
}

struct Pair {
    host: Pinned,
    device: Buffer,
    /// Everything of the pair's last step is done.
    done: Event,
}

impl Staging {
    pub(super) fn new(memory: &Arc<Memory>) -> Result<Self, KernelError> {
        let pairs = (0..TURNS).map(|_| Pair::new(memory, FIRST_BYTES));
        Ok(Self {
            memory: Arc::clone(memory),
            pairs: pairs.collect::<Result<_, _>>()?,
            turn: 0,
            outgrown: Vec::new(),
            filled: 0,
            sent: 0,
            known: HashMap::new(),
        })
    }

    /// Turns to the next pair, when the step that used it last is done.
    pub(super) fn next_step(&mut self, stream: &Stream) -> Result<(), KernelError> {
        if !self.outgrown.is_empty() {
            stream.synchronize()?;
            self.outgrown.clear();
        }
        self.pairs[self.turn].done.record(stream)?;
        self.turn = (self.turn + 1) % TURNS;
        self.pairs[self.turn].done.wait()?;
        (self.filled, self.sent) = (0, 0);
        self.known.clear();
        Ok(())
    }

    /// Appends a piece; none when it does not fit.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Option<CUdeviceptr> {
        if let Some(address) = self.known.get(bytes) {
            return Some(*address);
        }
        let pair = &mut self.pairs[self.turn];
        let end = self.filled + bytes.len();
        if end > pair.host.len() {
            return None;
        }
        let address = pair.device.address() + self.filled as u64;
        pair.host.bytes_mut()[self.filled..end].copy_from_slice(bytes);
        self.known.insert(bytes.to_vec(), address);
        self.filled = end.next_multiple_of(ALIGN_BYTES);
        Some(address)
    }

    /// Puts a larger pair in the current one's place, with room for `bytes` more. Everything queued was launched. What the step has appended so far stays where it is: an
    /// operation may hold its address without having queued anything yet.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), KernelError> {
        let memory = Arc::clone(&self.memory);
        memory.stream().device().bind()?;
        self.send(memory.stream())?;
        let size = (self.pairs[self.turn].host.len() + bytes).next_power_of_two();
        let larger = Pair::new(&self.memory, size)?;
        self.outgrown
            .push(std::mem::replace(&mut self.pairs[self.turn], larger));
        (self.filled, self.sent) = (0, 0);
        Ok(())
    }

    /// Copies what was appended and is not yet on its way.
    pub(super) fn send(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let pair = &self.pairs[self.turn];
        let end = self.filled.min(pair.host.len());
        if self.sent < end {
            let from = self.sent;
            // SAFETY: both ranges lie in the pair; the pinned bytes change only after `done`, or past `end`.
            check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    pair.device.address() + from as u64,
                    pair.host.as_ptr().byte_add(from),
                    end - from,
                    stream.raw(),
                )
            })?;
            self.sent = self.filled;
        }
        Ok(())
    }
}

impl Pair {
    fn new(memory: &Arc<Memory>, bytes: usize) -> Result<Self, KernelError> {
        let device = memory.stream().device();
        Ok(Self {
            host: Pinned::new(device, bytes)?,
            done: Event::new(device)?,
            // Nothing waits that still uses what may be given back for it.
            device: memory.alloc(bytes, "tables of a step", || Ok(()))?,
        })
    }
}
