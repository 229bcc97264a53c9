//! Operations whose cost is dominated by touching their operands.

use std::sync::PoisonError;

use hearth_kernels::ops::ElementwiseOps;
use hearth_kernels::{KernelError, RopeLayout, RopeTable, checks};

use super::tensor::{WeightData, weight_type};
use super::{CudaBackend, CudaTensor, CudaVector, CudaWeight, Kernel};
use crate::compile::Variant;
use crate::queue::Args;

/// Columns that a thread takes at once, and an address that allows it in elements (`quads.cuh`).
pub(super) const QUAD: usize = 4;
/// Columns per block where a thread takes four.
pub(super) const QUAD_COLS: usize = 1024;
/// Maximum pairs per head that rope.cu rotates.
const MOST_PAIRS: usize = 512;
/// Maximum columns of a group that one warp normalises.
const WARP_NORM_COLS: usize = 256;

impl ElementwiseOps for CudaBackend {
    fn embed(&self, table: &CudaWeight, tokens: &[u32]) -> Result<CudaTensor, KernelError> {
        let table = &*table.0;
        checks::embed(tokens, table.rows)?;
        self.embed_at(table, self.host(tokens)?, 0, tokens.len())
    }

    fn rms_norm(
        &self,
        x: &CudaTensor,
        weight: &CudaVector,
        eps: f32,
    ) -> Result<CudaTensor, KernelError> {
        checks::rms_norm(x.cols, weight.len)?;
        let y = self.tensor(x.rows, x.cols)?;
        let groups = x.elements() / weight.len;
        let args = Args::new()
            .with(y.address())
            .with(x.address())
            .with(weight.data.address())
            .with(eps)
            .with(groups as i32)
            .with(weight.len as i32);
        let variant = Variant::plain("rms_norm");
        let kernel = Kernel::new(&variant, "rms_norm");
        self.launch(kernel, norm_grid(groups, weight.len), args)?;
        Ok(y)
    }

    fn add_rms_norm(
        &self,
        residual: &mut CudaTensor,
        delta: &CudaTensor,
        weight: &CudaVector,
        eps: f32,
    ) -> Result<CudaTensor, KernelError> {
        checks::same("add_assign", residual.shape(), delta.shape())?;
        if weight.len != residual.cols {
            self.add_assign(residual, delta)?;
            return self.rms_norm(residual, weight, eps);
        }
        changed(residual);
        let y = self.tensor(residual.rows, residual.cols)?;
        let args = Args::new()
            .with(y.address())
            .with(residual.address())
            .with(delta.address())
            .with(weight.data.address())
            .with(eps)
            .with(y.rows as i32)
            .with(y.cols as i32);
        let variant = Variant::plain("rms_norm");
        let kernel = Kernel::new(&variant, "add_rms_norm");
        self.launch(kernel, norm_grid(y.rows, y.cols), args)?;
        Ok(y)
    }

    fn add_assign(&self, x: &mut CudaTensor, delta: &CudaTensor) -> Result<(), KernelError> {
        checks::same("add_assign", x.shape(), delta.shape())?;
        changed(x);
        let args = Args::new()
            .with(x.address())
            .with(delta.address())
            .with(x.elements() as i64);
        let variant = Variant::plain("add");
        let grid = [x.elements().div_ceil(QUAD_COLS), 1, 1];
        self.launch(Kernel::new(&variant, "add"), grid, args)
    }

    fn silu_mul(&self, gate: &CudaTensor, up: &CudaTensor) -> Result<CudaTensor, KernelError> {
        checks::same("silu_mul", gate.shape(), up.shape())?;
        let y = self.tensor(gate.rows, gate.cols)?;
        let args = Args::new()
            .with(y.address())
            .with(gate.address())
            .with(up.address())
            .with(y.elements() as i64);
        let variant = Variant::plain("silu_mul");
        let grid = [y.elements().div_ceil(QUAD_COLS), 1, 1];
        self.launch(Kernel::new(&variant, "silu_mul"), grid, args)?;
        Ok(y)
    }

    fn columns(
        &self,
        x: &CudaTensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<CudaTensor, KernelError> {
        checks::columns(x.cols, groups, first, cols)?;
        let y = self.tensor(x.rows, groups * cols)?;
        let args = Args::new()
            .with(y.address())
            .with(x.address())
            .with(x.rows as i32)
            .with(groups as i32)
            .with((x.cols / groups) as i32)
            .with(first as i32)
            .with(cols as i32);
        let variant = Variant::plain("columns");
        self.launch(
            Kernel::new(&variant, "columns"),
            row_grid(y.rows, y.cols),
            args,
        )?;
        Ok(y)
    }

    fn interleave(
        &self,
        a: &CudaTensor,
        b: &CudaTensor,
        groups: usize,
    ) -> Result<CudaTensor, KernelError> {
        checks::interleave(a.shape(), b.shape(), groups)?;
        let y = self.tensor(a.rows, a.cols + b.cols)?;
        let args = Args::new()
            .with(y.address())
            .with(a.address())
            .with(b.address())
            .with(y.rows as i32)
            .with(groups as i32)
            .with((a.cols / groups) as i32)
            .with((b.cols / groups) as i32);
        let variant = Variant::plain("columns");
        let kernel = Kernel::new(&variant, "interleave");
        self.launch(kernel, row_grid(y.rows, y.cols), args)?;
        Ok(y)
    }

    fn rows(&self, x: &CudaTensor, rows: &[u32]) -> Result<CudaTensor, KernelError> {
        checks::rows(rows, x.rows)?;
        let y = self.tensor(rows.len(), x.cols)?;
        let args = Args::new()
            .with(y.address())
            .with(x.address())
            .with(self.host(rows)?)
            .with(y.rows as i32)
            .with(y.cols as i32);
        let variant = Variant::plain("rows");
        let kernel = Kernel::new(&variant, "gather_rows");
        self.launch(kernel, row_grid(y.rows, y.cols), args)?;
        Ok(y)
    }

    fn put_rows(
        &self,
        x: &mut CudaTensor,
        first: usize,
        tile: &CudaTensor,
    ) -> Result<(), KernelError> {
        checks::put_rows(x.shape(), first, tile.shape())?;
        changed(x);
        let args = Args::new()
            .with(x.address() + (first * x.cols * 4) as u64)
            .with(tile.address())
            .with(tile.rows as i32)
            .with(tile.cols as i32);
        let variant = Variant::plain("rows");
        let kernel = Kernel::new(&variant, "put_rows");
        self.launch(kernel, row_grid(tile.rows, tile.cols), args)
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        heads: usize,
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        checks::rope(x.shape(), heads, positions.len(), table)?;
        let pairs = table.inv_freq.len();
        checks::ensure(pairs <= MOST_PAIRS, "rope", || {
            format!("{pairs} frequencies: the GPU's kernel takes {MOST_PAIRS}")
        })?;
        changed(x);
        let args = Args::new()
            .with(x.address())
            .with(self.host(positions)?)
            .with(self.host(&table.inv_freq)?)
            .with(table.magnitude)
            .with(i32::from(table.layout == RopeLayout::Interleaved))
            .with(x.rows as i32)
            .with(heads as i32)
            .with((x.cols / heads) as i32)
            .with(pairs as i32);
        let variant = Variant::plain("rope");
        let grid = [x.rows, heads.div_ceil(8), 1];
        self.launch(Kernel::new(&variant, "rope"), grid, args)
    }
}

impl CudaBackend {
    /// Rows of a table for `rows` tokens on the device, or for those of them whose indices are at `picked`, if not 0.
    pub(super) fn embed_at(
        &self,
        table: &WeightData,
        tokens: u64,
        picked: u64,
        rows: usize,
    ) -> Result<CudaTensor, KernelError> {
        let y = self.tensor(rows, table.cols)?;
        let args = Args::new()
            .with(y.address())
            .with(table.argument())
            .with(tokens)
            .with(picked)
            .with(y.rows as i32)
            .with(y.cols as i32);
        let variant = Variant::with("embed", &[("WEIGHT_TYPE", weight_type(table.dtype))]);
        let kernel = Kernel::new(&variant, "embed");
        self.launch(kernel, row_grid(y.rows, y.cols), args)?;
        Ok(y)
    }
}

/// Invalidates everything derived from the tensor's old contents.
pub(super) fn changed(x: &mut CudaTensor) {
    *x.terms.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
}

/// One block per row and 1024 of its columns.
fn row_grid(rows: usize, cols: usize) -> [usize; 3] {
    [rows, cols.div_ceil(QUAD_COLS), 1]
}

/// Eight narrow groups share a block; a wide one has its own.
fn norm_grid(groups: usize, cols: usize) -> [usize; 3] {
    let blocks = if cols <= WARP_NORM_COLS {
        groups.div_ceil(8)
    } else {
        groups
    };
    [blocks, 1, 1]
}
