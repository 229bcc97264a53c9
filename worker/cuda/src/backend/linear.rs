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
    /// How they enter the product.
    pub(super) activations: Activations,
    pub(super) weight: &'a WeightData,
    /// Address of the bias, or zero.
    pub(super) bias: u64,
}

impl Product<'_> {
    /// Number of partial sums per output.
    pub(super) fn segments(&self) -> usize {
        self.terms.padded.div_ceil(SEGMENT_COLS)
    }

    /// Its variant of `linear`.
    fn variant(&self) -> Variant {
        matrix_variant("linear", self.weight.dtype, self.activations)
    }

    /// Parameters of the kernels, with the address of partial sums.
    fn args(&self, partials: u64) -> Args {
        Args::new()
            .with(self.y.address())
            .with(partials)
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
        self.product(x, w, bias, self.activations_for(w.0.dtype))
    }

    fn router_linear(&self, x: &CudaTensor, w: &CudaWeight) -> Result<CudaTensor, KernelError> {
        self.product(x, w, None, Activations::F32)
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
    /// A product whose activations are of this precision.
    fn product(
        &self,
        x: &CudaTensor,
        w: &CudaWeight,
        bias: Option<&CudaVector>,
        activations: Activations,
    ) -> Result<CudaTensor, KernelError> {
        let weight = &*w.0;
        checks::linear(x.shape(), weight.shape(), bias.map(|b| b.len))?;
        let y = self.tensor(x.rows, weight.rows)?;
        if y.elements() == 0 {
            return Ok(y);
        }
        let terms = self.terms(x, activations)?;
        let product = Product {
            y: &y,
            terms: &terms,
            activations,
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

    /// Runs the decode kernel, whose blocks read each weight once; with few blocks, each sum is cut into its segments.
    fn decode(&self, product: &Product<'_>) -> Result<(), KernelError> {
        let blocks = product.y.cols.div_ceil(TILE_OUTPUTS);
        let is_few = blocks < 2 * self.device.info.multiprocessors as usize;
        let splits = if is_few { product.segments() } else { 1 };
        let variant = product.variant();
        let kernel = Kernel::new(&variant, "linear_decode");
        self.in_segments(product, splits, kernel, [blocks, splits, 1])
    }

    /// Launches a kernel with the parameters of `linear_decode`; if it writes several partial sums of each output, they
    /// are added afterwards.
    pub(super) fn in_segments(
        &self,
        product: &Product<'_>,
        sums: usize,
        kernel: Kernel<'_>,
        grid: [usize; 3],
    ) -> Result<(), KernelError> {
        let y = product.y;
        if sums == 1 {
            return self.launch(kernel, grid, product.args(0));
        }
        let partials = self.buffer(sums * y.elements() * 4, "partial sums")?;
        self.launch(kernel, grid, product.args(partials.address()))?;
        let args = Args::new()
            .with(y.address())
            .with(partials.address())
            .with(product.bias)
            .with(y.rows as i32)
            .with(y.cols as i32)
            .with(sums as i32);
        let variant = product.variant();
        let blocks = y.elements().div_ceil(256).min(4096);
        self.launch(Kernel::new(&variant, "linear_fold"), [blocks, 1, 1], args)
    }

    /// Runs the `mma.sync` kernel for any number of rows; where its blocks would leave half of the device idle, each sum
    /// is cut over several of them.
    pub(super) fn tiled(&self, product: &Product<'_>) -> Result<(), KernelError> {
        let variant = product.variant();
        let kernel = Kernel::new(&variant, "linear_tiled");
        let (rows, cols) = product.y.shape();
        let [columns, rows] = [cols.div_ceil(TILE_OUTPUTS), rows.div_ceil(TILE_ROWS)];
        let multiprocessors = self.device.info.multiprocessors as usize;
        let Cut { splits, sums } = Cut::of(columns * rows, product.segments(), multiprocessors);
        self.in_segments(product, sums, kernel, [columns, rows, splits])
    }

    /// Converts the rows of `x` to the form in which kernels take activations of this precision; the last conversion is
    /// cached while the tensor does not change.
    pub(super) fn terms(
        &self,
        x: &CudaTensor,
        activations: Activations,
    ) -> Result<Arc<Terms>, KernelError> {
        let mut kept = x.terms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(terms) = kept.as_ref().filter(|terms| terms.serve(activations)) {
            return Ok(Arc::clone(terms));
        }
        let terms = Arc::new(self.split(x.address(), x.rows, x.cols, activations)?);
        *kept = Some(Arc::clone(&terms));
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
            activations,
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
        matrix_variant(file, dtype, self.activations_for(dtype))
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

/// How the tiled kernel cuts the segments of its sums over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Blocks of each tile.
    splits: usize,
    /// Partial sums of each output: one by the first block, and one for each segment of the others.
    sums: usize,
}

impl Cut {
    /// As many blocks as the device has multiprocessors, on each of which one block runs at a time.
    fn of(tiles: usize, segments: usize, multiprocessors: usize) -> Self {
        let wanted = (multiprocessors / tiles.max(1)).clamp(1, segments.max(1));
        let each = segments.max(1).div_ceil(wanted);
        let splits = segments.max(1).div_ceil(each);
        Self {
            splits,
            sums: match splits {
                1 => 1,
                _ => segments - each + 1,
            },
        }
    }
}

/// Variant of `linear` or `experts` for weights of `dtype` and activations of this precision.
fn matrix_variant(file: &'static str, dtype: DType, activations: Activations) -> Variant {
    Variant::with(
        file,
        &[
            ("WEIGHT_TYPE", weight_type(dtype)),
            ("ACTIVATIONS", activations_number(activations)),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (splits, sums) for tiles and segments on a GPU of 128 multiprocessors.
    #[test]
    fn a_tile_is_cut_until_the_device_is_full_and_no_further() {
        let cut = |tiles, segments| {
            let Cut { splits, sums } = Cut::of(tiles, segments, 128);
            (splits, sums)
        };
        // 16 rows by DeepSeek-V3's kv_a, q_a, o and a dense FFN: outputs by columns.
        assert_eq!(cut(576_usize.div_ceil(128), 14), (14, 14));
        assert_eq!(cut(1536_usize.div_ceil(128), 14), (7, 13));
        assert_eq!(cut(7168_usize.div_ceil(128), 32), (2, 17));
        assert_eq!(cut(18_432_usize.div_ceil(128), 14), (1, 1));
        // Nothing to cut, or a device that is full.
        assert_eq!(cut(1, 1), (1, 1));
        assert_eq!(cut(65, 9), (1, 1));
        assert_eq!(cut(1000, 9), (1, 1));
    }

    /// The kernel derives the segments of a block from the number of blocks, and must find those that were meant.
    #[test]
    fn the_cut_covers_every_segment_once() {
        for (tiles, segments) in (1..140).flat_map(|t| (1..40).map(move |s| (t, s))) {
            let Cut { splits, sums } = Cut::of(tiles, segments, 128);
            let each = segments.div_ceil(splits);
            assert!((splits - 1) * each < segments && splits * each >= segments);
            let apart = if splits == 1 { 0 } else { segments - each };
            assert_eq!(sums, 1 + apart, "{tiles} tiles, {segments} segments");
        }
    }
}
