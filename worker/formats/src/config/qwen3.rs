//! `qwen3` (arXiv:2505.09388, section 2): grouped-query attention with a norm on each query and key head.

use super::fields::{Fields, MAX_HEADS};
use super::{AttentionConfig, Parts};
use crate::FormatError;

/// Default in transformers, which is not hidden size over heads.
const DEFAULT_HEAD_DIM: usize = 128;

pub(super) fn read(fields: &Fields<'_>) -> Result<Parts, FormatError> {
    fields.refuse_sliding_window()?;
    Ok(Parts {
        attention: attention(fields, Some(DEFAULT_HEAD_DIM))?,
        moe: None,
    })
}

/// Attention parameters; shared with `qwen3_moe`, which has a different default for `head_dim`.
pub(super) fn attention(
    fields: &Fields<'_>,
    default_head_dim: Option<usize>,
) -> Result<AttentionConfig, FormatError> {
    let heads = fields.size("num_attention_heads", MAX_HEADS)?;
    let bias = fields.bool_or("attention_bias", false)?;
    Ok(AttentionConfig::Gqa {
        heads,
        kv_heads: fields.kv_heads(heads)?,
        head_dim: fields.head_dim(heads, default_head_dim)?,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: true,
    })
}
