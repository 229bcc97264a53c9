//! Products of bfloat16 by `vdpbf16ps`, with FP8 weights turned into bfloat16 on the way.
//!
//! `vdpbf16ps` takes subnormal inputs as zero and flushes subnormal results. That loses nothing of FP8 weights
//! (the least is 2^-9), and of others only magnitudes below 2^-126.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{Avx512, Avx512Bf16, e4m3, f32};
use crate::arch::generic::{self, Bf16Weights, Decode, E4m3Weights, Engine, Simd, Tiling};
use crate::arch::{PackedRows, Packing};
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix, Precision};

/// `vdpbf16ps`: two products to a lane.
#[derive(Clone, Copy)]
struct Bf16Engine(Avx512);

impl Engine for Bf16Engine {
    type Acc = __m512;
    type V = __m512i;
    const V_ELEMENTS: usize = 32;
    const ELEMENT_BYTES: usize = 2;

    #[inline(always)]
    fn zero(self) -> __m512 {
        self.0.zero()
    }
    #[inline(always)]
    fn mac(self, acc: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: only an `Avx512Bf16` makes an engine; vectors of the same size are reinterpreted.
        unsafe { _mm512_dpbf16_ps(acc, as_bf16(w), as_bf16(x)) }
    }
    #[inline(always)]
    fn add_scaled(self, acc: __m512, block: __m512, scale: f32) -> __m512 {
        self.0.fma(block, self.0.splat(scale), acc)
    }
    #[inline(always)]
    fn add(self, acc: __m512, block: __m512) -> __m512 {
        self.0.add(acc, block)
    }
    #[inline(always)]
    fn reduce(self, acc: __m512) -> f32 {
        self.0.reduce_add(acc)
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        self.0.prefetch(p);
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> __m512i {
        // SAFETY: the value proves the instructions, the caller 64 bytes.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, v: __m512i) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
}

/// The same bits as a vector of bfloat16.
#[inline(always)]
fn as_bf16(v: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes without invalid values.
    unsafe { std::mem::transmute(v) }
}

impl Decode<Bf16Engine> for Bf16Weights {
    type Unit = [__m512i; 1];
    const UNIT: usize = 32;
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn decode(engine: Bf16Engine, p: *const u8) -> [__m512i; 1] {
        // SAFETY: the caller's promise; weights lie as the engine loads them.
        unsafe { [engine.load(p)] }
    }
    #[inline(always)]
    unsafe fn decode_partial(engine: Bf16Engine, p: *const u8, n: usize) -> [__m512i; 1] {
        // SAFETY: the caller's promise of `2 * n` bytes.
        unsafe { [engine.0.load_bytes_partial(p, 2 * n)] }
    }
}

impl Decode<Bf16Engine> for E4m3Weights {
    type Unit = [__m512i; 2];
    const UNIT: usize = 64;
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn decode(engine: Bf16Engine, p: *const u8) -> [__m512i; 2] {
        // SAFETY: the caller's promise of 64 bytes.
        e4m3::unpack(engine.0, unsafe { engine.0.load_bytes(p) })
    }
    #[inline(always)]
    unsafe fn decode_partial(engine: Bf16Engine, p: *const u8, n: usize) -> [__m512i; 2] {
        // SAFETY: the caller's promise of `n` bytes.
        e4m3::unpack(engine.0, unsafe { engine.0.load_bytes_partial(p, n) })
    }
}

pub(super) fn packing(dtype: DType, precision: Precision) -> Packing {
    match (precision, dtype) {
        (Precision::Fast, DType::Bf16) => Packing::Bf16,
        (Precision::Fast, DType::F8E4m3) => Packing::Bf16Unpacked,
        // binary16 and f32 weights would lose bits in bfloat16.
        (Precision::Full, _) | (_, DType::F16 | DType::F32) => f32::packing(dtype, precision),
    }
}

/// Packs a row as bfloat16 (round to nearest even, subnormals become zero).
pub(super) fn pack(isa: Avx512Bf16, packing: Packing, x: &[f32], out: &mut [u8]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    unsafe fn run(isa: Avx512, unpacked: bool, x: &[f32], out: &mut [u8]) {
        assert!(out.len() == Packing::Bf16.row_bytes(x.len()));
        for (unit, out) in out.chunks_exact_mut(128).enumerate() {
            let load = |quarter: usize| {
                let from = (unit * 64 + quarter * 16).min(x.len());
                // SAFETY: `x.len() - from` elements lie from `from` on.
                unsafe { isa.load_partial(x.as_ptr().add(from), x.len() - from) }
            };
            // SAFETY: the caller's promise of the target features; same-size vectors are reinterpreted.
            let [low, high]: [__m512i; 2] = unsafe {
                [
                    std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(load(1), load(0))),
                    std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(load(3), load(2))),
                ]
            };
            // Groups of eight: even ones, then odd ones, as the unpacking of 16-byte lanes leaves weights.
            let [low, high] = if unpacked {
                [
                    _mm512_shuffle_i64x2::<0b10_00_10_00>(low, high),
                    _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high),
                ]
            } else {
                [low, high]
            };
            // SAFETY: `out` is 128 bytes long.
            unsafe {
                Bf16Engine(isa).store(out.as_mut_ptr(), low);
                Bf16Engine(isa).store(out.as_mut_ptr().add(64), high);
            }
        }
    }
    if !matches!(packing, Packing::Bf16 | Packing::Bf16Unpacked) {
        f32::pack(isa.0, packing, x, out);
        return;
    }
    // SAFETY: the value proves the target features.
    unsafe { run(isa.0, packing == Packing::Bf16Unpacked, x, out) }
}

/// Products with bfloat16 activations, or with f32 ones where those were packed.
pub(super) fn linear(
    isa: Avx512Bf16,
    w: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    unsafe fn run<D: Decode<Bf16Engine>>(
        isa: Avx512,
        w: &HostMatrix,
        rows: Range<usize>,
        x: &PackedRows<'_>,
        scratch: &mut KernelScratch,
        out: &mut [f32],
    ) {
        let tiling = Tiling { stream_tokens: 8 };
        let engine = Bf16Engine(isa);
        // SAFETY: the caller's promise.
        unsafe { generic::linear::<_, D, 3, 4>(engine, w, rows, x, tiling, scratch, out) }
    }
    let run = match (w.dtype(), x.packing) {
        (DType::Bf16, Packing::Bf16) => run::<Bf16Weights>,
        (DType::F8E4m3, Packing::Bf16Unpacked) => run::<E4m3Weights>,
        _ => return f32::linear(isa.0, w, rows, x, scratch, out),
    };
    // SAFETY: the value proves the target features; the decoder and the order of the activations are those of
    // the element type.
    unsafe { run(isa.0, w, rows, x, scratch, out) }
}

/// See [`generic::multiply`].
pub(super) fn multiply(isa: Avx512Bf16, packing: Packing, steps: usize) -> usize {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
    unsafe fn run(isa: Avx512, steps: usize) -> usize {
        generic::multiply(Bf16Engine(isa), steps)
    }
    if packing.element_bytes() == 4 {
        return f32::multiply(isa.0, packing, steps);
    }
    // SAFETY: the value proves the target features.
    unsafe { run(isa.0, steps) }
}
