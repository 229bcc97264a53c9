//! The CPU backend: checks shapes and splits work; the computation is in `arch`.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arch::{Isa, Kernels, Packing};
use crate::ops::{DeviceOps, SampleOps};
use crate::thread_pool::ThreadPool;
use crate::{DType, HostMatrix, KernelError, SampleFault};

mod attention;
mod elementwise;
mod experts;
mod kv;
mod linear;
pub(crate) mod memory;
mod products;
mod route;
mod sum_tree;

pub use experts::CpuExpertSum;
pub use kv::CpuKv;
pub use memory::CpuTensor;

use memory::{FreeList, PooledBuf, Scratch};

/// Options of the CPU backend.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Instruction set; `None`: the best that the CPU has.
    pub isa: Option<Isa>,
    /// Threads, including the caller; 0: one for each CPU that this process may use. They are bound by
    /// [`DeviceOps::bind_compute_threads`].
    pub threads: usize,
    /// CPUs by NUMA node for the nodes that hold the KV cache's memory, evenly if several: a thread on each touches
    /// its part first. Empty: a page lies where it is first used.
    pub numa_cpus: Vec<Vec<usize>>,
}

/// A [`Backend`](crate::Backend) on this machine's CPU.
pub struct CpuBackend {
    kernels: Box<dyn Kernels>,
    pool: ThreadPool,
    free: Arc<FreeList>,
    /// One per thread of the pool.
    scratch: Vec<Mutex<Scratch>>,
    numa_cpus: Vec<Vec<usize>>,
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`KernelError::IsaUnavailable`] when the CPU lacks the instruction set that `options` names;
    /// [`KernelError::Device`] when a thread cannot be started.
    pub fn new(options: CpuOptions) -> Result<Self, KernelError> {
        let CpuOptions {
            isa,
            threads,
            numa_cpus,
        } = options;
        let isa = isa.unwrap_or_else(Isa::detect);
        let kernels = isa.kernels_or_error()?;
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            named => named,
        };
        let pool = ThreadPool::new(threads)?;
        tracing::debug!(%isa, threads, kernels = ?kernels.names(), "CPU kernels chosen");
        Ok(Self {
            kernels,
            pool,
            free: Arc::default(),
            scratch: (0..threads).map(|_| Mutex::default()).collect(),
            numa_cpus,
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        // Working memory carries nothing from one piece to the next, so a panicked holder left nothing invalid.
        self.scratch[worker]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn tensor(&self, rows: usize, cols: usize) -> CpuTensor {
        CpuTensor::uninit(&self.free, rows, cols)
    }

    fn buffer(&self, elements: usize) -> PooledBuf {
        self.free.take(elements)
    }

    fn packing(&self, dtype: DType) -> Packing {
        self.kernels.packing(dtype)
    }

    /// Splits `items` into contiguous pieces: as many as keep all threads busy to the end, but none with
    /// less than `min_cost` of work, each item costing `item_cost` (bytes read, or their equivalent in time).
    fn split(&self, items: usize, item_cost: usize, min_cost: usize) -> Split {
        let least = min_cost.div_ceil(item_cost.max(1)).max(1);
        let wanted = match self.pool.threads() {
            1 => 1,
            threads => threads * 8,
        };
        let size = items.div_ceil(wanted).max(least);
        Split { items, size }
    }

    /// Splits as [`split`](Self::split) does, for weight rows that each yield `tokens` results: a piece's results stay
    /// in a core's cache until they are scattered.
    fn split_weight_rows(&self, rows: usize, row_cost: usize, tokens: usize) -> Split {
        let split = self.split(rows, row_cost, linear::MIN_PIECE_BYTES);
        let cached = (MAX_TILE_BYTES / 4 / tokens.max(1)).max(16);
        Split {
            size: split.size.min(cached),
            ..split
        }
    }
}

/// Maximum size of a piece's results that still fit a core's cache beside the kernel's own data.
const MAX_TILE_BYTES: usize = 1 << 18;

/// Items in contiguous pieces of equal size, except that the last one may be shorter.
#[derive(Clone, Copy)]
struct Split {
    items: usize,
    size: usize,
}

impl Split {
    fn pieces(self) -> usize {
        self.items.div_ceil(self.size)
    }

    fn range(self, piece: usize) -> std::ops::Range<usize> {
        piece * self.size..self.items.min((piece + 1) * self.size)
    }
}

impl DeviceOps for CpuBackend {
    /// The calling thread computes its share of every operation.
    fn bind_thread(&self) -> Result<(), KernelError> {
        self.pool.bind_caller()
    }

    fn bind_compute_threads(&self, cpus: &[usize]) -> Result<usize, KernelError> {
        self.pool.bind(cpus)?;
        Ok(self.pool.threads_at_work())
    }

    fn describe(&self) -> String {
        format!("cpu {} ×{}", self.isa(), self.pool.threads())
    }

    fn numerics(&self) -> String {
        format!("cpu {}", self.isa().name())
    }

    /// About 50 ms of each thread.
    fn longest_operation_products(&self) -> Option<u64> {
        let of_thread = match self.isa() {
            Isa::Scalar => 1 << 26,
            _ => 1 << 31,
        };
        Some(of_thread * self.pool.threads() as u64)
    }

    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        crate::read_bandwidth_gbps(self.threads(), bytes)
    }
}

/// The host chooses tokens.
impl SampleOps for CpuBackend {
    type Tokens = Infallible;

    fn landed(&self, tokens: &Infallible) -> Result<Vec<Result<u32, SampleFault>>, KernelError> {
        match *tokens {}
    }

    fn embed_chosen(
        &self,
        _table: &HostMatrix,
        tokens: &Infallible,
        _picked: &[u32],
    ) -> Result<CpuTensor, KernelError> {
        match *tokens {}
    }
}
