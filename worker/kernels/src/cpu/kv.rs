//! The paged KV cache in host memory.

use std::ptr::NonNull;

use crate::convert::f32_to_bf16;
use crate::{BlockId, KernelError, KvDType, KvLayout, Span, checks};

use super::memory::CpuTensor;

/// Paged keys and values of all layers: one mapping of anonymous memory, of which the system backs only the
/// blocks that were written.
pub struct CpuKv {
    layout: KvLayout,
    blocks: usize,
    memory: Mapping,
}

impl CpuKv {
    /// Reserves `blocks` blocks, on the NUMA nodes `numa_nodes` if the system can do so: on one,
    /// or page by page over several.
    pub(super) fn new(
        layout: KvLayout,
        blocks: usize,
        numa_nodes: &[u32],
    ) -> Result<Self, KernelError> {
        checks::kv_alloc(&layout)?;
        let bytes = layout.block_bytes().checked_mul(blocks);
        let memory = bytes.and_then(|bytes| Mapping::new(bytes, numa_nodes).ok());
        let memory = memory.ok_or_else(|| KernelError::OutOfMemory {
            device: "cpu".into(),
            what: format!("{blocks} KV blocks"),
            needed_bytes: bytes.unwrap_or(usize::MAX) as u64,
        })?;
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

    pub(super) fn append(
        &mut self,
        layer: usize,
        keys: &CpuTensor,
        values: Option<&CpuTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let layout = self.layout;
        let shape = |x: &CpuTensor| (x.rows(), x.cols());
        checks::kv_layer("kv_append", &layout, layer)?;
        checks::kv_append(&layout, shape(keys), values.map(shape))?;
        for span in spans {
            checks::span("kv_append", &layout, self.blocks, span, keys.rows())?;
        }
        let key_bytes = keys.cols() * layout.dtype.size_bytes();
        for span in spans {
            for i in 0..span.rows {
                let at = self.offset(layer, &span.blocks, span.start + i);
                let record = &mut self.memory.bytes_mut()[at..at + layout.token_layer_bytes()];
                let (key, value) = record.split_at_mut(key_bytes);
                store(layout.dtype, keys.row(span.first_row + i), key);
                if let Some(values) = values {
                    store(layout.dtype, values.row(span.first_row + i), value);
                }
            }
        }
        Ok(())
    }

    pub(super) fn read(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        checks::kv_layer("kv_read", &self.layout, layer)?;
        self.check_blocks("kv_read", blocks, first_token, tokens)?;
        let size = self.layout.token_layer_bytes();
        let mut out = Vec::with_capacity(tokens * size);
        for token in first_token..first_token + tokens {
            let at = self.offset(layer, blocks, token);
            out.extend_from_slice(&self.memory.bytes()[at..at + size]);
        }
        Ok(out)
    }

    pub(super) fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        checks::kv_layer("kv_write", &self.layout, layer)?;
        let tokens = checks::kv_records(&self.layout, bytes.len())?;
        self.check_blocks("kv_write", blocks, first_token, tokens)?;
        let size = self.layout.token_layer_bytes();
        for (i, record) in bytes.chunks_exact(size).enumerate() {
            let at = self.offset(layer, blocks, first_token + i);
            self.memory.bytes_mut()[at..at + size].copy_from_slice(record);
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

/// Anonymous memory that reads as zero and takes no room before it is written.
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is owned by this value alone and is plain memory.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through `bytes`, which only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize, numa_nodes: &[u32]) -> Result<Self, rustix::io::Errno> {
        use rustix::mm::{MapFlags, ProtFlags};
        if bytes == 0 {
            return Ok(Self {
                start: NonNull::dangling(),
                bytes: 0,
            });
        }
        // SAFETY: a fresh private anonymous mapping at an address of the system's choice touches nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        let mapping = Self { start, bytes };
        if !numa_nodes.is_empty() {
            mapping.place_on(numa_nodes);
        }
        Ok(mapping)
    }

    /// Asks for pages on one NUMA node, or interleaved over several; where the system cannot, they lie where
    /// it puts them.
    fn place_on(&self, nodes: &[u32]) {
        const MPOL_PREFERRED: libc::c_int = 1;
        const MPOL_INTERLEAVE: libc::c_int = 3;
        const MASK_BITS: usize = 1024;
        let mut mask = [0u64; MASK_BITS / 64];
        for &node in nodes {
            let Some(word) = mask.get_mut(node as usize / 64) else {
                tracing::warn!(node, "no such NUMA node; KV memory is not bound");
                return;
            };
            *word |= 1 << (node % 64);
        }
        let policy = if nodes.len() == 1 {
            MPOL_PREFERRED
        } else {
            MPOL_INTERLEAVE
        };
        // SAFETY: the range is this mapping's own, the mask outlives the call, and the call changes only
        // where pages will be placed.
        let status = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.bytes,
                policy,
                mask.as_ptr(),
                MASK_BITS,
                0,
            )
        };
        if status != 0 {
            let error = std::io::Error::last_os_error();
            tracing::warn!(?nodes, %error, "KV memory is not bound to its NUMA nodes");
        }
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
