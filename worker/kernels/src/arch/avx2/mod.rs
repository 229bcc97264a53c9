//! AVX2 with FMA and F16C: everything in f32.

use std::arch::x86_64::*;

use super::Isa;
use super::dispatch::impl_kernels;
use super::generic::Simd;
use super::tuning::Tuning;

mod linear;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2 {
    tuning: Tuning,
}

impl Avx2 {
    /// Returns `None` if the CPU lacks one of them.
    pub(crate) fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then(|| Self {
            tuning: Tuning::detect(),
        })
    }

    /// The same value, tuned for another CPU.
    #[cfg(test)]
    pub(super) fn tuned(self, tuning: Tuning) -> Self {
        Self { tuning }
    }
}

impl_kernels!(
    Avx2,
    Isa::Avx2,
    "avx2,fma,f16c",
    linear,
    &[
        "avx2-f8e4m3xf32-stream",
        "avx2-f8e4m3xf32-tile",
        "avx2-anyxf32-stream",
        "avx2-anyxf32-tile",
        "avx2-f32-attention",
        "avx2-anyxf32-absorb",
        "avx2-f32-rmsnorm",
        "avx2-f32-silu",
    ]
);

/// Wraps one or more intrinsics of the instruction set that a method's `self` proves.
macro_rules! proven {
    ($e:expr) => {
        // SAFETY: `self` proves that the CPU has these instructions; they touch registers only.
        unsafe { $e }
    };
}

impl Simd for Avx2 {
    type F = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        proven!(_mm256_set1_ps(value))
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        proven!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        proven!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        proven!(_mm256_round_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(a))
    }
    /// Scales in two steps, because 2^n itself may be out of range.
    #[inline(always)]
    fn scale_by_power(self, a: __m256, n: __m256) -> __m256 {
        proven!({
            let n = _mm256_cvtps_epi32(n);
            let first = _mm256_srai_epi32::<1>(n);
            let second = _mm256_sub_epi32(n, first);
            let bias = _mm256_set1_epi32(127);
            let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, bias)));
            _mm256_mul_ps(_mm256_mul_ps(a, power(first)), power(second))
        })
    }
    #[inline(always)]
    fn zero_below(self, a: __m256, limit: __m256, value: __m256) -> __m256 {
        // Not-less-than, true for NaN.
        proven!(_mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a, limit), value))
    }
    #[inline(always)]
    fn reduce_add(self, a: __m256) -> f32 {
        proven!({
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: __m256) -> f32 {
        proven!({
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
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: `self` proves the instructions, the caller the memory.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_partial(self, p: *const f32, n: usize) -> __m256 {
        // SAFETY: as in `load`; masked lanes are not read.
        unsafe { _mm256_maskload_ps(p, lanes(n)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: __m256) {
        // SAFETY: as in `load`.
        unsafe { _mm256_storeu_ps(p, a) }
    }
    #[inline(always)]
    unsafe fn store_partial(self, p: *mut f32, n: usize, a: __m256) {
        // SAFETY: as in `load`; masked lanes are not written.
        unsafe { _mm256_maskstore_ps(p, lanes(n), a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m256 {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m256 {
        // SAFETY: as in `load`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    /// The code's bits, shifted left by seven, are a binary16 of 2^-8 times its value, including subnormals; NaN,
    /// which would be 1.875, is restored by a comparison.
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> __m256 {
        // SAFETY: as in `load`; eight bytes are read.
        unsafe {
            let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast()));
            let shifted = _mm_slli_epi16::<7>(codes);
            let half = _mm_and_si128(shifted, _mm_set1_epi16(0xbf80_u16 as i16));
            let magnitude = _mm_and_si128(half, _mm_set1_epi16(0x3f80));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
            let half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
        }
    }
}

/// A mask of the first `n` lanes of 8.
#[inline(always)]
fn lanes(n: usize) -> __m256i {
    const MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: eight entries lie from `8 - min(n, 8)` on; every caller holds an `Avx2`.
    unsafe { _mm256_loadu_si256(MASKS.as_ptr().add(8 - n.min(8)).cast()) }
}
