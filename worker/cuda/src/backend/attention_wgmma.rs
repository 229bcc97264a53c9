//! Attention of prompts with Hopper's wgmma.
//!
//! Its bits are those of `mma.sync`, so that a few rows go by one and many by the other. It is used if it is shown to give them on
//! the GPU at hand: one small prompt is attended to both ways when a cache of its dimensions is allocated.

use std::sync::PoisonError;

use hearth_kernels::ops::{KvOps, MemoryOps};
use hearth_kernels::{AttentionSpec, BlockId, KernelError, KvDType, KvLayout, Span};

use super::attention::{Prompt, Step};
use super::{CudaBackend, Kernel};
use crate::compile::AttentionShape;
use crate::queue::Args;

/// Positions of the trial: two splits, and a part of a tile.
const TRIAL_TOKENS: usize = 700;
/// Query heads of the trial's one kv head.
const TRIAL_HEADS: usize = 2;
/// Tokens per block of the trial's cache.
const TRIAL_BLOCK: usize = 16;

/// `(K_DIM, V_DIM)` of a cache, and whether wgmma gives the bits there.
pub(super) type Verdict = ((i64, i64), bool);

impl CudaBackend {
    /// Whether prompts attend by wgmma to a cache of this layout.
    pub fn attends_by_wgmma(&self, layout: &KvLayout) -> bool {
        if self.wgmma_attention(layout).is_none() {
            return false;
        }
        let dims = (layout.k_dim as i64, layout.v_dim as i64);
        let known = self.wgmma_attention.lock();
        let known = known.unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, verdict)) = known.iter().find(|(tried, _)| *tried == dims) {
            return *verdict;
        }
        let gives_the_bits = match self.try_attention(layout) {
            Ok(gives_the_bits) => gives_the_bits,
            // Another time there may be room.
            Err(KernelError::OutOfMemory { .. }) => return false,
            Err(error) => {
                tracing::warn!(%error, "attention by wgmma could not be tried: it is not used");
                false
            }
        };
        if !gives_the_bits {
            tracing::warn!(
                ?dims,
                "attention by wgmma does not give the bits of mma.sync on this GPU: it is not used"
            );
        }
        let known = self.wgmma_attention.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        known.push((dims, gives_the_bits));
        gives_the_bits
    }

    /// The kernel for a layout, as far as is known without a trial.
    pub(super) fn wgmma_attention(&self, layout: &KvLayout) -> Option<AttentionShape> {
        let dims = (layout.k_dim, layout.v_dim, layout.value_in_key);
        let may = self.uses_wgmma() && layout.dtype == KvDType::Bf16;
        let shape = AttentionShape::by_wgmma(dims, self.attention_terms());
        shape.filter(|_| may)
    }

    /// Attends to all positions without splits.
    pub(super) fn prompt_by_wgmma(
        &self,
        step: &Step<'_>,
        shape: &AttentionShape,
        prompt: &Prompt,
    ) -> Result<(), KernelError> {
        let layout = step.kv.layout;
        let args = Args::new()
            .with(step.out.output())
            .with(self.values(step.q)?)
            .with(step.kv.layer(step.layer))
            .with(prompt.tiles.tiles)
            .with(prompt.tiles.blocks)
            .with(step.spec.heads as i32)
            .with(layout.kv_heads as i32)
            .with(layout.block_tokens as i32)
            .with(layout.token_layer_bytes() as i32)
            .with(step.spec.scale);
        let kernel = Kernel::new(&shape.variant, "attention_sm90").threads(shape.threads);
        let grid = [prompt.tiles.count, layout.kv_heads * prompt.row_blocks, 1];
        self.launch(kernel, grid, args)
    }

    /// Attends to a prompt with `mma.sync` and with wgmma; returns whether the bits are the same.
    fn try_attention(&self, layout: &KvLayout) -> Result<bool, KernelError> {
        let Some(shape) = self.wgmma_attention(layout) else {
            return Ok(false);
        };
        let layout = KvLayout {
            layers: 1,
            kv_heads: 1,
            block_tokens: TRIAL_BLOCK,
            ..*layout
        };
        let mut draw = Draw(1);
        let blocks: Vec<BlockId> = (0..TRIAL_TOKENS.div_ceil(TRIAL_BLOCK) as u32)
            .map(BlockId)
            .collect();
        let mut kv = self.kv_without_trial(layout, blocks.len())?;
        let records: Vec<u8> = (0..TRIAL_TOKENS * layout.token_elements())
            .flat_map(|_| draw.bf16().to_le_bytes())
            .collect();
        self.kv_write(&mut kv, 0, &blocks, 0, &records)?;
        let queries: Vec<f32> = (0..TRIAL_TOKENS * TRIAL_HEADS * layout.k_dim)
            .map(|_| draw.unit())
            .collect();
        let q = self.upload(TRIAL_TOKENS, TRIAL_HEADS * layout.k_dim, &queries)?;
        let spans = [Span {
            first_row: 0,
            rows: TRIAL_TOKENS,
            start: 0,
            blocks,
        }];
        let spec = AttentionSpec {
            heads: TRIAL_HEADS,
            // Scores of a few units, whatever the number of columns.
            scale: 8.0 / (layout.k_dim as f32).sqrt(),
        };
        let cols = TRIAL_HEADS * layout.v_dim;
        // Elements that a kernel does not write stay NaN.
        let nan = vec![f32::NAN; TRIAL_TOKENS * cols];
        let bits = |shape: Option<&AttentionShape>| -> Result<Vec<u32>, KernelError> {
            let out = self.upload(TRIAL_TOKENS, cols, &nan)?;
            let step = Step {
                q: &q,
                kv: &kv,
                layer: 0,
                spans: &spans,
                spec,
                out: &out,
            };
            self.attend_whole(&step, shape)?;
            let out = self.download(&out)?;
            Ok(out.into_iter().map(f32::to_bits).collect())
        };
        let want = bits(None)?;
        let is_finite = want.iter().all(|bits| f32::from_bits(*bits).is_finite());
        Ok(is_finite && bits(Some(&shape))? == want)
    }
}

/// Numbers of the trial.
struct Draw(u32);

impl Draw {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 >> 8
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        self.next() as f32 / 8_388_608.0 - 1.0
    }

    /// The upper half of such a number.
    fn bf16(&mut self) -> u16 {
        (self.unit().to_bits() >> 16) as u16
    }
}
