//! Products with weights.

use std::sync::{Arc, PoisonError};

use hearth_kernels::ops::{LinearOps, MemoryOps};
use hearth_kernels::{DType, KernelError, MlaHeads, checks};

use super::tensor::{JointArg, MOST_JOINT, Part, Terms, WeightData, weight_type};
use super::weights::PADDED_COLS;
use super::{
    Activations, CudaBackend, CudaTensor, CudaVector, CudaWeight, Kernel, activations_number,
    terms_variant,
};
use crate::compile::{BY_WGMMA, Variant};
use crate::queue::Args;

/// Maximum rows of the decode kernel.
pub(super) const DECODE_ROWS: usize = 8;
/// Outputs per block (`TILE_OUTPUTS` of matmul.cuh), and rows per block of the tiled kernel (`TILE_TOKENS`): by `mma.sync`, and
/// by wgmma, which computes no more than the former's if there are no more.
const TILE_OUTPUTS: usize = 128;
pub(super) const TILE_ROWS: usize = 64;
pub(super) const WGMMA_TILE_ROWS: usize = 128;
/// Columns per partial sum (`SEGMENT` of common.cuh).
const SEGMENT_COLS: usize = 512;

/// One product of rows with a weight.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) rows: usize,
    /// The rows.
    pub(super) terms: &'a Terms,
    /// How they enter the product.
    pub(super) activations: Activations,
    pub(super) weight: &'a WeightData,
    pub(super) bias: Option<&'a CudaVector>,
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

    /// The same by wgmma.
    fn wgmma_variant(&self) -> Variant {
        wgmma_variant("linear", self.weight.dtype, self.activations)
    }

    /// Address of the bias, or zero.
    fn bias(&self) -> u64 {
        self.bias.map_or(0, |bias| bias.data.address())
    }

    /// The parameters of a kernel for one product behind those of its result.
    pub(super) fn operands(&self, args: Args) -> Args {
        args.with(self.terms.values.address())
            .with(self.terms.scales_address())
            .with(self.weight.argument())
            .with(self.bias())
            .with(self.rows as i32)
            .with(self.weight.rows as i32)
            .with(self.terms.padded as i32)
    }
}

/// Blocks of the decode kernel for all segments of a product.
fn decode_blocks(product: &Product<'_>) -> usize {
    product.weight.rows.div_ceil(TILE_OUTPUTS)
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

    fn linears(
        &self,
        x: &CudaTensor,
        products: &[(&CudaWeight, Option<&CudaVector>)],
    ) -> Result<Vec<CudaTensor>, KernelError> {
        if !self.is_joint(x, products) {
            return products
                .iter()
                .map(|(w, bias)| self.linear(x, w, *bias))
                .collect();
        }
        for (w, bias) in products {
            checks::linear(x.shape(), w.0.shape(), bias.map(|b| b.len))?;
        }
        let Some((first, _)) = products.first() else {
            return Ok(Vec::new());
        };
        let activations = self.activations_for(first.0.dtype);
        let terms = self.terms(x, activations)?;
        let products: Vec<Product<'_>> = products
            .iter()
            .map(|(w, bias)| Product {
                rows: x.rows,
                terms: &terms,
                activations,
                weight: &w.0,
                bias: *bias,
            })
            .collect();
        let splits = self.decode_splits(&products);
        let results = products.iter().map(|product| self.result(product, splits));
        let results = results.collect::<Result<Vec<_>, _>>()?;
        self.decode(&products, &results.iter().collect::<Vec<_>>(), splits)?;
        Ok(results)
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
        self.per_head(q_nope, &kv_b.0, dims, false)
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
        self.per_head(latent, &kv_b.0, dims, true)
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
        if x.rows * weight.rows == 0 {
            return self.tensor(x.rows, weight.rows);
        }
        if weight.cols == 0 {
            return self.of_no_columns(x.rows, weight.rows, bias);
        }
        let terms = self.terms(x, activations)?;
        let product = Product {
            rows: x.rows,
            terms: &terms,
            activations,
            weight,
            bias,
        };
        if terms.scales.is_some() && self.has_wgmma() {
            self.by_wgmma(&product)
        } else if x.rows <= DECODE_ROWS {
            let splits = self.decode_splits(&[product]);
            let y = self.result(&product, splits)?;
            self.decode(&[product], &[&y], splits)?;
            Ok(y)
        } else {
            self.tiled(&product)
        }
    }

    /// A product without columns: one sum of zero for each output, and the bias.
    fn of_no_columns(
        &self,
        rows: usize,
        cols: usize,
        bias: Option<&CudaVector>,
    ) -> Result<CudaTensor, KernelError> {
        let y = self.zeros(rows, cols)?;
        let mut values = y.values();
        values.first.segments = 1;
        values.first.bias = bias.map(|bias| Arc::clone(&bias.data));
        drop(values);
        Ok(y)
    }

    /// Whether one launch computes products of the same rows.
    fn is_joint(&self, x: &CudaTensor, products: &[(&CudaWeight, Option<&CudaVector>)]) -> bool {
        let Some((first, _)) = products.first() else {
            return false;
        };
        let dtype = first.0.dtype;
        let is_wgmma = self.activations_for(dtype) == Activations::Fp8 && self.has_wgmma();
        let is_alike =
            |(w, _): &(&CudaWeight, _)| w.0.dtype == dtype && w.0.rows > 0 && w.0.cols > 0;
        products.len() <= MOST_JOINT
            && (1..=DECODE_ROWS).contains(&x.rows)
            && products.iter().all(is_alike)
            && !is_wgmma
    }

    /// Memory for a product, or for its partial sums if each output has several: what reads the tensor adds them.
    pub(super) fn result(
        &self,
        product: &Product<'_>,
        sums: usize,
    ) -> Result<CudaTensor, KernelError> {
        let (rows, cols) = (product.rows, product.weight.rows);
        if sums == 1 {
            return self.tensor(rows, cols);
        }
        let segments = Part {
            buffer: self.buffer(sums * rows * cols * 4, "partial sums")?,
            segments: sums,
            bias: product.bias.map(|bias| Arc::clone(&bias.data)),
        };
        Ok(CudaTensor::new(rows, cols, segments))
    }

    /// Segments that the decode kernel cuts sums into: all there are if its blocks would be too few to fill the device.
    fn decode_splits(&self, products: &[Product<'_>]) -> usize {
        let blocks = products.iter().map(decode_blocks).sum::<usize>();
        let is_few = blocks < 2 * self.device.info.multiprocessors as usize;
        match products.first() {
            Some(product) if is_few => product.segments(),
            _ => 1,
        }
    }

    /// Runs the decode kernel for products of the same rows with weights of one type; its blocks read each weight once.
    fn decode(
        &self,
        products: &[Product<'_>],
        results: &[&CudaTensor],
        splits: usize,
    ) -> Result<(), KernelError> {
        let Some(first) = products.first() else {
            return Ok(());
        };
        let mut joint = JointArg {
            weights: [first.weight.argument(); MOST_JOINT],
            outputs: [0; MOST_JOINT],
            biases: [0; MOST_JOINT],
            cols: [0; MOST_JOINT],
            count: products.len() as i32,
        };
        for (at, (product, y)) in products.iter().zip(results).enumerate() {
            joint.weights[at] = product.weight.argument();
            joint.outputs[at] = y.output();
            joint.biases[at] = product.bias();
            joint.cols[at] = product.weight.rows as i32;
        }
        let args = Args::new()
            .with(first.terms.values.address())
            .with(first.terms.scales_address())
            .with(joint)
            .with(first.rows as i32)
            .with(first.terms.padded as i32);
        let blocks = products.iter().map(decode_blocks).sum();
        let variant = first.variant();
        let kernel = Kernel::new(&variant, "linear_decode");
        self.launch(kernel, [blocks, splits, 1], args)
    }

    /// Computes a product of any number of rows.
    pub(super) fn tiled(&self, product: &Product<'_>) -> Result<CudaTensor, KernelError> {
        let is_bf16 = product.activations == Activations::Bf16;
        let by_wgmma = is_bf16 && self.multiplies_by_wgmma(product.weight.dtype);
        self.tiled_by(product, by_wgmma)
    }

    /// The same by wgmma or by `mma.sync`; where its blocks would leave half of the device idle, each sum is cut over several
    /// of them.
    pub(super) fn tiled_by(
        &self,
        product: &Product<'_>,
        by_wgmma: bool,
    ) -> Result<CudaTensor, KernelError> {
        let (variant, tile_rows) = match by_wgmma {
            true => (product.wgmma_variant(), WGMMA_TILE_ROWS),
            false => (product.variant(), TILE_ROWS),
        };
        let kernel = Kernel::new(&variant, "linear_tiled");
        let columns = product.weight.rows.div_ceil(TILE_OUTPUTS);
        let rows = product.rows.div_ceil(tile_rows);
        let multiprocessors = self.device.info.multiprocessors as usize;
        let Cut { splits, sums } = Cut::of(columns * rows, product.segments(), multiprocessors);
        let y = self.result(product, sums)?;
        let args = Args::new().with(y.output());
        self.launch(kernel, [columns, rows, splits], product.operands(args))?;
        Ok(y)
    }

    /// Converts the rows of `x` to the form in which kernels take activations of this precision; one conversion of each
    /// precision is cached while the tensor does not change.
    pub(super) fn terms(
        &self,
        x: &CudaTensor,
        activations: Activations,
    ) -> Result<Arc<Terms>, KernelError> {
        let mut kept = x.terms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(terms) = kept.iter().find(|terms| terms.serve(activations)) {
            return Ok(Arc::clone(terms));
        }
        let terms = Arc::new(self.split(self.values(x)?, x.rows, x.cols, activations)?);
        kept.retain(|other| !terms.serve(other.activations));
        kept.push(Arc::clone(&terms));
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
        let terms = self.terms_of(rows, cols, activations)?;
        let args = Args::new()
            .with(address)
            .with(terms.values.address())
            .with(terms.scales_address())
            .with(rows as i32)
            .with(cols as i32)
            .with(terms.padded as i32);
        // A warp processes 128 columns of a row, and a block has eight warps.
        let blocks = (rows * terms.padded / PADDED_COLS).div_ceil(8);
        let variant = terms_variant("split", activations);
        self.launch(Kernel::new(&variant, "split"), [blocks, 1, 1], args)?;
        Ok(terms)
    }

    /// Memory for rows in the form that most products take; a kernel writes it.
    pub(super) fn new_terms(&self, rows: usize, cols: usize) -> Result<Terms, KernelError> {
        self.terms_of(rows, cols, self.activations)
    }

    /// The same in the form of a given precision.
    pub(super) fn terms_of(
        &self,
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
        Ok(Terms {
            values: self.buffer(rows * padded * element_bytes, "split activations")?,
            scales,
            activations,
            rows,
            padded,
        })
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

    /// The variants of a kernel that products with weights of a type may use.
    pub(super) fn matrix_variants_of(&self, file: &'static str, dtype: DType) -> Vec<Variant> {
        let activations = self.activations_for(dtype);
        let by_wgmma = self.may_multiply_by_wgmma(dtype);
        let by_wgmma = by_wgmma.then(|| wgmma_variant(file, dtype, activations));
        let of_all = matrix_variant(file, dtype, activations);
        std::iter::once(of_all).chain(by_wgmma).collect()
    }

    /// The variant of a kernel for products of many rows.
    pub(super) fn tiled_variant(&self, file: &'static str, dtype: DType) -> Variant {
        let activations = self.activations_for(dtype);
        match self.multiplies_by_wgmma(dtype) {
            true => wgmma_variant(file, dtype, activations),
            false => matrix_variant(file, dtype, activations),
        }
    }

    /// Runs one of the per-head up-projections: out of the latents, `v` outputs per head, or into them, `rank`.
    fn per_head(
        &self,
        x: &CudaTensor,
        kv_b: &WeightData,
        dims: MlaHeads,
        is_expanded: bool,
    ) -> Result<CudaTensor, KernelError> {
        let width = if is_expanded { dims.v } else { dims.rank };
        let y = self.tensor(x.rows, dims.heads * width)?;
        let terms = match is_expanded && self.activations != Activations::Fp8 {
            true => Some(self.new_terms(y.rows, y.cols)?),
            false => None,
        };
        let mut args = Args::new().with(y.output());
        if is_expanded {
            args = args.with(terms.as_ref().map_or(0, |terms| terms.values.address()));
        }
        args = args
            .with(self.rows_of(x)?)
            .with(kv_b.argument())
            .with(x.rows as i32)
            .with(dims.heads as i32)
            .with(dims.nope as i32)
            .with(dims.v as i32)
            .with(dims.rank as i32);
        if is_expanded {
            args = args.with(terms.as_ref().map_or(0, |terms| terms.padded) as i32);
        }
        let variant = self.mla_variant(kv_b.dtype);
        let grid = [dims.heads, width.div_ceil(64), x.rows.div_ceil(32)];
        let name = if is_expanded {
            "mla_expand"
        } else {
            "mla_absorb"
        };
        self.launch(Kernel::new(&variant, name).threads(128), grid, args)?;
        Ok(match terms {
            Some(terms) => y.with_terms(terms),
            None => y,
        })
    }

    /// Variant of `mla` for `kv_b` of `dtype`; FP8 terms are not its own to write.
    pub(super) fn mla_variant(&self, dtype: DType) -> Variant {
        let activations = match self.activations {
            Activations::F32 => Activations::F32,
            Activations::Bf16 | Activations::Fp8 => Activations::Bf16,
        };
        let defines = [
            ("WEIGHT_TYPE", weight_type(dtype)),
            ("ACTIVATIONS", activations_number(activations)),
        ];
        Variant::with("mla", &defines)
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

fn wgmma_variant(file: &'static str, dtype: DType, activations: Activations) -> Variant {
    matrix_variant(file, dtype, activations).and(BY_WGMMA)
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
