//! Products of weights with f32 activations: FP8 weights become binary16 first, or f32 directly if the CPU
//! multiplies subnormal numbers fast.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Avx2;
use crate::arch::generic::{
    self, Bf16Weights, Decode, F16Weights, F32Weights, Simd, pack_in_order,
};
use crate::arch::{PackedRows, Packing, packed_len};
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix};

/// Factor of [`Packing::RaisedPairs`].
const RAISE: f32 = 18_446_744_073_709_551_616.0;

/// FP8 weights as binary16: the code's bits, shifted left by seven, are 2^-8 times its value, including subnormals.
/// NaN would be 1.875, so rows are searched for it.
struct E4m3Halves;

/// FP8 weights as f32: the code's bits, shifted left by twenty, are 2^-120 times its value, including subnormals, for
/// CPUs that multiply subnormal numbers as fast as others; this takes a quarter less work. The vectors equal those of
/// [`E4m3Halves`] except for the power of two, so the sums are the same.
struct E4m3Floats;

/// The even elements of 32 codes, then the odd ones, 16 bits each: the code's bits shifted left by `places`, with the
/// sign at the top.
#[inline(always)]
fn spread(_proof: Avx2, codes: __m256i, places: u32) -> [__m256i; 2] {
    // SAFETY: `Avx2` proves the instructions; they touch registers only.
    unsafe {
        let keep = _mm256_set1_epi16((0x8000 | 0x7f << places) as i16);
        // Products with a signed code extend its sign, and the other code of each pair is multiplied by zero.
        let even = _mm256_maddubs_epi16(_mm256_set1_epi16(1 << places), codes);
        let odd = _mm256_maddubs_epi16(_mm256_set1_epi16((0x100 << places) as i16), codes);
        [_mm256_and_si256(even, keep), _mm256_and_si256(odd, keep)]
    }
}

impl Decode<Avx2> for E4m3Halves {
    type Unit = [__m256; 4];
    const UNIT: usize = 32;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    const NAN_APART: bool = true;
    const FACTOR: f32 = 256.0 / RAISE;
    #[inline(always)]
    unsafe fn decode(simd: Avx2, p: *const u8) -> [__m256; 4] {
        // SAFETY: the value proves the instructions, the caller 32 bytes.
        unsafe {
            let [even, odd] = spread(simd, _mm256_loadu_si256(p.cast()), 7);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(even)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(even)),
                _mm256_cvtph_ps(_mm256_castsi256_si128(odd)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn any_nan(_simd: Avx2, p: *const u8, n: usize) -> bool {
        const NAN: u8 = 0x7f;
        let whole = n / 32 * 32;
        // SAFETY: the value proves the instructions, the caller `n` bytes.
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

impl Decode<Avx2> for E4m3Floats {
    type Unit = [__m256; 4];
    const UNIT: usize = 32;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    const NAN_APART: bool = true;
    // 2^120 / RAISE.
    const FACTOR: f32 = 72_057_594_037_927_936.0;
    #[inline(always)]
    unsafe fn decode(simd: Avx2, p: *const u8) -> [__m256; 4] {
        // SAFETY: the value proves the instructions, the caller 32 bytes.
        unsafe {
            // Quarters 0, 2, 1, 3, because the following steps take the lower halves of both 128-bit lanes together.
            let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_loadu_si256(p.cast()));
            let [even, odd] = spread(simd, codes, 4);
            let zero = _mm256_setzero_si256();
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, even)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, even)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, odd)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn any_nan(simd: Avx2, p: *const u8, n: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { E4m3Halves::any_nan(simd, p, n) }
    }
}

pub(super) fn packing(dtype: DType) -> Packing {
    match dtype {
        DType::F8E4m3 => Packing::RaisedPairs,
        DType::F32 | DType::F16 | DType::Bf16 => Packing::InOrder,
    }
}

pub(super) fn pack(isa: Avx2, packing: Packing, x: &[f32], out: &mut [f32]) {
    if packing == Packing::InOrder {
        pack_in_order(x, out);
        return;
    }
    // SAFETY: the value proves the target features.
    unsafe { pack_raised_pairs(isa, x, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_raised_pairs(isa: Avx2, x: &[f32], out: &mut [f32]) {
    assert!(out.len() == packed_len(x.len()));
    for (unit, out) in out.chunks_exact_mut(32).enumerate() {
        let (even, odd) = out.split_at_mut(16);
        for half in 0..2 {
            let from = (unit * 32 + half * 16).min(x.len());
            let middle = (from + 8).min(x.len());
            // SAFETY: that many elements lie there, and both halves of `out` have room for two vectors.
            unsafe {
                let a = isa.load_partial(x.as_ptr().add(from), x.len() - from);
                let b = isa.load_partial(x.as_ptr().add(middle), x.len() - middle);
                let evens = pairs_in_order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
                let odds = pairs_in_order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
                isa.store(
                    even.as_mut_ptr().add(half * 8),
                    isa.mul(evens, isa.splat(RAISE)),
                );
                isa.store(
                    odd.as_mut_ptr().add(half * 8),
                    isa.mul(odds, isa.splat(RAISE)),
                );
            }
        }
    }
}

/// Pairs 0, 2, 1, 3.
#[target_feature(enable = "avx2")]
fn pairs_in_order(v: __m256) -> __m256 {
    _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)))
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
    assert!(x.packing == packing(w.dtype()));
    let run = match w.dtype() {
        DType::F32 => run::<F32Weights>,
        DType::F16 => run::<F16Weights>,
        DType::Bf16 => run::<Bf16Weights>,
        DType::F8E4m3 if isa.tuning.fast_subnormals => run::<E4m3Floats>,
        DType::F8E4m3 => run::<E4m3Halves>,
    };
    // SAFETY: the value proves the target features; the decoder is that of the element type, and activations
    // are packed for it.
    unsafe { run(isa, w, rows, x, scratch, out) }
}

/// # Safety
/// `D` decodes the matrix, and `x` is packed for it.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<D: Decode<Avx2>>(
    isa: Avx2,
    w: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { generic::linear::<_, D, 3, 4>(isa, w, rows, x, isa.tuning, scratch, out) }
}
