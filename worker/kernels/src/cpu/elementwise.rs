//! Operations whose cost is that of touching their operands.

use std::sync::Arc;

use super::memory::{CpuTensor, SharedMatrix};
use crate::ops::ElementwiseOps;
use crate::{HostMatrix, KernelError, RopeLayout, RopeTable, checks, reference};

use super::CpuBackend;

/// Minimum number of elements that makes a piece worth a thread (some tens of microseconds).
const MIN_PIECE_ELEMENTS: usize = 1 << 15;
/// Elements that are copied to the stack at a time, so that what is computed from them takes their place: a multiple of every
/// kernel's lanes.
const COPIED_ELEMENTS: usize = 256;

impl ElementwiseOps for CpuBackend {
    fn embed(&self, table: &HostMatrix, tokens: &[u32]) -> Result<CpuTensor, KernelError> {
        checks::embed(tokens, table.rows())?;
        let mut out = self.tensor(tokens.len(), table.cols());
        self.for_each_row(&mut out, |row, out| {
            reference::dequant_row(table, tokens[row] as usize, out);
        });
        Ok(out)
    }

    fn rms_norm(
        &self,
        x: &CpuTensor,
        weight: &Arc<[f32]>,
        eps: f32,
    ) -> Result<CpuTensor, KernelError> {
        let group = weight.len();
        checks::rms_norm(x.cols(), group)?;
        let mut out = self.tensor(x.rows(), x.cols());
        self.for_each_row(&mut out, |row, out| {
            for (x, out) in x.row(row).chunks(group).zip(out.chunks_mut(group)) {
                self.kernels.rms_norm(x, weight, eps, out);
            }
        });
        Ok(out)
    }

    fn add_rms_norm(
        &self,
        residual: &mut CpuTensor,
        delta: &CpuTensor,
        weight: &Arc<[f32]>,
        eps: f32,
    ) -> Result<CpuTensor, KernelError> {
        self.add_assign(residual, delta)?;
        self.rms_norm(residual, weight, eps)
    }

    fn add_assign(&self, x: &mut CpuTensor, delta: &CpuTensor) -> Result<(), KernelError> {
        checks::same("add_assign", shape(x), shape(delta))?;
        self.for_each_row(x, |row, x| {
            for (x, delta) in x.iter_mut().zip(delta.row(row)) {
                *x += delta;
            }
        });
        Ok(())
    }

    fn silu_mul(&self, mut gate: CpuTensor, up: &CpuTensor) -> Result<CpuTensor, KernelError> {
        checks::same("silu_mul", shape(&gate), shape(up))?;
        self.for_each_row(&mut gate, |row, out| {
            let mut gate = [0.0; COPIED_ELEMENTS];
            let chunks = out.chunks_mut(COPIED_ELEMENTS);
            for (out, up) in chunks.zip(up.row(row).chunks(COPIED_ELEMENTS)) {
                let gate = &mut gate[..out.len()];
                gate.copy_from_slice(out);
                self.kernels.silu_mul(gate, up, out);
            }
        });
        Ok(gate)
    }

    fn columns(
        &self,
        x: &CpuTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<CpuTensor, KernelError> {
        checks::columns(x.cols(), groups, first, cols)?;
        let mut out = self.tensor(x.rows(), groups * cols);
        let width = x.cols() / groups;
        self.for_each_row(&mut out, |row, out| {
            let x = x.row(row);
            for group in 0..groups {
                let start = group * width + first;
                out[group * cols..(group + 1) * cols].copy_from_slice(&x[start..start + cols]);
            }
        });
        Ok(out)
    }

    fn interleave(
        &self,
        a: &CpuTensor,
        b: &CpuTensor,
        groups: usize,
    ) -> Result<CpuTensor, KernelError> {
        checks::interleave(shape(a), shape(b), groups)?;
        let mut out = self.tensor(a.rows(), a.cols() + b.cols());
        let (first, second) = (a.cols() / groups, b.cols() / groups);
        self.for_each_row(&mut out, |row, out| {
            let (a, b) = (a.row(row), b.row(row));
            for group in 0..groups {
                let out = &mut out[group * (first + second)..][..first + second];
                out[..first].copy_from_slice(&a[group * first..(group + 1) * first]);
                out[first..].copy_from_slice(&b[group * second..(group + 1) * second]);
            }
        });
        Ok(out)
    }

    fn rows(&self, x: &CpuTensor, rows: &[u32]) -> Result<CpuTensor, KernelError> {
        checks::rows(rows, x.rows())?;
        let mut out = self.tensor(rows.len(), x.cols());
        self.for_each_row(&mut out, |row, out| {
            out.copy_from_slice(x.row(rows[row] as usize));
        });
        Ok(out)
    }

    fn put_tile(
        &self,
        x: &mut CpuTensor,
        (row, col): (usize, usize),
        tile: &CpuTensor,
    ) -> Result<(), KernelError> {
        checks::put_tile(shape(x), (row, col), shape(tile))?;
        let cols = x.cols();
        for i in 0..tile.rows() {
            let to = (row + i) * cols + col;
            x.as_mut_slice()[to..to + tile.cols()].copy_from_slice(tile.row(i));
        }
        Ok(())
    }

    fn rope(
        &self,
        x: &mut CpuTensor,
        (heads, first): (usize, usize),
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        checks::rope(shape(x), (heads, first), positions.len(), table)?;
        let head_dim = x.cols() / heads;
        self.for_each_row(x, |row, x| {
            // All heads of a row share its angles.
            let angles = angles(positions[row], table);
            for head in x.chunks_mut(head_dim) {
                rotate_head(&mut head[first..], &angles, table.layout);
            }
        });
        Ok(())
    }
}

impl CpuBackend {
    /// Calls `f` with the index and the elements of each row of `out`, on all threads if that pays off.
    pub(super) fn for_each_row(&self, out: &mut CpuTensor, f: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, cols) = (out.rows(), out.cols());
        let split = self.split(rows, cols, MIN_PIECE_ELEMENTS);
        let shared = SharedMatrix::new(out.as_mut_slice(), cols);
        if cols == 0 {
            return;
        }
        self.pool.run(split.pieces(), |piece| {
            for row in split.range(piece.index) {
                // SAFETY: pieces have disjoint ranges of rows, and within a piece one row is held at a time.
                f(row, unsafe { shared.part(row, 0..cols) });
            }
        });
    }
}

/// Sine and cosine of each pair, times the table's magnitude.
fn angles(position: u32, table: &RopeTable) -> Vec<[f32; 2]> {
    table
        .inv_freq
        .iter()
        .map(|&frequency| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            [sin * table.magnitude, cos * table.magnitude]
        })
        .collect()
}

/// Rotates as [`reference::rope_head`] does, with precomputed angles.
fn rotate_head(head: &mut [f32], angles: &[[f32; 2]], layout: RopeLayout) {
    let half = angles.len();
    match layout {
        RopeLayout::Half => {
            let (first, rest) = head.split_at_mut(half);
            for ((a, b), [sin, cos]) in first.iter_mut().zip(rest).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        RopeLayout::Interleaved => {
            for (pair, [sin, cos]) in head.chunks_exact_mut(2).zip(angles) {
                let [a, b] = [pair[0], pair[1]];
                pair[0] = a * cos - b * sin;
                pair[1] = b * cos + a * sin;
            }
        }
    }
}

fn shape(x: &CpuTensor) -> checks::Shape {
    (x.rows(), x.cols())
}
