//! The backend: checks shapes and chooses kernels; one file per operation group.

mod attention;
mod attention_wgmma;
mod device;
mod elementwise;
mod experts;
mod exports;
mod host_order;
mod incoming;
mod inputs;
mod kv;
mod linear;
mod route;
mod sampling;
mod slots;
mod tensor;
mod weights;
mod wgmma;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use hearth_kernels::KernelError;
use hearth_kernels::trace::Trace;

use crate::compile::{Modules, Variant};
use crate::driver::{Device, Marks, Stream, fault};
use crate::memory::{Buffer, Memory, RegisteredFiles, Uploader};
use crate::queue::{Args, Argument, Command, Launch, Queue};
use crate::recorder::Recorder;

pub use device::CopyRates;
pub use experts::{CudaBank, CudaExpertSum};
pub use exports::CudaHostCopy;
use exports::Exports;
pub use incoming::CudaIncoming;
pub use kv::CudaKv;
pub use sampling::CudaTokens;
pub use slots::{CudaMark, CudaSlot};
pub use tensor::CudaTensor;
pub use tensor::{CudaChosen, CudaVector, CudaWeight};
use tensor::{Part, RowsArg, Values};

/// Maximum rows of a step that is recorded and launched as a graph.
const MOST_RECORDED_ROWS: usize = 32;
/// Bytes of the GPU left unused if no budget is given: for the context, the display, and the driver.
const RESERVED_BYTES: u64 = 512 << 20;

/// Precision of the activations in products with weights; a router's product is [`Activations::F32`] with each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// Unrounded: three bf16 terms, products exact, sums f32. The same as on the other backends.
    F32,
    /// Rounded to bf16, as in most engines: a third of the work, different bits.
    #[default]
    Bf16,
    /// Quantised to e4m3 with one scale per row and 128 columns, for FP8 weights (DeepSeek-V3, arXiv:2412.19437,
    /// section 3.3.2); other weights use bf16.
    Fp8,
}

/// Options of the CUDA backend.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// UUID of the GPU, or a prefix of it; `None`: the first that is new enough.
    pub uuid: Option<String>,
    /// Bytes of device memory for weights, KV and activations together; `None`: the free memory, less half a GiB.
    pub budget_bytes: Option<u64>,
    /// Precision of the activations in products.
    pub activations: Activations,
    /// Directories of compiled kernels: all are read, the last one is written.
    pub kernel_cache: Vec<PathBuf>,
    /// Directory of NVRTC if the system does not find it.
    pub nvrtc: Option<PathBuf>,
    /// Test setting: every buffer is a separate allocation of exactly the requested size, between patterns of this
    /// many bytes (a multiple of 256), which [`CudaBackend::check_sentinels`] reads. 0: without patterns, so that a
    /// tool that watches the bounds of allocations sees every access beyond them.
    pub sentinels: Option<usize>,
    /// Test and benchmark setting: all goes by `mma.sync`, whether or not the GPU has wgmma.
    pub without_wgmma: bool,
    /// Receives what is launched and copied; its clock is not stretched.
    pub trace: Option<Arc<Trace>>,
}

/// A [`hearth_kernels::Backend`] on an NVIDIA GPU.
pub struct CudaBackend {
    queue: Queue,
    memory: Arc<Memory>,
    modules: Arc<Modules>,
    /// Copies that are waited for.
    uploader: Uploader,
    /// Copies to slots.
    loader: Arc<Uploader>,
    /// Copies of rows to activations.
    arrivals: Arc<Uploader>,
    files: Arc<RegisteredFiles>,
    /// Copies of KV and rows to the host.
    exports: Arc<Exports>,
    marks: Arc<Marks>,
    recorder: Arc<Recorder>,
    device: Arc<Device>,
    activations: Activations,
    /// Whether FP8 products use wgmma, once that has been tried.
    wgmma: OnceLock<bool>,
    /// Whether bf16 products of many rows use it.
    wgmma_bf16: OnceLock<bool>,
    /// Whether prompts attend by it, for each size of heads that has been tried.
    wgmma_attention: Mutex<Vec<attention_wgmma::Verdict>>,
    without_wgmma: bool,
}

impl CudaBackend {
    /// Opens the GPU.
    ///
    /// # Errors
    /// [`KernelError::Device`] if there is no driver, it is too old,
    /// there is no such GPU, or it does not support `options`.
    pub fn new(options: CudaOptions) -> Result<Self, KernelError> {
        let CudaOptions {
            uuid,
            budget_bytes,
            activations,
            kernel_cache,
            nvrtc,
            sentinels,
            without_wgmma,
            trace,
        } = options;
        let device = Arc::new(Device::open(uuid.as_deref())?);
        if activations == Activations::Fp8 && device.info.capability < (8, 9) {
            return Err(fault(format!(
                "--activations fp8 needs FP8 tensor cores, and {} has compute capability {}.{}\n  use --activations f32 or bf16, or a GPU of the RTX 40 series or newer",
                device.info.name, device.info.capability.0, device.info.capability.1
            )));
        }
        let budget_bytes = match budget_bytes {
            Some(bytes) => bytes,
            None => device.free_bytes()?.saturating_sub(RESERVED_BYTES),
        };
        let stream = Arc::new(Stream::new(&device)?);
        let modules = Modules::new(&device, kernel_cache, nvrtc);
        modules.prepare(Self::common_variants(activations));
        tracing::debug!(
            gpu = device.info.name,
            uuid = device.info.uuid,
            budget_bytes,
            ?activations,
            "GPU opened"
        );
        let memory = Memory::new(Arc::clone(&stream), budget_bytes, sentinels);
        let files = Arc::new(RegisteredFiles::new(&device));
        let marks = Marks::new(&device);
        let recorder = Recorder::new(trace.unwrap_or_default(), &marks);
        Ok(Self {
            queue: Queue::new(stream, &memory, &modules, &recorder)?,
            memory,
            modules,
            uploader: Uploader::new(Stream::new(&device)?, &files)?,
            loader: Arc::new(Uploader::new(Stream::new(&device)?, &files)?),
            arrivals: Arc::new(Uploader::new(Stream::new(&device)?, &files)?),
            files,
            exports: Exports::new(Stream::new(&device)?, &marks, &recorder),
            marks,
            recorder,
            device,
            activations,
            wgmma: OnceLock::new(),
            wgmma_bf16: OnceLock::new(),
            wgmma_attention: Mutex::default(),
            without_wgmma,
        })
    }

    /// Description of the GPU as reported by the driver.
    pub fn info(&self) -> &crate::DeviceInfo {
        &self.device.info
    }

    /// Precision of the activations in products.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Bytes of device memory in use, and the budget.
    pub fn memory_bytes(&self) -> (u64, u64) {
        (self.memory.used_bytes(), self.memory.budget_bytes())
    }

    /// Numbers of CUDA graphs created and of graph launches.
    pub fn graph_counts(&self) -> (u64, u64) {
        self.queue.graph_counts()
    }

    /// Number of times that a thread has waited for this GPU: each is a round trip unless what it waited for was done.
    pub fn waits(&self) -> u64 {
        self.device.waits()
    }

    /// Number of operations that are recorded, and not launched yet.
    pub fn recorded(&self) -> usize {
        self.queue.recorded()
    }

    /// Number of nodes of the CUDA graph that was launched last: the kernels and fills of a step.
    pub fn last_graph_nodes(&self) -> usize {
        self.queue.last_graph_nodes()
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// [`KernelError::Device`] if an error has occurred on the GPU since the last check.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.queue.synchronize()
    }

    /// Checks, with [`CudaOptions::sentinels`], the patterns around every buffer that has
    /// existed since the last call, and returns their number.
    ///
    /// # Errors
    /// [`KernelError::Device`] naming the first buffer whose pattern a kernel overwrote.
    pub fn check_sentinels(&self) -> Result<usize, KernelError> {
        self.queue.synchronize()?;
        self.memory.check_sentinels()
    }

    /// Kernels that every model uses.
    fn common_variants(activations: Activations) -> Vec<Variant> {
        let plain = ["add", "rope", "rows", "sample"].map(Variant::plain);
        let with_terms =
            ["rms_norm", "silu_mul", "split"].map(|file| terms_variant(file, activations));
        let norm_of_routers = terms_variant("rms_norm", Activations::F32);
        let norm = (activations == Activations::Bf16).then_some(norm_of_routers);
        plain.into_iter().chain(with_terms).chain(norm).collect()
    }

    /// Allocates an uninitialised tensor.
    fn tensor(&self, rows: usize, cols: usize) -> Result<CudaTensor, KernelError> {
        let values = Part {
            buffer: self.buffer(rows * cols * 4, "activations")?,
            segments: 0,
            bias: None,
        };
        Ok(CudaTensor::new(rows, cols, values))
    }

    /// Address of a tensor's values, which are summed if they are in parts.
    fn values(&self, x: &CudaTensor) -> Result<u64, KernelError> {
        let mut values = x.values();
        if values.first.segments == 0 && values.second.is_none() {
            return Ok(values.first.buffer.address());
        }
        let sum = self.buffer(x.elements() * 4, "activations")?;
        let [first, more] = values.arguments(x.elements());
        let args = Args::new()
            .with(sum.address())
            .with(first)
            .with(more)
            .with(x.rows as i32)
            .with(x.cols as i32);
        let grid = [x.rows, x.cols.div_ceil(1024), 1];
        self.launch(Kernel::new(&Variant::plain("add"), "sum_rows"), grid, args)?;
        *values = Values {
            first: Part {
                buffer: sum,
                segments: 0,
                bias: None,
            },
            second: None,
        };
        Ok(values.first.buffer.address())
    }

    /// A tensor for a kernel that adds segments itself.
    fn rows_of(&self, x: &CudaTensor) -> Result<RowsArg, KernelError> {
        if x.values().second.is_some() {
            self.values(x)?;
        }
        Ok(x.values().first.argument(x.elements()))
    }

    fn buffer(&self, bytes: usize, what: &'static str) -> Result<Buffer, KernelError> {
        self.memory.alloc(bytes, what, || {
            self.exports.take_back(|mark| self.queue.wait_for(mark))?;
            self.queue.flush()
        })
    }

    /// Launches an entry point.
    fn launch(&self, kernel: Kernel<'_>, grid: [usize; 3], args: Args) -> Result<(), KernelError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let Kernel {
            variant,
            name,
            threads,
            shared_bytes,
        } = kernel;
        self.queue.push(Command::Launch(Box::new(Launch {
            name,
            function: self.modules.function(variant, name, shared_bytes)?,
            grid: grid.map(|n| n as u32),
            threads,
            shared_bytes,
            args,
        })))
    }

    /// Copies host data to the device for kernels of this step.
    fn host<T: Argument>(&self, values: &[T]) -> Result<u64, KernelError> {
        self.queue.host_data(argument_bytes(values), true)
    }

    /// The same for data of one operation alone.
    fn host_once<T: Argument>(&self, values: &[T]) -> Result<u64, KernelError> {
        self.queue.host_data(argument_bytes(values), false)
    }
}

fn argument_bytes<T: Argument>(values: &[T]) -> &[u8] {
    // SAFETY: every byte of an `Argument` is initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Compilers still running use libraries that end with the process.
        self.modules.wait();
    }
}

/// An entry point and its launch parameters.
#[derive(Clone, Copy)]
struct Kernel<'a> {
    variant: &'a Variant,
    name: &'static str,
    /// Threads per block.
    threads: u32,
    /// Bytes of dynamic shared memory.
    shared_bytes: u32,
}

impl<'a> Kernel<'a> {
    /// Describes an entry point with the most threads that its blocks take, and its dynamic shared memory.
    fn new(variant: &'a Variant, name: &'static str) -> Self {
        Self {
            variant,
            name,
            threads: variant.threads(),
            shared_bytes: variant.shared_bytes(name),
        }
    }

    fn threads(self, threads: u32) -> Self {
        Self { threads, ..self }
    }
}

/// Variant of a file that writes activations in the matrix kernels' form.
fn terms_variant(file: &'static str, activations: Activations) -> Variant {
    Variant::with(file, &[("ACTIVATIONS", activations_number(activations))])
}

/// Value of the kernels' `ACTIVATIONS`.
fn activations_number(activations: Activations) -> i64 {
    match activations {
        Activations::F32 => 0,
        Activations::Bf16 => 1,
        Activations::Fp8 => 2,
    }
}
