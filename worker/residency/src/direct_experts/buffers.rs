//! Memory that direct reads write to, used again.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Alignment of direct reads in files and memory, on all common file systems.
pub(super) const ALIGN_BYTES: usize = 4096;

/// Buffers of one size that are used again.
pub(super) struct Buffers {
    buffer_bytes: usize,
    state: Mutex<BuffersState>,
    given_back: Condvar,
}

struct BuffersState {
    free: Vec<Buffer>,
    made: usize,
    /// No more than so many are made.
    most: usize,
    /// Whether nobody needs one any more.
    has_ended: bool,
}

impl Buffers {
    pub(super) fn new(buffer_bytes: usize, most: usize) -> Self {
        let state = BuffersState {
            free: Vec::new(),
            made: 0,
            most,
            has_ended: false,
        };
        Self {
            buffer_bytes,
            state: Mutex::new(state),
            given_back: Condvar::new(),
        }
    }

    /// A buffer; waits until one is given back if there are as many as there may be. The window has let another expert go
    /// for the one that this is for, whose buffer is on its way: under a read that nobody wants any more, or a guard that is
    /// being dropped. `None` once nobody needs any.
    pub(super) fn take(&self) -> io::Result<Option<Buffer>> {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return Ok(None);
            }
            if let Some(buffer) = state.free.pop() {
                return Ok(Some(buffer));
            }
            if state.made < state.most {
                let buffer = Buffer::new(self.buffer_bytes)?;
                state.made += 1;
                return Ok(Some(buffer));
            }
            let woken = self.given_back.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lends a buffer to weights; it comes back with the last of them.
    pub(super) fn lend(buffers: &Arc<Self>, buffer: Buffer) -> Bytes {
        Bytes::from_owner(Lent {
            buffer,
            home: Arc::clone(buffers),
        })
    }

    /// Takes a buffer back.
    pub(super) fn give_back(&self, buffer: Buffer) {
        self.lock().free.push(buffer);
        self.given_back.notify_one();
    }

    /// Allows buffers for so many bytes of experts, and more than before if need be.
    pub(super) fn allow(&self, bytes: u64) {
        let count = bytes / self.buffer_bytes.max(1) as u64;
        let mut state = self.lock();
        if count as usize > state.most {
            state.most = count as usize;
            self.given_back.notify_all();
        }
    }

    /// Has nobody wait for one any more.
    pub(super) fn end(&self) {
        self.lock().has_ended = true;
        self.given_back.notify_all();
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        (self.lock().made * self.buffer_bytes) as u64
    }

    fn lock(&self) -> MutexGuard<'_, BuffersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that direct reads may write to.
#[derive(Default)]
pub(super) struct Buffer {
    memory: Vec<u8>,
    first: usize,
    len: usize,
}

impl Buffer {
    /// Of so many bytes, of which the last [`ALIGN_BYTES`] or fewer cannot be used.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let mut memory = Vec::new();
        let reserved = memory.try_reserve_exact(bytes);
        reserved.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        memory.resize(bytes, 0);
        let first = memory.as_ptr().align_offset(ALIGN_BYTES);
        let len = bytes.saturating_sub(ALIGN_BYTES);
        Ok(Self { memory, first, len })
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.first..self.first + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.first..self.first + self.len]
    }
}

/// A buffer under the weights that are in it; it goes home with the last of them.
struct Lent {
    buffer: Buffer,
    home: Arc<Buffers>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buffer.bytes()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.home.give_back(std::mem::take(&mut self.buffer));
    }
}
