//! Routed experts larger than memory, read past the page cache into buffers of our own.
//!
//! As in [`crate::MmapPrefetch`], experts are read once the router has chosen them, and a window of those that are chosen
//! most stays in memory. Reads go to the disk directly (`O_DIRECT`), several at a time, into buffers that are used again:
//! the kernel neither copies nor maps nor reclaims pages, which takes it as long as the disk where nothing that was read
//! stays in the page cache.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_formats::Checkpoint;
use hearth_kernels::{Backend, HostMatrix};
use hearth_model::{
    Guard, ModuleId, ModuleSpec, ModuleWeights, Release, Residency, ResidencyError, ResidencyStats,
    TensorShape, TensorSpec,
};

use self::buffers::{ALIGN_BYTES, Buffer, Buffers};
use crate::host_module::vector;
use crate::kept::ReadAhead;
use crate::loader::{Loader, Loading, Shared};
use crate::mmap_prefetch::{check_budget, kind};
use crate::window::{Action, Index, Kind, Window};

mod buffers;
mod rates;

pub use rates::{ReadRates, read_rates};

/// Reads at a time: one alone leaves the disk idle while it is prepared.
const READERS: usize = 4;
/// Parts of an expert that are so close in a file are read at once, with what is between them.
const JOINED_BYTES: u64 = 64 << 10;

/// Routed experts within a budget of bytes, in buffers of our own.
pub struct DirectExperts<B: Backend> {
    index: HashMap<ModuleId, Index>,
    total_bytes: u64,
    loader: Loader<Reading<B>>,
    acquired: AtomicU64,
    read_bytes: AtomicU64,
}

/// What the readers share with the thread of the model.
struct Reading<B: Backend> {
    backend: Arc<B>,
    files: Vec<File>,
    experts: Vec<Expert<B>>,
    index: HashMap<ModuleId, Index>,
    buffers: Arc<Buffers>,
    shared: Shared<State<B>>,
    loaded_bytes: AtomicU64,
    released_bytes: AtomicU64,
}

/// An expert in its files. Vectors, which are small, stay in memory.
struct Expert<B: Backend> {
    id: ModuleId,
    bytes: u64,
    pieces: Vec<Piece>,
    matrices: Vec<Matrix>,
    vectors: Vec<(&'static str, B::Vector)>,
}

/// One read of an expert.
struct Piece {
    file: usize,
    /// Whole blocks of the file.
    offset: u64,
    /// Bytes to read: whole blocks, of which the last one may exceed the file.
    len: usize,
    /// Bytes of it that the file must have.
    needed: usize,
    /// Where it goes in the buffer.
    at: usize,
}

/// A matrix of an expert.
struct Matrix {
    field: &'static str,
    /// Over the mapped file: shape, scales, and what is known of its rows.
    mapped: HostMatrix,
    /// Where it is in the buffer.
    at: usize,
}

struct State<B: Backend> {
    window: Window,
    /// Experts to read, in order.
    wanted: VecDeque<Index>,
    places: Vec<Place<B>>,
}

/// Where an expert is.
enum Place<B: Backend> {
    Absent,
    Wanted,
    Reading { is_wanted: bool },
    Loaded(Arc<ModuleWeights<B>>),
    Failed(ResidencyError),
}

impl<B: Backend> DirectExperts<B> {
    /// Makes experts usable without reading them, and starts the readers. All modules must be routed experts.
    ///
    /// # Errors
    /// [`ResidencyError::Format`]; [`ResidencyError::Budget`] if an expert is larger than the budget;
    /// [`ResidencyError::System`] if the files cannot be read directly ([`reads_directly`] tells) or a thread cannot be
    /// started.
    pub fn open(
        checkpoint: &Checkpoint,
        modules: &[ModuleSpec],
        backend: Arc<B>,
        budget_bytes: u64,
    ) -> Result<Self, ResidencyError> {
        let files = checkpoint.files().iter().map(|file| {
            open_directly(&file.path).map_err(|source| ResidencyError::System {
                what: format!("read {} past the page cache", file.path.display()),
                source,
                remedy: "read through the page cache (--expert-reads cached).",
            })
        });
        let files = files.collect::<Result<Vec<File>, _>>()?;
        let experts = modules
            .iter()
            .map(|spec| Expert::new(spec, checkpoint, &*backend));
        let experts = experts.collect::<Result<Vec<Expert<B>>, _>>()?;
        let buffer_bytes = experts.iter().map(Expert::buffer_bytes).max();
        let buffer_bytes = buffer_bytes.unwrap_or(0) + ALIGN_BYTES;
        // Each takes a whole buffer, scales apart.
        let sizes: Vec<(Kind, u64)> = modules
            .iter()
            .map(|spec| (kind(spec.id), buffer_bytes as u64))
            .collect();
        check_budget(modules, &sizes, budget_bytes)?;
        let most = budget_bytes / (buffer_bytes as u64).max(1);
        let total_bytes = experts.iter().map(|expert| expert.bytes).sum();
        let index: HashMap<ModuleId, Index> = modules.iter().map(|spec| spec.id).zip(0..).collect();
        let state = State {
            window: Window::new(&sizes, budget_bytes, 0, ReadAhead::Least),
            wanted: VecDeque::new(),
            places: modules.iter().map(|_| Place::Absent).collect(),
        };
        let reading = Reading {
            backend,
            files,
            experts,
            index: index.clone(),
            buffers: Arc::new(Buffers::new(buffer_bytes, most as usize)),
            shared: Shared::new(state),
            loaded_bytes: AtomicU64::new(0),
            released_bytes: AtomicU64::new(0),
        };
        Ok(Self {
            index,
            total_bytes,
            loader: Loader::start_threads(reading, READERS)?,
            acquired: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        })
    }

    fn indices(&self, ids: &[ModuleId]) -> Vec<Index> {
        ids.iter()
            .filter_map(|id| self.index.get(id).copied())
            .collect()
    }
}

/// Whether all files of a checkpoint can be read past the page cache; a file system in memory has no other way.
pub fn reads_directly(checkpoint: &Checkpoint) -> bool {
    let can = |path: &Path| {
        let file = open_directly(path)?;
        let mut buffer = Buffer::new(2 * ALIGN_BYTES)?;
        file.read_at(buffer.bytes_mut(), 0)
    };
    let mut files = checkpoint.files().iter();
    files.all(|file| can(&file.path).is_ok())
}

fn open_directly(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT).open(path)
}

impl<B: Backend> Residency<B> for DirectExperts<B> {
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        let index = *self
            .index
            .get(&id)
            .ok_or(ResidencyError::Unknown { module: id })?;
        let reading = &*self.loader;
        let mut state = reading.shared.lock();
        let actions = state.window.acquire(index);
        // What is in use cannot be let go.
        reading.buffers.allow(state.window.held_bytes());
        reading.carry_out(&mut state, &actions);
        let weights = loop {
            match &mut state.places[index] {
                Place::Loaded(weights) => break Arc::clone(weights),
                Place::Absent => reading.want(&mut state, index),
                Place::Failed(_) => {
                    let failed = std::mem::replace(&mut state.places[index], Place::Absent);
                    let actions = state.window.release(index);
                    if !state.window.is_held(index) {
                        state.window.forget(index);
                    }
                    reading.carry_out(&mut state, &actions);
                    if let Place::Failed(error) = failed {
                        return Err(error);
                    }
                }
                Place::Wanted | Place::Reading { .. } => {}
            }
            if reading.shared.has_ended() {
                return Err(ResidencyError::Ended { module: id });
            }
            state = reading.shared.wait(state);
        };
        drop(state);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        self.read_bytes
            .fetch_add(weights.bytes(), Ordering::Relaxed);
        let release: Arc<dyn Release> = self.loader.loading();
        Ok(Guard::new(weights, Some(release)))
    }

    fn announce(&self, _layer: u32, upcoming: &[ModuleId]) {
        let mut state = self.loader.shared.lock();
        let actions = state.window.announce(&self.indices(upcoming));
        self.loader.carry_out(&mut state, &actions);
    }

    /// Those that have been read: they are computed while the others are read. Where not all fit the budget at once, those
    /// before them have left room for more.
    fn group(&self, upcoming: &[ModuleId]) -> usize {
        let upcoming = self.indices(upcoming);
        let mut state = self.loader.shared.lock();
        let actions = state.window.announce(&upcoming);
        self.loader.carry_out(&mut state, &actions);
        let is_loaded = |index: &&Index| matches!(state.places[**index], Place::Loaded(_));
        let loaded = upcoming.iter().take_while(is_loaded).count();
        loaded.min(state.window.group(&upcoming)).max(1)
    }

    fn stats(&self) -> ResidencyStats {
        ResidencyStats {
            total_bytes: self.total_bytes,
            resident_bytes: self.loader.buffers.bytes(),
            acquired: self.acquired.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            prefetched_bytes: self.loader.loaded_bytes.load(Ordering::Relaxed),
            released_bytes: self.loader.released_bytes.load(Ordering::Relaxed),
            ..ResidencyStats::default()
        }
    }
}

impl<B: Backend> Drop for DirectExperts<B> {
    fn drop(&mut self) {
        self.loader.buffers.end();
    }
}

impl<B: Backend> Loading for Reading<B> {
    type State = State<B>;
    type Task = Index;

    fn shared(&self) -> &Shared<State<B>> {
        &self.shared
    }

    fn next(&self, state: &mut State<B>) -> Option<Index> {
        let index = state.wanted.pop_front()?;
        state.places[index] = Place::Reading { is_wanted: true };
        Some(index)
    }

    fn load(&self, index: Index) {
        let loaded = self.buffer(index).and_then(|buffer| match buffer {
            Some(buffer) => self.read(&self.experts[index], buffer).map(Some),
            None => Ok(None),
        });
        let mut state = self.shared.lock();
        let is_wanted = matches!(state.places[index], Place::Reading { is_wanted: true });
        state.places[index] = match loaded {
            _ if !is_wanted => Place::Absent,
            Ok(Some(weights)) => Place::Loaded(Arc::new(weights)),
            // It was wanted again meanwhile.
            Ok(None) => {
                state.wanted.push_front(index);
                Place::Wanted
            }
            Err(error) if state.window.is_held(index) => Place::Failed(error),
            // Nobody waits for it, and the next who does tries again.
            Err(_) => {
                state.window.forget(index);
                Place::Absent
            }
        };
    }
}

impl<B: Backend> Release for Reading<B> {
    fn released(&self, id: ModuleId) {
        let Some(&index) = self.index.get(&id) else {
            return;
        };
        let mut state = self.shared.lock();
        let actions = state.window.release(index);
        self.carry_out(&mut state, &actions);
    }
}

impl<B: Backend> Reading<B> {
    fn carry_out(&self, state: &mut State<B>, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::Prefetch(index) => self.want(state, index),
                Action::Release(index) => self.let_go(state, index),
            }
        }
    }

    fn want(&self, state: &mut State<B>, index: Index) {
        match &mut state.places[index] {
            Place::Reading { is_wanted } => *is_wanted = true,
            place @ (Place::Absent | Place::Failed(_)) => {
                *place = Place::Wanted;
                state.wanted.push_back(index);
                self.shared.changed();
            }
            Place::Wanted | Place::Loaded(_) => {}
        }
    }

    fn let_go(&self, state: &mut State<B>, index: Index) {
        match &mut state.places[index] {
            Place::Reading { is_wanted } => *is_wanted = false,
            place => {
                if matches!(place, Place::Loaded(_)) {
                    let bytes = self.experts[index].bytes;
                    self.released_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                *place = Place::Absent;
                state.wanted.retain(|wanted| *wanted != index);
            }
        }
    }

    /// A buffer for an expert; `None` if nobody wants it any more.
    fn buffer(&self, index: Index) -> Result<Option<Buffer>, ResidencyError> {
        let buffer = self.buffers.take();
        let buffer = buffer.map_err(|source| ResidencyError::System {
            what: format!("allocate memory for {}", self.experts[index].id),
            source,
            remedy: "use a smaller --residency-budget (in a plan: plan again).",
        })?;
        let Some(buffer) = buffer else {
            return Ok(None);
        };
        let state = self.shared.lock();
        let is_wanted = matches!(state.places[index], Place::Reading { is_wanted: true });
        drop(state);
        if is_wanted {
            return Ok(Some(buffer));
        }
        self.buffers.give_back(buffer);
        Ok(None)
    }

    /// Reads an expert into a buffer.
    fn read(
        &self,
        expert: &Expert<B>,
        mut buffer: Buffer,
    ) -> Result<ModuleWeights<B>, ResidencyError> {
        let read = expert.pieces.iter().try_for_each(|piece| {
            let room = &mut buffer.bytes_mut()[piece.at..piece.at + piece.len];
            read_piece(&self.files[piece.file], piece, room)
        });
        let lent = Buffers::lend(&self.buffers, buffer);
        read.map_err(|source| ResidencyError::System {
            what: format!("read {} from its file", expert.id),
            source,
            remedy: "check the disk and the file: it was truncated, or cannot be read.",
        })?;
        self.loaded_bytes.fetch_add(expert.bytes, Ordering::Relaxed);
        let weight = |matrix: &Matrix| {
            let data = lent.slice(matrix.at..matrix.at + matrix.mapped.size_bytes());
            let host = matrix.mapped.with_data(data)?;
            Ok((matrix.field, self.backend.weight(&host)?))
        };
        let module = expert.id;
        let matrices = expert.matrices.iter().map(weight);
        let matrices = matrices
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| ResidencyError::Kernel { module, source })?;
        let vectors = expert.vectors.clone();
        Ok(ModuleWeights::new(module, matrices, vectors, expert.bytes))
    }
}

/// Reads whole blocks until the file has given all that is needed.
fn read_piece(file: &File, piece: &Piece, room: &mut [u8]) -> io::Result<()> {
    // Whole blocks, but for the last read.
    let mut read = 0;
    loop {
        match file.read_at(&mut room[read..], piece.offset + read as u64) {
            Ok(bytes) if read + bytes >= piece.needed => return Ok(()),
            Ok(bytes) if bytes < ALIGN_BYTES => return Err(io::ErrorKind::UnexpectedEof.into()),
            // What a file system gave of a block beyond whole ones cannot be continued from.
            Ok(bytes) => read += bytes / ALIGN_BYTES * ALIGN_BYTES,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl<B: Backend> Expert<B> {
    fn new(
        spec: &ModuleSpec,
        checkpoint: &Checkpoint,
        backend: &B,
    ) -> Result<Self, ResidencyError> {
        let (mut found, mut vectors) = (Vec::new(), Vec::new());
        for TensorSpec { field, name, shape } in &spec.tensors {
            match *shape {
                TensorShape::Matrix { rows, cols } => {
                    let mapped = checkpoint.matrix(name, rows, cols)?;
                    // The first part is the matrix itself; its scales were read with it.
                    for info in checkpoint.parts(name)?.into_iter().take(1) {
                        found.push((info.file, info.offset, *field, mapped.clone()));
                    }
                }
                TensorShape::Vector { len } => {
                    let vector = vector((spec.id, name, len), checkpoint, backend)?;
                    vectors.push((*field, vector));
                }
            }
        }
        found.sort_by_key(|(file, offset, ..)| (*file, *offset));
        let (mut pieces, mut matrices): (Vec<Piece>, Vec<Matrix>) = (Vec::new(), Vec::new());
        let mut buffer_bytes = 0;
        for (file, offset, field, mapped) in found {
            let end = offset + mapped.size_bytes() as u64;
            let joins = pieces.last().is_some_and(|last| {
                last.file == file && offset <= last.offset + last.needed as u64 + JOINED_BYTES
            });
            if !joins {
                let offset = offset / ALIGN_BYTES as u64 * ALIGN_BYTES as u64;
                pieces.push(Piece {
                    file,
                    offset,
                    len: 0,
                    needed: 0,
                    at: buffer_bytes,
                });
            }
            if let Some(piece) = pieces.last_mut() {
                piece.needed = (end - piece.offset) as usize;
                piece.len = piece.needed.next_multiple_of(ALIGN_BYTES);
                buffer_bytes = piece.at + piece.len;
                let at = piece.at + (offset - piece.offset) as usize;
                matrices.push(Matrix { field, mapped, at });
            }
        }
        Ok(Self {
            id: spec.id,
            bytes: spec.stored_bytes(checkpoint),
            pieces,
            matrices,
            vectors,
        })
    }

    fn buffer_bytes(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.at + piece.len)
    }
}
