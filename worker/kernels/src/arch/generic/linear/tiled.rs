//! The tiled path: weights are unpacked into a core's cache once, for many tokens.

use std::ops::Range;

use super::{Weights, add_block, result};
use crate::arch::PackedRows;
use crate::arch::generic::{BLOCK, Decode, Simd};
use crate::cpu::memory::{AlignedBuf, KernelScratch};

/// Unpacked weight elements that a core's second-level cache holds beside the activations.
const UNPACKED_ELEMENTS: usize = (256 << 10) / 4;

/// Blocks per pass over the K axis in the tiled path: the activations of a register tile and the weights
/// of a few stay in the first-level cache.
const PASS_BLOCKS: usize = 4;

/// Tokens per pass over the tokens in the tiled path.
const PASS_TOKENS: usize = 128;

/// Maximum weight rows per tile.
const TILE_ROWS: usize = 24;

/// Number of tokens up to which reading dominates, and rows are unpacked whole, as one stream.
const WHOLE_ROW_TOKENS: usize = 16;

/// Unpacks tiles of weight rows once into the second-level cache and uses them for up to [`PASS_TOKENS`]
/// tokens; running sums stay in memory between passes over the K axis.
///
/// # Safety
/// As [`linear`](super::linear).
#[inline(always)]
pub(super) unsafe fn tiled<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    weights: Weights<'_>,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    let tokens = x.len();
    let blocks = x.cols.div_ceil(BLOCK);
    let unpacked_blocks = if tokens <= WHOLE_ROW_TOKENS {
        blocks.max(1)
    } else {
        PASS_BLOCKS
    };
    let row_elements = unpacked_blocks * BLOCK;
    let tile_rows = (UNPACKED_ELEMENTS / row_elements / M * M).clamp(M, TILE_ROWS);
    for first_row in rows.clone().step_by(tile_rows) {
        let tile = first_row..rows.end.min(first_row + tile_rows);
        for first_token in (0..tokens).step_by(PASS_TOKENS) {
            let count = PASS_TOKENS.min(tokens - first_token);
            let sums = scratch
                .sums
                .f32s_mut(tile.len() * count * S::LANES)
                .as_mut_ptr()
                .cast::<S::F>();
            for i in 0..tile.len() * count {
                // SAFETY: the buffer holds that many accumulators and is aligned to a cache line.
                unsafe { sums.add(i).write(simd.zero()) };
            }
            for first_block in (0..blocks).step_by(unpacked_blocks) {
                let pass = Pass {
                    rows: tile.clone(),
                    tokens: first_token..first_token + count,
                    blocks: first_block..blocks.min(first_block + unpacked_blocks),
                };
                // SAFETY: the caller's promise; `sums` is `[tile rows, count]`.
                unsafe {
                    run_pass::<S, D, M, N>(simd, weights, x, &pass, &mut scratch.weights, sums);
                }
            }
            for (i, row) in tile.clone().enumerate() {
                let at = (row - rows.start) * tokens + first_token;
                let out = &mut out[at..at + count];
                for (t, out) in out.iter_mut().enumerate() {
                    // SAFETY: in bounds as above, and every accumulator is initialised.
                    *out = result::<S, D>(simd, unsafe { sums.add(i * count + t).read() });
                }
                // SAFETY: the whole weight row.
                if unsafe { weights.has_nan::<S, D>(simd, row) } {
                    out.fill(f32::NAN);
                }
            }
        }
    }
}

/// A part of a product: weight rows, tokens, and blocks of the K axis.
struct Pass {
    rows: Range<usize>,
    tokens: Range<usize>,
    blocks: Range<usize>,
}

/// # Safety
/// As [`linear`](super::linear); `sums` holds `[rows, tokens]` initialised accumulators of this pass.
#[inline(always)]
unsafe fn run_pass<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    weights: Weights<'_>,
    x: &PackedRows<'_>,
    pass: &Pass,
    buffer: &mut AlignedBuf,
    sums: *mut S::F,
) {
    let row_elements = pass.blocks.len() * BLOCK;
    let unpacked = buffer.f32s_mut(pass.rows.len() * row_elements);
    for (row, out) in pass
        .rows
        .clone()
        .zip(unpacked.chunks_exact_mut(row_elements))
    {
        // SAFETY: `out` has room for the pass's blocks of the row.
        unsafe { unpack::<S, D>(simd, weights, row, x.cols, &pass.blocks, out) };
    }
    for first in (0..pass.blocks.len()).step_by(PASS_BLOCKS) {
        let part = Part {
            row_elements,
            first_block: first,
            blocks: PASS_BLOCKS.min(pass.blocks.len() - first),
        };
        // SAFETY: the caller's promise; the part lies within the pass.
        unsafe { multiply::<S, D, M, N>(simd, weights, unpacked, x, pass, &part, sums) };
    }
}

/// A part of a pass's blocks, and the distance between unpacked rows.
struct Part {
    row_elements: usize,
    first_block: usize,
    blocks: usize,
}

/// Adds the products of some blocks of the unpacked rows to the running sums.
///
/// # Safety
/// As [`run_pass`]; `unpacked` holds the pass's rows and `part` lies within its blocks.
#[inline(always)]
unsafe fn multiply<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    weights: Weights<'_>,
    unpacked: &[f32],
    x: &PackedRows<'_>,
    pass: &Pass,
    part: &Part,
    sums: *mut S::F,
) {
    let count = pass.tokens.len();
    let mut token = 0;
    while token < count {
        // SAFETY: the caller's promise; the tokens lie within the pass.
        unsafe {
            let sums = sums.add(token);
            let x = Tokens {
                x,
                first: pass.tokens.start + token,
            };
            token += match count - token {
                left if left >= N => {
                    column::<S, D, M, N>(simd, weights, unpacked, x, pass, part, sums);
                    N
                }
                left if left >= 4 => {
                    column::<S, D, M, 4>(simd, weights, unpacked, x, pass, part, sums);
                    4
                }
                2 | 3 => {
                    column::<S, D, M, 2>(simd, weights, unpacked, x, pass, part, sums);
                    2
                }
                _ => {
                    column::<S, D, M, 1>(simd, weights, unpacked, x, pass, part, sums);
                    1
                }
            };
        }
    }
}

/// Packed rows, starting at `first`.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    x: &'a PackedRows<'a>,
    first: usize,
}

/// Multiplies all rows of the pass by `N` tokens, one register tile at a time;
/// `sums` points at the first token's column.
///
/// # Safety
/// As [`multiply`], for those tokens.
#[inline(always)]
unsafe fn column<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    weights: Weights<'_>,
    unpacked: &[f32],
    x: Tokens<'_>,
    pass: &Pass,
    part: &Part,
    sums: *mut S::F,
) {
    let first_block = pass.blocks.start + part.first_block;
    let stride = pass.tokens.len();
    let activations: [*const f32; N] =
        std::array::from_fn(|n| x.x.row(x.first + n)[first_block * BLOCK..].as_ptr());
    let weight_row =
        |row: usize| unpacked[row * part.row_elements + part.first_block * BLOCK..].as_ptr();
    let scales = |row: usize| {
        let scales = weights.scales(pass.rows.start + row);
        scales
            .get(first_block..first_block + part.blocks)
            .unwrap_or(&[])
    };
    let rows = pass.rows.len();
    let tall = rows / M * M;
    // SAFETY: unpacked rows and packed rows hold the part's blocks, and the accumulators of each row lie
    // `stride` apart.
    unsafe {
        for row in (0..tall).step_by(M) {
            let w: [*const f32; M] = std::array::from_fn(|m| weight_row(row + m));
            let scales: [&[f32]; M] = std::array::from_fn(|m| scales(row + m));
            let sums = sums.add(row * stride);
            tile::<S, D, M, N>(simd, w, scales, activations, part.blocks, sums, stride);
        }
        for row in tall..rows {
            let (w, scales) = ([weight_row(row)], [scales(row)]);
            let sums = sums.add(row * stride);
            tile::<S, D, 1, N>(simd, w, scales, activations, part.blocks, sums, stride);
        }
    }
}

/// Unpacks the blocks `blocks` of a weight row, padded with zeros to whole blocks.
///
/// # Safety
/// As [`linear`](super::linear); `out` has room for the blocks.
#[inline(always)]
unsafe fn unpack<S: Simd, D: Decode<S>>(
    simd: S,
    weights: Weights<'_>,
    row: usize,
    cols: usize,
    blocks: &Range<usize>,
    out: &mut [f32],
) {
    let w = weights.row(row);
    let begin = blocks.start * BLOCK;
    let units = blocks.len() * BLOCK / D::UNIT;
    assert!(out.len() == units * D::UNIT);
    let whole_units = cols.saturating_sub(begin) / D::UNIT;
    for unit in 0..units.min(whole_units) {
        // SAFETY: a whole unit lies in the row, and `out` has room for every unit by the assertion.
        unsafe {
            let p = w.add((begin + unit * D::UNIT) * D::BYTES);
            weights.prefetch(simd, p, D::UNIT * D::BYTES, 1);
            store_unit::<S, D>(simd, D::decode(simd, p), unit, out);
        }
    }
    for unit in whole_units..units {
        let from = (begin + unit * D::UNIT).min(cols);
        // SAFETY: `cols - from` elements, fewer than a unit, lie in the row; `out` as above.
        unsafe {
            let decoded = D::decode_partial(simd, w.add(from * D::BYTES), cols - from);
            store_unit::<S, D>(simd, decoded, unit, out);
        }
    }
}

/// # Safety
/// `out` has room for unit `unit`.
#[inline(always)]
unsafe fn store_unit<S: Simd, D: Decode<S>>(
    simd: S,
    decoded: D::Unit,
    unit: usize,
    out: &mut [f32],
) {
    for (i, &v) in decoded.as_ref().iter().enumerate() {
        let at = unit * D::UNIT + i * S::LANES;
        // SAFETY: the caller's promise.
        unsafe { simd.store(out.as_mut_ptr().add(at), v) };
    }
}

/// Computes a register tile of `M` weight rows and `N` tokens over `blocks` blocks; accumulator `(m, n)` lies at
/// `sums[m * stride + n]`.
///
/// # Safety
/// `w` and `x` point at that many blocks of unpacked weights and packed activations, scales (if any) cover
/// the blocks, and the accumulators are initialised.
#[inline(always)]
unsafe fn tile<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    w: [*const f32; M],
    scales: [&[f32]; M],
    x: [*const f32; N],
    blocks: usize,
    sums: *mut S::F,
    stride: usize,
) {
    // SAFETY: in bounds by the caller's promise.
    unsafe {
        let mut totals = [[simd.zero(); N]; M];
        for m in 0..M {
            for n in 0..N {
                totals[m][n] = sums.add(m * stride + n).read();
            }
        }
        for block in 0..blocks {
            let mut partial = [[simd.zero(); N]; M];
            for vector in 0..BLOCK / S::LANES {
                let at = block * BLOCK + vector * S::LANES;
                let mut weight = [simd.load(w[0].add(at)); M];
                for m in 1..M {
                    weight[m] = simd.load(w[m].add(at));
                }
                for n in 0..N {
                    let activation = simd.load(x[n].add(at));
                    for m in 0..M {
                        partial[m][n] = simd.fma(weight[m], activation, partial[m][n]);
                    }
                }
            }
            for m in 0..M {
                for n in 0..N {
                    totals[m][n] =
                        add_block::<S, D>(simd, totals[m][n], partial[m][n], scales[m], block);
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                sums.add(m * stride + n).write(totals[m][n]);
            }
        }
    }
}
