//! Small host data of a step (tokens, positions, tables) on its way to the device.
//!
//! A step's pieces are appended to a pinned buffer and copied to one place on the device in one go, before the first command that reads them.
//! The place is the same for every step, so that a graph finds its tables where it left them: the stream's order keeps one step's copy behind the
//! commands of the last. Pinned buffers take turns, so that a step can be prepared while the last one runs.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr};
use hearth_kernels::KernelError;

use crate::driver::{Event, Stream, check};
use crate::memory::{Buffer, Memory, Pinned};

/// Pinned buffers that take turns.
const TURNS: usize = 3;
/// Bytes of each at first, and of the place on the device.
const FIRST_BYTES: usize = 1 << 20;
/// Alignment of a piece: tables of structs with pointers are among them.
const ALIGN_BYTES: usize = 16;

pub(super) struct Staging {
    memory: Arc<Memory>,
    /// Where a step's pieces lie on the device.
    device: Buffer,
    /// Bytes of it.
    bytes: usize,
    turns: Vec<Turn>,
    turn: usize,
    /// What became too small in this step; what lies there is still read.
    outgrown: Vec<(Buffer, Pinned)>,
    /// Bytes that are filled, and those of them that are on their way.
    filled: usize,
    sent: usize,
    /// Where equal pieces of this step lie.
    known: HashMap<Vec<u8>, CUdeviceptr>,
}

struct Turn {
    host: Pinned,
    /// Everything of the step that used it last is done.
    done: Event,
}

impl Staging {
    pub(super) fn new(memory: &Arc<Memory>) -> Result<Self, KernelError> {
        let device = memory.stream().device();
        let turn = |_| {
            Ok(Turn {
                host: Pinned::new(device, FIRST_BYTES)?,
                done: Event::new(device)?,
            })
        };
        Ok(Self {
            device: place(memory, FIRST_BYTES)?,
            bytes: FIRST_BYTES,
            turns: (0..TURNS).map(turn).collect::<Result<_, KernelError>>()?,
            memory: Arc::clone(memory),
            turn: 0,
            outgrown: Vec::new(),
            filled: 0,
            sent: 0,
            known: HashMap::new(),
        })
    }

    /// Turns to the next pinned buffer, when the step that used it last is done.
    pub(super) fn next_step(&mut self, stream: &Stream) -> Result<(), KernelError> {
        if !self.outgrown.is_empty() {
            stream.synchronize()?;
            self.outgrown.clear();
        }
        self.turns[self.turn].done.record(stream)?;
        self.turn = (self.turn + 1) % TURNS;
        let turn = &mut self.turns[self.turn];
        turn.done.wait()?;
        if turn.host.len() < self.bytes {
            turn.host = Pinned::new(stream.device(), self.bytes)?;
        }
        (self.filled, self.sent) = (0, 0);
        self.known.clear();
        Ok(())
    }

    /// Appends a piece; `None` when it does not fit.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Option<CUdeviceptr> {
        if let Some(address) = self.known.get(bytes) {
            return Some(*address);
        }
        let end = self.filled + bytes.len();
        if end > self.bytes {
            return None;
        }
        let address = self.device.address() + self.filled as u64;
        let host = self.turns[self.turn].host.bytes_mut();
        host[self.filled..end].copy_from_slice(bytes);
        self.known.insert(bytes.to_vec(), address);
        self.filled = end.next_multiple_of(ALIGN_BYTES);
        Some(address)
    }

    /// Takes a larger place, with room for `bytes` more. Everything queued was launched. What the step has appended so far stays where it
    /// is: an operation may hold its address without having queued anything yet.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), KernelError> {
        let memory = Arc::clone(&self.memory);
        let stream = memory.stream();
        stream.device().bind()?;
        self.send(stream)?;
        let size = (self.bytes + bytes).next_power_of_two();
        let host = Pinned::new(stream.device(), size)?;
        let device = place(&memory, size)?;
        self.outgrown.push((
            std::mem::replace(&mut self.device, device),
            std::mem::replace(&mut self.turns[self.turn].host, host),
        ));
        self.bytes = size;
        (self.filled, self.sent) = (0, 0);
        Ok(())
    }

    /// Copies what was appended and is not yet on its way.
    pub(super) fn send(&mut self, stream: &Stream) -> Result<(), KernelError> {
        let end = self.filled.min(self.bytes);
        if self.sent < end {
            let from = self.sent;
            let host = &self.turns[self.turn].host;
            // SAFETY: both ranges lie in their buffers; the pinned bytes change only after `done`, or past `end`.
            check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    self.device.address() + from as u64,
                    host.as_ptr().byte_add(from),
                    end - from,
                    stream.raw(),
                )
            })?;
            self.sent = self.filled;
        }
        Ok(())
    }
}

/// A place on the device. Nothing waits that still uses what may be given back for it.
fn place(memory: &Arc<Memory>, bytes: usize) -> Result<Buffer, KernelError> {
    memory.alloc(bytes, "tables of a step", || Ok(()))
}
