//! One file per architecture, composed from shared blocks. A file only selects blocks; quantisation is a property of
//! the weight's type and does not belong here.

mod deepseek_v3;
mod llama;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use hearth_formats::{Architecture, ModelConfig};

use crate::blocks::ffn::SwiGlu;
use crate::blocks::gqa::Gqa;
use crate::blocks::moe::Moe;
use crate::decoder::{Attention, Decoder, FeedForward};
use crate::{ModelError, ModuleSpec};

/// Returns the decoder that a configuration describes.
pub(crate) fn describe(config: &ModelConfig) -> Result<Decoder, ModelError> {
    match config.architecture {
        Architecture::DeepseekV3 => deepseek_v3::describe(config),
        Architecture::Qwen3Moe => qwen3_moe::describe(config),
        Architecture::Qwen3 => qwen3::describe(config),
        Architecture::Qwen2 => qwen2::describe(config),
        Architecture::Llama => llama::describe(config),
    }
}

/// Returns the decoder's modules. Fails for a configuration that does not fit its architecture.
pub(crate) fn modules(config: &ModelConfig) -> Result<Vec<ModuleSpec>, ModelError> {
    Ok(describe(config)?.modules())
}

fn gqa(config: &ModelConfig) -> Result<Attention, ModelError> {
    Gqa::new(config)
        .map(Attention::Gqa)
        .ok_or_else(|| unfit(config, "latent attention"))
}

/// Uses a dense block in every layer.
fn dense(config: &ModelConfig) -> impl FnMut(usize) -> FeedForward {
    let block = SwiGlu {
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
    };
    move |_| FeedForward::Dense(block)
}

/// Uses a mixture of experts where the configuration places one, a dense block elsewhere.
fn sparse(config: &ModelConfig) -> Result<impl FnMut(usize) -> FeedForward, ModelError> {
    let moe = config
        .moe
        .as_ref()
        .ok_or_else(|| unfit(config, "no experts"))?;
    let moe = Moe::new(config.hidden_size, moe);
    let mut dense = dense(config);
    Ok(move |layer| {
        if config.is_moe_layer(layer) {
            FeedForward::Moe(Box::new(moe.clone()))
        } else {
            dense(layer)
        }
    })
}

fn unfit(config: &ModelConfig, what: &'static str) -> ModelError {
    ModelError::Config {
        architecture: config.architecture.to_string(),
        what,
    }
}
