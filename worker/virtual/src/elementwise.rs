//! Operations whose cost is dominated by touching their operands.

use hearth_kernels::ops::{ElementwiseOps, MemoryOps};
use hearth_kernels::{KernelError, RopeTable};

use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

impl ElementwiseOps for VirtualBackend {
    fn embed(&self, table: &VirtualWeight, tokens: &[u32]) -> Result<VirtualTensor, KernelError> {
        let shape = (tokens.len(), table.matrix.cols());
        self.output(shape, |cpu| cpu.embed(table.matrix()?, tokens))
    }

    fn rms_norm(
        &self,
        x: &VirtualTensor,
        weight: &VirtualVector,
        eps: f32,
    ) -> Result<VirtualTensor, KernelError> {
        self.output(self.shape(x), |cpu| {
            cpu.rms_norm(&x.values, &weight.values, eps)
        })
    }

    fn add_rms_norm(
        &self,
        residual: &mut VirtualTensor,
        delta: &VirtualTensor,
        weight: &VirtualVector,
        eps: f32,
    ) -> Result<VirtualTensor, KernelError> {
        self.output(self.shape(residual), |cpu| {
            cpu.add_rms_norm(&mut residual.values, &delta.values, &weight.values, eps)
        })
    }

    fn add_assign(&self, x: &mut VirtualTensor, delta: &VirtualTensor) -> Result<(), KernelError> {
        self.cpu.add_assign(&mut x.values, &delta.values)
    }

    fn silu_mul(
        &self,
        gate: &VirtualTensor,
        up: &VirtualTensor,
    ) -> Result<VirtualTensor, KernelError> {
        self.output(self.shape(gate), |cpu| {
            cpu.silu_mul(&gate.values, &up.values)
        })
    }

    fn columns(
        &self,
        x: &VirtualTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<VirtualTensor, KernelError> {
        let shape = (self.shape(x).0, groups.saturating_mul(cols));
        self.output(shape, |cpu| cpu.columns(&x.values, groups, first, cols))
    }

    fn interleave(
        &self,
        a: &VirtualTensor,
        b: &VirtualTensor,
        groups: usize,
    ) -> Result<VirtualTensor, KernelError> {
        let ((rows, a_cols), (_, b_cols)) = (self.shape(a), self.shape(b));
        self.output((rows, a_cols + b_cols), |cpu| {
            cpu.interleave(&a.values, &b.values, groups)
        })
    }

    fn rows(&self, x: &VirtualTensor, rows: &[u32]) -> Result<VirtualTensor, KernelError> {
        let shape = (rows.len(), self.shape(x).1);
        self.output(shape, |cpu| cpu.rows(&x.values, rows))
    }

    fn put_rows(
        &self,
        x: &mut VirtualTensor,
        first: usize,
        tile: &VirtualTensor,
    ) -> Result<(), KernelError> {
        self.cpu.put_rows(&mut x.values, first, &tile.values)
    }

    fn rope(
        &self,
        x: &mut VirtualTensor,
        heads: usize,
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        self.cpu.rope(&mut x.values, heads, positions, table)
    }
}
