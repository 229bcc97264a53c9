//! The paged KV cache in host memory.

use std::ptr::NonNull;

use crate::affinity;
use crate::convert::{bf16_to_f32, f32_to_bf16};
use crate::ops::KvOps;
use crate::{BlockId, KernelError, KvDType, KvLayout, Span, checks};

use super::CpuBackend;
use super::memory::CpuTensor;

/// Paged keys and values of all layers: one mapping of anonymous memory, of which the system backs only the
/// blocks that have been written.
pub struct CpuKv {
    layout: KvLayout,
    blocks: usize,
    memory: Mapping,
}

impl CpuKv {
    /// Reserves `blocks` blocks. With `numa_cpus`, CPUs by NUMA node, all of their memory is touched immediately by
    /// threads on these CPUs, in turn and evenly, and so lies on these nodes as far as they have room: containers may
    /// not set a memory policy (`mbind`).
    fn new(layout: KvLayout, blocks: usize, numa_cpus: &[Vec<usize>]) -> Result<Self, KernelError> {
        checks::kv_alloc(&layout)?;
        let bytes = layout.block_bytes().checked_mul(blocks);
        let memory = bytes.and_then(|bytes| Mapping::new(bytes).ok());
        let mut memory = memory.ok_or_else(|| KernelError::OutOfMemory {
            device: "cpu".into(),
            what: format!("{blocks} KV blocks"),
            needed_bytes: bytes.unwrap_or(usize::MAX) as u64,
        })?;
        if !numa_cpus.is_empty() {
            touch(memory.bytes_mut(), numa_cpus);
        }
        Ok(Self {
            layout,
            blocks,
            memory,
        })
    }

    /// Shape of the cache.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// All blocks of one layer.
    pub(super) fn layer(&self, layer: usize) -> &[u8] {
        let size = self.blocks * self.layout.block_layer_bytes();
        &self.memory.bytes()[layer * size..(layer + 1) * size]
    }

    fn check_blocks(
        &self,
        op: &'static str,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<(), KernelError> {
        checks::kv_blocks(op, &self.layout, self.blocks, blocks, first_token, tokens)
    }

    /// Byte offset of a token's record.
    fn offset(&self, layer: usize, blocks: &[BlockId], token: usize) -> usize {
        let block = blocks[token / self.layout.block_tokens].0 as usize;
        (layer * self.blocks + block) * self.layout.block_layer_bytes()
            + token % self.layout.block_tokens * self.layout.token_layer_bytes()
    }
}

impl KvOps for CpuBackend {
    type Kv = CpuKv;

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<CpuKv, KernelError> {
        CpuKv::new(layout, blocks, &self.numa_cpus)
    }

    fn kv_layout(&self, kv: &CpuKv) -> KvLayout {
        kv.layout
    }

    fn kv_append(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        keys: &CpuTensor,
        values: Option<&CpuTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let layout = kv.layout;
        let shape = |x: &CpuTensor| (x.rows(), x.cols());
        checks::kv_layer("kv_append", &layout, layer)?;
        checks::kv_append(&layout, shape(keys), values.map(shape))?;
        for span in spans {
            checks::span("kv_append", &layout, kv.blocks, span, keys.rows())?;
        }
        let key_bytes = keys.cols() * layout.dtype.size_bytes();
        for span in spans {
            for i in 0..span.rows {
                let at = kv.offset(layer, &span.blocks, span.start + i);
                let record = &mut kv.memory.bytes_mut()[at..at + layout.token_layer_bytes()];
                let (key, value) = record.split_at_mut(key_bytes);
                store(layout.dtype, keys.row(span.first_row + i), key);
                if let Some(values) = values {
                    store(layout.dtype, values.row(span.first_row + i), value);
                }
            }
        }
        Ok(())
    }

    fn kv_read_begin(
        &self,
        kv: &CpuKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        checks::kv_layer("kv_read", &kv.layout, layer)?;
        kv.check_blocks("kv_read", blocks, first_token, tokens)?;
        let size = kv.layout.token_layer_bytes();
        let mut out = Vec::with_capacity(tokens * size);
        for token in first_token..first_token + tokens {
            let at = kv.offset(layer, blocks, token);
            out.extend_from_slice(&kv.memory.bytes()[at..at + size]);
        }
        Ok(out)
    }

    fn kv_rows(
        &self,
        kv: &CpuKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<CpuTensor, KernelError> {
        checks::kv_layer("kv_rows", &kv.layout, layer)?;
        kv.check_blocks("kv_rows", blocks, first_token, tokens)?;
        let size = kv.layout.token_layer_bytes();
        let cols = kv.layout.token_elements();
        let mut out = self.tensor(tokens, cols);
        for (i, row) in out.as_mut_slice().chunks_exact_mut(cols).enumerate() {
            let at = kv.offset(layer, blocks, first_token + i);
            restore(kv.layout.dtype, &kv.memory.bytes()[at..at + size], row);
        }
        Ok(out)
    }

    fn kv_write(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        checks::kv_layer("kv_write", &kv.layout, layer)?;
        let tokens = checks::kv_records(&kv.layout, bytes.len())?;
        kv.check_blocks("kv_write", blocks, first_token, tokens)?;
        let size = kv.layout.token_layer_bytes();
        for (i, record) in bytes.chunks_exact(size).enumerate() {
            let at = kv.offset(layer, blocks, first_token + i);
            kv.memory.bytes_mut()[at..at + size].copy_from_slice(record);
        }
        Ok(())
    }
}

/// Stores one row in the cache's element type.
fn store(dtype: KvDType, values: &[f32], out: &mut [u8]) {
    match dtype {
        KvDType::Bf16 => {
            for (value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
                out.copy_from_slice(&f32_to_bf16(*value).to_le_bytes());
            }
        }
        KvDType::F32 => {
            for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// The inverse of [`store`].
fn restore(dtype: KvDType, stored: &[u8], out: &mut [f32]) {
    match dtype {
        KvDType::Bf16 => {
            for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
                *out = bf16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        KvDType::F32 => {
            for (out, bytes) in out.iter_mut().zip(stored.as_chunks().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
    }
}

/// Bytes that one NUMA node gets before the next node's turn: a huge page.
const REGION_BYTES: usize = 2 << 20;

/// Touches every page of fresh memory, region by region, from CPUs of the NUMA nodes in turn.
fn touch(memory: &mut [u8], numa_cpus: &[Vec<usize>]) {
    let mut shares: Vec<Vec<&mut [u8]>> = numa_cpus.iter().map(|_| Vec::new()).collect();
    for (turn, region) in memory.chunks_mut(REGION_BYTES).enumerate() {
        shares[turn % numa_cpus.len()].push(region);
    }
    std::thread::scope(|scope| {
        for (cpus, share) in numa_cpus.iter().zip(shares) {
            scope.spawn(move || {
                if let Err(error) = affinity::bind(None, cpus) {
                    tracing::warn!(?cpus, %error, "KV memory is touched from other CPUs");
                }
                let page = rustix::param::page_size();
                for region in share {
                    region.iter_mut().step_by(page).for_each(|byte| *byte = 0);
                }
            });
        }
    });
}

/// Anonymous memory that reads as zero and takes no space until it is written.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned by this value alone and is plain memory.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through `bytes`, which only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Result<Self, rustix::io::Errno> {
        use rustix::mm::{MapFlags, ProtFlags};
        if bytes == 0 {
            return Ok(Self {
                start: NonNull::dangling(),
                bytes: 0,
            });
        }
        // SAFETY: a fresh private anonymous mapping at an address that the system chooses touches nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { start, bytes })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, initialised (zero or written) and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: this is the mapping that `new` made, and no borrow of it is left.
            // Unmapping one's own whole mapping cannot fail.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}
