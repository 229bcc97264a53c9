//! Qwen2 and Qwen2.5 (arXiv:2407.10671, section 2.2): queries, keys and values have biases.
//!
//! | part | published tensors of a layer |
//! | --- | --- |
//! | attention | `self_attn.{q,k,v}_proj` with `.bias`, `self_attn.o_proj` |
//! | feed-forward | `mlp.{gate,up,down}_proj` |

use hearth_formats::ModelConfig;

use super::{dense, gqa};
use crate::ModelError;
use crate::decoder::Decoder;

pub(super) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    Ok(Decoder::new(config, gqa(config)?, dense(config)))
}
