//! `quantization_config`: block-scaled FP8 as published for DeepSeek-V3, or none.

use super::fields::Fields;
use crate::FormatError;
use hearth_kernels::SCALE_BLOCK;

/// Weights are E4M3 with one scale for each 128×128 block (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
///
/// Activations are never quantised here, whatever `activation_scheme` says: the dequantised product is the exact one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fp8Config {
    /// Rows and columns covered by one scale: `[128, 128]`.
    pub block: [usize; 2],
}

const REMEDY: &str = "take the model's BF16 or block-scaled FP8 version.";

pub(super) fn read(fields: &Fields<'_>) -> Result<Option<Fp8Config>, FormatError> {
    let Some(config) = fields.nested("quantization_config")? else {
        return Ok(None);
    };
    let method = config.string("quant_method")?;
    if method != "fp8" {
        let problem = format!("is {method:?}, which is not supported");
        return Err(config.error("quant_method", problem, REMEDY));
    }
    config.expect_or_absent("fmt", &["e4m3", "float8_e4m3fn"])?;
    let Some(block) = config.sizes("weight_block_size")? else {
        return Err(config.error(
            "weight_block_size",
            "is missing: FP8 with one scale a tensor or channel is not supported",
            REMEDY,
        ));
    };
    if block != [SCALE_BLOCK; 2] {
        return Err(config.error(
            "weight_block_size",
            format!("is {block:?}; only [128, 128] is supported"),
            REMEDY,
        ));
    }
    Ok(Some(Fp8Config {
        block: [SCALE_BLOCK; 2],
    }))
}
