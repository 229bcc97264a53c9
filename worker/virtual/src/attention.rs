//! The paged KV cache, and attention over it.

use hearth_kernels::ops::{AttentionOps, KvOps, MemoryOps};
use hearth_kernels::{AttentionSpec, BlockId, KernelError, KvLayout, Span};

use crate::{VirtualBackend, VirtualKv, VirtualTensor};

impl KvOps for VirtualBackend {
    type Kv = VirtualKv;

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<VirtualKv, KernelError> {
        let bytes = layout.block_bytes().saturating_mul(blocks);
        let held = self.memory.take(bytes, "the KV cache")?;
        Ok(VirtualKv {
            kv: self.cpu.kv_alloc(layout, blocks)?,
            _held: held,
        })
    }

    fn kv_layout(&self, kv: &VirtualKv) -> KvLayout {
        self.cpu.kv_layout(&kv.kv)
    }

    fn kv_append(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        keys: &VirtualTensor,
        values: Option<&VirtualTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let values = values.map(|values| &values.values);
        self.cpu
            .kv_append(&mut kv.kv, layer, &keys.values, values, spans)
    }

    fn kv_read(
        &self,
        kv: &VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        self.cpu.kv_read(&kv.kv, layer, blocks, first_token, tokens)
    }

    fn kv_write(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        self.cpu
            .kv_write(&mut kv.kv, layer, blocks, first_token, bytes)
    }
}

impl AttentionOps for VirtualBackend {
    fn attention(
        &self,
        q: &VirtualTensor,
        kv: &VirtualKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<VirtualTensor, KernelError> {
        let cols = spec.heads * self.kv_layout(kv).v_dim;
        self.output((self.shape(q).0, cols), |cpu| {
            cpu.attention(&q.values, &kv.kv, layer, spans, spec)
        })
    }

    fn attention_rows(
        &self,
        out: &mut VirtualTensor,
        q: &VirtualTensor,
        kv: &VirtualKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<(), KernelError> {
        self.cpu
            .attention_rows(&mut out.values, &q.values, &kv.kv, layer, spans, spec)
    }
}
