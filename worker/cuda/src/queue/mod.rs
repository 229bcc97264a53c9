//! Order of work: operations become commands in one stream.
//!
//! Small steps (decode) are **recorded**: their commands wait until a result is needed, and are then launched
//! together. A list of kernels that was seen before is launched as one CUDA graph, whose nodes get the arguments that
//! changed; the host's share of a decode step is then one launch instead of a thousand. Large steps (prefill) are
//! launched immediately, so that the GPU works while the host continues. Either way the commands run in the same order
//! with the same arguments, so results do not depend on it.

mod args;
mod graphs;
mod in_place;
mod landing;
mod staging;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use hearth_kernels::KernelError;
use hearth_kernels::trace::TraceLane;

use crate::compile::{Function, Modules};
use crate::driver::sys::{self, CUdeviceptr};
use crate::driver::{Mark, Marks, Stream, check, fault};
use crate::memory::{Memory, Pinned, Pitched, Ring};
use crate::recorder::Recorder;

pub(crate) use args::{Args, Argument};
pub(crate) use landing::Landing;

use graphs::Graphs;
use in_place::InPlace;
use landing::Landings;
use staging::Staging;

/// Maximum bytes copied to the host at a time.
pub(crate) const MOST_LANDING_BYTES: usize = 64 << 20;
/// Size at which that memory begins.
const LEAST_LANDING_BYTES: usize = 64 << 10;
/// Size of each of the pinned buffers through which activations come from the host.
const UPLOAD_BYTES: usize = 1 << 20;

/// One kernel launch.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Name of the entry point.
    pub(crate) name: &'static str,
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    /// Threads per block.
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) args: Args,
}

/// A command for the stream.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// Runs a kernel.
    Launch(Box<Launch>),
    /// Sets bytes to zero.
    Zero { address: CUdeviceptr, bytes: usize },
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Launch(launch) => launch.name,
            Self::Zero { .. } => "zero",
        }
    }
}

/// Name of commands that are launched together.
fn title(commands: &[Command]) -> Cow<'static, str> {
    let [first, last] =
        [commands.first(), commands.last()].map(|command| command.map_or("", Command::name));
    format!("{first} … {last} ({} operations)", commands.len()).into()
}

/// A backend's stream, with the commands not yet in it.
pub(crate) struct Queue {
    stream: Arc<Stream>,
    recorder: Arc<Recorder>,
    state: Mutex<State>,
}

struct State {
    /// The thread that owns the steps. A step of another thread would overwrite this
    /// one's tables, and buffers that it still reads.
    owner: Option<ThreadId>,
    /// Whether commands wait (a small step) or are launched immediately.
    recording: bool,
    waiting: Vec<Command>,
    staging: Staging,
    graphs: Graphs,
    /// Pinned host memory that results are copied to, or written to by kernels.
    landing: Option<Pinned>,
    /// Results that are copied while the host goes on.
    landings: Arc<Landings>,
    /// Pinned host memory that activations are copied from.
    uploads: Option<Ring>,
    /// The same for those of small steps, which are read in it.
    in_place: InPlace,
}

impl Queue {
    pub(crate) fn new(
        stream: Arc<Stream>,
        memory: &Arc<Memory>,
        modules: &Arc<Modules>,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, KernelError> {
        let staging = Staging::new(memory, modules)?;
        Ok(Self {
            recorder: Arc::clone(recorder),
            state: Mutex::new(State {
                owner: None,
                recording: false,
                waiting: Vec::new(),
                staging,
                graphs: Graphs::default(),
                landing: None,
                landings: Landings::new(stream.device()),
                uploads: None,
                in_place: InPlace::default(),
            }),
            stream,
        })
    }

    /// Makes the calling thread the owner of the queue.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails to launch the commands that the previous owner left.
    pub(crate) fn bind_thread(&self) -> Result<(), KernelError> {
        let mut state = self.lock();
        state.owner = Some(std::thread::current().id());
        self.launch_waiting(&mut state)
    }

    /// Begins a forward pass; `records`: it is small, so its commands wait to be launched together.
    pub(crate) fn begin_step(&self, records: bool) -> Result<(), KernelError> {
        let mut state = self.state()?;
        self.launch_waiting(&mut state)?;
        state.staging.next_step(&self.stream)?;
        state.recording = records;
        Ok(())
    }

    /// Adds a command.
    pub(crate) fn push(&self, command: Command) -> Result<(), KernelError> {
        let mut state = self.state()?;
        if state.recording {
            state.waiting.push(command);
            return Ok(());
        }
        self.stream.device().bind()?;
        self.send(&mut state)?;
        self.run(&command)
    }

    /// Puts host data where kernels of this step can read it, and returns its device address.
    /// Equal data within one step is sent only once, unless it is of one operation alone: it is not looked for then.
    pub(crate) fn host_data(
        &self,
        bytes: &[u8],
        is_shared: bool,
    ) -> Result<CUdeviceptr, KernelError> {
        let mut state = self.state()?;
        if let Some(address) = state.staging.put(bytes, is_shared) {
            return Ok(address);
        }
        self.launch_waiting(&mut state)?;
        self.stream.device().bind()?;
        self.send(&mut state)?;
        state.staging.grow(bytes.len())?;
        state
            .staging
            .put(bytes, is_shared)
            .ok_or_else(|| fault("the staging buffer did not grow"))
    }

    /// Forgets what [`Self::host_data`] has put, if that is much: nobody must have an address of it. Waits for what reads it.
    pub(crate) fn forget_host_data(&self) -> Result<(), KernelError> {
        let mut state = self.state()?;
        if state.staging.is_full() {
            self.launch_waiting(&mut state)?;
            self.stream.synchronize()?;
            state.staging.forget();
            state.in_place.clear();
        }
        Ok(())
    }

    /// Launches the waiting commands.
    pub(crate) fn flush(&self) -> Result<(), KernelError> {
        self.launch_waiting(&mut *self.state()?)
    }

    /// Marks the end of everything that was queued so far, after launching it.
    pub(crate) fn mark(&self, marks: &Arc<Marks>) -> Result<Mark, KernelError> {
        self.launch_waiting(&mut *self.state()?)?;
        marks.record(&self.stream)
    }

    /// Makes commands that are queued from now on wait for a mark; those queued before are launched.
    pub(crate) fn wait_for(&self, mark: &Mark) -> Result<(), KernelError> {
        self.launch_waiting(&mut *self.state()?)?;
        mark.hold_back(&self.stream)
    }

    /// Launches the waiting commands, and waits until they are done.
    pub(crate) fn synchronize(&self) -> Result<(), KernelError> {
        self.flush()?;
        self.stream.synchronize()?;
        self.state()?.in_place.clear();
        Ok(())
    }

    /// Copies device bytes to the host after all queued work, and passes them to `take`.
    pub(crate) fn download<R>(
        &self,
        address: CUdeviceptr,
        bytes: usize,
        take: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KernelError> {
        let mut state = self.state()?;
        self.launch_waiting(&mut state)?;
        self.stream.device().bind()?;
        let piece = bytes.min(MOST_LANDING_BYTES);
        let landing = state.landing(&self.stream, piece)?;
        if bytes <= piece {
            self.land_now(landing, address, bytes)?;
            let taken = take(&landing.bytes()[..bytes]);
            state.in_place.clear();
            return Ok(taken);
        }
        let mut all = Vec::with_capacity(bytes);
        while all.len() < bytes {
            let part = piece.min(bytes - all.len());
            self.land_now(landing, address + all.len() as u64, part)?;
            all.extend_from_slice(&landing.bytes()[..part]);
        }
        Ok(take(&all))
    }

    /// Launches the waiting commands, and queues a copy of device bytes to the host behind them.
    pub(crate) fn land(
        &self,
        address: CUdeviceptr,
        bytes: usize,
        marks: &Arc<Marks>,
    ) -> Result<Landing, KernelError> {
        let mut state = self.state()?;
        self.launch_waiting(&mut state)?;
        let mut landing = None;
        self.recorded_as("download", || {
            landing = Some(state.landings.land(&self.stream, address, bytes, marks)?);
            Ok(())
        })?;
        landing.ok_or_else(|| fault("a copy to the host was not queued"))
    }

    /// Lets `write` queue a kernel that writes `bytes` bytes, at most [`MOST_LANDING_BYTES`], to pinned memory at a device
    /// address, waits for it and all that was queued before, and passes the bytes to `take`: one round trip without a copy.
    pub(crate) fn collect<R>(
        &self,
        bytes: usize,
        write: impl FnOnce(CUdeviceptr) -> Result<(), KernelError>,
        take: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, KernelError> {
        // Whatever wrote or read it last was waited for.
        let address = self
            .state()?
            .landing(&self.stream, bytes)?
            .device_address()?;
        write(address)?;
        let mut state = self.state()?;
        self.launch_waiting(&mut state)?;
        self.stream.synchronize()?;
        state.in_place.clear();
        let landing = state.landing(&self.stream, bytes)?;
        Ok(take(&landing.bytes()[..bytes]))
    }

    /// Puts host bytes of a small step where a kernel that is queued next reads them: an address in pinned memory. `None` if
    /// the step is not recorded, or there is no room.
    pub(crate) fn in_place(&self, bytes: &[u8]) -> Result<Option<CUdeviceptr>, KernelError> {
        let mut state = self.state()?;
        match state.recording {
            true => state.in_place.put(self.stream.device(), bytes),
            false => Ok(None),
        }
    }

    /// Queues the copy of host bytes to the device behind all queued work, and waits for none of it; the bytes may change
    /// once this has returned.
    pub(crate) fn upload(&self, bytes: &[u8], to: Pitched) -> Result<(), KernelError> {
        let mut state = self.state()?;
        self.launch_waiting(&mut state)?;
        self.stream.device().bind()?;
        let ring = match &mut state.uploads {
            Some(ring) => ring,
            empty => empty.insert(Ring::new(&self.stream, UPLOAD_BYTES)?),
        };
        self.recorded_as("upload", || ring.stage(bytes, to, &self.stream))
    }

    /// Copies into pinned memory and waits.
    fn land_now(
        &self,
        landing: &mut Pinned,
        address: CUdeviceptr,
        bytes: usize,
    ) -> Result<(), KernelError> {
        if bytes > 0 {
            let (to, stream) = (landing.as_mut_ptr(), self.stream.raw());
            self.recorded_as("download", || {
                // SAFETY: the caller's range lies in a live buffer; the landing buffer
                // is as large and is read after the wait.
                check("cuMemcpyDtoHAsync", unsafe {
                    sys::cuMemcpyDtoHAsync_v2(to, address, bytes, stream)
                })
            })?;
        }
        self.stream.synchronize()
    }

    /// Lets `work` queue something, and records it under its name.
    fn recorded_as(
        &self,
        name: &'static str,
        work: impl FnOnce() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let lane = (TraceLane::Compute, &*self.stream);
        let queued = self
            .recorder
            .around(lane, || name.into(), || work().map(|()| true));
        queued.map(drop)
    }

    /// Number of commands that wait to be launched.
    pub(crate) fn recorded(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Numbers of graphs created and of graph launches, since the start.
    pub(crate) fn graph_counts(&self) -> (u64, u64) {
        self.lock().graphs.counts()
    }

    /// Number of nodes of the graph that was launched last.
    pub(crate) fn last_graph_nodes(&self) -> usize {
        self.lock().graphs.last_nodes()
    }

    fn launch_waiting(&self, state: &mut State) -> Result<(), KernelError> {
        if state.waiting.is_empty() {
            return Ok(());
        }
        self.stream.device().bind()?;
        self.send(state)?;
        let commands = std::mem::take(&mut state.waiting);
        let lane = (TraceLane::Compute, &*self.stream);
        let launched = self.recorder.around(
            lane,
            || title(&commands),
            || state.graphs.launch(&self.stream, &commands),
        )?;
        if !launched {
            for command in &commands {
                self.run(command)?;
            }
        }
        // Keep the allocation for reuse.
        state.waiting = commands;
        state.waiting.clear();
        Ok(())
    }

    /// Queues the copy of host data that was not sent yet.
    fn send(&self, state: &mut State) -> Result<(), KernelError> {
        match state.staging.unsent()? {
            Some(copy) => self.queue(&copy),
            None => Ok(()),
        }
    }

    fn run(&self, command: &Command) -> Result<(), KernelError> {
        self.recorded_as(command.name(), || self.queue(command))
    }

    fn queue(&self, command: &Command) -> Result<(), KernelError> {
        match command {
            Command::Zero { address, bytes } => {
                // SAFETY: the range lies in a buffer that lives until later commands.
                check("cuMemsetD8Async", unsafe {
                    sys::cuMemsetD8Async(*address, 0, *bytes, self.stream.raw())
                })
            }
            Command::Launch(launch) => {
                let Launch {
                    name: _,
                    function,
                    grid: [x, y, z],
                    threads,
                    shared_bytes,
                    args,
                } = &**launch;
                let mut pointers = args.pointers();
                // SAFETY: the arguments are laid out as the kernel's parameters (the backend's operations are written
                // alongside them and tested), and the buffers they point to are freed
                // only for commands queued after this one.
                check("cuLaunchKernel", unsafe {
                    sys::cuLaunchKernel(
                        function.raw(),
                        *x,
                        *y,
                        *z,
                        *threads,
                        1,
                        1,
                        *shared_bytes,
                        self.stream.raw(),
                        pointers.as_mut_ptr(),
                        std::ptr::null_mut(),
                    )
                })
            }
        }
    }

    /// Locks the state, for the thread that owns it.
    fn state(&self) -> Result<MutexGuard<'_, State>, KernelError> {
        let mut state = self.lock();
        let this = std::thread::current().id();
        if *state.owner.get_or_insert(this) != this {
            return Err(fault(
                "a GPU's backend computes for one thread, the last that bound it, and another has called it\n  this is a fault of Hearth: every engine needs a backend of its own",
            ));
        }
        Ok(state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Pinned memory of at least `bytes` bytes; what was in it may be gone.
    fn landing(&mut self, stream: &Stream, bytes: usize) -> Result<&mut Pinned, KernelError> {
        let kept = self.landing.take().filter(|kept| kept.len() >= bytes);
        let landing = match kept {
            Some(landing) => landing,
            None => {
                let size = bytes.next_power_of_two().max(LEAST_LANDING_BYTES);
                Pinned::new(stream.device(), size)?
            }
        };
        Ok(self.landing.insert(landing))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Copies in flight still read the pinned memory that is dropped with this. An error here cannot be handled.
        let _ = self.stream.synchronize();
    }
}
