//! Small host data of a step (tokens, positions, tables) on its way to the device.
//!
//! A step's pieces are appended to a pinned buffer and copied to one device buffer at once, before the first command
//! that reads them: by a kernel, since a GPU's one engine for copies from the host takes them in turn, and may have a layer's
//! weights before these. The device buffer is the same for every step, so that a graph finds its tables at the same
//! addresses: the stream's order keeps one step's copy after the commands of the previous one. Pinned buffers rotate,
//! so that a step can be prepared while the previous one runs.

use std::collections::HashMap;
use std::sync::Arc;

use hearth_kernels::KernelError;

use super::{Args, Command, Launch};
use crate::compile::{Modules, Variant};
use crate::driver::sys::CUdeviceptr;
use crate::driver::{Event, Stream};
use crate::memory::{Buffer, Memory, Pinned};

/// Number of pinned buffers in rotation.
const TURNS: usize = 3;
/// Initial size of each, and of the device buffer.
const FIRST_BYTES: usize = 1 << 20;
/// Alignment of a piece: some are tables of structs with pointers.
const ALIGN_BYTES: usize = 16;
/// The kernel that copies: threads of a block, each of which takes 16 bytes (the head of rows.cu).
const COPY: &str = "put_tile";
const COPY_THREADS: usize = 256;
/// Bytes of a step from which on they are no longer kept: the tables of a long prompt's experts take as much in a layer.
const MOST_KEPT_BYTES: usize = 32 << 20;

pub(super) struct Staging {
    memory: Arc<Memory>,
    modules: Arc<Modules>,
    /// Device buffer for a step's pieces.
    device: Buffer,
    /// Size of `device` in bytes.
    bytes: usize,
    turns: Vec<Turn>,
    turn: usize,
    /// Buffers outgrown in this step; their contents are still read.
    outgrown: Vec<(Buffer, Pinned)>,
    /// Bytes filled, and those of them already sent.
    filled: usize,
    sent: usize,
    /// Device addresses of this step's pieces by content, for deduplication.
    known: HashMap<Vec<u8>, CUdeviceptr>,
}

struct Turn {
    host: Pinned,
    /// Recorded after the step that used this buffer last.
    done: Event,
}

impl Staging {
    pub(super) fn new(memory: &Arc<Memory>, modules: &Arc<Modules>) -> Result<Self, KernelError> {
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
            modules: Arc::clone(modules),
            turn: 0,
            outgrown: Vec::new(),
            filled: 0,
            sent: 0,
            known: HashMap::new(),
        })
    }

    /// Switches to the next pinned buffer, once the step that used it last is done.
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

    /// Whether so much was appended that it is to be forgotten.
    pub(super) fn is_full(&self) -> bool {
        self.filled > MOST_KEPT_BYTES
    }

    /// Forgets all pieces: nobody has an address of one, and everything that reads one is done.
    pub(super) fn forget(&mut self) {
        (self.filled, self.sent) = (0, 0);
        self.known.clear();
        self.outgrown.clear();
    }

    /// Appends a piece, unless an equal one is there that others may share; `None` if it does not fit.
    pub(super) fn put(&mut self, bytes: &[u8], is_shared: bool) -> Option<CUdeviceptr> {
        let known = self.known.get(bytes).filter(|_| is_shared);
        if let Some(address) = known {
            return Some(*address);
        }
        let end = self.filled + bytes.len();
        if end > self.bytes {
            return None;
        }
        let address = self.device.address() + self.filled as u64;
        let host = self.turns[self.turn].host.bytes_mut();
        host[self.filled..end].copy_from_slice(bytes);
        if is_shared {
            self.known.insert(bytes.to_vec(), address);
        }
        self.filled = end.next_multiple_of(ALIGN_BYTES);
        Some(address)
    }

    /// Switches to larger buffers, with room for `bytes` more. Everything queued must have been launched, and sent. The pieces
    /// that the step has appended so far stay where they are: an operation may hold their
    /// address without having queued anything yet.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), KernelError> {
        let memory = Arc::clone(&self.memory);
        let stream = memory.stream();
        stream.device().bind()?;
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

    /// The copy of the appended bytes that have not been sent yet; the caller queues it.
    pub(super) fn unsent(&mut self) -> Result<Option<Command>, KernelError> {
        let (from, end) = (self.sent, self.filled.min(self.bytes));
        if from >= end {
            return Ok(None);
        }
        let host = &self.turns[self.turn].host;
        let words = (end - from) / 4;
        // One row. The pinned bytes change only after `done`, or past `end`.
        let args = Args::new()
            .with(self.device.address() + from as u64)
            .with(host.device_address()? + from as u64)
            .with(1_i32)
            .with(words as i32)
            .with(words as i32)
            .with(0_i32);
        let function = self.modules.function(&Variant::plain("rows"), COPY, 0)?;
        self.sent = self.filled;
        Ok(Some(Command::Launch(Box::new(Launch {
            name: COPY,
            function,
            grid: [1, words.div_ceil(4 * COPY_THREADS) as u32, 1],
            threads: COPY_THREADS as u32,
            shared_bytes: 0,
            args,
        }))))
    }
}

/// Allocates a device buffer. No waiting command uses the free buffers that may be given back for it.
fn place(memory: &Arc<Memory>, bytes: usize) -> Result<Buffer, KernelError> {
    memory.alloc(bytes, "tables of a step", || Ok(()))
}
