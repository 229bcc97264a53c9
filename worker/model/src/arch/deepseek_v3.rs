//! DeepSeek-V3 (arXiv:2412.19437) and Kimi K2 (arXiv:2507.20534), which differs only in sizes.
//!
//! | part | published tensors of a layer |
//! | --- | --- |
//! | latent attention | `self_attn.{q_proj \| q_a_proj, q_a_layernorm, q_b_proj}`, `.kv_a_proj_with_mqa`, `.kv_a_layernorm`, `.kv_b_proj`, `.o_proj` |
//! | first layers | `mlp.{gate,up,down}_proj` |
//! | other layers | `mlp.gate` with `e_score_correction_bias`, `mlp.shared_experts.*`, `mlp.experts.{e}.*` |
//!
//! Layers past `num_hidden_layers` predict further tokens (section 2.2) and are not part of the decoder.

use hearth_formats::ModelConfig;

use super::{sparse, unfit};
use crate::ModelError;
use crate::blocks::mla::Mla;
use crate::decoder::{Attention, Decoder};

pub(super) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    let mla = Mla::new(config).ok_or_else(|| unfit(config, "grouped-query attention"))?;
    Ok(Decoder::new(config, Attention::Mla(mla), sparse(config)?))
}
