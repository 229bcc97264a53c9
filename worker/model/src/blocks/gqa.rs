//! Grouped-query attention (arXiv:2305.13245); multi-head attention is the special case of one query head per group.

use hearth_formats::{AttentionConfig, ModelConfig};
use hearth_kernels::{AttentionSpec, Backend, Heads, KvDType, KvLayout, RopeLayout, RopeTable};

use super::rope::rope_table;
use super::{Pass, attend, layer_name, project};
use crate::{ModelError, ModuleWeights, TensorSpec};

/// Intermediates, by name: `q` `[rows, heads * dim]`, `k` and `v` `[rows, kv_heads * dim]` as projected,
/// `q_norm` and `k_norm` (if the architecture has them), `q_rope` and `k_rope` after rotation,
/// `attn_heads` `[rows, heads * dim]`, `attn_out` `[rows, hidden]`.
#[derive(Clone, Debug)]
pub(crate) struct Gqa {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
    eps: f32,
    rope: RopeTable,
}

impl Gqa {
    /// Creates the block that a configuration describes; `None` if it describes latent attention.
    pub(crate) fn new(config: &ModelConfig) -> Option<Self> {
        let AttentionConfig::Gqa {
            heads,
            kv_heads,
            head_dim,
            qkv_bias,
            o_bias,
            qk_norm,
        } = config.attention
        else {
            return None;
        };
        Some(Self {
            hidden: config.hidden_size,
            heads,
            kv_heads,
            head_dim,
            qkv_bias,
            o_bias,
            qk_norm,
            eps: config.rms_norm_eps,
            rope: rope_table(&config.rope, head_dim, RopeLayout::Half),
        })
    }

    pub(crate) fn tensors(&self, layer: u32) -> Vec<TensorSpec> {
        let name = |part: &str| layer_name(layer, &format!("self_attn.{part}"));
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = vec![
            TensorSpec::matrix("q", name("q_proj.weight"), q, self.hidden),
            TensorSpec::matrix("k", name("k_proj.weight"), kv, self.hidden),
            TensorSpec::matrix("v", name("v_proj.weight"), kv, self.hidden),
            TensorSpec::matrix("o", name("o_proj.weight"), self.hidden, q),
        ];
        if self.qkv_bias {
            tensors.push(TensorSpec::vector("q_bias", name("q_proj.bias"), q));
            tensors.push(TensorSpec::vector("k_bias", name("k_proj.bias"), kv));
            tensors.push(TensorSpec::vector("v_bias", name("v_proj.bias"), kv));
        }
        if self.o_bias {
            tensors.push(TensorSpec::vector(
                "o_bias",
                name("o_proj.bias"),
                self.hidden,
            ));
        }
        if self.qk_norm {
            let dim = self.head_dim;
            tensors.push(TensorSpec::vector("q_norm", name("q_norm.weight"), dim));
            tensors.push(TensorSpec::vector("k_norm", name("k_norm.weight"), dim));
        }
        tensors
    }

    pub(crate) fn kv_layout(&self, layers: usize, block_tokens: usize, dtype: KvDType) -> KvLayout {
        KvLayout {
            layers,
            kv_heads: self.kv_heads,
            k_dim: self.head_dim,
            v_dim: self.head_dim,
            value_in_key: false,
            block_tokens,
            dtype,
        }
    }

    /// Columns of [`Gqa::queries`].
    pub(crate) fn query_cols(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Stores the keys and values of the rows `x` `[rows, hidden]`, normalised, and returns their queries
    /// `[rows, heads * dim]`, rotated.
    pub(crate) fn queries<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        // q [rows, heads * dim]; k, v [rows, kv_heads * dim]
        let names = [("q", "q_bias"), ("k", "k_bias"), ("v", "v_bias")];
        let [q, k, v] = project(pass, weights, x, names)?;
        pass.check_cancelled()?;
        pass.show("q", &q);
        pass.show("k", &k);
        pass.show("v", &v);
        if pass.observer.sees_tensors() {
            let q = self.rotate(pass, weights, q, ["q_norm", "q_rope"])?;
            let k = self.rotate(pass, weights, k, ["k_norm", "k_rope"])?;
            let spans = &pass.sequences.spans;
            pass.backend
                .kv_append(kv, pass.cache_layer, &k, Some(&v), spans)?;
            return Ok(q);
        }
        let norms = match self.qk_norm {
            true => Some((weights.vector("q_norm")?, weights.vector("k_norm")?)),
            false => None,
        };
        let heads = Heads {
            q,
            k,
            v,
            norms,
            eps: self.eps,
            head_dim: self.head_dim,
            positions: &pass.sequences.positions,
            rope: &self.rope,
        };
        let spans = &pass.sequences.spans;
        Ok(pass
            .backend
            .cache_heads(kv, pass.cache_layer, spans, heads)?)
    }

    /// Attention of queries `[rows, heads * dim]` over what is cached → `[rows, hidden]`.
    pub(crate) fn attended<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &B::Kv,
        weights: &ModuleWeights<B>,
        q: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let spec = AttentionSpec {
            heads: self.heads,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        };
        // heads [rows, heads * dim]
        let cached = (kv, pass.cache_layer, &pass.sequences.spans[..]);
        let heads = attend(pass, cached, q, spec)?;
        pass.show("attn_heads", &heads);
        pass.check_cancelled()?;
        // out [rows, hidden]
        let out = pass.backend.linear(
            &heads,
            weights.matrix("o")?,
            weights.optional_vector("o_bias"),
        )?;
        pass.show("attn_out", &out);
        Ok(out)
    }

    /// Queries or keys: normalised per head if the architecture does so (Qwen3), and rotated; `names` are those of the
    /// norm, with its intermediate, and of the result.
    fn rotate<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        mut x: B::Tensor,
        [norm, rotated]: [&'static str; 2],
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        if self.qk_norm {
            x = backend.rms_norm(&x, weights.vector(norm)?, self.eps)?;
            pass.show(norm, &x);
        }
        let heads = backend.shape(&x).1 / self.head_dim;
        backend.rope(&mut x, (heads, 0), &pass.sequences.positions, &self.rope)?;
        pass.show(rotated, &x);
        Ok(x)
    }
}
