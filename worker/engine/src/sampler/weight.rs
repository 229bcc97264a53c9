//! Weights of tokens and their masses: arithmetic that every device repeats bit for bit.
//!
//! A weight is computed by single f32 operations, none of them fused and none from a library, whose last bit differs from
//! one to the next. Masses are integers, so that the order of their sum does not matter and no device needs f64, in which
//! consumer GPUs have 1/64 of their f32 rate.

/// Binary places of a mass: the sum over 2^23 tokens fits 64 bits.
const MASS_BITS: i32 = 40;
/// Quotients below this have weight 0: their exponential function is below 2^-124.
const LEAST: f32 = -86.0;
/// Adding and subtracting it rounds a small number to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;
/// The natural logarithm of 2 in two parts. Nine bits suffice for the first, so that its products with n are exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1/7!, 1/6!, …, 1/0!: the series leaves an error of 5e-9 for |r| <= ln 2 / 2.
const SERIES: [f32; 8] = [
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// Probability of a token relative to the likeliest one's, whose logit is `largest`: 0 to 1.
pub(super) fn weight(logit: f32, largest: f32, temperature: f32) -> f32 {
    exp((logit - largest) / temperature)
}

/// `e^x` for `x <= 0`: `x = n ln 2 + r`, and the series of `e^r`.
fn exp(x: f32) -> f32 {
    if x < LEAST {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let series = SERIES.iter().fold(0.0, |sum, term| sum * r + term);
    series * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// A weight in units of 2^-40, rounded down.
pub(super) fn mass(weight: f32) -> u64 {
    (f64::from(weight) * 2.0_f64.powi(MASS_BITS)) as u64
}

/// The share `top_p < 1` of a mass, rounded down; `top_p` counts in units of 2^-32.
pub(super) fn share(total: u64, top_p: f32) -> u64 {
    let units = (f64::from(top_p) * 2.0_f64.powi(32)) as u64;
    let (high, low) = (total >> 32, total & 0xffff_ffff);
    high * units + ((low * units) >> 32)
}

/// The point `quantile`, in units of 2^-64, of a mass, rounded down: less than the mass, unless that is 0.
pub(super) fn point(total: u64, quantile: u64) -> u64 {
    ((u128::from(total) * u128::from(quantile)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As accurate as a library's function, to a few units of the last place, and never above 1.
    #[test]
    fn weights_are_those_of_the_exponential_function() {
        let mut worst = 0.0_f64;
        for step in 0..860_000 {
            let x = step as f32 * -1e-4;
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!(got <= 1.0, "{x}: {got}");
            worst = worst.max((got / want - 1.0).abs());
        }
        assert!(worst < 1.5e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-86.5), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn a_weight_needs_no_more_than_the_range_of_f32() {
        assert_eq!(weight(f32::MAX, f32::MAX, 1e-45), 1.0);
        assert_eq!(weight(f32::MIN, f32::MAX, 1.0), 0.0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.0, 0.5), 0.0);
        assert_eq!(weight(-1e-20, 0.0, 1e-40), 0.0);
    }

    #[test]
    fn masses_shares_and_points_are_exact() {
        assert_eq!(mass(1.0), 1 << 40);
        assert_eq!(mass(0.75), 3 << 38);
        assert_eq!(mass(2.0_f32.powi(-41)), 0);
        assert_eq!(mass(f32::from_bits(0x2b80_0001)), 1);
        assert_eq!(share(1 << 40, 0.5), 1 << 39);
        assert_eq!(share((1 << 40) + 3, 0.5), (1 << 39) + 1);
        assert_eq!(share(u64::MAX >> 1, 0.0), 0);
        assert!(share(1 << 60, 1.0 - f32::EPSILON / 2.0) < 1 << 60);
        assert_eq!(point(1 << 40, 1 << 63), 1 << 39);
        assert_eq!(point(1 << 40, u64::MAX), (1 << 40) - 1);
        assert_eq!(point(7, 0), 0);
    }
}
