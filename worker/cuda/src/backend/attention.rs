//! Attention over the paged cache.

use hearth_kernels::ops::{AttentionOps, MemoryOps};
use hearth_kernels::{
    AttentionSpec, Heads, KernelError, KvDType, KvLayout, Latents, MlaHeads, RopeTable, Span,
    checks, compose,
};

use super::inputs::MOST_HEAD_DIM;
use super::tensor::AttentionTileArg;
use super::{Activations, CudaBackend, CudaKv, CudaTensor, CudaVector, CudaWeight, Kernel};
use crate::compile::{AttentionShape, Variant};
use crate::queue::Args;

/// Shared memory of a block of attention.cu that is static, and what tools and drivers may take.
const OTHER_SHARED_BYTES: i64 = 2 << 10;
/// Positions per partial result (`KEY_SPLIT` of common.cuh).
const SPLIT_POSITIONS: usize = 512;
/// Size of the partial results beyond which splits are merged in registers instead.
const MOST_PARTIAL_BYTES: usize = 256 << 20;

/// Rows of a batch cut into tiles, with the blocks of their sequences.
pub(super) struct Tiles {
    pub(super) tiles: u64,
    pub(super) count: usize,
    pub(super) blocks: u64,
}

/// Tiles as a kernel takes them, and blocks of rows for each of them and each kv head.
pub(super) struct Prompt {
    pub(super) tiles: Tiles,
    pub(super) row_blocks: usize,
}

impl AttentionOps for CudaBackend {
    fn cache_heads(
        &self,
        kv: &mut CudaKv,
        layer: usize,
        spans: &[Span],
        heads: Heads<'_, CudaTensor, CudaVector>,
    ) -> Result<CudaTensor, KernelError> {
        match (1..=MOST_HEAD_DIM).contains(&heads.head_dim) {
            true => self.cache_heads_at_once(kv, layer, spans, heads),
            false => compose::cache_heads(self, kv, layer, spans, heads),
        }
    }

    fn cache_latents(
        &self,
        kv: &mut CudaKv,
        layer: usize,
        spans: &[Span],
        latents: Latents<'_, CudaTensor, CudaVector>,
    ) -> Result<Option<CudaTensor>, KernelError> {
        self.cache_latents_at_once(kv, layer, spans, latents)
    }

    fn kv_append_expanded(
        &self,
        kv: &mut CudaKv,
        (product, latents): (CudaTensor, CudaTensor),
        heads: MlaHeads,
        to: &Span,
    ) -> Result<(), KernelError> {
        self.append_expanded(kv, (&product, &latents), heads, to)
    }

    fn latent_queries(
        &self,
        q: &CudaTensor,
        kv_b: &CudaWeight,
        heads: MlaHeads,
        positions: &[u32],
        rope: &RopeTable,
    ) -> Result<CudaTensor, KernelError> {
        self.latent_queries_at_once(q, &kv_b.0, heads, positions, rope)
    }

    fn attention(
        &self,
        q: &CudaTensor,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<CudaTensor, KernelError> {
        let covered: usize = spans.iter().map(|span| span.rows).sum();
        let cols = spec.heads * kv.layout.v_dim;
        // Rows that belong to no sequence attend to nothing.
        let mut out = if covered < q.rows {
            self.zeros(q.rows, cols)?
        } else {
            self.tensor(q.rows, cols)?
        };
        self.attention_rows(&mut out, q, kv, layer, spans, spec)?;
        Ok(out)
    }

    fn attention_rows(
        &self,
        out: &mut CudaTensor,
        q: &CudaTensor,
        kv: &CudaKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<(), KernelError> {
        let layout = kv.layout;
        checks::attention(&layout, kv.blocks, q.shape(), layer, spans, spec)?;
        checks::attention_out(&layout, q.shape(), out.shape(), spec)?;
        super::elementwise::changed(out);
        if spans.iter().all(|span| span.rows == 0) {
            return Ok(());
        }
        let step = Step {
            q,
            kv,
            layer,
            spans,
            spec,
            out,
        };
        match flash_dims(&layout) {
            Some(dims) => self.flash(&step, dims),
            None => self.any(&step),
        }
    }
}

impl CudaBackend {
    /// Kernels that will read a cache of this layout.
    pub(super) fn attention_variants(&self, layout: &KvLayout) -> Vec<Variant> {
        match flash_dims(layout) {
            None => vec![Variant::plain("attention_any")],
            Some(dims) => {
                let terms = self.attention_terms();
                let by_wgmma = self.wgmma_attention(layout);
                [16, AttentionShape::prefill_rows(dims, terms)]
                    .map(|rows| self.attention_shape(dims, rows, terms).variant)
                    .into_iter()
                    .chain(by_wgmma.map(|shape| shape.variant))
                    .collect()
            }
        }
    }

    fn attention_shape(&self, dims: (i64, i64, bool), rows: i64, terms: i64) -> AttentionShape {
        let most_bytes = i64::from(self.device.info.shared_bytes_per_block) - OTHER_SHARED_BYTES;
        AttentionShape::new(dims, rows, terms, most_bytes)
    }

    /// Bf16 terms of queries and probabilities.
    pub(super) fn attention_terms(&self) -> i64 {
        match self.activations {
            Activations::F32 => 3,
            Activations::Bf16 | Activations::Fp8 => 1,
        }
    }

    fn flash(&self, step: &Step<'_>, dims: (i64, i64, bool)) -> Result<(), KernelError> {
        let layout = step.kv.layout;
        let group = step.spec.heads / layout.kv_heads;
        let most_rows = step.spans.iter().map(|s| s.rows).max().unwrap_or(0);
        let terms = self.attention_terms();
        let work_rows = match most_rows * group <= 16 {
            true => 16,
            false => AttentionShape::prefill_rows(dims, terms),
        };
        let shape = self.attention_shape(dims, work_rows, terms);
        let prompt = self.prompt(step, work_rows as usize)?;

        let longest = step.spans.iter().map(|s| s.start + s.rows).max();
        let reached = longest.unwrap_or(0).div_ceil(SPLIT_POSITIONS);
        let rows = step.q.rows;
        let partial_bytes = rows * step.spec.heads * reached * (2 + layout.v_dim) * 4;
        let blocks = prompt.tiles.count * layout.kv_heads * prompt.row_blocks;
        let multiprocessors = self.device.info.multiprocessors as usize;
        // Where half the device has a block, wgmma is faster than splits, which are not for it.
        let by_wgmma = work_rows > 16 && (reached == 1 || 2 * blocks >= multiprocessors);
        if by_wgmma
            && self.attends_by_wgmma(&layout)
            && let Some(shape) = self.wgmma_attention(&layout)
        {
            return self.prompt_by_wgmma(step, &shape, &prompt);
        }
        let idle = blocks < 2 * multiprocessors;
        let is_split = reached > 1 && idle && partial_bytes <= MOST_PARTIAL_BYTES;
        // Splits change the time and no bit: without memory for them, blocks read all positions one after the other.
        let partials = match is_split.then(|| self.buffer(partial_bytes, "partial attention")) {
            None | Some(Err(KernelError::OutOfMemory { .. })) => None,
            Some(partials) => Some(partials?),
        };
        let splits = if partials.is_some() { reached } else { 1 };
        let partials_at = partials.as_ref().map_or(0, |p| p.address());
        self.by_mma_sync(step, &shape, &prompt, (partials_at, splits))?;
        if splits > 1 {
            self.merge(step, &shape.variant, partials_at, splits)?;
        }
        Ok(())
    }

    /// Attends to all positions of a prompt without splits, by wgmma with that kernel's shape and else by `mma.sync`.
    pub(super) fn attend_whole(
        &self,
        step: &Step<'_>,
        by_wgmma: Option<&AttentionShape>,
    ) -> Result<(), KernelError> {
        let Some(dims) = flash_dims(&step.kv.layout) else {
            return self.any(step);
        };
        let terms = self.attention_terms();
        let work_rows = AttentionShape::prefill_rows(dims, terms);
        let prompt = self.prompt(step, work_rows as usize)?;
        match by_wgmma {
            Some(shape) => self.prompt_by_wgmma(step, shape, &prompt),
            None => {
                let shape = self.attention_shape(dims, work_rows, terms);
                self.by_mma_sync(step, &shape, &prompt, (0, 1))
            }
        }
    }

    fn prompt(&self, step: &Step<'_>, work_rows: usize) -> Result<Prompt, KernelError> {
        let group = step.spec.heads / step.kv.layout.kv_heads;
        let tokens = (work_rows / group).max(1);
        Ok(Prompt {
            tiles: self.tiles(step.spans, tokens)?,
            row_blocks: (tokens * group).div_ceil(work_rows),
        })
    }

    /// Launches `attention`, with the address of the partial results and the number of splits.
    fn by_mma_sync(
        &self,
        step: &Step<'_>,
        shape: &AttentionShape,
        prompt: &Prompt,
        (partials, splits): (u64, usize),
    ) -> Result<(), KernelError> {
        let layout = step.kv.layout;
        let args = Args::new()
            .with(step.out.output())
            .with(partials)
            .with(self.values(step.q)?)
            .with(step.kv.layer(step.layer))
            .with(prompt.tiles.tiles)
            .with(prompt.tiles.blocks)
            .with(step.spec.heads as i32)
            .with(layout.kv_heads as i32)
            .with(layout.block_tokens as i32)
            .with(layout.token_layer_bytes() as i32)
            .with(step.spec.scale)
            .with(splits as i32);
        let kernel = Kernel::new(&shape.variant, "attention").threads(shape.threads);
        let blocks = layout.kv_heads * prompt.row_blocks;
        self.launch(kernel, [prompt.tiles.count, blocks, splits], args)
    }

    /// Merges the splits that each row reaches.
    fn merge(
        &self,
        step: &Step<'_>,
        variant: &Variant,
        partials: u64,
        splits: usize,
    ) -> Result<(), KernelError> {
        // Each run of covered rows is one launch; rows that belong to no sequence stay zero.
        for run in step
            .spans
            .chunk_by(|a, b| a.first_row + a.rows == b.first_row)
        {
            let positions: Vec<i32> = run
                .iter()
                .flat_map(|span| span.start..span.start + span.rows)
                .map(|position| position as i32)
                .collect();
            let first_row = run.first().map_or(0, |span| span.first_row);
            let width = step.kv.layout.v_dim;
            let heads = step.spec.heads;
            let out = step.out.output() + (first_row * heads * width * 4) as u64;
            let from = partials + (first_row * heads * splits * (2 + width) * 4) as u64;
            let args = Args::new()
                .with(out)
                .with(from)
                .with(self.host(&positions)?)
                .with(positions.len() as i32)
                .with(heads as i32)
                .with(splits as i32);
            let kernel = Kernel::new(variant, "attention_merge").threads(128);
            self.launch(kernel, [positions.len(), heads, 1], args)?;
        }
        Ok(())
    }

    fn any(&self, step: &Step<'_>) -> Result<(), KernelError> {
        let layout = step.kv.layout;
        checks::ensure(
            layout.k_dim <= 1024 && layout.v_dim <= 1024,
            "attention",
            || format!("heads of up to 1024 elements, and {}", layout.fingerprint()),
        )?;
        let tiles = self.tiles(step.spans, 1)?;
        let args = Args::new()
            .with(step.out.output())
            .with(self.values(step.q)?)
            .with(step.kv.layer(step.layer))
            .with(tiles.tiles)
            .with(tiles.blocks)
            .with(step.spec.heads as i32)
            .with(layout.kv_heads as i32)
            .with(layout.k_dim as i32)
            .with(layout.v_dim as i32)
            .with(i32::from(layout.value_in_key))
            .with(i32::from(layout.dtype == KvDType::F32))
            .with(layout.block_tokens as i32)
            .with(layout.token_layer_bytes() as i32)
            .with(step.spec.scale);
        let variant = Variant::plain("attention_any");
        let kernel = Kernel::new(&variant, "attention_any");
        self.launch(kernel, [tiles.count, step.spec.heads, 1], args)
    }

    /// Cuts spans into tiles of at most `tokens` tokens; the last rows of a sequence see the most keys and come first.
    fn tiles(&self, spans: &[Span], tokens: usize) -> Result<Tiles, KernelError> {
        let mut blocks: Vec<u32> = Vec::new();
        let mut tiles = Vec::new();
        for span in spans {
            let table = blocks.len() as i32;
            blocks.extend(span.blocks.iter().map(|block| block.0));
            for first in (0..span.rows).step_by(tokens) {
                tiles.push(AttentionTileArg {
                    first_row: (span.first_row + first) as i32,
                    tokens: tokens.min(span.rows - first) as i32,
                    start: (span.start + first) as i32,
                    table,
                });
            }
        }
        tiles.reverse();
        Ok(Tiles {
            tiles: self.host(&tiles)?,
            count: tiles.len(),
            blocks: self.host(&blocks)?,
        })
    }
}

/// Operands of one call of [`AttentionOps::attention`].
pub(super) struct Step<'a> {
    pub(super) q: &'a CudaTensor,
    pub(super) kv: &'a CudaKv,
    pub(super) layer: usize,
    pub(super) spans: &'a [Span],
    pub(super) spec: AttentionSpec,
    pub(super) out: &'a CudaTensor,
}

/// `(K_DIM, V_DIM, VALUE_IN_KEY)` if the tensor-core kernel supports the layout. This depends on the layout alone, so
/// that all rows of a cache take the same path.
fn flash_dims(layout: &KvLayout) -> Option<(i64, i64, bool)> {
    let fits = layout.dtype == KvDType::Bf16
        && layout.k_dim.is_multiple_of(16)
        && layout.v_dim.is_multiple_of(16)
        && AttentionShape::fits(layout.k_dim, layout.v_dim, layout.value_in_key);
    fits.then_some((
        layout.k_dim as i64,
        layout.v_dim as i64,
        layout.value_in_key,
    ))
}
