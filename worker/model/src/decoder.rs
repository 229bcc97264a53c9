//! Declarative description of a decoder-only model: its blocks, their shapes and the names of their tensors.

use hearth_formats::ModelConfig;
use hearth_kernels::{Backend, KvDType, KvLayout};

use crate::blocks::ffn::SwiGlu;
use crate::blocks::gqa::Gqa;
use crate::blocks::layer_name;
use crate::blocks::mla::Mla;
use crate::blocks::moe::Moe;
use crate::blocks::{Cached, Pass};
use crate::{ModelError, ModuleId, ModuleSpec, ModuleWeights, TensorSpec};

/// A pre-norm decoder: embedding, layers of attention and feed-forward block on a residual stream, final norm, head.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    /// Epsilon of the residual stream's norms.
    pub(crate) eps: f32,
    /// Whether the head shares the embedding's weights.
    pub(crate) tied: bool,
    /// Attention, the same in all layers.
    pub(crate) attention: Attention,
    /// Feed-forward block of each layer.
    pub(crate) feed_forward: Vec<FeedForward>,
}

/// An attention block.
#[derive(Clone, Debug)]
pub(crate) enum Attention {
    Gqa(Gqa),
    Mla(Mla),
}

impl Attention {
    /// `x` `[rows, hidden]`, normalised → `[rows, hidden]`.
    pub(crate) fn forward<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let queries = self.queries(pass, kv, weights, x, &mut |_| Ok(()))?;
        self.attended(pass, kv, weights, &queries)
    }

    /// Columns of [`Attention::queries`].
    pub(crate) fn query_cols(&self) -> usize {
        match self {
            Self::Gqa(gqa) => gqa.query_cols(),
            Self::Mla(mla) => mla.query_cols(),
        }
    }

    /// The first half of [`Attention::forward`]: stores the keys and values of the rows, and returns their queries. `cached`
    /// is called once they are stored, before what is left of the queries.
    pub(crate) fn queries<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
        cached: Cached<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Gqa(gqa) => {
                let queries = gqa.queries(pass, kv, weights, x)?;
                cached(kv)?;
                Ok(queries)
            }
            Self::Mla(mla) => mla.absorbed(pass, kv, weights, x, cached),
        }
    }

    /// The second half: attention of queries over what is cached → `[rows, hidden]`.
    pub(crate) fn attended<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &B::Kv,
        weights: &ModuleWeights<B>,
        queries: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        match self {
            Self::Gqa(gqa) => gqa.attended(pass, kv, weights, queries),
            Self::Mla(mla) => mla.attended(pass, kv, weights, queries),
        }
    }
}

/// A layer's feed-forward block.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward {
    Dense(SwiGlu),
    Moe(Box<Moe>),
}

impl Decoder {
    /// Creates a decoder with the configuration's sizes; `feed_forward` returns each layer's block.
    pub(crate) fn new(
        config: &ModelConfig,
        attention: Attention,
        feed_forward: impl FnMut(usize) -> FeedForward,
    ) -> Self {
        Self {
            vocab: config.vocab_size,
            hidden: config.hidden_size,
            eps: config.rms_norm_eps,
            tied: config.tie_word_embeddings,
            attention,
            feed_forward: (0..config.layers).map(feed_forward).collect(),
        }
    }

    /// All modules in execution order; a layer's experts are in index order.
    pub(crate) fn modules(&self) -> Vec<ModuleSpec> {
        let embedding = "model.embed_tokens.weight";
        let mut modules = vec![ModuleSpec {
            id: ModuleId::Embedding,
            tensors: vec![self.vocabulary("embedding", embedding)],
        }];
        for (layer, feed_forward) in self.feed_forward.iter().enumerate() {
            let layer = layer as u32;
            modules.push(self.attention_module(layer));
            modules.extend(self.feed_forward_modules(layer, feed_forward));
        }
        let head = if self.tied {
            embedding
        } else {
            "lm_head.weight"
        };
        let norm = TensorSpec::vector("norm", "model.norm.weight".into(), self.hidden);
        modules.push(ModuleSpec {
            id: ModuleId::Head,
            tensors: vec![norm, self.vocabulary("head", head)],
        });
        modules
    }

    /// Layout of the KV that one token stores in each layer.
    pub(crate) fn kv_layout(&self, block_tokens: usize, dtype: KvDType) -> KvLayout {
        let layers = self.feed_forward.len();
        match &self.attention {
            Attention::Gqa(gqa) => gqa.kv_layout(layers, block_tokens, dtype),
            Attention::Mla(mla) => mla.kv_layout(layers, block_tokens, dtype),
        }
    }

    fn vocabulary(&self, field: &'static str, name: &str) -> TensorSpec {
        TensorSpec::matrix(field, name.into(), self.vocab, self.hidden)
    }

    fn norm(&self, layer: u32, name: &str) -> TensorSpec {
        TensorSpec::vector("norm", layer_name(layer, name), self.hidden)
    }

    fn attention_module(&self, layer: u32) -> ModuleSpec {
        let mut tensors = vec![self.norm(layer, "input_layernorm.weight")];
        tensors.extend(match &self.attention {
            Attention::Gqa(gqa) => gqa.tensors(layer),
            Attention::Mla(mla) => mla.tensors(layer),
        });
        ModuleSpec {
            id: ModuleId::Attention(layer),
            tensors,
        }
    }

    fn feed_forward_modules(&self, layer: u32, block: &FeedForward) -> Vec<ModuleSpec> {
        let norm = self.norm(layer, "post_attention_layernorm.weight");
        match block {
            FeedForward::Dense(dense) => {
                let mut tensors = vec![norm];
                tensors.extend(dense.tensors(layer, "mlp"));
                vec![ModuleSpec {
                    id: ModuleId::DenseFfn(layer),
                    tensors,
                }]
            }
            FeedForward::Moe(moe) => moe.modules(layer, norm),
        }
    }
}
