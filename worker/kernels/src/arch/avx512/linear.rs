//! Products of weights with f32 activations: BF16 and FP8 weights become f32 by a shift or a mask per vector,
//! which separates the even elements of 32 from the odd ones; activations are packed accordingly.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{Avx512, e4m3};
use crate::arch::generic::{self, Decode, F16Weights, F32Weights, Simd, pack_in_order};
use crate::arch::{PackedRows, Packing, packed_len};
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix};

/// bfloat16 weights, even elements before odd ones.
struct Bf16Pairs;

/// FP8 weights in the order of [`Packing::Unpacked`].
struct E4m3Pairs;

/// The even elements of 32 bfloat16 as f32, then the odd ones.
#[inline(always)]
fn split(_proof: Avx512, v: __m512i) -> [__m512; 2] {
    // SAFETY: `Avx512` proves the instructions; they touch registers only.
    unsafe {
        let odd = _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)),
            _mm512_castsi512_ps(odd),
        ]
    }
}

impl Decode<Avx512> for Bf16Pairs {
    type Unit = [__m512; 2];
    const UNIT: usize = 32;
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn decode(simd: Avx512, p: *const u8) -> [__m512; 2] {
        // SAFETY: the value proves the instructions, the caller 64 bytes.
        split(simd, unsafe { simd.load_bytes(p) })
    }
    #[inline(always)]
    unsafe fn decode_partial(simd: Avx512, p: *const u8, n: usize) -> [__m512; 2] {
        // SAFETY: the caller's promise of `2 * n` bytes.
        split(simd, unsafe { simd.load_bytes_partial(p, 2 * n) })
    }
}

impl Decode<Avx512> for E4m3Pairs {
    type Unit = [__m512; 4];
    const UNIT: usize = 64;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn decode(simd: Avx512, p: *const u8) -> [__m512; 4] {
        // SAFETY: the caller's promise of 64 bytes.
        expand(simd, unsafe { simd.load_bytes(p) })
    }
    #[inline(always)]
    unsafe fn decode_partial(simd: Avx512, p: *const u8, n: usize) -> [__m512; 4] {
        // SAFETY: the caller's promise of `n` bytes.
        expand(simd, unsafe { simd.load_bytes_partial(p, n) })
    }
}

/// 64 codes as f32.
#[inline(always)]
fn expand(proof: Avx512, codes: __m512i) -> [__m512; 4] {
    let [low, high] = e4m3::unpack(proof, codes);
    let [a, b] = split(proof, low);
    let [c, d] = split(proof, high);
    [a, b, c, d]
}

pub(super) fn packing(dtype: DType) -> Packing {
    match dtype {
        DType::F32 | DType::F16 => Packing::InOrder,
        DType::Bf16 => Packing::Pairs,
        DType::F8E4m3 => Packing::Unpacked,
    }
}

pub(super) fn pack(isa: Avx512, packing: Packing, x: &[f32], out: &mut [f32]) {
    if packing == Packing::InOrder {
        pack_in_order(x, out);
        return;
    }
    // SAFETY: the value proves the target features.
    unsafe { pack_permuted(isa, packing == Packing::Unpacked, x, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
fn pack_permuted(isa: Avx512, unpacked: bool, x: &[f32], out: &mut [f32]) {
    assert!(out.len() == packed_len(x.len()));
    for (unit, out) in out.chunks_exact_mut(64).enumerate() {
        let mut v = [isa.zero(); 4];
        for (quarter, v) in v.iter_mut().enumerate() {
            let from = (unit * 64 + quarter * 16).min(x.len());
            // SAFETY: `x.len() - from` elements lie from `from` on.
            *v = unsafe { isa.load_partial(x.as_ptr().add(from), x.len() - from) };
        }
        let v = if unpacked {
            unpacked_order(v)
        } else {
            pairs_order(v)
        };
        for (out, v) in out.chunks_exact_mut(16).zip(v) {
            // SAFETY: `out` is one vector long.
            unsafe { isa.store(out.as_mut_ptr(), v) };
        }
    }
}

/// Even and odd elements of each two vectors.
#[target_feature(enable = "avx512f,avx512dq")]
fn pairs_order(v: [__m512; 4]) -> [__m512; 4] {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    [
        _mm512_permutex2var_ps(v[0], even, v[1]),
        _mm512_permutex2var_ps(v[0], odd, v[1]),
        _mm512_permutex2var_ps(v[2], even, v[3]),
        _mm512_permutex2var_ps(v[2], odd, v[3]),
    ]
}

/// Distributes each vector's elements 0 2 4 6, 1 3 5 7, 8 10 12 14 and 9 11 13 15 to four vectors: a transposition of
/// groups of four.
#[target_feature(enable = "avx512f,avx512dq")]
fn unpacked_order(v: [__m512; 4]) -> [__m512; 4] {
    let order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    let [a, b, c, d] = [
        _mm512_permutexvar_ps(order, v[0]),
        _mm512_permutexvar_ps(order, v[1]),
        _mm512_permutexvar_ps(order, v[2]),
        _mm512_permutexvar_ps(order, v[3]),
    ];
    // Groups 0 and 1 of two vectors, and 2 and 3; then combined with their counterparts.
    let [ab_low, ab_high] = [
        _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
    ];
    let [cd_low, cd_high] = [
        _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
        _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
    ];
    [
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_low, cd_low),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_low, cd_low),
        _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_high, cd_high),
        _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_high, cd_high),
    ]
}

/// Products with f32 activations.
pub(super) fn linear(
    isa: Avx512,
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
        DType::Bf16 => run::<Bf16Pairs>,
        DType::F8E4m3 => run::<E4m3Pairs>,
    };
    // SAFETY: the value proves the target features; the decoder is that of the element type, and activations
    // are packed for it.
    unsafe { run(isa, w, rows, x, scratch, out) }
}

/// # Safety
/// `D` decodes the matrix, and `x` is packed for it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
unsafe fn run<D: Decode<Avx512>>(
    isa: Avx512,
    w: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { generic::linear::<_, D, 2, 8>(isa, w, rows, x, isa.tuning, scratch, out) }
}
