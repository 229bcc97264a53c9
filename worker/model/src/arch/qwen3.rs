//! Qwen3 (arXiv:2505.09388, section 2): each head's query and key are normalised before rotation; no biases.
//!
//! | part | published tensors of a layer |
//! | --- | --- |
//! | attention | `self_attn.{q,k,v,o}_proj`, `self_attn.{q,k}_norm` of `[head_dim]` |
//! | feed-forward | `mlp.{gate,up,down}_proj` |

use hearth_formats::ModelConfig;

use super::{dense, gqa};
use crate::ModelError;
use crate::decoder::Decoder;

pub(super) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    Ok(Decoder::new(config, gqa(config)?, dense(config)))
}
