//! `qwen2` (arXiv:2407.10671, section 2.2): biases on q, k and v, none on the output.

use super::fields::{Fields, MAX_HEADS};
use super::{AttentionConfig, Parts};
use crate::FormatError;

pub(super) fn read(fields: &Fields<'_>) -> Result<Parts, FormatError> {
    fields.refuse_sliding_window()?;
    let heads = fields.size("num_attention_heads", MAX_HEADS)?;
    Ok(Parts {
        attention: AttentionConfig::Gqa {
            heads,
            kv_heads: fields.kv_heads(heads)?,
            head_dim: fields.head_dim(heads, None)?,
            qkv_bias: true,
            o_bias: false,
            qk_norm: false,
        },
        moe: None,
    })
}
