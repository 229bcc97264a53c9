//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437, equations 1 to 11).
//!
//! The cache holds one latent per token: the normalised `c_KV` and the rotated shared key. Queries are absorbed
//! (`q · W_UK`) and outputs expanded (`W_UV · o`) with `kv_b_proj` as it is stored. A model may expand keys and values
//! instead (`expanded`), which is algebraically equal but differs in bits: one form holds for all that a model computes.

mod expanded;

pub use expanded::EXPANSION_TILE_ROWS;
use hearth_formats::{AttentionConfig, ModelConfig};
use hearth_kernels::{
    AttentionSpec, Backend, KvDType, KvLayout, Latents, MlaHeads, RopeLayout, RopeTable,
};

use super::rope::{rope_table, yarn_softmax_factor};
use super::{Cached, Pass, attend, layer_name, project};
use crate::{ModelError, ModuleWeights, TensorSpec};

/// Epsilon of the latents' norms: DeepSeek-V3's code leaves it at its default, regardless of `rms_norm_eps`.
const LATENT_NORM_EPS: f32 = 1e-6;

/// Intermediates, by name: `q_a_norm` `[rows, q_rank]`, `q` `[rows, heads * (nope + rope)]`, `kv_a` `[rows, rank + rope]`,
/// `kv_latent` `[rows, rank]`, `q_latent` `[rows, heads * rank]`, `attn_latent` `[rows, heads * rank]`,
/// `attn_heads` `[rows, heads * v]`, `attn_out` `[rows, hidden]`. Expanded: `kv_a`, `q_a_norm`, `attn_heads`, `attn_out`.
#[derive(Clone, Debug)]
pub(crate) struct Mla {
    hidden: usize,
    q_rank: Option<usize>,
    rope_dim: usize,
    heads: MlaHeads,
    scale: f32,
    rope: RopeTable,
}

impl Mla {
    /// Creates the block that a configuration describes; `None` if it describes grouped-query attention.
    pub(crate) fn new(config: &ModelConfig) -> Option<Self> {
        let AttentionConfig::Mla {
            heads,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            interleaved_rope,
        } = config.attention
        else {
            return None;
        };
        let layout = if interleaved_rope {
            RopeLayout::Interleaved
        } else {
            RopeLayout::Half
        };
        let query_dim = (qk_nope_head_dim + qk_rope_head_dim) as f32;
        Some(Self {
            hidden: config.hidden_size,
            q_rank: q_lora_rank,
            rope_dim: qk_rope_head_dim,
            heads: MlaHeads {
                heads,
                nope: qk_nope_head_dim,
                v: v_head_dim,
                rank: kv_lora_rank,
            },
            scale: yarn_softmax_factor(&config.rope) / query_dim.sqrt(),
            rope: rope_table(&config.rope, qk_rope_head_dim, layout),
        })
    }

    pub(crate) fn tensors(&self, layer: u32) -> Vec<TensorSpec> {
        let name = |part: &str| layer_name(layer, &format!("self_attn.{part}.weight"));
        let MlaHeads {
            heads,
            nope,
            v,
            rank,
        } = self.heads;
        let q = heads * (nope + self.rope_dim);
        let mut tensors = match self.q_rank {
            None => vec![TensorSpec::matrix("q", name("q_proj"), q, self.hidden)],
            Some(q_rank) => vec![
                TensorSpec::matrix("q_a", name("q_a_proj"), q_rank, self.hidden),
                TensorSpec::vector("q_a_norm", name("q_a_layernorm"), q_rank),
                TensorSpec::matrix("q_b", name("q_b_proj"), q, q_rank),
            ],
        };
        let latent = rank + self.rope_dim;
        tensors.extend([
            TensorSpec::matrix("kv_a", name("kv_a_proj_with_mqa"), latent, self.hidden),
            TensorSpec::vector("kv_a_norm", name("kv_a_layernorm"), rank),
            TensorSpec::matrix("kv_b", name("kv_b_proj"), heads * (nope + v), rank),
            TensorSpec::matrix("o", name("o_proj"), self.hidden, heads * v),
        ]);
        tensors
    }

    pub(crate) fn kv_layout(&self, layers: usize, block_tokens: usize, dtype: KvDType) -> KvLayout {
        KvLayout {
            layers,
            kv_heads: 1,
            k_dim: self.heads.rank + self.rope_dim,
            v_dim: self.heads.rank,
            value_in_key: true,
            block_tokens,
            dtype,
        }
    }

    /// Columns of [`Mla::absorbed`].
    pub(crate) fn query_cols(&self) -> usize {
        self.heads.heads * (self.heads.rank + self.rope_dim)
    }

    /// Stores the keys of the rows `x` `[rows, hidden]`, normalised, and returns their absorbed queries,
    /// `[rows, heads * (rank + rope)]`. `cached` is called between.
    pub(crate) fn absorbed<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
        cached: Cached<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        match pass.observer.sees_tensors() {
            true => self.inputs_shown(pass, kv, weights, x, cached),
            false => self.inputs(pass, kv, weights, x, cached),
        }
    }

    /// Attention of absorbed queries `[rows, heads * (rank + rope)]` over what is cached → `[rows, hidden]`.
    pub(crate) fn attended<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &B::Kv,
        weights: &ModuleWeights<B>,
        query: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        pass.check_cancelled()?;
        let spec = AttentionSpec {
            heads: self.heads.heads,
            scale: self.scale,
        };
        let backend = pass.backend;
        // latent [rows, heads * rank]
        let cached = (kv, pass.cache_layer, &pass.sequences.spans[..]);
        let latent = attend(pass, cached, query, spec)?;
        pass.show("attn_latent", &latent);
        pass.check_cancelled()?;
        // heads [rows, heads * v]
        let heads = backend.mla_expand(&latent, weights.matrix("kv_b")?, self.heads)?;
        pass.show("attn_heads", &heads);
        // out [rows, hidden]
        let out = backend.linear(&heads, weights.matrix("o")?, None)?;
        pass.show("attn_out", &out);
        Ok(out)
    }

    /// Stores the keys of the rows, and returns their absorbed queries, `[rows, heads * (rank + rope)]`.
    fn inputs<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
        cached: Cached<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        // kv_a [rows, rank + rope]; q_a [rows, q_rank]; q [rows, heads * (nope + rope)]
        let (kv_a, q_a, q) = match self.q_rank {
            Some(_) => {
                let [kv_a, q_a] = project(pass, weights, x, [("kv_a", ""), ("q_a", "")])?;
                (kv_a, Some((q_a, weights.vector("q_a_norm")?)), None)
            }
            None => {
                let [kv_a, q] = project(pass, weights, x, [("kv_a", ""), ("q", "")])?;
                (kv_a, None, Some(q))
            }
        };
        let backend = pass.backend;
        let positions = &pass.sequences.positions;
        let latents = Latents {
            kv_a,
            kv_norm: weights.vector("kv_a_norm")?,
            q_a,
            rank: self.heads.rank,
            eps: LATENT_NORM_EPS,
            positions,
            rope: &self.rope,
        };
        let spans = &pass.sequences.spans;
        let q_a = backend.cache_latents(kv, pass.cache_layer, spans, latents)?;
        cached(kv)?;
        pass.check_cancelled()?;
        let q = match (q, q_a) {
            (Some(q), _) => q,
            (None, Some(q_a)) => backend.linear(&q_a, weights.matrix("q_b")?, None)?,
            (None, None) => backend.linear(x, weights.matrix("q")?, None)?,
        };
        Ok(backend.latent_queries(
            &q,
            weights.matrix("kv_b")?,
            self.heads,
            positions,
            &self.rope,
        )?)
    }

    /// The same, one operation after the other, so that every intermediate is seen.
    fn inputs_shown<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
        cached: Cached<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        // key [rows, rank + rope]
        let key = self.key(pass, weights, x)?;
        let spans = &pass.sequences.spans;
        pass.backend
            .kv_append(kv, pass.cache_layer, &key, None, spans)?;
        cached(kv)?;
        pass.check_cancelled()?;
        self.query(pass, weights, x)
    }

    /// Cached keys: `[norm(c_KV), rope(k_R)]`, `[rows, rank + rope]` (DeepSeek-V3, equations 1, 3 and 4).
    fn key<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let rank = self.heads.rank;
        // kv_a [rows, rank + rope]
        let kv_a = backend.linear(x, weights.matrix("kv_a")?, None)?;
        pass.show("kv_a", &kv_a);
        // latent [rows, rank]
        let latent = backend.columns(&kv_a, 1, 0, rank)?;
        let latent = backend.rms_norm(&latent, weights.vector("kv_a_norm")?, LATENT_NORM_EPS)?;
        pass.show("kv_latent", &latent);
        // k_rope [rows, rope], shared by all heads
        let mut k_rope = backend.columns(&kv_a, 1, rank, self.rope_dim)?;
        backend.rope(&mut k_rope, (1, 0), &pass.sequences.positions, &self.rope)?;
        Ok(backend.interleave(&latent, &k_rope, 1)?)
    }

    /// Absorbed queries: for each head `[W_UKᵀ q_C, rope(q_R)]`, `[rows, heads * (rank + rope)]` (equations 6 to 9,
    /// with `W_UK` moved from the key to the query, as noted in DeepSeek-V2, section 2.1.2).
    fn query<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let MlaHeads { heads, nope, .. } = self.heads;
        // q [rows, heads * (nope + rope)]
        let q = match self.q_rank {
            None => backend.linear(x, weights.matrix("q")?, None)?,
            Some(_) => {
                // q_a [rows, q_rank]
                let q_a = backend.linear(x, weights.matrix("q_a")?, None)?;
                let q_a = backend.rms_norm(&q_a, weights.vector("q_a_norm")?, LATENT_NORM_EPS)?;
                pass.show("q_a_norm", &q_a);
                backend.linear(&q_a, weights.matrix("q_b")?, None)?
            }
        };
        pass.show("q", &q);
        // q_nope [rows, heads * nope], q_rope [rows, heads * rope]
        let q_nope = backend.columns(&q, heads, 0, nope)?;
        let mut q_rope = backend.columns(&q, heads, nope, self.rope_dim)?;
        backend.rope(
            &mut q_rope,
            (heads, 0),
            &pass.sequences.positions,
            &self.rope,
        )?;
        // q_latent [rows, heads * rank]
        let q_latent = backend.mla_absorb(&q_nope, weights.matrix("kv_b")?, self.heads)?;
        pass.show("q_latent", &q_latent);
        Ok(backend.interleave(&q_latent, &q_rope, heads)?)
    }
}
