//! The CPU backend: shapes are checked and work is split here; what computes lies in `arch`.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arch::{Isa, Kernels, Packing};
use crate::backend::{
    AttentionSpec, Backend, ExpertCall, ExpertWeights, MlaHeads, RopeTable, RouterSpec, Routing,
    Span,
};
use crate::pool::Pool;
use crate::{BlockId, DType, HostMatrix, KernelError, KvLayout, checks};

mod attention;
mod elementwise;
mod experts;
mod kv;
mod linear;
pub(crate) mod memory;
mod mla;
mod route;

pub use kv::CpuKv;
pub use memory::CpuTensor;

use memory::{FreeList, PooledBuf, Scratch};

/// How the CPU backend runs.
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Instruction set; the best that the CPU has when none is named.
    pub isa: Option<Isa>,
    /// Threads, the caller included; 0: one for each CPU that this process may use. They are bound by [`Backend::place`].
    pub threads: usize,
    /// CPUs by the NUMA node that the KV cache's memory is to lie on, evenly on several: a thread on each touches its part
    /// first. None: a page lies where it is first used.
    pub numa_cpus: Vec<Vec<usize>>,
}

/// A [`Backend`] on this machine's CPU.
pub struct CpuBackend {
    kernels: Box<dyn Kernels>,
    pool: Pool,
    free: Arc<FreeList>,
    /// One for each thread of the pool.
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
        let pool = Pool::new(threads)?;
        tracing::debug!(%isa, threads, kernels = ?kernels.names(), "CPU kernels chosen");
        Ok(Self {
            kernels,
            pool,
            free: Arc::default(),
            scratch: (0..threads).map(|_| Mutex::default()).collect(),
            numa_cpus,
        })
    }

    /// The instruction set that runs.
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        // Working memory holds nothing from one piece to the next, so a panicked holder left nothing bad.
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
    /// less than `min_cost` of work, an item costing `item_cost` (bytes read, or their equal in time).
    fn split(&self, items: usize, item_cost: usize, min_cost: usize) -> Split {
        let least = min_cost.div_ceil(item_cost.max(1)).max(1);
        let wanted = match self.pool.threads() {
            1 => 1,
            threads => threads * 8,
        };
        let size = items.div_ceil(wanted).max(least);
        Split { items, size }
    }

    /// As [`split`](Self::split), for weight rows that each yield `tokens` results: a piece's results stay
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

/// Results of a piece that still fit a core's cache beside what the kernel keeps there.
const MAX_TILE_BYTES: usize = 1 << 18;

/// Items in contiguous pieces of equal size, the last one shorter.
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

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = HostMatrix;
    type Vector = Arc<[f32]>;
    type Kv = CpuKv;
    type Chosen = Routing;
    type ExpertBank = Infallible;

    /// The calling thread computes its share of every operation.
    fn bind_thread(&self) -> Result<(), KernelError> {
        self.pool.place_caller()
    }

    fn place(&self, cpus: &[usize]) -> Result<usize, KernelError> {
        self.pool.place(cpus)?;
        Ok(self.pool.threads_at_work())
    }

    fn describe(&self) -> String {
        format!("cpu {} ×{}", self.isa(), self.pool.threads())
    }

    fn numerics(&self) -> String {
        format!("cpu {}", self.isa().name())
    }

    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError> {
        crate::read_bandwidth_gbps(self.threads(), bytes)
    }

    fn weight(&self, matrix: &HostMatrix) -> Result<HostMatrix, KernelError> {
        Ok(matrix.clone())
    }

    fn vector(&self, values: &[f32]) -> Result<Arc<[f32]>, KernelError> {
        Ok(values.into())
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Result<CpuTensor, KernelError> {
        checks::upload((rows, cols), values.len())?;
        let mut x = self.tensor(rows, cols);
        x.as_mut_slice().copy_from_slice(values);
        Ok(x)
    }

    fn download(&self, x: &CpuTensor) -> Result<Vec<f32>, KernelError> {
        Ok(x.as_slice().to_vec())
    }

    fn shape(&self, x: &CpuTensor) -> (usize, usize) {
        (x.rows(), x.cols())
    }

    fn embed(&self, table: &HostMatrix, tokens: &[u32]) -> Result<CpuTensor, KernelError> {
        self.embed_rows(table, tokens)
    }

    fn linear(
        &self,
        x: &CpuTensor,
        w: &HostMatrix,
        bias: Option<&Arc<[f32]>>,
    ) -> Result<CpuTensor, KernelError> {
        self.linear_layer(x, w, bias.map(|b| &**b))
    }

    fn rms_norm(
        &self,
        x: &CpuTensor,
        weight: &Arc<[f32]>,
        eps: f32,
    ) -> Result<CpuTensor, KernelError> {
        self.norm(x, weight, eps)
    }

    fn add_rms_norm(
        &self,
        residual: &mut CpuTensor,
        delta: &CpuTensor,
        weight: &Arc<[f32]>,
        eps: f32,
    ) -> Result<CpuTensor, KernelError> {
        self.add(residual, delta)?;
        self.norm(residual, weight, eps)
    }

    fn add_assign(&self, x: &mut CpuTensor, delta: &CpuTensor) -> Result<(), KernelError> {
        self.add(x, delta)
    }

    fn silu_mul(&self, gate: &CpuTensor, up: &CpuTensor) -> Result<CpuTensor, KernelError> {
        self.gated(gate, up)
    }

    fn columns(
        &self,
        x: &CpuTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<CpuTensor, KernelError> {
        self.take_columns(x, groups, first, cols)
    }

    fn interleave(
        &self,
        a: &CpuTensor,
        b: &CpuTensor,
        groups: usize,
    ) -> Result<CpuTensor, KernelError> {
        self.join_columns(a, b, groups)
    }

    fn rows(&self, x: &CpuTensor, rows: &[u32]) -> Result<CpuTensor, KernelError> {
        self.take_rows(x, rows)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<CpuTensor, KernelError> {
        let mut x = self.tensor(rows, cols);
        x.as_mut_slice().fill(0.0);
        Ok(x)
    }

    fn rope(
        &self,
        x: &mut CpuTensor,
        heads: usize,
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        self.rotate(x, heads, positions, table)
    }

    fn mla_absorb(
        &self,
        q_nope: &CpuTensor,
        kv_b: &HostMatrix,
        heads: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        self.absorb(q_nope, kv_b, heads)
    }

    fn mla_expand(
        &self,
        latent: &CpuTensor,
        kv_b: &HostMatrix,
        heads: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        self.expand(latent, kv_b, heads)
    }

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<CpuKv, KernelError> {
        CpuKv::new(layout, blocks, &self.numa_cpus)
    }

    fn kv_layout(&self, kv: &CpuKv) -> KvLayout {
        kv.layout()
    }

    fn kv_append(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        keys: &CpuTensor,
        values: Option<&CpuTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        kv.append(layer, keys, values, spans)
    }

    fn kv_read(
        &self,
        kv: &CpuKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        kv.read(layer, blocks, first_token, tokens)
    }

    fn kv_write(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        kv.write(layer, blocks, first_token, bytes)
    }

    fn attention(
        &self,
        q: &CpuTensor,
        kv: &CpuKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<CpuTensor, KernelError> {
        self.attend(q, kv, layer, spans, spec)
    }

    fn route(
        &self,
        logits: &CpuTensor,
        bias: Option<&Arc<[f32]>>,
        spec: RouterSpec,
    ) -> Result<Routing, KernelError> {
        self.choose_experts(logits, bias.map(|b| &**b), spec)
    }

    fn routing(&self, chosen: Routing) -> Result<Routing, KernelError> {
        Ok(chosen)
    }

    fn experts(
        &self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        calls: &[ExpertCall<'_, HostMatrix>],
    ) -> Result<(), KernelError> {
        self.run_experts(out, x, calls)
    }

    /// The host is the device: it always knows what was chosen.
    fn expert_bank(
        &self,
        _experts: &[ExpertWeights<'_, HostMatrix>],
    ) -> Result<Option<Infallible>, KernelError> {
        Ok(None)
    }

    fn banked_experts(
        &self,
        _out: &mut CpuTensor,
        _x: &CpuTensor,
        _chosen: &Routing,
        bank: &Infallible,
    ) -> Result<(), KernelError> {
        match *bank {}
    }
}
