//! Products in f32; AVX2 has none of bfloat16.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Avx2;
use crate::arch::generic::{
    self, Bf16Weights, Decode, F16Weights, F32Engine, F32Weights, Tiling, pack_f32,
};
use crate::arch::{PackedRows, Packing};
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix, Precision};

/// FP8 weights, 16 at a time and 2^8 too small: the code's bits, seven places up, are a binary16 of 2^-8 times
/// its value, subnormals included. NaN would be 1.875, so rows are searched for it: that costs a third of what
/// mending it here would.
struct E4m3Halves;

impl Decode<F32Engine<Avx2>> for E4m3Halves {
    type Unit = [__m256; 2];
    const UNIT: usize = 16;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    const NAN_APART: bool = true;
    const FACTOR: f32 = 256.0;
    #[inline(always)]
    unsafe fn decode(_engine: F32Engine<Avx2>, p: *const u8) -> [__m256; 2] {
        // SAFETY: the engine proves the instructions, the caller 16 bytes.
        unsafe {
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let half = _mm256_and_si256(
                _mm256_slli_epi16::<7>(codes),
                _mm256_set1_epi16(0xbf80_u16 as i16),
            );
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn any_nan(_engine: F32Engine<Avx2>, p: *const u8, n: usize) -> bool {
        const NAN: u8 = 0x7f;
        let whole = n / 32 * 32;
        // SAFETY: the engine proves the instructions, the caller `n` bytes.
        unsafe {
            let mut greatest = _mm256_setzero_si256();
            for at in (0..whole).step_by(32) {
                let codes = _mm256_loadu_si256(p.add(at).cast());
                let magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(NAN as i8));
                greatest = _mm256_max_epu8(greatest, magnitudes);
            }
            let found = _mm256_cmpeq_epi8(greatest, _mm256_set1_epi8(NAN as i8));
            let rest = std::slice::from_raw_parts(p.add(whole), n - whole);
            _mm256_movemask_epi8(found) != 0 || rest.iter().any(|code| code & NAN == NAN)
        }
    }
}

pub(super) fn packing(_dtype: DType, _precision: Precision) -> Packing {
    Packing::F32
}

pub(super) fn pack(_isa: Avx2, _packing: Packing, x: &[f32], out: &mut [u8]) {
    pack_f32(x, out);
}

/// Products with f32 activations.
pub(super) fn linear(
    isa: Avx2,
    w: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<D: Decode<F32Engine<Avx2>>>(
        isa: Avx2,
        w: &HostMatrix,
        rows: Range<usize>,
        x: &PackedRows<'_>,
        scratch: &mut KernelScratch,
        out: &mut [f32],
    ) {
        let tiling = Tiling { stream_tokens: 6 };
        let engine = F32Engine(isa);
        // SAFETY: the caller's promise.
        unsafe { generic::linear::<_, D, 3, 4>(engine, w, rows, x, tiling, scratch, out) }
    }
    let run = match w.dtype() {
        DType::F32 => run::<F32Weights>,
        DType::F16 => run::<F16Weights>,
        DType::Bf16 => run::<Bf16Weights>,
        DType::F8E4m3 => run::<E4m3Halves>,
    };
    // SAFETY: the value proves the target features; the decoder is that of the element type, and activations
    // are in order.
    unsafe { run(isa, w, rows, x, scratch, out) }
}

/// See [`generic::multiply`].
pub(super) fn multiply(isa: Avx2, _packing: Packing, steps: usize) -> usize {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run(isa: Avx2, steps: usize) -> usize {
        generic::multiply(F32Engine(isa), steps)
    }
    // SAFETY: the value proves the target features.
    unsafe { run(isa, steps) }
}
