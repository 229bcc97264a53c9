//! `deepseek_v3` and `kimi_k2` (arXiv:2412.19437, section 2.1).

use super::fields::{Fields, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH};
use super::{AttentionConfig, MoeConfig, Parts, ScoreFunction};
use crate::FormatError;

pub(super) fn read(fields: &Fields<'_>) -> Result<Parts, FormatError> {
    fields.refuse_flag(
        "attention_bias",
        "no published DeepSeek-V3 has attention biases.",
    )?;
    fields.expect_or_absent("scoring_func", &["sigmoid"])?;
    fields.expect_or_absent("topk_method", &["noaux_tc"])?;
    Ok(Parts {
        attention: attention(fields)?,
        moe: Some(moe(fields)?),
    })
}

fn attention(fields: &Fields<'_>) -> Result<AttentionConfig, FormatError> {
    let heads = fields.size("num_attention_heads", MAX_HEADS)?;
    let kv_heads = fields.size_or("num_key_value_heads", MAX_HEADS, heads)?;
    if kv_heads != heads {
        return Err(fields.error(
            "num_key_value_heads",
            format!("is {kv_heads}, but num_attention_heads is {heads}"),
            "latent attention has one key for each query head; both must be equal.",
        ));
    }
    if !fields.is_written("q_lora_rank") {
        return Err(fields.error(
            "q_lora_rank",
            "is missing",
            "write null where queries are not compressed; else download the file again.",
        ));
    }
    let qk_rope_head_dim = fields.size("qk_rope_head_dim", MAX_HEAD_DIM)?;
    fields.expect_even("qk_rope_head_dim", qk_rope_head_dim)?;
    Ok(AttentionConfig::Mla {
        heads,
        q_lora_rank: fields.optional_size("q_lora_rank", MAX_WIDTH)?,
        kv_lora_rank: fields.size("kv_lora_rank", MAX_WIDTH)?,
        qk_nope_head_dim: fields.size("qk_nope_head_dim", MAX_HEAD_DIM)?,
        qk_rope_head_dim,
        v_head_dim: fields.size("v_head_dim", MAX_HEAD_DIM)?,
        interleaved_rope: fields.bool_or("rope_interleave", true)?,
    })
}

fn moe(fields: &Fields<'_>) -> Result<MoeConfig, FormatError> {
    let experts = fields.size_either("n_routed_experts", "num_local_experts", MAX_EXPERTS)?;
    let experts_per_token = fields.size("num_experts_per_tok", MAX_EXPERTS)?;
    let groups = fields.size_or("n_group", MAX_EXPERTS, 8)?;
    let top_groups = fields.size_or("topk_group", MAX_EXPERTS, 4)?;
    if !experts.is_multiple_of(groups) {
        return Err(fields.error(
            "n_routed_experts",
            format!("is {experts}, no multiple of n_group {groups}"),
            "groups are of equal size; download the file again.",
        ));
    }
    if groups > 1 && experts / groups < 2 {
        return Err(fields.error(
            "n_group",
            format!("is {groups} for {experts} experts"),
            "a group is scored by its two best experts and needs two.",
        ));
    }
    if top_groups > groups {
        return Err(fields.error(
            "topk_group",
            format!("is {top_groups}, more than n_group {groups}"),
            "download the file again.",
        ));
    }
    let eligible = experts / groups * top_groups;
    if experts_per_token > eligible {
        return Err(fields.error(
            "num_experts_per_tok",
            format!(
                "is {experts_per_token}, more than the {eligible} experts of topk_group groups"
            ),
            "download the file again.",
        ));
    }
    Ok(MoeConfig {
        experts,
        experts_per_token,
        intermediate_size: fields.size("moe_intermediate_size", MAX_WIDTH)?,
        shared_experts: shared_experts(fields)?,
        first_dense_layers: fields
            .optional_count("first_k_dense_replace", MAX_LAYERS)?
            .unwrap_or(3),
        moe_layer_freq: fields.size_or("moe_layer_freq", MAX_LAYERS, 1)?,
        decoder_sparse_step: 1,
        mlp_only_layers: Vec::new(),
        groups,
        top_groups,
        normalize: fields.bool_or("norm_topk_prob", true)?,
        scaling: fields.float_or("routed_scaling_factor", 2.5)?,
        score: ScoreFunction::Sigmoid,
        correction_bias: true,
    })
}

/// Reads `n_shared_experts`: absent means 1, as in transformers; null means none.
fn shared_experts(fields: &Fields<'_>) -> Result<usize, FormatError> {
    let default = usize::from(!fields.is_written("n_shared_experts"));
    Ok(fields
        .optional_count("n_shared_experts", 1024)?
        .unwrap_or(default))
}
