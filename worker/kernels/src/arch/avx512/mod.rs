//! AVX-512 with VBMI.

use std::arch::x86_64::*;

use super::Isa;
use super::dispatch::impl_kernels;
use super::generic::Simd;
use super::tuning::Tuning;

mod e4m3;
mod linear;

/// Proof that the CPU has AVX-512 F, BW, VL, DQ and VBMI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512 {
    tuning: Tuning,
}

impl Avx512 {
    /// Returns `None` if the CPU lacks one of them.
    pub(crate) fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vbmi");
        has.then(|| Self {
            tuning: Tuning::detect(),
        })
    }

    /// The same value, tuned for another CPU.
    #[cfg(test)]
    pub(super) fn tuned(self, tuning: Tuning) -> Self {
        Self { tuning }
    }

    /// # Safety
    /// 64 bytes lie at `p`.
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m512i {
        // SAFETY: `self` proves the instruction, the caller the memory.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    /// The first `n <= 64` bytes, then zeros.
    ///
    /// # Safety
    /// `n` bytes lie at `p`.
    #[inline(always)]
    unsafe fn load_bytes_partial(self, p: *const u8, n: usize) -> __m512i {
        let mask = if n >= 64 { u64::MAX } else { (1 << n) - 1 };
        // SAFETY: as in `load_bytes`; masked bytes are not read.
        unsafe { _mm512_maskz_loadu_epi8(mask, p.cast()) }
    }
}

impl_kernels!(
    Avx512,
    Isa::Avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi",
    linear,
    &[
        "avx512-f8e4m3xf32-stream",
        "avx512-f8e4m3xf32-tile",
        "avx512-bf16xf32-stream",
        "avx512-bf16xf32-tile",
        "avx512-f16f32xf32-stream",
        "avx512-f16f32xf32-tile",
        "avx512-f32-attention",
        "avx512-anyxf32-absorb",
        "avx512-f32-rmsnorm",
        "avx512-f32-silu",
    ]
);

/// Wraps one or more intrinsics of the instruction set that a method's `self` proves.
macro_rules! proven {
    ($e:expr) => {
        // SAFETY: `self` proves that the CPU has these instructions; they touch registers only.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        proven!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        proven!(_mm512_roundscale_ps::<0>(a))
    }
    #[inline(always)]
    fn scale_by_power(self, a: __m512, n: __m512) -> __m512 {
        proven!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn zero_below(self, a: __m512, limit: __m512, value: __m512) -> __m512 {
        // Not-less-than, true for NaN.
        proven!(_mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, limit),
            value
        ))
    }
    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        proven!({
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        proven!({
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        proven!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: `self` proves the instructions, the caller the memory.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize) -> __m512 {
        // SAFETY: as in `load`; masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(lanes(n), p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m512) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_ps(p, a) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize, a: __m512) {
        // SAFETY: as in `load`; masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(p, lanes(n), a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        // SAFETY: as in `load`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    /// The code's bits, shifted left by seven, are a binary16 of 2^-8 times its value, including subnormals; NaN,
    /// which would be 1.875, is restored by a comparison.
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> __m512 {
        // SAFETY: as in `load`.
        unsafe {
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()));
            let shifted = _mm256_slli_epi16::<7>(codes);
            let half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80_u16 as i16));
            let magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3f80));
            let nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x3f80));
            let half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        }
    }
}

/// Mask of the first `n` of 16 lanes.
#[inline(always)]
fn lanes(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}
