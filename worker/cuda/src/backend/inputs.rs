//! From projections to what attention reads, in one launch: heads or latents are normalised, rotated and cached.

use hearth_kernels::{
    Heads, KernelError, KvLayout, Latents, MlaHeads, RopeLayout, RopeTable, Span, checks,
};

use super::elementwise::MOST_PAIRS;
use super::kv::kv_type;
use super::tensor::{RowsArg, WeightData};
use super::{CudaBackend, CudaKv, CudaTensor, CudaVector, Kernel, activations_number};
use crate::compile::Variant;
use crate::queue::Args;

/// Maximum elements of a head in cache_heads.cu.
pub(super) const MOST_HEAD_DIM: usize = 256;
/// Heads per block of cache_heads.cu.
const BLOCK_HEADS: usize = 8;

impl CudaBackend {
    pub(super) fn cache_heads_at_once(
        &self,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        of: Heads<'_, CudaTensor, CudaVector>,
    ) -> Result<CudaTensor, KernelError> {
        let Heads {
            q,
            k,
            v,
            norms,
            head_dim,
            ..
        } = of;
        checks::cache_heads(&kv.layout, q.shape(), head_dim)?;
        let (heads, kv_heads) = (q.cols / head_dim, k.cols / head_dim);
        if let Some((of_q, of_k)) = norms {
            for (x, norm) in [(&q, of_q), (&k, of_k)] {
                checks::rms_norm(x.cols, norm.len)?;
                checks::ensure(norm.len == head_dim, "cache_heads", || {
                    format!("a norm of {} elements for heads of {head_dim}", norm.len)
                })?;
            }
        }
        checks::rope(q.shape(), (heads, 0), of.positions.len(), of.rope)?;
        checks::rope(k.shape(), (kv_heads, 0), of.positions.len(), of.rope)?;
        checks::kv_append(&kv.layout, k.shape(), Some(v.shape()))?;
        let offsets = self.row_offsets(kv, layer, spans, q.rows)?;
        let out = self.tensor(q.rows, q.cols)?;
        let norm = |norm: Option<&CudaVector>| norm.map_or(0, |norm| norm.data.address());
        let args = Args::new()
            .with(out.output())
            .with(kv.layer(layer))
            .with(self.rows_of(&q)?)
            .with(self.rows_of(&k)?)
            .with(self.rows_of(&v)?)
            .with(norm(norms.map(|norms| norms.0)))
            .with(norm(norms.map(|norms| norms.1)))
            .with(of.eps);
        let args = self
            .rotation(args, of.positions, of.rope)?
            .with(offsets)
            .with(heads as i32)
            .with(kv_heads as i32)
            .with(head_dim as i32)
            .with(of.rope.inv_freq.len() as i32);
        let variant = self.input_variant(&kv.layout);
        let blocks = (heads + 2 * kv_heads).div_ceil(BLOCK_HEADS);
        self.launch(
            Kernel::new(&variant, "cache_heads"),
            [q.rows, blocks, 1],
            args,
        )?;
        Ok(out)
    }

    pub(super) fn cache_latents_at_once(
        &self,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        of: Latents<'_, CudaTensor, CudaVector>,
    ) -> Result<Option<CudaTensor>, KernelError> {
        let Latents {
            kv_a,
            kv_norm,
            q_a,
            rank,
            ..
        } = of;
        let rows = kv_a.rows;
        let rotated = kv_a.cols.saturating_sub(rank);
        checks::columns(kv_a.cols, 1, 0, rank)?;
        checks::ensure(kv_norm.len == rank, "cache_latents", || {
            format!("a norm of {} elements for a latent of {rank}", kv_norm.len)
        })?;
        checks::rope((rows, rotated), (1, 0), of.positions.len(), of.rope)?;
        checks::kv_append(&kv.layout, kv_a.shape(), None)?;
        let offsets = self.row_offsets(kv, layer, spans, rows)?;
        let q = match &q_a {
            None => None,
            Some((q_a, norm)) => {
                let fits = norm.len == q_a.cols && q_a.rows == rows;
                checks::ensure(fits, "cache_latents", || {
                    format!("a norm of {} elements for {:?}", norm.len, q_a.shape())
                })?;
                let (out, terms) = (
                    self.tensor(rows, q_a.cols)?,
                    self.new_terms(rows, q_a.cols)?,
                );
                Some((self.rows_of(q_a)?, norm.data.address(), out, terms))
            }
        };
        let part = q.as_ref();
        let args = Args::new()
            .with(part.map_or(0, |(_, _, out, _)| out.output()))
            .with(part.map_or(0, |(_, _, _, terms)| terms.values.address()))
            .with(part.map_or(0, |(_, _, _, terms)| terms.scales_address()))
            .with(kv.layer(layer))
            .with(self.rows_of(&kv_a)?)
            .with(part.map_or(RowsArg::NONE, |(from, ..)| *from))
            .with(kv_norm.data.address())
            .with(part.map_or(0, |(_, norm, ..)| *norm))
            .with(of.eps);
        let args = self
            .rotation(args, of.positions, of.rope)?
            .with(offsets)
            .with(rows as i32)
            .with(rank as i32)
            .with(rotated as i32)
            .with(of.rope.inv_freq.len() as i32)
            .with(part.map_or(0, |(_, _, out, _)| out.cols) as i32)
            .with(part.map_or(0, |(_, _, _, terms)| terms.padded) as i32);
        let variant = self.input_variant(&kv.layout);
        let kernel = Kernel::new(&variant, "cache_latents");
        self.launch(kernel, [rows, 1 + usize::from(q.is_some()), 1], args)?;
        Ok(q.map(|(_, _, out, terms)| out.with_terms(terms)))
    }

    pub(super) fn latent_queries_at_once(
        &self,
        q: &CudaTensor,
        kv_b: &WeightData,
        dims: MlaHeads,
        positions: &[u32],
        rope: &RopeTable,
    ) -> Result<CudaTensor, KernelError> {
        let MlaHeads {
            heads,
            nope,
            v,
            rank,
        } = dims;
        let rotated = (q.cols / heads.max(1)).saturating_sub(nope);
        checks::columns(q.cols, heads, nope, rotated)?;
        checks::mla(
            "latent_queries",
            (q.rows, heads * nope),
            nope,
            kv_b.shape(),
            dims,
        )?;
        checks::rope((q.rows, heads * rotated), (heads, 0), positions.len(), rope)?;
        let out = self.tensor(q.rows, heads * (rank + rotated))?;
        let args = Args::new()
            .with(out.output())
            .with(self.rows_of(q)?)
            .with(kv_b.argument());
        let args = self
            .rotation(args, positions, rope)?
            .with(q.rows as i32)
            .with(heads as i32)
            .with(nope as i32)
            .with(v as i32)
            .with(rank as i32)
            .with(rotated as i32)
            .with(rope.inv_freq.len() as i32);
        let variant = self.mla_variant(kv_b.dtype);
        let grid = [heads, rank.div_ceil(64) + 1, q.rows.div_ceil(32)];
        self.launch(Kernel::new(&variant, "mla_query").threads(128), grid, args)?;
        Ok(out)
    }

    /// The kernel that fills a cache of this layout.
    pub(super) fn input_variant(&self, layout: &KvLayout) -> Variant {
        let kind = ("KV_TYPE", kv_type(layout.dtype));
        if !layout.value_in_key {
            return Variant::with("cache_heads", &[kind]);
        }
        let activations = ("ACTIVATIONS", activations_number(self.activations));
        Variant::with("cache_latents", &[kind, activations])
    }

    /// Adds the parameters of a rotation.
    fn rotation(
        &self,
        args: Args,
        positions: &[u32],
        rope: &RopeTable,
    ) -> Result<Args, KernelError> {
        let pairs = rope.inv_freq.len();
        checks::ensure(pairs <= MOST_PAIRS, "rope", || {
            format!("{pairs} frequencies: the GPU's kernel takes {MOST_PAIRS}")
        })?;
        Ok(args
            .with(self.host(positions)?)
            .with(self.host(&rope.inv_freq)?)
            .with(rope.magnitude)
            .with(i32::from(rope.layout == RopeLayout::Interleaved)))
    }

    /// Byte offset of each row's record in a layer, on the device; -1 for rows that belong to no span.
    fn row_offsets(
        &self,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        rows: usize,
    ) -> Result<u64, KernelError> {
        checks::kv_layer("kv_append", &kv.layout, layer)?;
        let mut offsets = vec![-1_i64; rows];
        for span in spans {
            checks::span("kv_append", &kv.layout, kv.blocks, span, rows)?;
            let of_span = offsets.iter_mut().skip(span.first_row).take(span.rows);
            for (offset, token) in of_span.zip(span.start..) {
                *offset = kv.offset(&span.blocks, token);
            }
        }
        self.host(&offsets)
    }
}
