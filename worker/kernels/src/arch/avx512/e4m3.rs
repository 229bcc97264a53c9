//! E4M3 to bfloat16, exact for every code: a 128-entry table each for the high and the low byte of the
//! magnitude's bfloat16, looked up by `vpermi2b`, with the sign restored by a ternary operation. The bytes are
//! interleaved by `vpunpcklbw` and `vpunpckhbw`, which leave a fixed permutation of each 64 elements;
//! activations are packed once in that order, so weights are never moved.

use std::arch::x86_64::*;

use super::Avx512;

/// High and low bytes of the bfloat16 of each E4M3 magnitude.
struct Tables {
    high: [u8; 128],
    low: [u8; 128],
}

static TABLES: Tables = tables();

const fn tables() -> Tables {
    let mut tables = Tables {
        high: [0; 128],
        low: [0; 128],
    };
    let mut code = 0;
    while code < 128 {
        let bits = magnitude_bits(code as u16);
        tables.high[code] = (bits >> 8) as u8;
        tables.low[code] = bits as u8;
        code += 1;
    }
    tables
}

/// bfloat16 bits of the value of a code without its sign.
const fn magnitude_bits(code: u16) -> u16 {
    let mantissa = code & 7;
    match (code, mantissa) {
        (0x7f, _) => 0x7fc0,
        (8.., _) => (code << 4) + ((127 - 7) << 7),
        (_, 0) => 0,
        // m * 2^-9: the leading bit gives the exponent, the bits below it the mantissa.
        _ => {
            let leading = 15 - mantissa.leading_zeros() as u16;
            let fraction = (mantissa << (7 - leading)) & 0x7f;
            ((127 - 9 + leading) << 7) | fraction
        }
    }
}

/// 64 codes as bfloat16: elements 0..8, 16..24, 32..40, 48..56, then the others.
#[inline(always)]
pub(super) fn unpack(_proof: Avx512, codes: __m512i) -> [__m512i; 2] {
    // SAFETY: `Avx512` proves the instructions; tables have 128 bytes each.
    unsafe {
        let table = |t: &'static [u8; 128]| {
            let p = t.as_ptr();
            [
                _mm512_loadu_si512(p.cast()),
                _mm512_loadu_si512(p.add(64).cast()),
            ]
        };
        let [high0, high1] = table(&TABLES.high);
        let [low0, low1] = table(&TABLES.low);
        // `vpermi2b` uses seven bits of each index, so the sign bit is ignored.
        let high = _mm512_permutex2var_epi8(high0, codes, high1);
        let low = _mm512_permutex2var_epi8(low0, codes, low1);
        // high | (codes & 0x80)
        let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(-128));
        [
            _mm512_unpacklo_epi8(low, high),
            _mm512_unpackhi_epi8(low, high),
        ]
    }
}

#[cfg(test)]
mod tests {
    use crate::convert::{bf16_to_f32, e4m3_to_f32};

    #[test]
    fn the_tables_hold_the_value_of_every_magnitude() {
        for code in 0..128u8 {
            let value = bf16_to_f32(super::magnitude_bits(u16::from(code)));
            let want = e4m3_to_f32(code);
            assert!(
                value == want || value.is_nan() && want.is_nan(),
                "{code:#x}"
            );
        }
    }
}
