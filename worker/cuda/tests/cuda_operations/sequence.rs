//! One sequence with its keys, values and queries, for the tests of attention and of the cache.

use hearth_kernels::convert::{bf16_to_f32, f32_to_bf16};
use hearth_kernels::ops::*;
use hearth_kernels::{AttentionSpec, BlockId, KvDType, KvLayout, Span, reference};

use crate::common::Rng;

/// The layer used, out of two.
pub(crate) const LAYER: usize = 1;

/// Keys and values of every position, and queries for them.
pub(crate) struct Sequence {
    pub(crate) layout: KvLayout,
    pub(crate) heads: usize,
    pub(crate) tokens: usize,
    pub(crate) q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Rows of a batch that hold positions from `start` of the sequence, in blocks from `first_block`.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) start: usize,
    pub(crate) first_block: u32,
}

/// A layout with two layers and blocks of 16 tokens.
pub(crate) const fn layout(
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    value_in_key: bool,
    dtype: KvDType,
) -> KvLayout {
    KvLayout {
        layers: 2,
        kv_heads,
        k_dim,
        v_dim,
        value_in_key,
        block_tokens: 16,
        dtype,
    }
}

impl Sequence {
    pub(crate) fn new(layout: KvLayout, heads: usize, tokens: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        // Numbers that the cache stores exactly.
        let mut stored = |n: usize| -> Vec<f32> {
            let exact = |v: f32| match layout.dtype {
                KvDType::Bf16 => bf16_to_f32(f32_to_bf16(v)),
                KvDType::F32 => v,
            };
            rng.normals(n).into_iter().map(exact).collect()
        };
        let k = stored(tokens * layout.kv_heads * layout.k_dim);
        let v = stored(tokens * layout.kv_heads * layout.v_dim);
        Self {
            layout,
            heads,
            tokens,
            q: rng.normals(tokens * heads * layout.k_dim),
            k,
            v,
        }
    }

    pub(crate) fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads,
            scale: 0.3,
        }
    }

    /// Blocks from `first` on, in descending order.
    pub(crate) fn blocks(&self, first: u32) -> Vec<BlockId> {
        let n = self.layout.blocks_for(self.tokens) as u32;
        (0..n).rev().map(|i| BlockId(first + i)).collect()
    }

    pub(crate) fn spans(&self, parts: &[Part]) -> Vec<Span> {
        let span = |part: &Part| Span {
            first_row: part.first_row,
            rows: part.rows,
            start: part.start,
            blocks: self.blocks(part.first_block),
        };
        parts.iter().map(span).collect()
    }

    /// Appends the parts' keys and values; rows of the batch that belong to no
    /// part are NaN and must not affect anything.
    pub(crate) fn append<B: Backend>(&self, backend: &B, kv: &mut B::Kv, parts: &[Part]) {
        let rows = batch_rows(parts);
        let gather = |from: &[f32], cols: usize| {
            let batch = batch(parts, from, cols);
            backend.upload(rows, cols, &batch).unwrap()
        };
        let keys = gather(&self.k, self.layout.kv_heads * self.layout.k_dim);
        let values = (!self.layout.value_in_key)
            .then(|| gather(&self.v, self.layout.kv_heads * self.layout.v_dim));
        backend
            .kv_append(kv, LAYER, &keys, values.as_ref(), &self.spans(parts))
            .unwrap();
    }

    /// Runs attention for the parts' rows and returns the batch's result.
    pub(crate) fn attend<B: Backend>(&self, backend: &B, kv: &B::Kv, parts: &[Part]) -> Vec<f32> {
        let cols = self.heads * self.layout.k_dim;
        let q = batch(parts, &self.q, cols);
        let q = backend.upload(batch_rows(parts), cols, &q).unwrap();
        let spans = self.spans(parts);
        let out = backend
            .attention(&q, kv, LAYER, &spans, self.spec())
            .unwrap();
        backend.download(&out).unwrap()
    }

    /// Appends and attends to positions `start..start + rows`, in blocks from 0.
    pub(crate) fn step<B: Backend>(
        &self,
        backend: &B,
        kv: &mut B::Kv,
        start: usize,
        rows: usize,
    ) -> Vec<f32> {
        let part = [Part {
            first_row: 0,
            rows,
            start,
            first_block: 0,
        }];
        self.append(backend, kv, &part);
        self.attend(backend, kv, &part)
    }

    /// The reference's result for a position: `[heads * v_dim]`.
    pub(crate) fn reference(&self, position: usize) -> Vec<f32> {
        let KvLayout {
            kv_heads,
            k_dim,
            v_dim,
            value_in_key,
            ..
        } = self.layout;
        let mut out = vec![0.0; self.heads * v_dim];
        for (head, out) in out.chunks_mut(v_dim).enumerate() {
            let kv_head = head / (self.heads / kv_heads);
            let of_head = |from: &[f32], dim: usize| -> Vec<f32> {
                (0..=position)
                    .flat_map(|p| &from[(p * kv_heads + kv_head) * dim..][..dim])
                    .copied()
                    .collect()
            };
            let keys = of_head(&self.k, k_dim);
            let values = of_head(&self.v, v_dim);
            let (values, stride) = match value_in_key {
                true => (&keys, k_dim),
                false => (&values, v_dim),
            };
            let q = &self.q[(position * self.heads + head) * k_dim..][..k_dim];
            reference::attention_head(q, &keys, values, stride, self.spec().scale, out);
        }
        out
    }

    /// Columns per row of a result.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.layout.v_dim
    }
}

fn batch_rows(parts: &[Part]) -> usize {
    let ends = parts.iter().map(|part| part.first_row + part.rows);
    ends.max().unwrap_or(0)
}

/// The parts' rows of `from` `[tokens, cols]`; other rows are NaN.
fn batch(parts: &[Part], from: &[f32], cols: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; batch_rows(parts) * cols];
    for part in parts {
        out[part.first_row * cols..][..part.rows * cols]
            .copy_from_slice(&from[part.start * cols..][..part.rows * cols]);
    }
    out
}
