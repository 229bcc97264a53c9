//! Llama 2 (arXiv:2307.09288) and 3 (arXiv:2407.21783): the plain decoder. Llama 3.1 scales its rotary frequencies by
//! wavelength.
//!
//! | part | published tensors of a layer |
//! | --- | --- |
//! | attention | `self_attn.{q,k,v,o}_proj`, with `.bias` if `attention_bias` is set |
//! | feed-forward | `mlp.{gate,up,down}_proj` |

use hearth_formats::ModelConfig;

use super::{dense, gqa};
use crate::ModelError;
use crate::decoder::Decoder;

pub(super) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    Ok(Decoder::new(config, gqa(config)?, dense(config)))
}
