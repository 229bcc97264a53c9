//! Linear layers: activations are packed once and weight rows are split over the threads;
//! also latent attention's per-head up-projections.

use std::sync::Arc;

use crate::arch::{AbsorbTask, PackedRows, Packing, RowSet, packed_len};
use crate::ops::LinearOps;
use crate::{HostMatrix, KernelError, MlaHeads, checks};

use super::CpuBackend;
use super::memory::{CpuTensor, PooledBuf, SharedMatrix};

/// Minimum weight bytes that make a piece worth a thread.
pub(super) const MIN_PIECE_BYTES: usize = 1 << 16;

/// Tokens that one read of a weight serves for free: up to this number, reading dominates the time.
pub(super) const FREE_TOKENS: usize = 4;

/// Packed activations and their buffer.
pub(super) struct Packed {
    buffer: PooledBuf,
    packing: Packing,
    rows: usize,
    cols: usize,
}

impl Packed {
    pub(super) fn rows<'a>(&'a self, rows: RowSet<'a>) -> PackedRows<'a> {
        PackedRows {
            values: self.buffer.f32s(self.rows * packed_len(self.cols)),
            packing: self.packing,
            cols: self.cols,
            rows,
        }
    }

    pub(super) fn all(&self) -> PackedRows<'_> {
        self.rows(RowSet::Range {
            first: 0,
            count: self.rows,
        })
    }
}

impl LinearOps for CpuBackend {
    fn linear(
        &self,
        x: &CpuTensor,
        w: &HostMatrix,
        bias: Option<&Arc<[f32]>>,
    ) -> Result<CpuTensor, KernelError> {
        let bias = bias.map(|b| &**b);
        let (x_shape, w_shape) = ((x.rows(), x.cols()), (w.rows(), w.cols()));
        checks::linear(x_shape, w_shape, bias.map(<[f32]>::len))?;
        let packed = self.pack(x.as_slice(), x.rows(), self.packing(w.dtype()));
        let mut y = self.tensor(x.rows(), w.rows());
        self.linear_into(w, &packed.all(), y.as_mut_slice(), w.rows(), 0, bias);
        Ok(y)
    }

    fn mla_absorb(
        &self,
        q_nope: &CpuTensor,
        kv_b: &HostMatrix,
        dims: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        check_mla("mla_absorb", q_nope, dims.nope, kv_b, dims)?;
        let tokens = q_nope.rows();
        let mut out = self.tensor(tokens, dims.heads * dims.rank);
        if tokens == 0 || dims.rank == 0 {
            return Ok(out);
        }
        let shared = SharedMatrix::new(out.as_mut_slice(), dims.heads * dims.rank);
        self.pool.run(dims.heads, |piece| {
            let head = piece.index;
            let mut scratch = self.scratch(piece.worker);
            let scratch = &mut *scratch;
            let tile = scratch.tile.f32s_mut(tokens * dims.rank);
            let task = AbsorbTask {
                kv_b,
                dims,
                head,
                q_nope: q_nope.as_slice(),
                first_row: 0,
                rows: tokens,
            };
            self.kernels.mla_absorb(&task, &mut scratch.kernel, tile);
            for (t, row) in tile.chunks(dims.rank).enumerate() {
                // SAFETY: each piece writes the columns of its own head.
                let out = unsafe { shared.part(t, head * dims.rank..(head + 1) * dims.rank) };
                out.copy_from_slice(row);
            }
        });
        Ok(out)
    }

    fn mla_expand(
        &self,
        latent: &CpuTensor,
        kv_b: &HostMatrix,
        dims: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        check_mla("mla_expand", latent, dims.rank, kv_b, dims)?;
        let tokens = latent.rows();
        let mut out = self.tensor(tokens, dims.heads * dims.v);
        if tokens == 0 || dims.v == 0 {
            return Ok(out);
        }
        let packing = self.packing(kv_b.dtype());
        // Each head of a token is a row of its own here: `[tokens * heads, rank]`.
        let packed = self.pack(latent.as_slice(), tokens * dims.heads, packing);
        let shared = SharedMatrix::new(out.as_mut_slice(), dims.heads * dims.v);
        self.pool.run(dims.heads, |piece| {
            let head = piece.index;
            let rows: Vec<u32> = (0..tokens)
                .map(|t| (t * dims.heads + head) as u32)
                .collect();
            let x: PackedRows<'_> = packed.rows(RowSet::List(&rows));
            let first = head * (dims.nope + dims.v) + dims.nope;
            let mut scratch = self.scratch(piece.worker);
            let scratch = &mut *scratch;
            let tile = scratch.tile.f32s_mut(dims.v * tokens);
            self.kernels
                .linear(kv_b, first..first + dims.v, &x, &mut scratch.kernel, tile);
            for t in 0..tokens {
                // SAFETY: each piece writes the columns of its own head.
                let out = unsafe { shared.part(t, head * dims.v..(head + 1) * dims.v) };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = tile[i * tokens + t];
                }
            }
        });
        Ok(out)
    }
}

impl CpuBackend {
    /// Packs `rows` rows.
    pub(super) fn pack(&self, x: &[f32], rows: usize, packing: Packing) -> Packed {
        let cols = x.len().checked_div(rows).unwrap_or(0);
        let len = packed_len(cols);
        let mut buffer = self.buffer(rows * len);
        if len > 0 {
            let shared = SharedMatrix::new(buffer.f32s_mut(rows * len), len);
            let split = self.split(rows, len * 4, MIN_PIECE_BYTES);
            self.pool.run(split.pieces(), |piece| {
                for row in split.range(piece.index) {
                    // SAFETY: pieces have disjoint ranges of rows, held one at a time.
                    let out = unsafe { shared.part(row, 0..len) };
                    self.kernels
                        .pack(packing, &x[row * cols..(row + 1) * cols], out);
                }
            });
        }
        Packed {
            buffer,
            packing,
            rows,
            cols,
        }
    }

    /// Writes `x Wᵀ + bias` to the columns `first_col..first_col + w.rows()` of `y` `[x.len(), y_cols]`.
    pub(super) fn linear_into(
        &self,
        w: &HostMatrix,
        x: &PackedRows<'_>,
        y: &mut [f32],
        y_cols: usize,
        first_col: usize,
        bias: Option<&[f32]>,
    ) {
        let tokens = x.len();
        if tokens == 0 {
            return;
        }
        let row_cost = row_cost(w, tokens);
        let split = self.split_weight_rows(w.rows(), row_cost, tokens);
        let y = SharedMatrix::new(y, y_cols);
        self.pool.run(split.pieces(), |piece| {
            let rows = split.range(piece.index);
            let mut scratch = self.scratch(piece.worker);
            let scratch = &mut *scratch;
            let tile = scratch.tile.f32s_mut(rows.len() * tokens);
            self.kernels
                .linear(w, rows.clone(), x, &mut scratch.kernel, tile);
            for t in 0..tokens {
                // SAFETY: pieces have disjoint ranges of weight rows, hence of output columns.
                let out = unsafe { y.part(t, first_col + rows.start..first_col + rows.end) };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = tile[i * tokens + t] + bias.map_or(0.0, |b| b[rows.start + i]);
                }
            }
        });
    }
}

/// Cost of one weight row, in bytes read or their equivalent in time.
pub(super) fn row_cost(w: &HostMatrix, tokens: usize) -> usize {
    w.row_bytes() * tokens.div_ceil(FREE_TOKENS)
}

fn check_mla(
    op: &'static str,
    x: &CpuTensor,
    width: usize,
    kv_b: &HostMatrix,
    dims: MlaHeads,
) -> Result<(), KernelError> {
    let (x, kv_b) = ((x.rows(), x.cols()), (kv_b.rows(), kv_b.cols()));
    checks::mla(op, x, width, kv_b, dims)
}
