//! `out[r][t] = Σ_k w[r][k] * x[t][k]`, streaming for a few tokens and tiled for many.

use std::ops::Range;

use super::{BLOCK, Decode, Simd};
use crate::arch::PackedRows;
use crate::arch::tuning::Tuning;
use crate::cpu::memory::KernelScratch;
use crate::{BlockScales, HostMatrix};

mod stream;
mod tiled;

use stream::stream;
use tiled::tiled;

/// Number of activation elements, over all tokens, that stay in the first-level
/// cache beside the weights that stream through it.
const NEAR_ELEMENTS: usize = (12 << 10) / 4;

/// Maximum number of tokens for the streaming path.
const STREAM_TOKENS: usize = 8;

/// Weight rows in a matrix, by address.
#[derive(Clone, Copy)]
struct Weights<'a> {
    matrix: &'a HostMatrix,
    row_bytes: usize,
    /// Distance of prefetches ahead of the reads, over all streams together; 0: none.
    prefetch_bytes: usize,
}

impl Weights<'_> {
    /// First byte of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> *const u8 {
        self.matrix.data()[row * self.row_bytes..(row + 1) * self.row_bytes].as_ptr()
    }

    /// The scales of a row's blocks; empty if there are no scales.
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

    /// Prefetches the `bytes` bytes that one of `streams` streams of reads, now at `p`, will reach later.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S, p: *const u8, bytes: usize, streams: usize) {
        if self.prefetch_bytes > 0 {
            let ahead = p.wrapping_add(self.prefetch_bytes / streams);
            for line in 0..bytes.div_ceil(64) {
                simd.prefetch(ahead.wrapping_add(line * 64));
            }
        }
    }

    /// Whether a row holds a NaN that its decoder takes for a number. A row without one is searched only once.
    ///
    /// # Safety
    /// `D` decodes the matrix's element type.
    #[inline(always)]
    unsafe fn has_nan<S: Simd, D: Decode<S>>(&self, simd: S, row: usize) -> bool {
        if !D::NAN_APART || self.matrix.is_free_of_nan(row) {
            return false;
        }
        // SAFETY: the whole weight row.
        let found = unsafe { D::any_nan(simd, self.row(row), self.matrix.cols()) };
        if !found {
            self.matrix.remember_free_of_nan(row);
        }
        found
    }
}

/// Multiplies weight rows `rows` of `matrix` by all rows of `x` → out `[rows.len(), x.len()]`. `M` and `N` are the
/// weight rows and tokens of a register tile.
///
/// # Safety
/// `x` is packed for decoder `D`, whose element type is that of `matrix`.
#[inline(always)]
pub(crate) unsafe fn linear<S: Simd, D: Decode<S>, const M: usize, const N: usize>(
    simd: S,
    matrix: &HostMatrix,
    rows: Range<usize>,
    x: &PackedRows<'_>,
    tuning: Tuning,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    let tokens = x.len();
    assert!(rows.end <= matrix.rows() && out.len() == rows.len() * tokens);
    assert!(x.cols == matrix.cols());
    let near = tokens * x.cols <= NEAR_ELEMENTS;
    let weights = Weights {
        matrix,
        row_bytes: matrix.row_bytes(),
        prefetch_bytes: if near {
            tuning.prefetch_bytes
        } else {
            tuning.far_prefetch_bytes
        },
    };
    // SAFETY: operands fit each other by the assertions and the caller's promise.
    unsafe {
        match tokens {
            0 => {}
            1 if near => stream::<S, D, 1, 2, 2>(simd, weights, rows, x, out),
            1 => stream::<S, D, 1, 4, 1>(simd, weights, rows, x, out),
            2 if near => stream::<S, D, 2, 2, 2>(simd, weights, rows, x, out),
            2 => stream::<S, D, 2, 4, 1>(simd, weights, rows, x, out),
            3 => stream::<S, D, 3, 2, 1>(simd, weights, rows, x, out),
            4 => stream::<S, D, 4, 2, 1>(simd, weights, rows, x, out),
            5 => stream::<S, D, 5, 2, 1>(simd, weights, rows, x, out),
            6 => stream::<S, D, 6, 2, 1>(simd, weights, rows, x, out),
            7 => stream::<S, D, 7, 2, 1>(simd, weights, rows, x, out),
            STREAM_TOKENS => stream::<S, D, STREAM_TOKENS, 2, 1>(simd, weights, rows, x, out),
            _ => tiled::<S, D, M, N>(simd, weights, rows, x, scratch, out),
        }
    }
}

/// The scales of `count` blocks, starting at `first`; empty if there are no scales.
#[inline(always)]
fn block_scales<S: Simd, D: Decode<S>>(scales: &[f32], first: usize, count: usize) -> &[f32] {
    if D::SCALED {
        &scales[first..][..count]
    } else {
        &[]
    }
}

/// Adds a block's sum, times the block's scale.
#[inline(always)]
fn add_block<S: Simd, D: Decode<S>>(
    simd: S,
    sum: S::F,
    partial: S::F,
    scales: &[f32],
    block: usize,
) -> S::F {
    if D::SCALED {
        simd.fma(partial, simd.splat(scales[block]), sum)
    } else {
        simd.add(sum, partial)
    }
}

/// The final result of a row's sum.
#[inline(always)]
fn result<S: Simd, D: Decode<S>>(simd: S, sum: S::F) -> f32 {
    simd.reduce_add(sum) * D::FACTOR
}
