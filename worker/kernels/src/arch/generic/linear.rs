//! `out[r][t] = Σ_k w[r][k] * x[t][k]`, streaming for a few tokens and tiled for many.

use std::ops::Range;

use super::{BLOCK, Decode, Engine};
use crate::arch::PackedRows;
use crate::cpu::memory::{AlignedBuf, KernelScratch};
use crate::{BlockScales, HostMatrix};

/// How far ahead of the reads weights are fetched: one row at a time as one stream, this far ahead, reads at
/// over nine tenths of what memory can give.
const PREFETCH_BYTES: usize = 8192;

/// Unpacked weights that a core's second-level cache holds beside the activations.
const UNPACKED_BYTES: usize = 256 << 10;

/// Blocks of one pass over the K axis in the tiled path: the activations of a register tile and the weights
/// of a few stay in the first-level cache.
const PASS_BLOCKS: usize = 4;

/// Tokens of one pass over the tokens in the tiled path.
const PASS_TOKENS: usize = 128;

/// Weight rows of a tile, at most.
const TILE_ROWS: usize = 24;

/// Up to so many tokens, time is that of reading, and rows are unpacked whole, as one stream.
const WHOLE_ROW_TOKENS: usize = 16;

/// Where the tiled path begins to pay.
#[derive(Clone, Copy)]
pub(crate) struct Tiling {
    /// The greatest number of tokens that the streaming path takes (1 to 8).
    pub(crate) stream_tokens: usize,
}

/// Weight rows in a matrix, by address.
#[derive(Clone, Copy)]
struct Weights<'a> {
    matrix: &'a HostMatrix,
    row_bytes: usize,
}

impl Weights<'_> {
    /// First byte of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> *const u8 {
        self.matrix.data()[row * self.row_bytes..(row + 1) * self.row_bytes].as_ptr()
    }

    /// The scales of a row's blocks; empty without scales.
    #[inline(always)]
    fn scales(&self, row: usize) -> &[f32] {
        match self.matrix.scales() {
            Some(BlockScales {
                values,
                blocks_per_row,
            }) => {
                let first = (self.matrix.first_row() + row) / BLOCK * blocks_per_row;
                &values[first..first + blocks_per_row]
            }
            None => &[],
        }
    }
}

/// Weight rows `rows` of `matrix` times all rows of `x` → out `[rows.len(), x.len()]`. `M` and `N` are the
/// weight rows and tokens of a register tile.
///
/// # Safety
/// `x` is packed for engine `E` and decoder `D`, whose element type is that of `matrix`.
#[inline(always)]
pub(crate) unsafe fn linear<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
    matrix: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    tiling: Tiling,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    let tokens = x.len();
    assert!(rows.end <= matrix.rows() && out.len() == rows.len() * tokens);
    assert!(x.cols == matrix.cols() && x.packing.element_bytes() == E::ELEMENT_BYTES);
    let weights = Weights {
        matrix,
        row_bytes: matrix.cols() * D::BYTES,
    };
    // SAFETY: operands fit each other by the assertions and the caller's promise.
    unsafe {
        if tokens > tiling.stream_tokens {
            tiled::<E, D, M, N>(engine, weights, rows, x, scratch, out);
            return;
        }
        match tokens {
            0 => {}
            1 => stream::<E, D, 1>(engine, weights, rows, x, out),
            2 => stream::<E, D, 2>(engine, weights, rows, x, out),
            3 => stream::<E, D, 3>(engine, weights, rows, x, out),
            4 => stream::<E, D, 4>(engine, weights, rows, x, out),
            5 => stream::<E, D, 5>(engine, weights, rows, x, out),
            6 => stream::<E, D, 6>(engine, weights, rows, x, out),
            7 => stream::<E, D, 7>(engine, weights, rows, x, out),
            _ => stream::<E, D, 8>(engine, weights, rows, x, out),
        }
    }
}

/// Weight rows that share a load of activations which leave the first-level cache.
const GROUP_ROWS: usize = 4;

/// Activations that stay in the first-level cache beside the weights that stream through it.
const CACHED_BYTES: usize = 28 << 10;

/// One weight row after another, each unit decoded once for all `T` tokens. Where the activations are too long
/// for the first-level cache, a few rows go through one part of them after the other.
///
/// # Safety
/// As [`linear`], with `x.len() == T`.
#[inline(always)]
unsafe fn stream<E: Engine, D: Decode<E>, const T: usize>(
    engine: E,
    weights: Weights<'_>,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    out: &mut [f32],
) {
    let activations: [*const u8; T] = std::array::from_fn(|t| x.row(t).as_ptr());
    let full_blocks = x.cols / BLOCK;
    let rest = x.cols % BLOCK;
    let block_bytes = T * BLOCK * E::ELEMENT_BYTES;
    let (group, part) = if full_blocks * block_bytes <= CACHED_BYTES {
        (1, full_blocks)
    } else {
        (GROUP_ROWS, CACHED_BYTES / block_bytes)
    };
    for (first, out) in rows.step_by(group).zip(out.chunks_mut(group * T)) {
        let mut sums = [[engine.zero(); T]; GROUP_ROWS];
        let group = first..first + out.len() / T;
        for first_block in (0..full_blocks).step_by(part.max(1)) {
            let blocks = first_block..full_blocks.min(first_block + part);
            for (row, sums) in group.clone().zip(&mut sums) {
                // SAFETY: whole blocks of the weight row and of every packed row.
                unsafe {
                    stream_blocks::<E, D, T>(
                        engine,
                        weights.row(row),
                        weights.scales(row),
                        blocks.clone(),
                        activations,
                        sums,
                    );
                }
            }
        }
        for ((row, sums), out) in group.zip(&mut sums).zip(out.chunks_exact_mut(T)) {
            if rest > 0 {
                let begin = full_blocks * BLOCK;
                // SAFETY: `rest` weights lie from `begin` on; packed rows are padded to whole blocks.
                let partial = unsafe {
                    let w = weights.row(row).add(begin * D::BYTES);
                    stream_block::<E, D, T>(engine, w, rest, activations, begin)
                };
                let scales = weights.scales(row);
                for t in 0..T {
                    sums[t] = add_block::<E, D>(engine, sums[t], partial[t], scales, full_blocks);
                }
            }
            for t in 0..T {
                out[t] = engine.reduce(sums[t]);
            }
            // SAFETY: the whole weight row.
            if D::NAN_APART && unsafe { D::any_nan(engine, weights.row(row), x.cols) } {
                out.fill(f32::NAN);
            }
        }
    }
}

/// Adds whole blocks of one weight row to the sums of `T` tokens, fetching ahead.
///
/// # Safety
/// The weight row `w` and every packed row have the blocks.
#[inline(always)]
unsafe fn stream_blocks<E: Engine, D: Decode<E>, const T: usize>(
    engine: E,
    w: *const u8,
    scales: &[f32],
    blocks: Range<usize>,
    activations: [*const u8; T],
    sums: &mut [E::Acc; T],
) {
    let mut totals = *sums;
    for block in blocks {
        let begin = block * BLOCK;
        // SAFETY: the caller's promise.
        let partial = unsafe {
            let w = w.add(begin * D::BYTES);
            for line in 0..BLOCK * D::BYTES / 64 {
                engine.prefetch(w.wrapping_add(PREFETCH_BYTES + line * 64));
            }
            stream_block::<E, D, T>(engine, w, BLOCK, activations, begin)
        };
        for t in 0..T {
            totals[t] = add_block::<E, D>(engine, totals[t], partial[t], scales, block);
        }
    }
    *sums = totals;
}

/// A block's sums for `T` tokens, of a weight row with `n` elements left.
///
/// # Safety
/// `min(n, BLOCK)` weights lie at `w`, and every packed row has a whole block at element `begin`.
#[inline(always)]
unsafe fn stream_block<E: Engine, D: Decode<E>, const T: usize>(
    engine: E,
    w: *const u8,
    n: usize,
    activations: [*const u8; T],
    begin: usize,
) -> [E::Acc; T] {
    let mut partial = [engine.zero(); T];
    for unit in 0..BLOCK / D::UNIT {
        let from = (unit * D::UNIT).min(n);
        // SAFETY: the caller's promise.
        unsafe {
            let p = w.add(from * D::BYTES);
            let decoded = D::decode_up_to(engine, p, (n - from).min(D::UNIT));
            for (i, &w) in decoded.as_ref().iter().enumerate() {
                let at = (begin + unit * D::UNIT + i * E::V_ELEMENTS) * E::ELEMENT_BYTES;
                for t in 0..T {
                    partial[t] = engine.mac(partial[t], w, engine.load(activations[t].add(at)));
                }
            }
        }
    }
    partial
}

#[inline(always)]
fn add_block<E: Engine, D: Decode<E>>(
    engine: E,
    sum: E::Acc,
    partial: E::Acc,
    scales: &[f32],
    block: usize,
) -> E::Acc {
    if D::SCALED {
        engine.add_scaled(sum, partial, scales[block] * D::FACTOR)
    } else {
        engine.add(sum, partial)
    }
}

/// Tiles of weight rows are unpacked once into the second-level cache and used for up to [`PASS_TOKENS`]
/// tokens; running sums rest in memory between passes over the K axis.
///
/// # Safety
/// As [`linear`].
#[inline(always)]
unsafe fn tiled<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
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
    let row_bytes = unpacked_blocks * BLOCK * E::ELEMENT_BYTES;
    let tile_rows = (UNPACKED_BYTES / row_bytes / M * M).clamp(M, TILE_ROWS);
    for first_row in rows.clone().step_by(tile_rows) {
        let tile = first_row..rows.end.min(first_row + tile_rows);
        for first_token in (0..tokens).step_by(PASS_TOKENS) {
            let count = PASS_TOKENS.min(tokens - first_token);
            let sums = scratch
                .sums
                .bytes_mut(tile.len() * count * size_of::<E::Acc>())
                .as_mut_ptr()
                .cast::<E::Acc>();
            for i in 0..tile.len() * count {
                // SAFETY: the buffer holds that many accumulators and is aligned to a cache line.
                unsafe { sums.add(i).write(engine.zero()) };
            }
            for first_block in (0..blocks).step_by(unpacked_blocks) {
                let pass = Pass {
                    rows: tile.clone(),
                    tokens: first_token..first_token + count,
                    blocks: first_block..blocks.min(first_block + unpacked_blocks),
                };
                // SAFETY: the caller's promise; `sums` is `[tile rows, count]`.
                unsafe {
                    run_pass::<E, D, M, N>(engine, weights, x, &pass, &mut scratch.weights, sums);
                }
            }
            for (i, row) in tile.clone().enumerate() {
                let at = (row - rows.start) * tokens + first_token;
                let out = &mut out[at..at + count];
                for (t, out) in out.iter_mut().enumerate() {
                    // SAFETY: in bounds as above, and every accumulator is initialised.
                    *out = engine.reduce(unsafe { sums.add(i * count + t).read() });
                }
                // SAFETY: the whole weight row.
                if D::NAN_APART && unsafe { D::any_nan(engine, weights.row(row), x.cols) } {
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
/// As [`linear`]; `sums` holds `[rows, tokens]` initialised accumulators of this pass.
#[inline(always)]
unsafe fn run_pass<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
    weights: Weights<'_>,
    x: &PackedRows<'_>,
    pass: &Pass,
    buffer: &mut AlignedBuf,
    sums: *mut E::Acc,
) {
    let row_bytes = pass.blocks.len() * BLOCK * E::ELEMENT_BYTES;
    let unpacked = buffer.bytes_mut(pass.rows.len() * row_bytes);
    for (row, out) in pass.rows.clone().zip(unpacked.chunks_exact_mut(row_bytes)) {
        // SAFETY: `out` has room for the pass's blocks of the row.
        unsafe { unpack::<E, D>(engine, weights, row, x.cols, &pass.blocks, out) };
    }
    for first in (0..pass.blocks.len()).step_by(PASS_BLOCKS) {
        let part = Part {
            row_bytes,
            first_block: first,
            blocks: PASS_BLOCKS.min(pass.blocks.len() - first),
        };
        // SAFETY: the caller's promise; the part lies within the pass.
        unsafe { multiply::<E, D, M, N>(engine, weights, unpacked, x, pass, &part, sums) };
    }
}

/// A part of a pass's blocks, and the distance of unpacked rows.
struct Part {
    row_bytes: usize,
    first_block: usize,
    blocks: usize,
}

/// Adds the products of some blocks of the unpacked rows to the running sums.
///
/// # Safety
/// As [`run_pass`]; `unpacked` holds the pass's rows and `part` lies within its blocks.
#[inline(always)]
unsafe fn multiply<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
    weights: Weights<'_>,
    unpacked: &[u8],
    x: &PackedRows<'_>,
    pass: &Pass,
    part: &Part,
    sums: *mut E::Acc,
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
                    column::<E, D, M, N>(engine, weights, unpacked, x, pass, part, sums);
                    N
                }
                left if left >= 4 => {
                    column::<E, D, M, 4>(engine, weights, unpacked, x, pass, part, sums);
                    4
                }
                2 | 3 => {
                    column::<E, D, M, 2>(engine, weights, unpacked, x, pass, part, sums);
                    2
                }
                _ => {
                    column::<E, D, M, 1>(engine, weights, unpacked, x, pass, part, sums);
                    1
                }
            };
        }
    }
}

/// Packed rows from `first` on.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    x: &'a PackedRows<'a>,
    first: usize,
}

/// All rows of the pass times `N` tokens, register tile by tile; `sums` points at the first token's column.
///
/// # Safety
/// As [`multiply`], for those tokens.
#[inline(always)]
unsafe fn column<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
    weights: Weights<'_>,
    unpacked: &[u8],
    x: Tokens<'_>,
    pass: &Pass,
    part: &Part,
    sums: *mut E::Acc,
) {
    let block_bytes = BLOCK * E::ELEMENT_BYTES;
    let first_block = pass.blocks.start + part.first_block;
    let stride = pass.tokens.len();
    let activations: [*const u8; N] =
        std::array::from_fn(|n| x.x.row(x.first + n)[first_block * block_bytes..].as_ptr());
    let weight_row =
        |row: usize| unpacked[row * part.row_bytes + part.first_block * block_bytes..].as_ptr();
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
            let w: [*const u8; M] = std::array::from_fn(|m| weight_row(row + m));
            let scales: [&[f32]; M] = std::array::from_fn(|m| scales(row + m));
            let sums = sums.add(row * stride);
            tile::<E, D, M, N>(engine, w, scales, activations, part.blocks, sums, stride);
        }
        for row in tall..rows {
            let (w, scales) = ([weight_row(row)], [scales(row)]);
            let sums = sums.add(row * stride);
            tile::<E, D, 1, N>(engine, w, scales, activations, part.blocks, sums, stride);
        }
    }
}

/// Unpacks the blocks `blocks` of a weight row, padded with zeros to whole blocks.
///
/// # Safety
/// As [`linear`]; `out` has room for the blocks.
#[inline(always)]
unsafe fn unpack<E: Engine, D: Decode<E>>(
    engine: E,
    weights: Weights<'_>,
    row: usize,
    cols: usize,
    blocks: &Range<usize>,
    out: &mut [u8],
) {
    let w = weights.row(row);
    let begin = blocks.start * BLOCK;
    let units = blocks.len() * BLOCK / D::UNIT;
    assert!(out.len() == units * D::UNIT * E::ELEMENT_BYTES);
    let whole_units = cols.saturating_sub(begin) / D::UNIT;
    for unit in 0..units.min(whole_units) {
        // SAFETY: a whole unit lies in the row, and `out` has room for every unit by the assertion.
        unsafe {
            let p = w.add((begin + unit * D::UNIT) * D::BYTES);
            for line in 0..(D::UNIT * D::BYTES).div_ceil(64) {
                engine.prefetch(p.wrapping_add(PREFETCH_BYTES + line * 64));
            }
            store_unit::<E, D>(engine, D::decode(engine, p), unit, out);
        }
    }
    for unit in whole_units..units {
        let from = (begin + unit * D::UNIT).min(cols);
        // SAFETY: `cols - from` elements, fewer than a unit, lie in the row; `out` as above.
        unsafe {
            let decoded = D::decode_partial(engine, w.add(from * D::BYTES), cols - from);
            store_unit::<E, D>(engine, decoded, unit, out);
        }
    }
}

/// # Safety
/// `out` has room for unit `unit`.
#[inline(always)]
unsafe fn store_unit<E: Engine, D: Decode<E>>(
    engine: E,
    decoded: D::Unit,
    unit: usize,
    out: &mut [u8],
) {
    for (i, &v) in decoded.as_ref().iter().enumerate() {
        let at = (unit * D::UNIT + i * E::V_ELEMENTS) * E::ELEMENT_BYTES;
        // SAFETY: the caller's promise.
        unsafe { engine.store(out.as_mut_ptr().add(at), v) };
    }
}

/// A register tile of `M` weight rows and `N` tokens over `blocks` blocks; accumulator `(m, n)` lies at
/// `sums[m * stride + n]`.
///
/// # Safety
/// `w` and `x` point at that many blocks of unpacked weights and packed activations, scales (if any) cover
/// the blocks, and the accumulators are initialised.
#[inline(always)]
unsafe fn tile<E: Engine, D: Decode<E>, const M: usize, const N: usize>(
    engine: E,
    w: [*const u8; M],
    scales: [&[f32]; M],
    x: [*const u8; N],
    blocks: usize,
    sums: *mut E::Acc,
    stride: usize,
) {
    // SAFETY: in bounds by the caller's promise.
    unsafe {
        let mut totals = [[engine.zero(); N]; M];
        for m in 0..M {
            for n in 0..N {
                totals[m][n] = sums.add(m * stride + n).read();
            }
        }
        for block in 0..blocks {
            let mut partial = [[engine.zero(); N]; M];
            for vector in 0..BLOCK / E::V_ELEMENTS {
                let at = (block * BLOCK + vector * E::V_ELEMENTS) * E::ELEMENT_BYTES;
                let mut weight = [engine.load(w[0].add(at)); M];
                for m in 1..M {
                    weight[m] = engine.load(w[m].add(at));
                }
                for n in 0..N {
                    let activation = engine.load(x[n].add(at));
                    for m in 0..M {
                        partial[m][n] = engine.mac(partial[m][n], weight[m], activation);
                    }
                }
            }
            for m in 0..M {
                for n in 0..N {
                    totals[m][n] =
                        add_block::<E, D>(engine, totals[m][n], partial[m][n], scales[m], block);
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
