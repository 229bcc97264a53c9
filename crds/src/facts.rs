//! Model facts that a plan is based on. The worker reads them from config.json and the weight headers; the planner
//! computes with them.

use serde::{Deserialize, Serialize};

use crate::plan::PlanMlaForm;

/// Bytes of the weights as stored, summed over all layers, by class of module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModuleBytes {
    /// The embedding table; 0 when it is tied to the head.
    pub embedding: u64,
    /// Attention projections with their norms.
    pub attention: u64,
    /// Feed-forward layers without experts.
    pub dense_ffn: u64,
    /// Experts that every token uses.
    pub shared_expert: u64,
    /// Routers and their correction biases.
    pub router: u64,
    /// All routed experts.
    pub routed_experts: u64,
    /// The output projection and the last norm.
    pub head: u64,
}

impl ModuleBytes {
    /// Bytes of all weights.
    pub fn total(&self) -> u64 {
        [
            self.embedding,
            self.attention,
            self.dense_ffn,
            self.shared_expert,
            self.router,
            self.routed_experts,
            self.head,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// KV cache entry of one token in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum KvShape {
    /// Keys and values of each KV head (MHA, GQA, MQA).
    #[serde(rename_all = "camelCase")]
    Heads {
        /// KV heads.
        kv_heads: u32,
        /// Elements of a key.
        key_dim: u32,
        /// Elements of a value.
        value_dim: u32,
    },
    /// The latent and the rotary key of multi-head latent attention, stored as keys.
    #[serde(rename_all = "camelCase")]
    Latent {
        /// `kv_lora_rank`.
        rank: u32,
        /// `qk_rope_head_dim`.
        rope_dim: u32,
        /// `qk_nope_head_dim`: elements of an expanded key without the rotary part; 0 in facts of earlier versions.
        #[serde(default)]
        nope_dim: u32,
        /// `v_head_dim`: elements of an expanded value; 0 in facts of earlier versions.
        #[serde(default)]
        value_dim: u32,
    },
}

/// Everything that placement and prediction need to know about a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelFacts {
    /// `model_type` of config.json, such as `deepseek_v3`.
    pub architecture: String,
    /// Storage format of most of the weights, such as `FP8` or `BF16`.
    pub dtype: String,
    /// Total number of parameters.
    pub parameter_count: u64,
    /// Parameters used for one token: of the routed experts `experts_per_token` of `experts`, and none of the
    /// embedding.
    pub active_parameter_count: u64,
    /// Layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Rows of the output projection.
    pub vocab: u32,
    /// Largest number of positions that the model was made for (after RoPE scaling).
    pub max_context: u32,
    /// Routed experts of one layer; 0 for a dense model.
    pub experts: u32,
    /// Routed experts that one token uses per layer.
    pub experts_per_token: u32,
    /// Layers with routed experts; 0 in facts of earlier versions.
    #[serde(default)]
    pub expert_layers: u32,
    /// Inner width of one routed expert; 0 in facts of earlier versions.
    #[serde(default)]
    pub expert_hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// KV cache entry of one token in one layer.
    pub kv: KvShape,
    /// Weights by class.
    pub bytes: ModuleBytes,
    /// Bytes of the largest layer: with `MmapPrefetch` two of them must be in memory at once.
    pub largest_layer_bytes: u64,
    /// Bytes of the largest attention, dense or shared feed-forward block of one layer, which a slot for dense modules
    /// holds; 0 in facts of earlier versions.
    #[serde(default)]
    pub largest_dense_module_bytes: u64,
    /// Bytes of the largest routed expert, which a slot of the experts' ring holds; 0 for a dense model and in facts of
    /// earlier versions.
    #[serde(default)]
    pub largest_expert_bytes: u64,
    /// What each layer has. Absent where that follows from the sums: all layers with routed experts are alike and the last
    /// ones, and all others are alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_kinds: Option<LayerKinds>,
}

/// Layers of unlike bytes, in any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerKinds {
    /// Bytes of one layer of each kind, of [`LayerKinds::MAX_KINDS`] kinds at most.
    pub bytes: Vec<ModuleBytes>,
    /// The kind of each layer, a digit for each: `0101` for two kinds in turn.
    pub order: String,
}

impl LayerKinds {
    /// Most kinds: a node's agent reports facts in 4 KiB.
    pub const MAX_KINDS: usize = 8;
    /// Most layers whose order is told, for the same reason; no ring has more.
    pub const MAX_LAYERS: usize = 512;

    /// Kinds of layers, by their bytes; `None` where these are too many kinds or layers.
    fn of(layers: &[ModuleBytes]) -> Option<Self> {
        let mut kinds = Self {
            bytes: Vec::new(),
            order: String::new(),
        };
        if layers.len() > Self::MAX_LAYERS {
            return None;
        }
        for layer in layers {
            let kind = kinds.bytes.iter().position(|bytes| bytes == layer);
            let kind = kind.unwrap_or(kinds.bytes.len());
            if kind == Self::MAX_KINDS {
                return None;
            }
            if kind == kinds.bytes.len() {
                kinds.bytes.push(*layer);
            }
            kinds.order.push(char::from(b'0' + kind as u8));
        }
        Some(kinds)
    }

    fn layer(&self, layer: u32) -> Option<ModuleBytes> {
        let digit = self.order.as_bytes().get(layer as usize)?;
        let kind = digit.checked_sub(b'0')?;
        self.bytes.get(usize::from(kind)).copied()
    }
}

impl ModelFacts {
    /// The same facts with what each layer has, where that does not follow from the sums. Of more kinds than
    /// [`LayerKinds::MAX_KINDS`] only the order of layers with and without routed experts is told, with their average bytes.
    pub fn with_layers(mut self, layers: &[ModuleBytes]) -> Self {
        self.layer_kinds = None;
        let averages = || -> Vec<ModuleBytes> {
            let of = |bytes: &ModuleBytes| self.average_layer(bytes.routed_experts > 0);
            layers.iter().map(of).collect()
        };
        let kinds = LayerKinds::of(layers).or_else(|| LayerKinds::of(&averages()));
        let is_told = |kinds: &LayerKinds| {
            (0..self.layers).any(|layer| kinds.layer(layer) != Some(self.layer_bytes(layer)))
        };
        self.layer_kinds = kinds.filter(is_told);
        self
    }

    /// Whether they are of the same model: facts of versions before 0.1.0 do not tell what each layer has.
    pub fn are_of_the_model_of(&self, other: &Self) -> bool {
        let without = |facts: &Self| Self {
            layer_kinds: None,
            ..facts.clone()
        };
        match self.layer_kinds.is_some() && other.layer_kinds.is_some() {
            true => self == other,
            false => without(self) == without(other),
        }
    }

    /// Bytes of a layer.
    pub fn layer_bytes(&self, layer: u32) -> ModuleBytes {
        let kinds = self.layer_kinds.as_ref();
        kinds
            .and_then(|kinds| kinds.layer(layer))
            .unwrap_or_else(|| {
                let without_experts = self.layers.saturating_sub(self.routed_layers());
                self.average_layer(layer >= without_experts)
            })
    }

    /// Average bytes of a layer with or without routed experts.
    fn average_layer(&self, has_experts: bool) -> ModuleBytes {
        let expert_layers = self.routed_layers().min(self.layers);
        let each = |bytes: u64, layers: u32| bytes.div_ceil(u64::from(layers.max(1)));
        let bytes = &self.bytes;
        let attention = ModuleBytes {
            attention: each(bytes.attention, self.layers),
            ..ModuleBytes::default()
        };
        match has_experts {
            false => ModuleBytes {
                dense_ffn: each(bytes.dense_ffn, self.layers - expert_layers),
                ..attention
            },
            true => ModuleBytes {
                shared_expert: each(bytes.shared_expert, expert_layers),
                router: each(bytes.router, expert_layers),
                routed_experts: each(bytes.routed_experts, expert_layers),
                ..attention
            },
        }
    }

    /// Bytes that one token adds to the KV cache over all layers, for keys and values of the given element sizes.
    pub fn kv_bytes_per_token(&self, key_bytes: u64, value_bytes: u64) -> u64 {
        let layer = match self.kv {
            KvShape::Heads {
                kv_heads,
                key_dim,
                value_dim,
            } => {
                u64::from(kv_heads)
                    * (u64::from(key_dim) * key_bytes + u64::from(value_dim) * value_bytes)
            }
            KvShape::Latent { rank, rope_dim, .. } => {
                (u64::from(rank) + u64::from(rope_dim)) * key_bytes
            }
        };
        layer.saturating_mul(u64::from(self.layers))
    }

    /// Floating-point operations of attention for one token per position that it attends to, over all layers, in a form of
    /// latent attention. A multiply-add counts as two.
    pub fn attention_flops_per_position(&self, form: PlanMlaForm) -> f64 {
        let per_head = match (self.kv, form) {
            (
                KvShape::Heads {
                    key_dim, value_dim, ..
                },
                _,
            ) => f64::from(key_dim) + f64::from(value_dim),
            (KvShape::Latent { rank, rope_dim, .. }, PlanMlaForm::Absorbed) => {
                2.0 * f64::from(rank) + f64::from(rope_dim)
            }
            (
                KvShape::Latent {
                    rope_dim,
                    nope_dim,
                    value_dim,
                    ..
                },
                PlanMlaForm::Expanded,
            ) => f64::from(nope_dim) + f64::from(rope_dim) + f64::from(value_dim),
        };
        2.0 * f64::from(self.heads) * per_head * f64::from(self.layers)
    }

    /// Floating-point operations that expand one cached position for all heads of all layers. For a token of the pass itself,
    /// the absorbed form spends as many on its query and its output.
    pub fn expansion_flops_per_position(&self) -> f64 {
        match self.kv {
            KvShape::Heads { .. } => 0.0,
            KvShape::Latent {
                rank,
                nope_dim,
                value_dim,
                ..
            } => {
                let head = f64::from(nope_dim) + f64::from(value_dim);
                2.0 * f64::from(self.heads) * head * f64::from(rank) * f64::from(self.layers)
            }
        }
    }

    /// Expected number of distinct routed experts of one layer that `tokens` tokens use, if each chooses uniformly and
    /// independently: `E · (1 − (1 − k/E)^tokens)`.
    pub fn expected_distinct_experts(&self, tokens: u32) -> f64 {
        if self.experts == 0 {
            return 0.0;
        }
        let experts = f64::from(self.experts);
        let missed = (1.0 - f64::from(self.experts_per_token.min(self.experts)) / experts)
            .powf(f64::from(tokens));
        experts * (1.0 - missed)
    }

    /// Bytes of weights that one step over `tokens` tokens reads: everything except the embedding, and only those
    /// routed experts that some token uses.
    pub fn step_bytes(&self, tokens: u32) -> f64 {
        self.always_bytes() as f64 + self.expert_step_bytes(tokens)
    }

    /// Part of [`Self::step_bytes`] that must be read from disk when the system keeps `kept_bytes` of the weights in
    /// memory. It keeps what was read last: with routed experts, first the weights that every step reads, then a
    /// uniform share of the experts. In a dense model no part of the weights is favoured. The same holds for a window
    /// over mapped weights and what must be mapped.
    pub fn absent_step_bytes(&self, tokens: u32, kept_bytes: u64) -> f64 {
        let share = |kept: u64, of: u64| kept.min(of) as f64 / of.max(1) as f64;
        if self.experts == 0 {
            return self.step_bytes(tokens) * (1.0 - share(kept_bytes, self.bytes.total()));
        }
        let always = self.always_bytes();
        let kept_experts = kept_bytes.saturating_sub(always);
        let absent = 1.0 - share(kept_experts, self.bytes.routed_experts);
        always.saturating_sub(kept_bytes) as f64 + self.expert_step_bytes(tokens) * absent
    }

    /// Part of [`Self::step_bytes`] that must be read from disk when a window of `mapped_bytes` is mapped and the
    /// system keeps `kept_bytes` in memory, including the window.
    ///
    /// The layers of a dense model are read in a cycle: some stay in the window for good, the others pass through its last
    /// two layers' worth. Of these, the page cache evicts what was read longest ago, which is what is read next. The kernel
    /// keeps some of it only if it sees pages return soon after their eviction: while about three quarters of the cycle fit,
    /// as measured on Linux 6.18 (docs/benchmarks.md, "Prefetched weights").
    pub fn disk_step_bytes(&self, tokens: u32, mapped_bytes: u64, kept_bytes: u64) -> f64 {
        let stays = mapped_bytes.saturating_sub(2 * self.largest_layer_bytes);
        let circle = (self.step_bytes(tokens) - stays as f64).max(0.0);
        let beside = kept_bytes.saturating_sub(stays) as f64;
        if self.experts == 0 && beside < circle * 0.75 {
            return circle;
        }
        self.absent_step_bytes(tokens, kept_bytes)
    }

    /// Layers with routed experts: all of them if the facts do not say.
    pub fn routed_layers(&self) -> u32 {
        match self.expert_layers {
            _ if self.experts == 0 => 0,
            0 => self.layers,
            layers => layers,
        }
    }

    /// Bytes of one routed expert as stored; 0 for a dense model.
    pub fn expert_bytes(&self) -> u64 {
        let experts = u64::from(self.experts) * u64::from(self.routed_layers());
        self.bytes.routed_experts.checked_div(experts).unwrap_or(0)
    }

    /// Floating-point operations of weights of `bytes`, as stored, for one token.
    pub fn flops_of(&self, bytes: f64) -> f64 {
        let share = bytes / self.bytes.total().max(1) as f64;
        2.0 * share * self.parameter_count as f64
    }

    /// Floating-point operations of the output projection for one token.
    pub fn head_flops(&self) -> f64 {
        2.0 * f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// Floating-point operations of one routed expert for one token; 0 for a dense model.
    pub fn expert_flops(&self) -> f64 {
        match self.expert_hidden {
            0 => self.flops_of(self.expert_bytes() as f64),
            width => 2.0 * 3.0 * f64::from(self.hidden) * f64::from(width),
        }
    }

    /// Floating-point operations of all products but those of routed experts and of attention's scores, for one token.
    pub fn dense_flops(&self) -> f64 {
        let routed = f64::from(self.experts_per_token) * f64::from(self.routed_layers());
        let all = 2.0 * self.active_parameter_count as f64;
        (all - self.expert_flops() * routed).max(0.0)
    }

    /// Bytes of all weights but the routed experts.
    pub fn dense_bytes(&self) -> u64 {
        self.bytes.total().saturating_sub(self.bytes.routed_experts)
    }

    /// Bytes of attention, dense and shared feed-forward blocks: the dense modules that may stream with the experts.
    pub fn streamed_dense_bytes(&self) -> u64 {
        self.bytes
            .attention
            .saturating_add(self.bytes.dense_ffn)
            .saturating_add(self.bytes.shared_expert)
    }

    /// Bytes that every step reads, regardless of its tokens.
    fn always_bytes(&self) -> u64 {
        self.bytes
            .attention
            .saturating_add(self.bytes.dense_ffn)
            .saturating_add(self.bytes.shared_expert)
            .saturating_add(self.bytes.router)
            .saturating_add(self.bytes.head)
    }

    /// Bytes of routed experts that one step over `tokens` tokens reads.
    fn expert_step_bytes(&self, tokens: u32) -> f64 {
        let share = match self.experts {
            0 => 1.0,
            experts => self.expected_distinct_experts(tokens) / f64::from(experts),
        };
        self.bytes.routed_experts as f64 * share
    }

    /// Smallest part of the weights that must be in memory at once with `MmapPrefetch`: the current layer, the next
    /// one, and the head.
    pub fn least_resident_bytes(&self) -> u64 {
        self.largest_layer_bytes
            .saturating_mul(2)
            .saturating_add(self.bytes.head)
            .min(self.bytes.total())
    }
}
