//! Operations whose cost is dominated by touching their operands.

use std::sync::PoisonError;

use hearth_kernels::ops::ElementwiseOps;
use hearth_kernels::{KernelError, RopeLayout, RopeTable, checks};

use super::tensor::{Terms, WeightData, weight_type};
use super::{
    Activations, CudaBackend, CudaTensor, CudaVector, CudaWeight, Kernel, MOST_RECORDED_ROWS,
    terms_variant,
};
use crate::compile::Variant;
use crate::queue::Args;

/// Columns that a thread takes at once, and an address that allows it in elements (`quads.cuh`).
pub(super) const QUAD: usize = 4;
/// Columns per block where a thread takes four.
pub(super) const QUAD_COLS: usize = 1024;
/// Maximum pairs per head that rope.cu rotates.
pub(super) const MOST_PAIRS: usize = 512;
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
        let is_row = weight.len == x.cols;
        // A group that is a part of a row has no segments of its own.
        let from = if is_row {
            self.rows_of(x)?
        } else {
            self.values(x)?;
            x.values().first.argument(x.elements())
        };
        let activations = self.norm_activations(x.rows);
        let terms = if is_row {
            Some(self.terms_of(x.rows, x.cols, activations)?)
        } else {
            None
        };
        let args = Args::new()
            .with(y.output())
            .with(terms.as_ref().map_or(0, |terms| terms.values.address()))
            .with(terms.as_ref().map_or(0, Terms::scales_address))
            .with(from)
            .with(weight.data.address())
            .with(eps)
            .with(groups as i32)
            .with(weight.len as i32)
            .with(terms.as_ref().map_or(0, |terms| terms.padded) as i32);
        let variant = terms_variant("rms_norm", activations);
        let kernel = Kernel::new(&variant, "rms_norm");
        self.launch(kernel, norm_grid(groups, weight.len), args)?;
        Ok(match terms {
            Some(terms) => y.with_terms(terms),
            None => y,
        })
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
        let [of_delta, more] = delta.parts();
        let sum = self.values(residual)?;
        changed(residual);
        let y = self.tensor(residual.rows, residual.cols)?;
        let activations = self.norm_activations(y.rows);
        let terms = self.terms_of(y.rows, y.cols, activations)?;
        let args = Args::new()
            .with(y.output())
            .with(terms.values.address())
            .with(terms.scales_address())
            .with(sum)
            .with(of_delta)
            .with(more)
            .with(weight.data.address())
            .with(eps)
            .with(y.rows as i32)
            .with(y.cols as i32)
            .with(terms.padded as i32);
        let variant = terms_variant("rms_norm", activations);
        let kernel = Kernel::new(&variant, "add_rms_norm");
        self.launch(kernel, norm_grid(y.rows, y.cols), args)?;
        Ok(y.with_terms(terms))
    }

    /// Leaves the sum to the kernel that reads it.
    fn sum(&self, x: CudaTensor, delta: CudaTensor) -> Result<CudaTensor, KernelError> {
        checks::same("sum", x.shape(), delta.shape())?;
        for part in [&x, &delta] {
            self.rows_of(part)?;
        }
        let CudaTensor {
            rows, cols, values, ..
        } = x;
        let [first, second] = [values, delta.values].map(|values| {
            values
                .into_inner()
                .unwrap_or_else(PoisonError::into_inner)
                .first
        });
        let sum = CudaTensor::new(rows, cols, first);
        sum.values().second = Some(second);
        Ok(sum)
    }

    fn add_assign(&self, x: &mut CudaTensor, delta: &CudaTensor) -> Result<(), KernelError> {
        checks::same("add_assign", x.shape(), delta.shape())?;
        let sum = self.values(x)?;
        changed(x);
        let [of_delta, more] = delta.parts();
        let args = Args::new()
            .with(sum)
            .with(of_delta)
            .with(more)
            .with(x.rows as i32)
            .with(x.cols as i32);
        let grid = row_grid(x.rows, x.cols);
        self.launch(Kernel::new(&Variant::plain("add"), "add"), grid, args)
    }

    fn silu_mul(&self, gate: CudaTensor, up: &CudaTensor) -> Result<CudaTensor, KernelError> {
        checks::same("silu_mul", gate.shape(), up.shape())?;
        let y = self.tensor(gate.rows, gate.cols)?;
        let terms = self.new_terms(y.rows, y.cols)?;
        let args = Args::new()
            .with(y.output())
            .with(terms.values.address())
            .with(terms.scales_address())
            .with(self.rows_of(&gate)?)
            .with(self.rows_of(up)?)
            .with(y.rows as i32)
            .with(y.cols as i32)
            .with(terms.padded as i32);
        let variant = terms_variant("silu_mul", self.activations);
        let grid = row_grid(y.rows, terms.padded);
        self.launch(Kernel::new(&variant, "silu_mul"), grid, args)?;
        Ok(y.with_terms(terms))
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
            .with(y.output())
            .with(self.values(x)?)
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
            .with(y.output())
            .with(self.values(a)?)
            .with(self.values(b)?)
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
            .with(y.output())
            .with(self.values(x)?)
            .with(self.host(rows)?)
            .with(y.rows as i32)
            .with(y.cols as i32);
        let variant = Variant::plain("rows");
        let kernel = Kernel::new(&variant, "gather_rows");
        self.launch(kernel, row_grid(y.rows, y.cols), args)?;
        Ok(y)
    }

    fn put_tile(
        &self,
        x: &mut CudaTensor,
        (row, col): (usize, usize),
        tile: &CudaTensor,
    ) -> Result<(), KernelError> {
        checks::put_tile(x.shape(), (row, col), tile.shape())?;
        changed(x);
        let args = Args::new()
            .with(self.values(x)? + (row * x.cols * 4) as u64)
            .with(self.values(tile)?)
            .with(tile.rows as i32)
            .with(tile.cols as i32)
            .with(x.cols as i32)
            .with(col as i32);
        let variant = Variant::plain("rows");
        let kernel = Kernel::new(&variant, "put_tile");
        self.launch(kernel, row_grid(tile.rows, tile.cols), args)
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        (heads, first): (usize, usize),
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError> {
        checks::rope(x.shape(), (heads, first), positions.len(), table)?;
        let pairs = table.inv_freq.len();
        checks::ensure(pairs <= MOST_PAIRS, "rope", || {
            format!("{pairs} frequencies: the GPU's kernel takes {MOST_PAIRS}")
        })?;
        changed(x);
        let args = Args::new()
            .with(self.values(x)?)
            .with(self.host(positions)?)
            .with(self.host(&table.inv_freq)?)
            .with(table.magnitude)
            .with(i32::from(table.layout == RopeLayout::Interleaved))
            .with(x.rows as i32)
            .with(heads as i32)
            .with((x.cols / heads) as i32)
            .with(first as i32)
            .with(pairs as i32);
        let variant = Variant::plain("rope");
        let grid = [x.rows, heads.div_ceil(8), 1];
        self.launch(Kernel::new(&variant, "rope"), grid, args)
    }
}

impl CudaBackend {
    /// Queues a kernel that copies rows from one address to another.
    pub(super) fn put_rows(
        &self,
        to: u64,
        from: u64,
        (rows, cols): checks::Shape,
    ) -> Result<(), KernelError> {
        if rows * cols == 0 {
            return Ok(());
        }
        let args = Args::new()
            .with(to)
            .with(from)
            .with(rows as i32)
            .with(cols as i32)
            .with(cols as i32)
            .with(0_i32);
        let variant = Variant::plain("rows");
        let kernel = Kernel::new(&variant, "put_tile");
        self.launch(kernel, row_grid(rows, cols), args)
    }

    /// Precision in which a norm's rows are stored for products. In a recorded step a router may read them, which takes
    /// three terms; the first of them serves other products.
    fn norm_activations(&self, rows: usize) -> Activations {
        match self.activations {
            Activations::Bf16 if rows <= MOST_RECORDED_ROWS => Activations::F32,
            other => other,
        }
    }

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
            .with(y.output())
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
    x.terms
        .get_mut()
        .unwrap_or_else(PoisonError::into_inner)
        .clear();
}

/// One block per row and 1024 of its columns.
pub(super) fn row_grid(rows: usize, cols: usize) -> [usize; 3] {
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
