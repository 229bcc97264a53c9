//! Conversions between f32 and the checkpoint's element types.

use half::{bf16, f16};

use crate::SCALE_BLOCK;

/// The largest finite E4M3FN magnitude.
pub const E4M3_MAX: f32 = 448.0;

/// The value of an E4M3FN code: sign, four exponent bits of bias 7, three mantissa bits; no infinities,
/// `0x7f` and `0xff` are NaN.
pub fn e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(code >> 3 & 0x0f);
    let mantissa = f32::from(code & 0x07);
    let magnitude = match (exponent, code & 0x07) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    sign * magnitude
}

/// The nearest E4M3FN code, ties to even; magnitudes above 448 (including infinities) saturate, NaN stays NaN.
pub fn f32_to_e4m3(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= E4M3_MAX {
        return sign | 0x7e;
    }
    if magnitude < 2f32.powi(-6) {
        // Subnormal codes count multiples of 2^-9; eight of them are the first normal code.
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
    let code = (rounded >> 20) - ((127 - 7) << 3);
    sign | (code.min(0x7e) as u8)
}

/// The nearest bfloat16, ties to even, as its bits.
pub fn f32_to_bf16(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// The value of bfloat16 bits.
pub fn bf16_to_f32(bits: u16) -> f32 {
    bf16::from_bits(bits).to_f32()
}

/// The nearest binary16, ties to even, as its bits.
pub fn f32_to_f16(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

/// The value of binary16 bits.
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Little-endian bfloat16 bytes of `values`, as safetensors stores them.
pub fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&v| f32_to_bf16(v).to_le_bytes())
        .collect()
}

/// Quantises a row-major matrix `[rows, cols]` to E4M3 with one scale per 128×128 block, as
/// DeepSeek-V3's checkpoints store it: `scale = amax / 448`, `code = round(value / scale)`.
///
/// Returns the codes `[rows, cols]` and the scales `[ceil(rows / 128), ceil(cols / 128)]`. A block without a finite
/// non-zero value has scale 1. If `values` is shorter than `rows * cols`, the missing elements are zero.
pub fn quantize_fp8_block(values: &[f32], rows: usize, cols: usize) -> (Vec<u8>, Vec<f32>) {
    let block_rows = rows.div_ceil(SCALE_BLOCK);
    let block_cols = cols.div_ceil(SCALE_BLOCK);
    let value = |r: usize, c: usize| values.get(r * cols + c).copied().unwrap_or(0.0);
    let mut codes = vec![0; rows * cols];
    let mut scales = vec![1.0; block_rows * block_cols];
    for (block, scale) in scales.iter_mut().enumerate() {
        let first_row = block / block_cols * SCALE_BLOCK;
        let first_col = block % block_cols * SCALE_BLOCK;
        let covered_rows = first_row..rows.min(first_row + SCALE_BLOCK);
        let covered_cols = first_col..cols.min(first_col + SCALE_BLOCK);
        let mut amax = 0f32;
        for r in covered_rows.clone() {
            for c in covered_cols.clone() {
                let magnitude = value(r, c).abs();
                if magnitude.is_finite() {
                    amax = amax.max(magnitude);
                }
            }
        }
        if amax > 0.0 {
            *scale = (amax / E4M3_MAX).max(f32::MIN_POSITIVE);
        }
        for r in covered_rows {
            for c in covered_cols.clone() {
                codes[r * cols + c] = f32_to_e4m3(value(r, c) / *scale);
            }
        }
    }
    (codes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_code_survives_the_round_trip() {
        for code in 0..=255u8 {
            let value = e4m3_to_f32(code);
            assert_eq!(value.is_nan(), code & 0x7f == 0x7f, "{code:#x}");
            assert_eq!(f32_to_e4m3(value), code, "{code:#x} = {value}");
        }
        assert_eq!(e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(e4m3_to_f32(0x08), 2f32.powi(-6));
        assert_eq!(e4m3_to_f32(0x7e), 448.0);
        assert_eq!(e4m3_to_f32(0x80).to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn f32_to_e4m3_rounds_to_the_nearest_code_with_ties_to_even() {
        let finite: Vec<f32> = (0..0x7f).map(e4m3_to_f32).collect();
        for pair in finite.windows(2) {
            let low = f32_to_e4m3(pair[0]);
            let middle = f32::midpoint(pair[0], pair[1]);
            assert_eq!(f32_to_e4m3(middle), low + (low & 1), "{middle}");
            assert_eq!(f32_to_e4m3(middle.next_down()), low);
            assert_eq!(f32_to_e4m3(-middle.next_up()), 0x80 | (low + 1));
        }
        assert_eq!(f32_to_e4m3(1e9), 0x7e);
        assert_eq!(f32_to_e4m3(f32::NEG_INFINITY), 0xfe);
        assert_eq!(f32_to_e4m3(f32::MIN_POSITIVE), 0);
    }

    #[test]
    fn block_quantisation_is_within_half_a_step_also_in_partial_blocks() {
        let (rows, cols) = (130, 200);
        let values: Vec<f32> = (0..rows * cols)
            .map(|i| ((i * 37 % 1009) as f32 - 504.0) * if i < 1000 { 1e-3 } else { 2.0 })
            .collect();
        let (codes, scales) = quantize_fp8_block(&values, rows, cols);
        assert_eq!((codes.len(), scales.len()), (rows * cols, 4));
        for r in 0..rows {
            for c in 0..cols {
                let scale = scales[r / 128 * 2 + c / 128];
                let got = e4m3_to_f32(codes[r * cols + c]) * scale;
                let want = values[r * cols + c];
                // Half a step: 2^-4 of the value when normal, 2^-10 of the scale when subnormal.
                let bound = want.abs() / 16.0 + scale * 2f32.powi(-10) + 1e-12;
                assert!((got - want).abs() <= bound, "[{r}, {c}] {got} {want}");
            }
        }
        let (codes, scales) = quantize_fp8_block(&[0.0; 3], 1, 3);
        assert_eq!((codes, scales), (vec![0; 3], vec![1.0]));
    }
}
