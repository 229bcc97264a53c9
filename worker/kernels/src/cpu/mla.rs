//! Latent attention's per-head up-projections.

use crate::arch::{AbsorbTask, PackedRows, RowSet};
use crate::{HostMatrix, KernelError, MlaHeads, checks};

use super::CpuBackend;
use super::memory::{CpuTensor, SharedMatrix};

impl CpuBackend {
    pub(super) fn absorb(
        &self,
        q_nope: &CpuTensor,
        kv_b: &HostMatrix,
        dims: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        check("mla_absorb", q_nope, dims.nope, kv_b, dims)?;
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

    pub(super) fn expand(
        &self,
        latent: &CpuTensor,
        kv_b: &HostMatrix,
        dims: MlaHeads,
    ) -> Result<CpuTensor, KernelError> {
        check("mla_expand", latent, dims.rank, kv_b, dims)?;
        let tokens = latent.rows();
        let mut out = self.tensor(tokens, dims.heads * dims.v);
        if tokens == 0 || dims.v == 0 {
            return Ok(out);
        }
        let packing = self.packing(kv_b.dtype());
        // A head of a token is a row of its own here: `[tokens * heads, rank]`.
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

fn check(
    op: &'static str,
    x: &CpuTensor,
    width: usize,
    kv_b: &HostMatrix,
    dims: MlaHeads,
) -> Result<(), KernelError> {
    let (x, kv_b) = ((x.rows(), x.cols()), (kv_b.rows(), kv_b.cols()));
    checks::mla(op, x, width, kv_b, dims)
}
