//! Rotary position embedding: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.

use super::fields::{Fields, MAX_POSITIONS};
use crate::FormatError;

/// Base and scaling of the rotary angles.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of frequencies.
    pub theta: f32,
    /// Scaling beyond the pretraining context.
    pub scaling: RopeScaling,
}

/// Method of scaling the angles.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Positions are divided by `factor` (position interpolation, arXiv:2306.15595).
    Linear {
        /// Scaling factor.
        factor: f32,
    },
    /// Scaling by wavelength, with a ramp between two bounds (Llama 3.1).
    Llama3 {
        /// Scaling factor for long wavelengths.
        factor: f32,
        /// Wavelengths above `original / low_freq_factor` are fully scaled.
        low_freq_factor: f32,
        /// Wavelengths below `original / high_freq_factor` are unchanged.
        high_freq_factor: f32,
        /// Pretraining context, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN (arXiv:2309.00071).
    Yarn {
        /// Scaling factor. If absent from the file: the context divided by the pretraining context.
        factor: f32,
        /// Rotations over the original context above which a frequency is unchanged.
        beta_fast: f32,
        /// Rotations below which a frequency is fully scaled.
        beta_slow: f32,
        /// Numerator of the magnitude, a DeepSeek extension.
        mscale: Option<f32>,
        /// Denominator of the magnitude, and factor of the attention scale.
        mscale_all_dim: Option<f32>,
        /// Magnitude, if given explicitly.
        attention_factor: Option<f32>,
        /// Whether the ramp's bounds are rounded to whole dimensions.
        truncate: bool,
        /// Pretraining context, in tokens.
        original_max_position_embeddings: usize,
    },
}

const DEFAULT_THETA: f32 = 10_000.0;
const SUPPORTED: &str = "supported: default, linear, llama3, yarn";

pub(super) fn read(fields: &Fields<'_>, max_positions: usize) -> Result<RopeConfig, FormatError> {
    let parameters = fields.nested("rope_parameters")?;
    let scaling = fields.nested("rope_scaling")?;
    for source in [Some(fields), parameters.as_ref(), scaling.as_ref()]
        .into_iter()
        .flatten()
    {
        refuse_partial(source)?;
    }
    // transformers lets `rope_scaling` override `rope_parameters`, and looks for the base in either, then beside them.
    let object = scaling.filter(|s| !s.is_empty()).or(parameters);
    let inner_theta = match &object {
        Some(object) => object.optional_float("rope_theta")?,
        None => None,
    };
    let theta = match inner_theta {
        Some(theta) => theta,
        None => fields.float_or("rope_theta", DEFAULT_THETA)?,
    };
    if theta <= 1.0 {
        return Err(fields.error(
            "rope_theta",
            format!("is {theta}"),
            "it must be more than 1, usually 10000.",
        ));
    }
    let scaling = match object {
        Some(object) => read_scaling(fields, &object, max_positions)?,
        None => RopeScaling::None,
    };
    Ok(RopeConfig { theta, scaling })
}

fn refuse_partial(fields: &Fields<'_>) -> Result<(), FormatError> {
    match fields.optional_float("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(fields.error(
            "partial_rotary_factor",
            format!("is {factor}, and partial rotary embedding is not supported"),
            "use a model that rotates whole heads.",
        )),
        _ => Ok(()),
    }
}

fn read_scaling(
    fields: &Fields<'_>,
    object: &Fields<'_>,
    max_positions: usize,
) -> Result<RopeScaling, FormatError> {
    if object.keys().any(|key| key.ends_with("_attention")) {
        return Err(object.error(
            "full_attention",
            "gives each layer its own angles, which is not supported",
            "use a model with one rotary embedding for all layers.",
        ));
    }
    let kind = match object.optional_string("rope_type")? {
        Some(kind) => kind,
        None => match object.optional_string("type")? {
            Some(kind) => kind,
            None if object.get("factor").is_some() => return Err(object.missing("rope_type")),
            None => "default",
        },
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: positive(object, "factor")?,
        }),
        "llama3" => read_llama3(fields, object, max_positions),
        "yarn" => read_yarn(fields, object, max_positions),
        "dynamic" => Err(object.error(
            "rope_type",
            "is \"dynamic\": angles would change with the length of each text, and cached keys with them",
            "use \"yarn\" or \"linear\" with the same factor.",
        )),
        other => Err(object.error("rope_type", format!("is {other:?}, which is unknown"), SUPPORTED)),
    }
}

fn read_llama3(
    fields: &Fields<'_>,
    object: &Fields<'_>,
    max_positions: usize,
) -> Result<RopeScaling, FormatError> {
    let low_freq_factor = positive(object, "low_freq_factor")?;
    let high_freq_factor = positive(object, "high_freq_factor")?;
    if high_freq_factor <= low_freq_factor {
        return Err(object.error(
            "high_freq_factor",
            format!("is {high_freq_factor}, not more than low_freq_factor {low_freq_factor}"),
            "Llama 3.1 has 4 and 1; download the file again.",
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: positive(object, "factor")?,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings: original_positions(fields, object, max_positions)?,
    })
}

fn read_yarn(
    fields: &Fields<'_>,
    object: &Fields<'_>,
    max_positions: usize,
) -> Result<RopeScaling, FormatError> {
    let original = original_positions(fields, object, max_positions)?;
    let factor = match object.get("factor") {
        Some(_) => positive(object, "factor")?,
        None if max_positions > original => (max_positions as f64 / original as f64) as f32,
        None => return Err(object.missing("factor")),
    };
    // Zero means absent, as in transformers' `get(..) or default`.
    let or = |field: &str, default: f32| -> Result<f32, FormatError> {
        Ok(object
            .optional_float(field)?
            .filter(|b| *b != 0.0)
            .unwrap_or(default))
    };
    let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
    if !(beta_slow > 0.0 && beta_fast >= beta_slow) {
        return Err(object.error(
            "beta_fast",
            format!("is {beta_fast} and beta_slow is {beta_slow}"),
            "beta_fast is at least beta_slow, and both are positive; usual values are 32 and 1.",
        ));
    }
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        mscale: object.optional_float("mscale")?,
        mscale_all_dim: object.optional_float("mscale_all_dim")?,
        attention_factor: match object.get("attention_factor") {
            Some(_) => Some(positive(object, "attention_factor")?),
            None => None,
        },
        truncate: object.bool_or("truncate", true)?,
        original_max_position_embeddings: original,
    })
}

/// Reads the pretraining context: beside the parameters, else in them, else the context itself, like transformers.
fn original_positions(
    fields: &Fields<'_>,
    object: &Fields<'_>,
    max_positions: usize,
) -> Result<usize, FormatError> {
    const FIELD: &str = "original_max_position_embeddings";
    if let Some(original) = fields.optional_size(FIELD, MAX_POSITIONS)? {
        return Ok(original);
    }
    object.size_or(FIELD, MAX_POSITIONS, max_positions)
}

fn positive(object: &Fields<'_>, field: &str) -> Result<f32, FormatError> {
    let value = object.float(field)?;
    if value > 0.0 {
        return Ok(value);
    }
    Err(object.error(
        field,
        format!("is {value}"),
        "it must be positive; download the file again.",
    ))
}
