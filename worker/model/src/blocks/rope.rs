//! Rotary position embedding (RoFormer, arXiv:2104.09864, equation 15): the frequency table.
//!
//! Scaling follows transformers' `modeling_rope_utils.py`, the reference for published checkpoints.

use std::f64::consts::PI;

use hearth_formats::{RopeConfig, RopeScaling};
use hearth_kernels::{RopeLayout, RopeTable};

/// Builds the table for `rotary_dim` elements of a head: `inv_freq[i] = theta^(-2i / rotary_dim)`, scaled.
pub fn rope_table(rope: &RopeConfig, rotary_dim: usize, layout: RopeLayout) -> RopeTable {
    // pos_freq [rotary_dim / 2]: theta^(2i / rotary_dim).
    let pos_freq: Vec<f32> = (0..rotary_dim / 2)
        .map(|i| f64::from(rope.theta).powf((2 * i) as f64 / rotary_dim as f64) as f32)
        .collect();
    let plain = pos_freq.iter().map(|f| 1.0 / f);
    let (inv_freq, magnitude) = match rope.scaling {
        RopeScaling::None => (plain.collect(), 1.0),
        RopeScaling::Linear { factor } => (plain.map(|f| f / factor).collect(), 1.0),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let bounds = Llama3Bounds {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_tokens: original_max_position_embeddings as f32,
            };
            (plain.map(|f| bounds.scale(f)).collect(), 1.0)
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            attention_factor,
            truncate,
            original_max_position_embeddings,
        } => {
            let ramp = YarnRamp::new(
                rotary_dim,
                f64::from(rope.theta),
                original_max_position_embeddings as f64,
                [beta_fast, beta_slow],
                truncate,
            );
            let inv_freq = pos_freq
                .iter()
                .enumerate()
                .map(|(i, f)| ramp.blend(i, 1.0 / f, 1.0 / (factor * f)))
                .collect();
            let magnitude =
                attention_factor.unwrap_or_else(|| yarn_magnitude(factor, mscale, mscale_all_dim));
            (inv_freq, magnitude)
        }
    };
    RopeTable {
        inv_freq,
        magnitude,
        layout,
    }
}

/// Factor of latent attention's softmax scale: `yarn_get_mscale(factor, mscale_all_dim)²`
/// (DeepSeek-V3's `modeling_deepseek.py`, `softmax_scale * mscale * mscale`); 1 without YaRN.
pub fn yarn_softmax_factor(rope: &RopeConfig) -> f32 {
    match rope.scaling {
        RopeScaling::Yarn {
            factor,
            mscale_all_dim: Some(mscale_all_dim),
            ..
        } if mscale_all_dim != 0.0 => yarn_mscale(factor, mscale_all_dim).powi(2),
        _ => 1.0,
    }
}

/// `0.1 * mscale * ln(factor) + 1` (YaRN, arXiv:2309.00071, equation 22, where `mscale` is 1).
fn yarn_mscale(factor: f32, mscale: f32) -> f32 {
    if factor <= 1.0 {
        return 1.0;
    }
    (0.1 * f64::from(mscale) * f64::from(factor).ln() + 1.0) as f32
}

/// Factor of cosine and sine. A scale of 0 counts as absent, as in transformers.
fn yarn_magnitude(factor: f32, mscale: Option<f32>, mscale_all_dim: Option<f32>) -> f32 {
    let given = |scale: Option<f32>| scale.filter(|s| *s != 0.0);
    match (given(mscale), given(mscale_all_dim)) {
        (Some(mscale), Some(all)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all),
        _ => yarn_mscale(factor, 1.0),
    }
}

/// Llama 3.1's scaling by wavelength (`_compute_llama3_parameters`).
struct Llama3Bounds {
    factor: f32,
    low_freq_factor: f32,
    high_freq_factor: f32,
    original_tokens: f32,
}

impl Llama3Bounds {
    fn scale(&self, inv_freq: f32) -> f32 {
        let wavelength = 2.0 * PI as f32 / inv_freq;
        if wavelength < self.original_tokens / self.high_freq_factor {
            return inv_freq;
        }
        if wavelength > self.original_tokens / self.low_freq_factor {
            return inv_freq / self.factor;
        }
        let smooth = (self.original_tokens / wavelength - self.low_freq_factor)
            / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - smooth) * inv_freq / self.factor + smooth * inv_freq
    }
}

/// YaRN's ramp between extrapolated and interpolated frequencies (arXiv:2309.00071, equations 17 to 20).
struct YarnRamp {
    low: f64,
    high: f64,
}

impl YarnRamp {
    fn new(dim: usize, theta: f64, original_tokens: f64, betas: [f32; 2], truncate: bool) -> Self {
        // The dimension that makes `rotations` rotations over the original context.
        let dimension = |rotations: f32| {
            dim as f64 * (original_tokens / (f64::from(rotations) * 2.0 * PI)).ln()
                / (2.0 * theta.ln())
        };
        let [fast, slow] = betas.map(dimension);
        let (low, high) = if truncate {
            (fast.floor(), slow.ceil())
        } else {
            (fast, slow)
        };
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        Self { low, high }
    }

    /// Blends frequency `i`: extrapolated below the ramp, interpolated above.
    fn blend(&self, i: usize, extrapolated: f32, interpolated: f32) -> f32 {
        let ramp = ((i as f64 - self.low) / (self.high - self.low)).clamp(0.0, 1.0) as f32;
        // transformers computes 1 - (1 - ramp); so do we, for the same rounding.
        let keep = 1.0 - ramp;
        interpolated * (1.0 - keep) + extrapolated * keep
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!(
                (g - w).abs() <= 4e-7 * w.abs(),
                "frequency {i}: {g} against {w}"
            );
        }
    }

    fn yarn(mscale: Option<f32>, mscale_all_dim: Option<f32>, truncate: bool) -> RopeScaling {
        RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale,
            mscale_all_dim,
            attention_factor: None,
            truncate,
            original_max_position_embeddings: 64,
        }
    }

    fn table(theta: f32, scaling: RopeScaling, dim: usize) -> RopeTable {
        rope_table(&RopeConfig { theta, scaling }, dim, RopeLayout::Half)
    }

    // The expected numbers come from transformers 5.23, `ROPE_INIT_FUNCTIONS[rope_type](config)`, printed in full.

    #[test]
    fn llama3_scales_by_wavelength() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let got = table(500_000.0, scaling, 16);
        let want = [
            1.0,
            0.079_403_01,
            0.004_700_754,
            0.000_911_583_13,
            0.000_176_776_68,
            3.428_102_4e-5,
            6.647_869_7e-6,
            1.289_173_2e-6,
        ];
        assert_close(&got.inv_freq, &want);
        assert_eq!(got.magnitude, 1.0);
    }

    #[test]
    fn linear_divides_every_frequency() {
        let got = table(10_000.0, RopeScaling::Linear { factor: 2.5 }, 8);
        assert_close(&got.inv_freq, &[0.4, 0.04, 0.004, 0.0004]);
    }

    #[test]
    fn yarn_blends_between_its_bounds() {
        let got = table(10_000.0, yarn(None, None, true), 16);
        let rest = [
            0.007_905_695,
            0.0025,
            0.000_790_569_47,
            0.000_25,
            7.905_695e-5,
        ];
        assert_close(
            &got.inv_freq,
            &[&[1.0, 0.237_170_82, 0.05][..], &rest].concat(),
        );
        assert!((got.magnitude - 1.138_629_4).abs() < 1e-6);

        let got = table(10_000.0, yarn(None, None, false), 16);
        assert_close(
            &got.inv_freq,
            &[&[1.0, 0.198_583_53, 0.025_595_25][..], &rest].concat(),
        );
    }

    #[test]
    fn deepseek_moves_yarns_magnitude_between_the_table_and_the_softmax() {
        let rope = |mscale, all| RopeConfig {
            theta: 10_000.0,
            scaling: RopeScaling::Yarn {
                factor: 40.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                mscale,
                mscale_all_dim: all,
                attention_factor: None,
                truncate: true,
                original_max_position_embeddings: 4096,
            },
        };
        let published = rope(Some(1.0), Some(1.0));
        assert_eq!(
            rope_table(&published, 64, RopeLayout::Interleaved).magnitude,
            1.0
        );
        // (0.1 * ln 40 + 1)², DeepSeek-V3's value.
        assert!((yarn_softmax_factor(&published) - 1.873_854_2).abs() < 1e-6);

        let unequal = rope(Some(0.7), Some(1.0));
        let got = rope_table(&unequal, 64, RopeLayout::Half);
        assert!((got.magnitude - 0.919_156).abs() < 1e-6);
        assert_close(
            &got.inv_freq[10..14],
            &[0.056_234_13, 0.039_006_926, 0.026_879_36, 0.018_378_144],
        );

        let absent = rope(None, Some(0.0));
        assert!((rope_table(&absent, 64, RopeLayout::Half).magnitude - 1.368_888).abs() < 1e-6);
        assert_eq!(yarn_softmax_factor(&absent), 1.0);
    }

    #[test]
    fn a_magnitude_given_outright_wins() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: Some(0.5),
            mscale_all_dim: Some(1.0),
            attention_factor: Some(1.25),
            truncate: true,
            original_max_position_embeddings: 64,
        };
        assert_eq!(table(10_000.0, scaling, 16).magnitude, 1.25);
    }
}
