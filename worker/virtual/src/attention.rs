//! The paged KV cache, and attention over it.

use hearth_kernels::ops::{AttentionOps, KvOps};
use hearth_kernels::{
    AttentionSpec, BlockId, Heads, KernelError, KvLayout, Latents, MlaHeads, RopeTable, Span,
    checks,
};

use crate::device::Computer;
use crate::tensor::no_values;
use crate::work::Work;
use crate::{
    VirtualBackend, VirtualHostCopy, VirtualKv, VirtualTensor, VirtualVector, VirtualWeight,
};

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
        check_append(
            kv,
            layer,
            spans,
            keys.shape,
            values.map(|values| values.shape),
        )?;
        let read = keys.elements() + values.map_or(0, VirtualTensor::elements);
        let work = Work::new("kv_append", read).bytes(keys.shape.0 * layout.token_layer_bytes());
        self.run(&work, |cpu| {
            let values = values.map(VirtualTensor::values).transpose()?;
            cpu.kv_append(kv.values_mut()?, layer, keys.values()?, values, spans)
        })?;
        Ok(())
    }

    /// Gathers the bytes in the order of computation, and copies them beside what is computed next; zeros in modelled mode.
    fn kv_read_begin(
        &self,
        kv: &VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<VirtualHostCopy, KernelError> {
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
        let work = Work::new("kv_read", 0).bytes(2 * bytes);
        let read = self.run(&work, |cpu| {
            cpu.kv_read(kv.values()?, layer, blocks, first_token, tokens)
        })?;
        Ok(self.export(read.unwrap_or_else(|| vec![0; bytes])))
    }

    fn kv_rows(
        &self,
        kv: &VirtualKv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<VirtualTensor, KernelError> {
        checks::kv_layer("kv_rows", &kv.layout, layer)?;
        checks::kv_blocks(
            "kv_rows",
            &kv.layout,
            kv.blocks,
            blocks,
            first_token,
            tokens,
        )?;
        let shape = (tokens, kv.layout.token_elements());
        let stored = tokens * kv.layout.token_layer_bytes();
        let work = Work::new("kv_rows", shape.0 * shape.1).bytes(stored);
        self.output(&work, shape, |cpu| {
            cpu.kv_rows(kv.values()?, layer, blocks, first_token, tokens)
        })
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
    fn cache_heads(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        spans: &[Span],
        heads: Heads<'_, VirtualTensor, VirtualVector>,
    ) -> Result<VirtualTensor, KernelError> {
        let Heads {
            q,
            k,
            v,
            norms,
            eps,
            head_dim,
            positions,
            rope,
        } = heads;
        checks::rope(
            q.shape,
            (q.shape.1 / head_dim.max(1), 0),
            positions.len(),
            rope,
        )?;
        checks::rope(
            k.shape,
            (k.shape.1 / head_dim.max(1), 0),
            positions.len(),
            rope,
        )?;
        check_append(kv, layer, spans, k.shape, Some(v.shape))?;
        let touched = 2 * q.elements() + k.elements() + v.elements();
        let work =
            Work::new("cache_heads", touched).bytes(k.shape.0 * kv.layout.token_layer_bytes());
        // The queries take the memory that they were projected to.
        let VirtualTensor {
            shape,
            values,
            _held,
            ..
        } = q;
        let values = self.run(&work, |cpu| {
            let heads = Heads {
                q: values.ok_or_else(no_values)?,
                k: k.values.ok_or_else(no_values)?,
                v: v.values.ok_or_else(no_values)?,
                norms: norms.map(|(q, k)| (&q.values, &k.values)),
                eps,
                head_dim,
                positions,
                rope,
            };
            cpu.cache_heads(kv.values_mut()?, layer, spans, heads)
        })?;
        Ok(VirtualTensor {
            shape,
            values,
            product_of: None,
            _held,
        })
    }

    fn cache_latents(
        &self,
        kv: &mut VirtualKv,
        layer: usize,
        spans: &[Span],
        latents: Latents<'_, VirtualTensor, VirtualVector>,
    ) -> Result<Option<VirtualTensor>, KernelError> {
        let Latents {
            kv_a,
            kv_norm,
            q_a,
            rank,
            eps,
            positions,
            rope,
        } = latents;
        checks::columns(kv_a.shape.1, 1, 0, rank)?;
        checks::rope(
            (kv_a.shape.0, kv_a.shape.1 - rank),
            (1, 0),
            positions.len(),
            rope,
        )?;
        check_append(kv, layer, spans, kv_a.shape, None)?;
        let touched = kv_a.elements() + 2 * q_a.as_ref().map_or(0, |(q_a, _)| q_a.elements());
        let stored = kv_a.shape.0 * kv.layout.token_layer_bytes();
        let work = Work::new("cache_latents", touched).bytes(stored);
        let (q_a, norm) = q_a.unzip();
        let (place, values) = q_a.map(|q_a| ((q_a.shape, q_a._held), q_a.values)).unzip();
        let computed = self.run(&work, |cpu| {
            let q_a = match (values, norm) {
                (Some(values), Some(norm)) => Some((values.ok_or_else(no_values)?, &norm.values)),
                _ => None,
            };
            let latents = Latents {
                kv_a: kv_a.values.ok_or_else(no_values)?,
                kv_norm: &kv_norm.values,
                q_a,
                rank,
                eps,
                positions,
                rope,
            };
            cpu.cache_latents(kv.values_mut()?, layer, spans, latents)
        })?;
        Ok(place.map(|(shape, _held)| VirtualTensor {
            shape,
            values: computed.flatten(),
            product_of: None,
            _held,
        }))
    }

    fn kv_append_expanded(
        &self,
        kv: &mut VirtualKv,
        (product, latents): (VirtualTensor, VirtualTensor),
        heads: MlaHeads,
        to: &Span,
    ) -> Result<(), KernelError> {
        let layout = &kv.layout;
        checks::kv_append_expanded(layout, product.shape, latents.shape, heads)?;
        checks::span("kv_append_expanded", layout, kv.blocks, to, product.shape.0)?;
        let touched = product.elements() + latents.elements();
        let stored = to.rows * layout.token_layer_bytes();
        let work = Work::new("kv_append_expanded", touched).bytes(stored);
        self.run(&work, |cpu| {
            let of = (
                product.values.ok_or_else(no_values)?,
                latents.values.ok_or_else(no_values)?,
            );
            cpu.kv_append_expanded(kv.values_mut()?, of, heads, to)
        })?;
        Ok(())
    }

    fn latent_queries(
        &self,
        q: &VirtualTensor,
        kv_b: &VirtualWeight,
        heads: MlaHeads,
        positions: &[u32],
        rope: &RopeTable,
    ) -> Result<VirtualTensor, KernelError> {
        let rows = q.shape.0;
        let rotated = (q.shape.1 / heads.heads.max(1)).saturating_sub(heads.nope);
        checks::columns(q.shape.1, heads.heads, heads.nope, rotated)?;
        let nope = (rows, heads.heads * heads.nope);
        checks::mla("latent_queries", nope, heads.nope, kv_b.shape(), heads)?;
        checks::rope(
            (rows, heads.heads * rotated),
            (heads.heads, 0),
            positions.len(),
            rope,
        )?;
        let shape = (rows, heads.heads * (heads.rank + rotated));
        let flops = 2.0 * rows as f64 * (heads.heads * heads.rank * heads.nope) as f64;
        let work = Work::new("latent_queries", q.elements() + shape.0 * shape.1)
            .rows_of(kv_b, heads.heads * heads.nope)
            .flops(flops);
        self.output(&work, shape, |cpu| {
            cpu.latent_queries(q.values()?, &kv_b.matrix()?, heads, positions, rope)
        })
    }

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

/// Checks what is to be stored in a layer.
fn check_append(
    kv: &VirtualKv,
    layer: usize,
    spans: &[Span],
    keys: (usize, usize),
    values: Option<(usize, usize)>,
) -> Result<(), KernelError> {
    checks::kv_layer("kv_append", &kv.layout, layer)?;
    checks::kv_append(&kv.layout, keys, values)?;
    spans
        .iter()
        .try_for_each(|span| checks::span("kv_append", &kv.layout, kv.blocks, span, keys.0))
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
