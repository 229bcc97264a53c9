//! Products in f32: BF16 and FP8 weights become f32 by a shift or a mask for each vector, which leaves the even
//! elements of 32 apart from the odd ones; activations are packed so.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{Avx512, e4m3};
use crate::arch::generic::{
    self, Decode, Engine, F16Weights, F32Engine, F32Weights, Simd, Tiling, pack_f32,
};
use crate::arch::{PackedRows, Packing};
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix, Precision};

/// bfloat16 weights, even elements before odd ones.
struct Bf16Pairs;

/// FP8 weights in the order of [`Packing::F32Unpacked`].
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

impl Decode<F32Engine<Avx512>> for Bf16Pairs {
    type Unit = [__m512; 2];
    const UNIT: usize = 32;
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn decode(engine: F32Engine<Avx512>, p: *const u8) -> [__m512; 2] {
        // SAFETY: the engine proves the instructions, the caller 64 bytes.
        split(engine.0, unsafe { engine.0.load_bytes(p) })
    }
    #[inline(always)]
    unsafe fn decode_partial(engine: F32Engine<Avx512>, p: *const u8, n: usize) -> [__m512; 2] {
        // SAFETY: the caller's promise of `2 * n` bytes.
        split(engine.0, unsafe { engine.0.load_bytes_partial(p, 2 * n) })
    }
}

impl Decode<F32Engine<Avx512>> for E4m3Pairs {
    type Unit = [__m512; 4];
    const UNIT: usize = 64;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn decode(engine: F32Engine<Avx512>, p: *const u8) -> [__m512; 4] {
        // SAFETY: the caller's promise of 64 bytes.
        expand(engine.0, unsafe { engine.0.load_bytes(p) })
    }
    #[inline(always)]
    unsafe fn decode_partial(engine: F32Engine<Avx512>, p: *const u8, n: usize) -> [__m512; 4] {
        // SAFETY: the caller's promise of `n` bytes.
        expand(engine.0, unsafe { engine.0.load_bytes_partial(p, n) })
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

pub(super) fn packing(dtype: DType, _precision: Precision) -> Packing {
    match dtype {
        DType::F32 | DType::F16 => Packing::F32,
        DType::Bf16 => Packing::F32Pairs,
        DType::F8E4m3 => Packing::F32Unpacked,
    }
}

/// Packs a row as f32.
pub(super) fn pack(isa: Avx512, packing: Packing, x: &[f32], out: &mut [u8]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
    unsafe fn run(isa: Avx512, unpacked: bool, x: &[f32], out: &mut [u8]) {
        assert!(out.len() == Packing::F32Pairs.row_bytes(x.len()));
        for (unit, out) in out.chunks_exact_mut(256).enumerate() {
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
            for (i, &v) in v.iter().enumerate() {
                // SAFETY: `out` is four vectors long.
                unsafe { F32Engine(isa).store(out.as_mut_ptr().add(i * 64), v) };
            }
        }
    }
    if packing == Packing::F32 {
        pack_f32(x, out);
        return;
    }
    // SAFETY: the value proves the target features.
    unsafe { run(isa, packing == Packing::F32Unpacked, x, out) }
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

/// Each vector's elements 0 2 4 6, 1 3 5 7, 8 10 12 14 and 9 11 13 15 go to four vectors: a transposition of
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
    // Groups 0 and 1 of two vectors, and 2 and 3; then those with their likes.
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
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
    unsafe fn run<D: Decode<F32Engine<Avx512>>>(
        isa: Avx512,
        w: &HostMatrix,
        rows: Range<usize>,
        x: &PackedRows<'_>,
        scratch: &mut KernelScratch,
        out: &mut [f32],
    ) {
        let tiling = Tiling { stream_tokens: 6 };
        let engine = F32Engine(isa);
        // SAFETY: the caller's promise.
        unsafe { generic::linear::<_, D, 2, 8>(engine, w, rows, x, tiling, scratch, out) }
    }
    let run = match (w.dtype(), x.packing) {
        (DType::F32, Packing::F32) => run::<F32Weights>,
        (DType::F16, Packing::F32) => run::<F16Weights>,
        (DType::Bf16, Packing::F32Pairs) => run::<Bf16Pairs>,
        (DType::F8E4m3, Packing::F32Unpacked) => run::<E4m3Pairs>,
        (dtype, packing) => unreachable!("{} with {packing:?}", dtype.name()),
    };
    // SAFETY: the value proves the target features; the decoder and the order of the activations are those of
    // the element type.
    unsafe { run(isa, w, rows, x, scratch, out) }
}

/// See [`generic::multiply`].
pub(super) fn multiply(isa: Avx512, _packing: Packing, steps: usize) -> usize {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
    unsafe fn run(isa: Avx512, steps: usize) -> usize {
        generic::multiply(F32Engine(isa), steps)
    }
    // SAFETY: the value proves the target features.
    unsafe { run(isa, steps) }
}
