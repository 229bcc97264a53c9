//! `q_latent[t] = Σ_i q[t][i] * W[i]` over the rows `i` of one head's `W_UK`: lanes along the latent, rows in
//! ascending order.

use super::{BLOCK, DecodeInOrder, Simd};
use crate::arch::AbsorbTask;
use crate::cpu::memory::KernelScratch;

/// Weight rows unpacked at a time: with a latent of 512 they fill half of a first-level cache.
const ROWS: usize = 8;

/// Tokens that share a load of the weights.
const TOKENS: usize = 4;

/// Distance at which weights are prefetched ahead of the reads.
const PREFETCH_BYTES: usize = 8192;

/// Computes out `[rows, rank]`.
///
/// # Safety
/// `D` decodes the element type of the task's matrix, one vector per unit, in order.
#[inline(always)]
pub(crate) unsafe fn mla_absorb<S: Simd, D: DecodeInOrder<S>>(
    simd: S,
    task: &AbsorbTask<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    let dims = task.dims;
    assert!(out.len() == task.rows * dims.rank && task.kv_b.cols() == dims.rank);
    out.fill(0.0);
    let stride = dims.rank.next_multiple_of(BLOCK);
    let unpacked = scratch.weights.f32s_mut(ROWS * stride);
    for first in (0..dims.nope).step_by(ROWS) {
        let count = ROWS.min(dims.nope - first);
        for i in 0..count {
            let row = task.head * (dims.nope + dims.v) + first + i;
            // SAFETY: the caller's promise about `D`.
            unsafe {
                unpack_scaled::<S, D>(simd, task, row, &mut unpacked[i * stride..][..stride])
            };
        }
        let mut token = 0;
        while token < task.rows {
            let begin = token * dims.rank;
            if task.rows - token >= TOKENS {
                let q = std::array::from_fn(|t| query(task, token + t, first, count));
                add_rows::<S, TOKENS>(simd, unpacked, stride, q, dims.rank, &mut out[begin..]);
                token += TOKENS;
            } else {
                let q = [query(task, token, first, count)];
                add_rows::<S, 1>(simd, unpacked, stride, q, dims.rank, &mut out[begin..]);
                token += 1;
            }
        }
    }
}

/// Elements `first..first + count` of one token's query.
#[inline(always)]
fn query<'a>(task: &AbsorbTask<'a>, token: usize, first: usize, count: usize) -> &'a [f32] {
    let dims = task.dims;
    let start = ((task.first_row + token) * dims.heads + task.head) * dims.nope + first;
    &task.q_nope[start..start + count]
}

/// `out[t] += Σ_i q[t][i] * w[i]` for `T` tokens, `rank` elements each.
#[inline(always)]
fn add_rows<S: Simd, const T: usize>(
    simd: S,
    w: &[f32],
    stride: usize,
    q: [&[f32]; T],
    rank: usize,
    out: &mut [f32],
) {
    let count = q[0].len();
    assert!(out.len() >= T * rank && w.len() >= count * stride && rank <= stride);
    for at in (0..rank).step_by(S::LANES) {
        // SAFETY: by the assertion, `rank - at` elements lie from `at` on in each row of `out`, and a whole
        // vector in each row of `w`, whose stride is a multiple of the lanes.
        unsafe {
            let target: [*mut f32; T] =
                std::array::from_fn(|t| out.as_mut_ptr().wrapping_add(t * rank + at));
            let mut sums = [simd.zero(); T];
            for t in 0..T {
                sums[t] = simd.load_partial(target[t], rank - at);
            }
            for i in 0..count {
                let w = simd.load(w.as_ptr().add(i * stride + at));
                for t in 0..T {
                    sums[t] = simd.fma(simd.splat(q[t][i]), w, sums[t]);
                }
            }
            for t in 0..T {
                simd.store_partial(target[t], rank - at, sums[t]);
            }
        }
    }
}

/// A weight row as f32, scales applied, padded with zeros to whole blocks.
///
/// # Safety
/// `D` decodes the element type of the task's matrix, one vector per unit, in order.
#[inline(always)]
unsafe fn unpack_scaled<S: Simd, D: DecodeInOrder<S>>(
    simd: S,
    task: &AbsorbTask<'_>,
    row: usize,
    out: &mut [f32],
) {
    let cols = task.kv_b.cols();
    let row_bytes = task.kv_b.row_bytes();
    let bytes = &task.kv_b.data()[row * row_bytes..(row + 1) * row_bytes];
    let scale_row = (task.kv_b.first_row() + row) / BLOCK;
    for (vector, out) in out.chunks_exact_mut(S::LANES).enumerate() {
        let from = (vector * S::LANES).min(cols);
        let n = (cols - from).min(S::LANES);
        // SAFETY: `n` elements lie from `from` on, and `out` is one vector long.
        unsafe {
            let p = bytes.as_ptr().add(from * D::BYTES);
            simd.prefetch(p.wrapping_add(PREFETCH_BYTES));
            let [mut w] = D::decode_up_to(simd, p, n);
            if let (true, Some(scales)) = (n > 0, task.kv_b.scales()) {
                let scale = scales.values[scale_row * scales.blocks_per_row + from / BLOCK];
                w = simd.mul(w, simd.splat(scale * D::FACTOR));
            }
            simd.store(out.as_mut_ptr(), w);
        }
    }
}
