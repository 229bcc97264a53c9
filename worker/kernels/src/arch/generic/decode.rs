//! Decoders: from a weight's bytes to vectors of f32.

use super::Simd;
use crate::SCALE_BLOCK;

/// Elements that share one scale and one partial sum.
pub(crate) const BLOCK: usize = SCALE_BLOCK;

/// A weight type as an instruction set reads it: units of a few vectors, whose elements may come out permuted;
/// activations are then packed in the same order.
pub(crate) trait Decode<S: Simd> {
    /// The vectors of one unit.
    type Unit: Copy + AsRef<[S::F]>;
    /// Elements per unit; divides [`BLOCK`].
    const UNIT: usize;
    /// Bytes per element.
    const BYTES: usize;
    /// Whether blocks carry a scale, which `decode` leaves out.
    const SCALED: bool;
    /// Whether `decode` treats NaN as a number, so that rows are searched for it ([`any_nan`](Self::any_nan)).
    const NAN_APART: bool = false;
    /// Power of two that sums of decoded elements times packed activations must be multiplied by.
    const FACTOR: f32 = 1.0;
    /// # Safety
    /// `UNIT * BYTES` bytes lie at `p`.
    unsafe fn decode(simd: S, p: *const u8) -> Self::Unit;

    /// The first `n <= UNIT` elements, then zeros.
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn decode_partial(simd: S, p: *const u8, n: usize) -> Self::Unit {
        let mut padded = [0u8; 128];
        debug_assert!(n <= Self::UNIT && Self::UNIT * Self::BYTES <= padded.len());
        // SAFETY: the source has `n * BYTES` bytes by contract, the target has room for a unit; zero bytes
        // decode to zero in every type.
        unsafe {
            std::ptr::copy_nonoverlapping(p, padded.as_mut_ptr(), n * Self::BYTES);
            Self::decode(simd, padded.as_ptr())
        }
    }

    /// Whether any of `n` elements is NaN; called only with [`NAN_APART`](Self::NAN_APART).
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn any_nan(_simd: S, _p: *const u8, _n: usize) -> bool {
        false
    }

    /// Calls [`decode`](Self::decode) or [`decode_partial`](Self::decode_partial).
    ///
    /// # Safety
    /// `n * BYTES` bytes lie at `p`.
    #[inline(always)]
    unsafe fn decode_up_to(simd: S, p: *const u8, n: usize) -> Self::Unit {
        // SAFETY: the caller's promise.
        unsafe {
            if n == Self::UNIT {
                Self::decode(simd, p)
            } else {
                Self::decode_partial(simd, p, n)
            }
        }
    }
}

/// A decoder of one vector that keeps the order of the elements.
pub(crate) trait DecodeInOrder<S: Simd>: Decode<S, Unit = [S::F; 1]> {}

impl<S: Simd, D: Decode<S, Unit = [S::F; 1]>> DecodeInOrder<S> for D {}

/// f32 weights.
pub(crate) struct F32Weights;
/// binary16 weights.
pub(crate) struct F16Weights;
/// bfloat16 weights.
pub(crate) struct Bf16Weights;
/// FP8 E4M3 weights with block scales.
pub(crate) struct E4m3Weights;

/// Implements a decoder with one vector load, elements in order.
macro_rules! decode_by {
    ($weights:ty, $bytes:literal, $scaled:literal, $load:ident) => {
        impl<S: Simd> Decode<S> for $weights {
            type Unit = [S::F; 1];
            const UNIT: usize = S::LANES;
            const BYTES: usize = $bytes;
            const SCALED: bool = $scaled;
            #[inline(always)]
            unsafe fn decode(simd: S, p: *const u8) -> [S::F; 1] {
                // SAFETY: the caller's promise: one unit is one vector of this type.
                unsafe { [simd.$load(p.cast())] }
            }
        }
    };
}

decode_by!(F32Weights, 4, false, load);
decode_by!(F16Weights, 2, false, load_f16);
decode_by!(Bf16Weights, 2, false, load_bf16);
decode_by!(E4m3Weights, 1, true, load_e4m3);

/// Packs one row in order: a copy, padded with zeros.
pub(crate) fn pack_in_order(x: &[f32], out: &mut [f32]) {
    out[..x.len()].copy_from_slice(x);
    out[x.len()..].fill(0.0);
}
