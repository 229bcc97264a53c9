//! The paged KV cache, and attention over it.

use hearth_kernels::ops::{AttentionOps, KvOps};
use hearth_kernels::{AttentionSpec, BlockId, KernelError, KvLayout, Span, checks};

use crate::device::Computer;
use crate::work::Work;
use crate::{VirtualBackend, VirtualKv, VirtualTensor};

impl KvOps for VirtualBackend {
    type Kv = VirtualKv;

    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<VirtualKv, KernelError> {
        checks::kv_alloc(&layout)?;
        let bytes = layout.block_bytes().saturating_mul(blocks);
        let held = self.memory.take(bytes, "the KV cache")?;
        let kv = match &self.computer {
            Computer::Exact { cpu, .. } => Some(cpu.kv_alloc(layout, blocks)?),
            Computer::Modelled(_) => None,
        };
        Ok(VirtualKv::new(layout, blocks, kv, held))
    }

    fn kv_layout(&self, kv: &VirtualKv) -> KvLayout {
        kv.layout
    }

    fn kv_append(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        keys: &VirtualTensor,
        values: Option<&VirtualTensor>,
        spans: &[Span],
    ) -> Result<(), KernelError> {
        let layout = kv.layout;
        checks::kv_layer("kv_append", &layout, layer)?;
        checks::kv_append(&layout, keys.shape, values.map(|values| values.shape))?;
        for span in spans {
            checks::span("kv_append", &layout, kv.blocks, span, keys.shape.0)?;
        }
        let read = keys.elements() + values.map_or(0, VirtualTensor::elements);
        let work = Work::new("kv_append", read).bytes(keys.shape.0 * layout.token_layer_bytes());
        self.run(&work, |cpu| {
            let values = values.map(VirtualTensor::values).transpose()?;
            cpu.kv_append(kv.values_mut()?, layer, keys.values()?, values, spans)
        })?;
        Ok(())
    }

    /// Waits until the tokens were computed; zeros in modelled mode.
    fn kv_read(
        &self,
        kv: &VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        checks::kv_layer("kv_read", &kv.layout, layer)?;
        checks::kv_blocks(
            "kv_read",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let bytes = tokens * kv.layout.token_layer_bytes();
        let work = Work::new("kv_read", 0).over_link(bytes);
        let read = self.run(&work, |cpu| {
            cpu.kv_read(kv.values()?, layer, blocks, first_token, tokens)
        })?;
        self.lanes.wait_for_compute();
        Ok(read.unwrap_or_else(|| vec![0; bytes]))
    }

    fn kv_write(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError> {
        checks::kv_layer("kv_write", &kv.layout, layer)?;
        let tokens = checks::kv_records(&kv.layout, bytes.len())?;
        checks::kv_blocks(
            "kv_write",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let work = Work::new("kv_write", 0).over_link(bytes.len());
        self.run(&work, |cpu| {
            cpu.kv_write(kv.values_mut()?, layer, blocks, first_token, bytes)
        })?;
        Ok(())
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
        checks::attention(&kv.layout, kv.blocks, q.shape, layer, spans, spec)?;
        let shape = (q.shape.0, spec.heads * kv.layout.v_dim);
        let work = attention(&kv.layout, spans, spec);
        self.output(&work, shape, |cpu| {
            cpu.attention(q.values()?, kv.values()?, layer, spans, spec)
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
        checks::attention(&kv.layout, kv.blocks, q.shape, layer, spans, spec)?;
        checks::attention_out(&kv.layout, q.shape, out.shape, spec)?;
        let work = attention(&kv.layout, spans, spec);
        self.run(&work, |cpu| {
            let (out, q) = (out.values_mut()?, q.values()?);
            cpu.attention_rows(out, q, kv.values()?, layer, spans, spec)
        })?;
        Ok(())
    }
}

/// Attention that reads a span's keys and values once.
fn attention(layout: &KvLayout, spans: &[Span], spec: AttentionSpec) -> Work<'static> {
    let width = layout.k_dim + layout.v_dim;
    let (mut rows, mut tokens, mut pairs) = (0, 0, 0.0);
    for span in spans {
        rows += span.rows;
        tokens += span.start + span.rows;
        let positions = (span.start + 1 + span.start + span.rows) as f64 / 2.0;
        pairs += positions * span.rows as f64;
    }
    Work::new("attention", rows * spec.heads * width)
        .bytes(tokens * layout.token_layer_bytes())
        .flops(2.0 * pairs * (spec.heads * width) as f64)
}
