//! Operations whose cost is dominated by touching their operands.

use hearth_kernels::ops::ElementwiseOps;
use hearth_kernels::{KernelError, RopeTable, checks};

use crate::work::Work;
use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

impl ElementwiseOps for VirtualBackend {
    fn embed(&self, table: &VirtualWeight, tokens: &[u32]) -> Result<VirtualTensor, KernelError> {
        checks::embed(tokens, table.rows)?;
        let shape = (tokens.len(), table.cols);
        let work = Work::new("embed", shape.0 * shape.1).rows_of(table, tokens.len());
        self.output(&work, shape, |cpu| cpu.embed(&table.matrix()?, tokens))
    }

    fn rms_norm(
        &self,
        x: &VirtualTensor,
        weight: &VirtualVector,
        eps: f32,
    ) -> Result<VirtualTensor, KernelError> {
        checks::rms_norm(x.shape.1, weight.values.len())?;
        let work = Work::new("rms_norm", 2 * x.elements());
        self.output(&work, x.shape, |cpu| {
            cpu.rms_norm(x.values()?, &weight.values, eps)
        })
    }

    fn add_rms_norm(
        &self,
        residual: &mut VirtualTensor,
        delta: &VirtualTensor,
        weight: &VirtualVector,
        eps: f32,
    ) -> Result<VirtualTensor, KernelError> {
        checks::same("add_assign", residual.shape, delta.shape)?;
        checks::rms_norm(residual.shape.1, weight.values.len())?;
        let work = Work::new("add_rms_norm", 4 * delta.elements());
        self.output(&work, delta.shape, |cpu| {
            cpu.add_rms_norm(residual.values_mut()?, delta.values()?, &weight.values, eps)
        })
    }

    fn add_assign(&self, x: &mut VirtualTensor, delta: &VirtualTensor) -> Result<(), KernelError> {
        checks::same("add_assign", x.shape, delta.shape)?;
        let work = Work::new("add_assign", 3 * delta.elements());
        self.run(&work, |cpu| {
            cpu.add_assign(x.values_mut()?, delta.values()?)
        })?;
        Ok(())
    }

    fn silu_mul(
        &self,
        gate: VirtualTensor,
        up: &VirtualTensor,
    ) -> Result<VirtualTensor, KernelError> {
        checks::same("silu_mul", gate.shape, up.shape)?;
        let work = Work::new("silu_mul", 3 * gate.elements());
        self.output(&work, gate.shape, |cpu| {
            cpu.silu_mul(gate.into_values()?, up.values()?)
        })
    }

    fn columns(
        &self,
        x: &VirtualTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<VirtualTensor, KernelError> {
        checks::columns(x.shape.1, groups, first, cols)?;
        let shape = (x.shape.0, groups * cols);
        let work = Work::new("columns", 2 * shape.0 * shape.1);
        self.output(&work, shape, |cpu| {
            cpu.columns(x.values()?, groups, first, cols)
        })
    }

    fn interleave(
        &self,
        a: &VirtualTensor,
        b: &VirtualTensor,
        groups: usize,
    ) -> Result<VirtualTensor, KernelError> {
        checks::interleave(a.shape, b.shape, groups)?;
        let shape = (a.shape.0, a.shape.1 + b.shape.1);
        let work = Work::new("interleave", 2 * shape.0 * shape.1);
        self.output(&work, shape, |cpu| {
            cpu.interleave(a.values()?, b.values()?, groups)
        })
    }

    fn rows(&self, x: &VirtualTensor, rows: &[u32]) -> Result<VirtualTensor, KernelError> {
        checks::rows(rows, x.shape.0)?;
        let shape = (rows.len(), x.shape.1);
        let work = Work::new("rows", 2 * shape.0 * shape.1);
        self.output(&work, shape, |cpu| cpu.rows(x.values()?, rows))
    }

    fn put_tile(
        &self,
        x: &mut VirtualTensor,
        at: (usize, usize),
        tile: &VirtualTensor,
    ) -> Result<(), KernelError> {
        checks::put_tile(x.shape, at, tile.shape)?;
        let work = Work::new("put_tile", 2 * tile.elements());
        self.run(&work, |cpu| {
            cpu.put_tile(x.values_mut()?, at, tile.values()?)
        })?;
        Ok(())
    }

    fn rope(
        &self,
        x: &mut VirtualTensor,
        heads: (usize, usize),
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        checks::rope(x.shape, heads, positions.len(), table)?;
        let work = Work::new("rope", 4 * x.shape.0 * heads.0 * table.inv_freq.len());
        self.run(&work, |cpu| {
            cpu.rope(x.values_mut()?, heads, positions, table)
        })?;
        Ok(())
    }
}
