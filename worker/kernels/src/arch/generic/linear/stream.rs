//! The streaming path: weights pass from memory through registers once, for a few tokens.

use std::ops::Range;

use super::{Weights, add_block, block_scales, result};
use crate::arch::PackedRows;
use crate::arch::generic::{BLOCK, Decode, Simd};

/// The operands for `T` tokens.
#[derive(Clone, Copy)]
struct Operands<'a, const T: usize> {
    weights: Weights<'a>,
    activations: [*const f32; T],
    cols: usize,
}

/// Processes `R` weight rows at a time, each unit decoded once for all `T` tokens. The rows share the loads of
/// activations. They lie far apart, so that memory is read as `R` contiguous streams, which the hardware
/// follows; adjacent rows would be many short ones. `R * B` blocks at a time have independent chains of products:
/// while one waits for memory or its last product, the others proceed.
///
/// # Safety
/// As [`linear`](super::linear), with `x.len() == T`.
#[inline(always)]
pub(super) unsafe fn stream<
    S: Simd,
    D: Decode<S>,
    const T: usize,
    const R: usize,
    const B: usize,
>(
    simd: S,
    weights: Weights<'_>,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    out: &mut [f32],
) {
    let operands = Operands {
        weights,
        activations: std::array::from_fn(|t| x.row(t).as_ptr()),
        cols: x.cols,
    };
    let stride = rows.len() / R;
    for i in 0..stride {
        let far = std::array::from_fn(|r| i + r * stride);
        // SAFETY: the caller's promise.
        unsafe { stream_rows::<S, D, T, R, B>(simd, operands, rows.start, far, out) };
    }
    for i in R * stride..rows.len() {
        // SAFETY: the caller's promise.
        unsafe { stream_rows::<S, D, T, 1, B>(simd, operands, rows.start, [i], out) };
    }
}

/// Computes the products of `R` weight rows, counted from `first`.
///
/// # Safety
/// As [`stream`].
#[inline(always)]
unsafe fn stream_rows<S: Simd, D: Decode<S>, const T: usize, const R: usize, const B: usize>(
    simd: S,
    operands: Operands<'_, T>,
    first: usize,
    places: [usize; R],
    out: &mut [f32],
) {
    let weights = operands.weights;
    let rows = Rows {
        w: std::array::from_fn(|r| weights.row(first + places[r])),
        scales: std::array::from_fn(|r| weights.scales(first + places[r])),
    };
    let blocks = operands.cols / BLOCK;
    let mut sums = [[simd.zero(); T]; R];
    let mut block = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while block + B <= blocks {
            add_blocks::<S, D, T, R, B>(simd, operands, rows, block, &mut sums);
            block += B;
        }
        while block < blocks {
            add_blocks::<S, D, T, R, 1>(simd, operands, rows, block, &mut sums);
            block += 1;
        }
        if block * BLOCK < operands.cols {
            add_last_block::<S, D, T, R>(simd, operands, rows, block, &mut sums);
        }
    }
    for r in 0..R {
        let out = &mut out[places[r] * T..][..T];
        for t in 0..T {
            out[t] = result::<S, D>(simd, sums[r][t]);
        }
        // SAFETY: `D` decodes the matrix.
        if unsafe { weights.has_nan::<S, D>(simd, first + places[r]) } {
            out.fill(f32::NAN);
        }
    }
}

/// `R` weight rows.
#[derive(Clone, Copy)]
struct Rows<'a, const R: usize> {
    w: [*const u8; R],
    scales: [&'a [f32]; R],
}

/// Adds `B` whole blocks of `R` rows to the sums of `T` tokens, prefetching ahead.
///
/// # Safety
/// The weight rows and every packed row have the blocks.
#[inline(always)]
unsafe fn add_blocks<S: Simd, D: Decode<S>, const T: usize, const R: usize, const B: usize>(
    simd: S,
    operands: Operands<'_, T>,
    rows: Rows<'_, R>,
    first_block: usize,
    sums: &mut [[S::F; T]; R],
) {
    let begin = first_block * BLOCK;
    let mut scales = rows.scales;
    for r in 0..R {
        let w = rows.w[r].wrapping_add(begin * D::BYTES);
        operands.weights.prefetch(simd, w, B * BLOCK * D::BYTES, R);
        scales[r] = block_scales::<S, D>(scales[r], first_block, B);
    }
    let mut partial = [[[simd.zero(); T]; R]; B];
    for unit in 0..BLOCK / D::UNIT {
        for b in 0..B {
            let from = begin + b * BLOCK + unit * D::UNIT;
            // SAFETY: the caller's promise.
            unsafe {
                let mut w = [D::decode(simd, rows.w[0].add(from * D::BYTES)); R];
                for r in 1..R {
                    w[r] = D::decode(simd, rows.w[r].add(from * D::BYTES));
                }
                mac_unit::<S, D, T, R>(simd, w, operands.activations, from, &mut partial[b]);
            }
        }
    }
    for b in 0..B {
        for r in 0..R {
            for t in 0..T {
                let partial = partial[b][r][t];
                sums[r][t] = add_block::<S, D>(simd, sums[r][t], partial, scales[r], b);
            }
        }
    }
}

/// Adds the last, partial block of `R` rows.
///
/// # Safety
/// As [`add_blocks`], except that the weight rows end within the block.
#[inline(always)]
unsafe fn add_last_block<S: Simd, D: Decode<S>, const T: usize, const R: usize>(
    simd: S,
    operands: Operands<'_, T>,
    rows: Rows<'_, R>,
    block: usize,
    sums: &mut [[S::F; T]; R],
) {
    let mut partial = [[simd.zero(); T]; R];
    for from in (block * BLOCK..(block + 1) * BLOCK).step_by(D::UNIT) {
        let at = from.min(operands.cols);
        let n = (operands.cols - at).min(D::UNIT);
        // SAFETY: `cols - at` weights lie from `at` on; packed rows have the whole block.
        unsafe {
            let mut w = [D::decode_up_to(simd, rows.w[0].add(at * D::BYTES), n); R];
            for r in 1..R {
                w[r] = D::decode_up_to(simd, rows.w[r].add(at * D::BYTES), n);
            }
            mac_unit::<S, D, T, R>(simd, w, operands.activations, from, &mut partial);
        }
    }
    for r in 0..R {
        for t in 0..T {
            let scales = rows.scales[r];
            sums[r][t] = add_block::<S, D>(simd, sums[r][t], partial[r][t], scales, block);
        }
    }
}

/// Adds the products of one unit of each of `R` weight rows with `T` tokens, starting at element `from`.
///
/// # Safety
/// Every packed row has a whole unit there.
#[inline(always)]
unsafe fn mac_unit<S: Simd, D: Decode<S>, const T: usize, const R: usize>(
    simd: S,
    w: [D::Unit; R],
    activations: [*const f32; T],
    from: usize,
    partial: &mut [[S::F; T]; R],
) {
    for i in 0..D::UNIT / S::LANES {
        let at = from + i * S::LANES;
        for t in 0..T {
            // SAFETY: the caller's promise.
            let x = unsafe { simd.load(activations[t].add(at)) };
            for r in 0..R {
                partial[r][t] = simd.fma(w[r].as_ref()[i], x, partial[r][t]);
            }
        }
    }
}
