//! Products with weights.

use std::sync::{Arc, PoisonError};

use hearth_kernels::ops::LinearOps;
use hearth_kernels::{DType, KernelError, MlaHeads, checks};

use super::tensor::{Terms, WeightData, weight_type};
use super::weights::PADDED_COLS;
use super::{
    Activations, CudaBackend, CudaTensor, CudaVector, CudaWeight, Kernel, activations_number,
};
use crate::compile::Variant;
use crate::queue::Args;

/// Maximum rows of the decode kernel.
pub(super) const DECODE_ROWS: usize = 8;
/// Outputs per block (`TILE_OUTPUTS` of matmul.cuh) and rows per block of the tiled kernel (`TILE_TOKENS`).
const TILE_OUTPUTS: usize = 128;
pub(super) const TILE_ROWS: usize = 64;
/// Columns per partial sum (`SEGMENT` of common.cuh).
const SEGMENT_COLS: usize = 512;

/// One product of rows with a weight.
pub(super) struct Product<'a> {
    pub(super) y: &'a CudaTensor,
    /// The rows.
    pub(super) terms: &'a Terms,
    pub(super) weight: &'a WeightData,
    /// Address of the bias, or zero.
    pub(super) bias: u64,
}

impl Product<'_> {
    /// Number of partial sums per output.
    pub(super) fn segments(&self) -> usize {
        self.terms.padded.div_ceil(SEGMENT_COLS)
    }

    /// Parameters of the kernels; those that can compute segments also take the address of `partials`.
    fn args(&self, partials: Option<u64>) -> Args {
        let args = Args::new().with(self.y.address());
        match partials {
            Some(address) => args.with(address),
            None => args,
        }
        .with(self.terms.values.address())
        .with(self.terms.scales_address())
        .with(self.weight.argument())
        .with(self.bias)
        .with(self.y.rows as i32)
        .with(self.y.cols as i32)
        .with(self.terms.padded as i32)
    }
}

impl LinearOps for CudaBackend {
    fn linear(
        &self,
        x: &CudaTensor,
        w: &CudaWeight,
        bias: Option<&CudaVector>,
    ) -> Result<CudaTensor, KernelError> {
        let weight = &*w.0;
        checks::linear(x.shape(), weight.shape(), bias.map(|b| b.len))?;
        let y = self.tensor(x.rows, weight.rows)?;
        if y.elements() == 0 {
            return Ok(y);
        }
        let terms = self.terms(x, weight.dtype)?;
        let product = Product {
            y: &y,
            terms: &terms,
            weight,
            bias: bias.map_or(0, |b| b.data.address()),
        };
        if terms.scales.is_some() && self.has_wgmma() {
            self.by_wgmma(&product)?;
        } else if x.rows <= DECODE_ROWS {
            self.decode(&product)?;
        } else {
            self.tiled(&product)?;
        }
        Ok(y)
    }

    fn mla_absorb(
        &self,
        q_nope: &CudaTensor,
        kv_b: &CudaWeight,
        dims: MlaHeads,
    ) -> Result<CudaTensor, KernelError> {
        checks::mla(
            "mla_absorb",
            q_nope.shape(),
            dims.nope,
            kv_b.0.shape(),
            dims,
        )?;
        self.per_head("mla_absorb", q_nope, &kv_b.0, dims, dims.rank)
    }

    fn mla_expand(
        &self,
        latent: &CudaTensor,
        kv_b: &CudaWeight,
        dims: MlaHeads,
    ) -> Result<CudaTensor, KernelError> {
        checks::mla(
            "mla_expand",
            latent.shape(),
            dims.rank,
            kv_b.0.shape(),
            dims,
        )?;
        self.per_head("mla_expand", latent, &kv_b.0, dims, dims.v)
    }
}

impl CudaBackend {
    /// Runs the decode kernel, whose blocks read each weight once; with few blocks, each sum is cut into its segments.
    fn decode(&self, product: &Product<'_>) -> Result<(), KernelError> {
        let blocks = product.y.cols.div_ceil(TILE_OUTPUTS);
        let is_few = blocks < 2 * self.device.info.multiprocessors as usize;
        let splits = if is_few { product.segments() } else { 1 };
        let variant = self.matrix_variant("linear", product.weight.dtype);
        let kernel = Kernel::new(&variant, "linear_decode");
        self.in_segments(product, splits, kernel, [blocks, splits, 1])
    }

    /// Launches a kernel with the parameters of `linear_decode`; if its grid has several splits, each computes one
    /// segment, and these are added afterwards.
    pub(super) fn in_segments(
        &self,
        product: &Product<'_>,
        splits: usize,
        kernel: Kernel<'_>,
        grid: [usize; 3],
    ) -> Result<(), KernelError> {
        let y = product.y;
        if splits == 1 {
            return self.launch(kernel, grid, product.args(Some(0)));
        }
        let partials = self.buffer(splits * y.elements() * 4, "partial sums")?;
        self.launch(kernel, grid, product.args(Some(partials.address())))?;
        let args = Args::new()
            .with(y.address())
            .with(partials.address())
            .with(product.bias)
            .with(y.rows as i32)
            .with(y.cols as i32)
            .with(splits as i32);
        let variant = self.matrix_variant("linear", product.weight.dtype);
        let blocks = y.elements().div_ceil(256).min(4096);
        self.launch(Kernel::new(&variant, "linear_fold"), [blocks, 1, 1], args)
    }

    /// Runs the `mma.sync` kernel for any number of rows.
    pub(super) fn tiled(&self, product: &Product<'_>) -> Result<(), KernelError> {
        let dtype = product.weight.dtype;
        let variant = self.matrix_variant("linear", dtype);
        let kernel = Kernel::new(&variant, "linear_tiled").shared(self.tiled_shared(dtype));
        let (rows, cols) = product.y.shape();
        let grid = [cols.div_ceil(TILE_OUTPUTS), rows.div_ceil(TILE_ROWS), 1];
        self.launch(kernel, grid, product.args(None))
    }

    /// Converts the rows of `x` to the form that kernels for weights of `dtype`
    /// take; cached while the tensor does not change.
    pub(super) fn terms(&self, x: &CudaTensor, dtype: DType) -> Result<Arc<Terms>, KernelError> {
        let activations = self.activations_for(dtype);
        let is_own = activations == self.activations;
        let mut kept = x.terms.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(terms), true) = (&*kept, is_own) {
            return Ok(Arc::clone(terms));
        }
        let terms = Arc::new(self.split(x.address(), x.rows, x.cols, activations)?);
        if is_own {
            *kept = Some(Arc::clone(&terms));
        }
        Ok(terms)
    }

    /// Splits `[rows, cols]` f32 at `address`.
    pub(super) fn split(
        &self,
        address: u64,
        rows: usize,
        cols: usize,
        activations: Activations,
    ) -> Result<Terms, KernelError> {
        let padded = cols.next_multiple_of(PADDED_COLS);
        let element_bytes = match activations {
            Activations::F32 => 6,
            Activations::Bf16 => 2,
            Activations::Fp8 => 1,
        };
        let scales = match activations {
            Activations::Fp8 => {
                let count = rows * padded / PADDED_COLS;
                Some(self.buffer(count * 4, "scales of activations")?)
            }
            _ => None,
        };
        let terms = Terms {
            values: self.buffer(rows * padded * element_bytes, "split activations")?,
            scales,
            rows,
            padded,
        };
        let variant = Variant::with("split", &[("ACTIVATIONS", activations_number(activations))]);
        let args = Args::new()
            .with(address)
            .with(terms.values.address())
            .with(terms.scales_address())
            .with(rows as i32)
            .with(cols as i32)
            .with(padded as i32);
        // A warp processes 128 columns of a row, and a block has eight warps.
        let blocks = (rows * padded / PADDED_COLS).div_ceil(8);
        self.launch(Kernel::new(&variant, "split"), [blocks, 1, 1], args)?;
        Ok(terms)
    }

    /// Activations used with weights of `dtype`: FP8 activations are used with FP8 weights only.
    pub(super) fn activations_for(&self, dtype: DType) -> Activations {
        match (self.activations, dtype) {
            (Activations::Fp8, DType::F8E4m3) => Activations::Fp8,
            (Activations::Fp8, _) => Activations::Bf16,
            (other, _) => other,
        }
    }

    /// Variant of `linear` or `experts` for weights of `dtype`.
    pub(super) fn matrix_variant(&self, file: &'static str, dtype: DType) -> Variant {
        let activations = activations_number(self.activations_for(dtype));
        Variant::with(
            file,
            &[
                ("WEIGHT_TYPE", weight_type(dtype)),
                ("ACTIVATIONS", activations),
            ],
        )
    }

    /// Dynamic shared memory of the tiled kernels: `STAGES * STAGE_BYTES` of matmul.cuh.
    pub(super) fn tiled_shared(&self, dtype: DType) -> u32 {
        let activations = self.activations_for(dtype);
        let (term_bytes, terms) = match activations {
            Activations::F32 => (2, 3),
            Activations::Bf16 => (2, 1),
            Activations::Fp8 => (1, 1),
        };
        let cols = match (activations, dtype) {
            (Activations::Fp8, _) => 128,
            (_, DType::F32) => 32,
            _ => 64,
        };
        let stage = TILE_OUTPUTS * dtype.row_bytes(cols) + TILE_ROWS * terms * cols * term_bytes;
        let stages = ((96 << 10) / stage).min(4);
        (stages * stage) as u32
    }

    /// Runs one of the per-head up-projections, with `width` outputs per head.
    fn per_head(
        &self,
        name: &'static str,
        x: &CudaTensor,
        kv_b: &WeightData,
        dims: MlaHeads,
        width: usize,
    ) -> Result<CudaTensor, KernelError> {
        let y = self.tensor(x.rows, dims.heads * width)?;
        let args = Args::new()
            .with(y.address())
            .with(x.address())
            .with(kv_b.argument())
            .with(x.rows as i32)
            .with(dims.heads as i32)
            .with(dims.nope as i32)
            .with(dims.v as i32)
            .with(dims.rank as i32);
        let variant = Variant::with("mla", &[("WEIGHT_TYPE", weight_type(kv_b.dtype))]);
        let grid = [dims.heads, width.div_ceil(64), x.rows.div_ceil(32)];
        self.launch(Kernel::new(&variant, name).threads(128), grid, args)?;
        Ok(y)
    }
}
