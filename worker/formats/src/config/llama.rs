//! `llama`: version 2 (arXiv:2307.09288) and 3 (arXiv:2407.21783).

use super::fields::{Fields, MAX_HEADS};
use super::{AttentionConfig, Parts};
use crate::FormatError;

pub(super) fn read(fields: &Fields<'_>) -> Result<Parts, FormatError> {
    fields.refuse_flag(
        "mlp_bias",
        "no published Llama has biases in its feed-forward blocks.",
    )?;
    let heads = fields.size("num_attention_heads", MAX_HEADS)?;
    let bias = fields.bool_or("attention_bias", false)?;
    Ok(Parts {
        attention: AttentionConfig::Gqa {
            heads,
            kv_heads: fields.kv_heads(heads)?,
            head_dim: fields.head_dim(heads, None)?,
            qkv_bias: bias,
            o_bias: bias,
            qk_norm: false,
        },
        moe: None,
    })
}
