//! `config.json`: converts each architecture's own field names into one [`ModelConfig`].
//!
//! Both generations of the format are read: `rope_theta` beside `rope_scaling`, and `rope_parameters`. Sizes are
//! required; flags default to the same values as in transformers. Anything that would change the numbers and is not
//! implemented (sliding windows, partial rotary embedding, other quantisations) is rejected, never ignored.

mod deepseek_v3;
mod fields;
mod llama;
mod quantization;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
mod shared;

use std::fmt;
use std::path::Path;

use serde_json::Value;

pub use quantization::Fp8Config;
pub use rope::{RopeConfig, RopeScaling};

use crate::FormatError;
use crate::error::without_bom;
use crate::file::{MAX_CONFIG_BYTES, read_file};
use fields::Fields;

/// Model families that Hearth runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// `deepseek_v3`, and `kimi_k2`, which is another name for the same architecture.
    DeepseekV3,
    /// `qwen3_moe`.
    Qwen3Moe,
    /// `qwen3`.
    Qwen3,
    /// `qwen2`.
    Qwen2,
    /// `llama`, versions 2 and 3.
    Llama,
}

const MODEL_TYPES: [(&str, Architecture); 6] = [
    ("deepseek_v3", Architecture::DeepseekV3),
    ("kimi_k2", Architecture::DeepseekV3),
    ("qwen3_moe", Architecture::Qwen3Moe),
    ("qwen3", Architecture::Qwen3),
    ("qwen2", Architecture::Qwen2),
    ("llama", Architecture::Llama),
];

impl Architecture {
    /// Returns the architecture of a `model_type`.
    pub fn from_model_type(model_type: &str) -> Option<Self> {
        let known = MODEL_TYPES.iter().find(|(name, _)| *name == model_type);
        known.map(|(_, architecture)| *architecture)
    }

    /// All supported values of `model_type`, for messages.
    pub fn names() -> String {
        MODEL_TYPES.map(|(name, _)| name).join(", ")
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = MODEL_TYPES
            .iter()
            .find(|(_, a)| a == self)
            .map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub architecture: Architecture,
    /// `model_type` as written (`kimi_k2` stays `kimi_k2`).
    pub model_type: String,
    /// Rows of the embedding and of the head; may exceed the tokenizer's vocabulary because of padding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers (without multi-token-prediction layers).
    pub layers: usize,
    /// Width of dense feed-forward blocks; 0 if every layer is a mixture of experts and the file specifies none.
    pub intermediate_size: usize,
    /// Epsilon of all RMS norms.
    pub rms_norm_eps: f32,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Longest context, in tokens.
    pub max_position_embeddings: usize,
    /// Attention parameters.
    pub attention: AttentionConfig,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Mixture-of-experts parameters; `None` for a dense model.
    pub moe: Option<MoeConfig>,
    /// Tokens that end a text; generation_config.json may add more.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// `Some` if weights are FP8 with 128×128 block scales.
    pub fp8: Option<Fp8Config>,
}

/// Attention of one layer; all layers are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionConfig {
    /// Grouped-query attention (multi-head when `kv_heads == heads`).
    Gqa {
        /// Query heads; a multiple of `kv_heads`.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
        /// Elements per head; even.
        head_dim: usize,
        /// Whether the q, k and v projections have a bias.
        qkv_bias: bool,
        /// Whether the output projection has a bias.
        o_bias: bool,
        /// Whether queries and keys are normalised per head.
        qk_norm: bool,
    },
    /// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    Mla {
        /// Number of heads.
        heads: usize,
        /// Rank of the compressed queries; `None` if queries are projected directly.
        q_lora_rank: Option<usize>,
        /// Rank of the compressed keys and values.
        kv_lora_rank: usize,
        /// Elements of the query or key part without position.
        qk_nope_head_dim: usize,
        /// Elements of the query or key part with position; even.
        qk_rope_head_dim: usize,
        /// Elements per value.
        v_head_dim: usize,
        /// Whether element `2i` rotates with `2i + 1` (else `i` with `i + dim / 2`).
        interleaved_rope: bool,
    },
}

/// Function that turns router logits into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// Mixture-of-experts parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Number of routed experts.
    pub experts: usize,
    /// Routed experts per token.
    pub experts_per_token: usize,
    /// Width of one expert; the shared experts are one block of `shared_experts` times this width.
    pub intermediate_size: usize,
    /// Number of shared experts; 0 if there are none.
    pub shared_experts: usize,
    /// Number of leading layers that are dense.
    pub first_dense_layers: usize,
    /// DeepSeek: a layer is sparse if its index is a multiple of this.
    pub moe_layer_freq: usize,
    /// Qwen: a layer is sparse if its index + 1 is a multiple of this.
    pub decoder_sparse_step: usize,
    /// Additional dense layers, by index.
    pub mlp_only_layers: Vec<usize>,
    /// Groups of experts; 1 means no grouping.
    pub groups: usize,
    /// Groups that remain eligible for a token.
    pub top_groups: usize,
    /// Whether the chosen scores are divided by their sum.
    pub normalize: bool,
    /// Factor applied to the weights afterwards.
    pub scaling: f32,
    /// Score function.
    pub score: ScoreFunction,
    /// Whether a bias corrects the choice of experts (not their weights).
    pub correction_bias: bool,
}

impl MoeConfig {
    fn is_sparse(&self, layer: usize) -> bool {
        layer >= self.first_dense_layers
            && layer.is_multiple_of(self.moe_layer_freq)
            && (layer + 1).is_multiple_of(self.decoder_sparse_step)
            && !self.mlp_only_layers.contains(&layer)
    }
}

impl ModelConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// [`FormatError::Io`], [`FormatError::TooLarge`], and the errors of [`ModelConfig::parse`].
    pub fn read(dir: &Path) -> Result<Self, FormatError> {
        let path = dir.join("config.json");
        let remedy = "give the folder of a checkpoint, with its config.json.";
        let text = read_file(&path, MAX_CONFIG_BYTES, remedy)?;
        let text = String::from_utf8(text).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            not_json(format!("is not UTF-8 (at byte {at})"))
        })?;
        Self::parse(&text)
    }

    /// Parses the text of a config.json.
    ///
    /// # Errors
    /// [`FormatError::Malformed`] (not JSON), [`FormatError::UnsupportedArchitecture`],
    /// [`FormatError::Config`] (a field is missing, of the wrong type, out of range, or requests something
    /// unsupported).
    pub fn parse(json: &str) -> Result<Self, FormatError> {
        let value: Value = serde_json::from_slice(without_bom(json.as_bytes()))
            .map_err(|e| not_json(format!("is not valid JSON: {e}")))?;
        let Value::Object(object) = value else {
            return Err(not_json("is not a JSON object".into()));
        };
        let fields = Fields::root(&object);
        let model_type = fields.string("model_type")?;
        let architecture = Architecture::from_model_type(model_type).ok_or_else(|| {
            FormatError::UnsupportedArchitecture {
                found: model_type.into(),
            }
        })?;
        let parts = match architecture {
            Architecture::DeepseekV3 => deepseek_v3::read(&fields)?,
            Architecture::Qwen3Moe => qwen3_moe::read(&fields)?,
            Architecture::Qwen3 => qwen3::read(&fields)?,
            Architecture::Qwen2 => qwen2::read(&fields)?,
            Architecture::Llama => llama::read(&fields)?,
        };
        let config = common(&fields, architecture, parts)?;
        check_sizes(&config)?;
        Ok(config)
    }

    /// Whether a layer's feed-forward block is a mixture of experts.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.is_sparse(layer))
    }
}

/// Fields that each architecture reads under its own names.
struct Parts {
    attention: AttentionConfig,
    moe: Option<MoeConfig>,
}

fn common(
    fields: &Fields<'_>,
    architecture: Architecture,
    Parts { attention, moe }: Parts,
) -> Result<ModelConfig, FormatError> {
    fields.expect_or_absent("hidden_act", &["silu"])?;
    let layers = fields.size("num_hidden_layers", fields::MAX_LAYERS)?;
    let all_sparse = moe
        .as_ref()
        .is_some_and(|moe| (0..layers).all(|l| moe.is_sparse(l)));
    let max_position_embeddings = fields.size("max_position_embeddings", fields::MAX_POSITIONS)?;
    let eps = fields.float_or("rms_norm_eps", 1e-6)?;
    if !(eps > 0.0 && eps < 1.0) {
        return Err(fields.error(
            "rms_norm_eps",
            format!("is {eps}"),
            "it lies between 0 and 1, usually 1e-6.",
        ));
    }
    Ok(ModelConfig {
        architecture,
        model_type: fields.string("model_type")?.into(),
        vocab_size: fields.size("vocab_size", fields::MAX_VOCABULARY)?,
        hidden_size: fields.size("hidden_size", fields::MAX_WIDTH)?,
        layers,
        intermediate_size: match fields.optional_size("intermediate_size", fields::MAX_WIDTH)? {
            Some(size) => size,
            None if all_sparse => 0,
            None => fields.size("intermediate_size", fields::MAX_WIDTH)?,
        },
        rms_norm_eps: eps,
        tie_word_embeddings: fields.bool_or("tie_word_embeddings", false)?,
        max_position_embeddings,
        attention,
        rope: rope::read(fields, max_position_embeddings)?,
        moe,
        eos_token_ids: fields.token_ids("eos_token_id")?,
        bos_token_id: fields.token_ids("bos_token_id")?.first().copied(),
        fp8: quantization::read(fields)?,
    })
}

/// Bounds products of sizes, so that later arithmetic on shapes cannot overflow and plans stay enumerable.
fn check_sizes(config: &ModelConfig) -> Result<(), FormatError> {
    const MAX_MODULES: usize = 1_000_000;
    let too_large = |field: &str, product: usize, limit: usize| {
        Err(FormatError::Config {
            field: field.into(),
            problem: format!("give {product}, more than {limit}"),
            remedy: "no such model is known; check the file.".into(),
        })
    };
    let (query_width, fields) = match config.attention {
        AttentionConfig::Gqa {
            heads, head_dim, ..
        } => (heads * head_dim, "num_attention_heads and head_dim"),
        AttentionConfig::Mla {
            heads,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            ..
        } => (
            heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim),
            "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
        ),
    };
    if query_width > fields::MAX_WIDTH * 16 {
        return too_large(fields, query_width, fields::MAX_WIDTH * 16);
    }
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts);
    if experts * config.layers > MAX_MODULES {
        return too_large(
            "experts and num_hidden_layers",
            experts * config.layers,
            MAX_MODULES,
        );
    }
    Ok(())
}

fn not_json(problem: String) -> FormatError {
    FormatError::malformed("config.json", problem, "download the file again.")
}
