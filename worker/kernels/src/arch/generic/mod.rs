//! Each algorithm, written once over the vector operations of an instruction set.
//!
//! Everything here is `#[inline(always)]`, so that it is compiled inside the function in the instruction
//! set's module that enables the target features; called from elsewhere it would be correct but slow.
//!
//! Accumulation order of a product of length K, the same in every path: the K axis is cut into blocks of
//! 128; within a block each lane sums its elements in ascending order from zero; the block's sum, times its
//! scale, is added to the row's running sum in the order of the blocks; finally, lanes are summed by halves, and
//! the sum is multiplied by the decoder's power of two.
//! The order does not depend on the number of rows, tokens or threads.

// A register tile is indexed by its rows and tokens; iterators over three arrays at once would hide that.
#![allow(clippy::needless_range_loop)]

mod absorb;
mod attention;
mod decode;
mod elementwise;
mod linear;
mod probe;
mod simd;

pub(crate) use absorb::mla_absorb;
pub(crate) use attention::attention;
pub(crate) use decode::{BLOCK, Decode, DecodeInOrder, pack_in_order};
pub(crate) use decode::{Bf16Weights, E4m3Weights, F16Weights, F32Weights};
pub(crate) use elementwise::{rms_norm, silu_mul};
pub(crate) use linear::linear;
pub(crate) use probe::{multiply, read};
pub(crate) use simd::Simd;
