//! Qwen3-MoE (arXiv:2505.09388, section 2): Qwen3's attention, a softmax router, no shared expert.
//!
//! | part | published tensors of a layer |
//! | --- | --- |
//! | attention | `self_attn.{q,k,v,o}_proj`, `self_attn.{q,k}_norm` of `[head_dim]` |
//! | sparse layers | `mlp.gate`, `mlp.experts.{e}.*` |
//! | dense layers | `mlp.{gate,up,down}_proj`, by `mlp_only_layers` and `decoder_sparse_step` |

use hearth_formats::ModelConfig;

use super::{gqa, sparse};
use crate::ModelError;
use crate::decoder::Decoder;

pub(super) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    Ok(Decoder::new(config, gqa(config)?, sparse(config)?))
}
