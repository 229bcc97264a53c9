//! Engines: how products are summed; decoders: how a weight's bytes become an engine's operand.

use super::Simd;
use crate::SCALE_BLOCK;

/// Elements that share one scale and one partial sum.
pub(crate) const BLOCK: usize = SCALE_BLOCK;

/// A way to multiply and accumulate: of f32 by FMA today.
pub(crate) trait Engine: Copy {
    /// f32 partial sums.
    type Acc: Copy;
    /// A vector of weights or activations.
    type V: Copy;
    /// Elements of a vector; divides [`BLOCK`].
    const V_ELEMENTS: usize;
    /// Bytes of one element of packed activations and unpacked weights.
    const ELEMENT_BYTES: usize;

    fn zero(self) -> Self::Acc;
    /// `acc + w * x`.
    fn mac(self, acc: Self::Acc, w: Self::V, x: Self::V) -> Self::Acc;
    /// `acc + block * scale`.
    fn add_scaled(self, acc: Self::Acc, block: Self::Acc, scale: f32) -> Self::Acc;
    /// `acc + block`.
    fn add(self, acc: Self::Acc, block: Self::Acc) -> Self::Acc;
    /// The lanes' sum, by halves.
    fn reduce(self, acc: Self::Acc) -> f32;
    fn prefetch(self, p: *const u8);

    /// # Safety
    /// `V_ELEMENTS * ELEMENT_BYTES` bytes lie at `p`.
    unsafe fn load(self, p: *const u8) -> Self::V;
    /// # Safety
    /// `V_ELEMENTS * ELEMENT_BYTES` bytes may be written at `p`.
    unsafe fn store(self, p: *mut u8, v: Self::V);
}

/// A weight type as an engine reads it: units of a few vectors, whose elements may come out permuted, as
/// activations are then packed.
pub(crate) trait Decode<E: Engine> {
    /// The vectors of one unit.
    type Unit: Copy + AsRef<[E::V]>;
    /// Elements of a unit; divides [`BLOCK`].
    const UNIT: usize;
    /// Bytes of one element.
    const BYTES: usize;
    /// Whether blocks carry a scale, which `decode` leaves out.
    const SCALED: bool;
    /// Whether `decode` takes NaN for a number, so that rows are searched for it ([`any_nan`](Self::any_nan)).
    const NAN_APART: bool = false;
    /// A power of two by which decoded elements are too small; goes into the scale.
    const FACTOR: f32 = 1.0;
    /// # Safety
    /// `UNIT * BYTES` bytes lie at `p`.
    unsafe fn decode(engine: E, p: *const u8) -> Self::Unit;

    /// The first `n <= UNIT` elements, then zeros.
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn decode_partial(engine: E, p: *const u8, n: usize) -> Self::Unit {
        let mut padded = [0u8; 128];
        debug_assert!(n <= Self::UNIT && Self::UNIT * Self::BYTES <= padded.len());
        // SAFETY: the source has `n * BYTES` bytes by contract, the target has room for a unit; zero bytes
        // decode to zero in every type.
        unsafe {
            std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n * Self::BYTES);
            Self::decode(engine, padded.as_ptr())
        }
    }

    /// Whether any of `n` elements is NaN; asked only with [`NAN_APART`](Self::NAN_APART).
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn any_nan(_engine: E, _p: *const u8, _n: usize) -> bool {
        false
    }

    /// [`decode`](Self::decode) or [`decode_partial`](Self::decode_partial).
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn decode_up_to(engine: E, p: *const u8, n: usize) -> Self::Unit {
        // SAFETY: the caller's promise.
        unsafe {
            if n == Self::UNIT {
                Self::decode(engine, p)
            } else {
                Self::decode_partial(engine, p, n)
            }
        }
    }
}

/// A decoder of one vector, whose elements keep their order.
pub(crate) trait DecodeInOrder<S: Simd>: Decode<F32Engine<S>, Unit = [S::F; 1]> {}

impl<S: Simd, D: Decode<F32Engine<S>, Unit = [S::F; 1]>> DecodeInOrder<S> for D {}

/// f32 weights.
pub(crate) struct F32Weights;
/// binary16 weights.
pub(crate) struct F16Weights;
/// bfloat16 weights.
pub(crate) struct Bf16Weights;
/// FP8 E4M3 weights with block scales.
pub(crate) struct E4m3Weights;

/// Products and sums in f32: exact operands of every type, one rounding a step.
#[derive(Clone, Copy)]
pub(crate) struct F32Engine<S>(pub(crate) S);

impl<S: Simd> Engine for F32Engine<S> {
    type Acc = S::F;
    type V = S::F;
    const V_ELEMENTS: usize = S::LANES;
    const ELEMENT_BYTES: usize = 4;

    #[inline(always)]
    fn zero(self) -> S::F {
        self.0.zero()
    }
    #[inline(always)]
    fn mac(self, acc: S::F, w: S::F, x: S::F) -> S::F {
        self.0.fma(w, x, acc)
    }
    #[inline(always)]
    fn add_scaled(self, acc: S::F, block: S::F, scale: f32) -> S::F {
        self.0.fma(block, self.0.splat(scale), acc)
    }
    #[inline(always)]
    fn add(self, acc: S::F, block: S::F) -> S::F {
        self.0.add(acc, block)
    }
    #[inline(always)]
    fn reduce(self, acc: S::F) -> f32 {
        self.0.reduce_add(acc)
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        self.0.prefetch(p);
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u8) -> S::F {
        // SAFETY: the caller's promise, which is one vector's.
        unsafe { self.0.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8, v: S::F) {
        // SAFETY: the caller's promise, which is one vector's.
        unsafe { self.0.store(p.cast(), v) }
    }
}

/// Implements a decoder of the f32 engines by one vector load, elements in order.
macro_rules! decode_by {
    ($weights:ty, $bytes:literal, $scaled:literal, $load:ident) => {
        impl<S: Simd> Decode<F32Engine<S>> for $weights {
            type Unit = [S::F; 1];
            const UNIT: usize = S::LANES;
            const BYTES: usize = $bytes;
            const SCALED: bool = $scaled;
            #[inline(always)]
            unsafe fn decode(engine: F32Engine<S>, p: *const u8) -> [S::F; 1] {
                // SAFETY: the caller's promise: one unit is one vector of this type.
                unsafe { [engine.0.$load(p.cast())] }
            }
        }
    };
}

decode_by!(F32Weights, 4, false, load);
decode_by!(F16Weights, 2, false, load_f16);
decode_by!(Bf16Weights, 2, false, load_bf16);
decode_by!(E4m3Weights, 1, true, load_e4m3);

/// Packs one row as f32: a copy, padded with zeros.
pub(crate) fn pack_f32(x: &[f32], out: &mut [u8]) {
    let out: &mut [f32] = bytemuck::cast_slice_mut(out);
    out[..x.len()].copy_from_slice(x);
    out[x.len()..].fill(0.0);
}
