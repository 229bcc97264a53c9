//! `qwen3_moe` (arXiv:2505.09388, section 2).

use super::fields::{Fields, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH};
use super::{MoeConfig, Parts, ScoreFunction, qwen3};
use crate::FormatError;

pub(super) fn read(fields: &Fields<'_>) -> Result<Parts, FormatError> {
    fields.refuse_sliding_window()?;
    Ok(Parts {
        attention: qwen3::attention(fields, None)?,
        moe: Some(moe(fields)?),
    })
}

fn moe(fields: &Fields<'_>) -> Result<MoeConfig, FormatError> {
    let experts = fields.size_either("num_experts", "num_local_experts", MAX_EXPERTS)?;
    let experts_per_token = fields.size("num_experts_per_tok", MAX_EXPERTS)?;
    if experts_per_token > experts {
        return Err(fields.error(
            "num_experts_per_tok",
            format!("is {experts_per_token}, more than num_experts {experts}"),
            "download the file again.",
        ));
    }
    let layers = fields.size("num_hidden_layers", MAX_LAYERS)?;
    let mlp_only_layers = fields.sizes("mlp_only_layers")?.unwrap_or_default();
    if let Some(layer) = mlp_only_layers.iter().find(|layer| **layer >= layers) {
        return Err(fields.error(
            "mlp_only_layers",
            format!("names layer {layer}, but num_hidden_layers is {layers}"),
            "download the file again.",
        ));
    }
    Ok(MoeConfig {
        experts,
        experts_per_token,
        intermediate_size: fields.size("moe_intermediate_size", MAX_WIDTH)?,
        shared_experts: 0,
        first_dense_layers: 0,
        moe_layer_freq: 1,
        decoder_sparse_step: fields.size_or("decoder_sparse_step", MAX_LAYERS, 1)?,
        mlp_only_layers,
        groups: 1,
        top_groups: 1,
        normalize: fields.bool_or("norm_topk_prob", false)?,
        scaling: 1.0,
        score: ScoreFunction::Softmax,
        correction_bias: false,
    })
}
