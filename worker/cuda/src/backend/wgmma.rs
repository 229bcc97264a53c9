//! Products with Hopper's wgmma.
//!
//! For FP8 activations wgmma adds inside the tensor core what `mma.sync` adds outside, so their bits differ: a GPU uses one of
//! them for every number of rows, for prompt and decode alike. For bf16 their bits are the same, and many rows go by wgmma.
//! Either is used if it is shown to compute the product, or those bits, on the GPU at hand: one product is tried in all
//! variants when the first weight is used.

use hearth_kernels::ops::MemoryOps;
use hearth_kernels::{BlockScales, DType, HostMatrix, KernelError, SCALE_BLOCK};

use super::linear::Product;
use super::{Activations, CudaBackend, CudaTensor, Kernel};
use crate::compile::Variant;
use crate::queue::Args;

/// Outputs and tokens per block (the head of gemm_fp8_sm90.cu).
const TILE: usize = 128;
/// Maximum relative error in the trial. The tensor core keeps 14 bits of a sum of 32 products, which over the trial's
/// columns gives an error of 3e-4 of the largest result. A wrong layout would give an error as large as the result.
const TRIAL_ERROR: f32 = 1.0 / 1024.0;
/// Rows, outputs and columns of the trial: a whole tile of rows and one of fewer than half as many, and no multiples of tiles.
const TRIAL: (usize, usize, usize) = (180, 328, 1408);

impl CudaBackend {
    /// Whether FP8 products use wgmma.
    pub(super) fn has_wgmma(&self) -> bool {
        if self.activations != Activations::Fp8 || !self.uses_wgmma() {
            return false;
        }
        *self.wgmma.get_or_init(|| match self.try_wgmma() {
            Ok(error) if error <= TRIAL_ERROR => true,
            Ok(error) => {
                tracing::warn!(
                    error,
                    "wgmma is off on this GPU: FP8 products go by mma.sync"
                );
                false
            }
            Err(error) => {
                tracing::warn!(%error, "wgmma could not be tried: FP8 products go by mma.sync");
                false
            }
        })
    }

    /// Whether products of many rows of bf16 with weights of a type use wgmma.
    pub fn multiplies_by_wgmma(&self, dtype: DType) -> bool {
        if !self.may_multiply_by_wgmma(dtype) {
            return false;
        }
        if let Some(known) = self.wgmma_bf16.get() {
            return *known;
        }
        let gives_the_bits = match self.try_bf16_wgmma() {
            Ok(gives_the_bits) => gives_the_bits,
            // Another time there may be room.
            Err(KernelError::OutOfMemory { .. }) => return false,
            Err(error) => {
                tracing::warn!(%error, "wgmma could not be tried: it is not used");
                false
            }
        };
        if !gives_the_bits {
            tracing::warn!("wgmma does not give the bits of mma.sync on this GPU: it is not used");
        }
        *self.wgmma_bf16.get_or_init(|| gives_the_bits)
    }

    /// The same as far as is known without a trial.
    pub(super) fn may_multiply_by_wgmma(&self, dtype: DType) -> bool {
        self.activations == Activations::Bf16 && self.uses_wgmma() && TERMED.contains(&dtype)
    }

    /// Whether the GPU has wgmma, and the options allow it.
    pub(super) fn uses_wgmma(&self) -> bool {
        self.device.info.architecture() == "sm_90a" && !self.without_wgmma
    }

    /// Computes products with `mma.sync` and with wgmma; returns whether their bits are the same.
    fn try_bf16_wgmma(&self) -> Result<bool, KernelError> {
        for dtype in TERMED {
            let trial = Trial::new(dtype);
            let weight = self.weight(&trial.weight()?)?;
            let (rows, cols, inner) = TRIAL;
            let x = self.upload(rows, inner, &trial.values)?;
            let terms = self.terms(&x, Activations::Bf16)?;
            let product = Product {
                rows,
                terms: &terms,
                activations: Activations::Bf16,
                weight: &weight.0,
                bias: None,
            };
            // Elements that a variant does not write stay NaN.
            let nan = vec![f32::NAN; rows * cols];
            let bits = |by_wgmma| -> Result<Vec<u32>, KernelError> {
                drop(self.upload(rows, cols, &nan)?);
                let y = self.download(&self.tiled_by(&product, by_wgmma)?)?;
                Ok(y.into_iter().map(f32::to_bits).collect())
            };
            let want = bits(false)?;
            let is_finite = want.iter().all(|bits| f32::from_bits(*bits).is_finite());
            if !is_finite || bits(true)? != want {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Computes the product with wgmma; if the blocks would leave half the device
    /// idle, each sum is cut into its segments.
    pub(super) fn by_wgmma(&self, product: &Product<'_>) -> Result<CudaTensor, KernelError> {
        let [columns, rows] = tiles(product);
        let is_few = 2 * columns * rows <= self.device.info.multiprocessors as usize;
        self.wgmma_in(product, if is_few { product.segments() } else { 1 })
    }

    fn wgmma_in(&self, product: &Product<'_>, splits: usize) -> Result<CudaTensor, KernelError> {
        let variant = Variant::plain("gemm_fp8_sm90");
        let kernel = Kernel::new(&variant, "gemm_fp8_sm90");
        let [columns, rows] = tiles(product);
        let y = self.result(product, splits)?;
        // The result, and that of segments.
        let args = Args::new().with(y.output()).with(y.output());
        self.launch(kernel, [columns, rows, splits], product.operands(args))?;
        Ok(y)
    }

    /// Computes one product with `mma.sync`, and with wgmma whole and in segments; returns the largest difference
    /// relative to the largest result.
    fn try_wgmma(&self) -> Result<f32, KernelError> {
        let (rows, cols, inner) = TRIAL;
        let trial = Trial::new(DType::F8E4m3);
        let weight = self.weight(&trial.weight()?)?;
        let x = self.upload(rows, inner, &trial.values)?;
        let terms = self.terms(&x, Activations::Fp8)?;
        // Elements that a variant does not write stay NaN.
        let nan = vec![f32::NAN; rows * cols];
        let product = Product {
            rows,
            terms: &terms,
            activations: Activations::Fp8,
            weight: &weight.0,
            bias: None,
        };
        let values = |way: &dyn Fn(&Product<'_>) -> Result<CudaTensor, KernelError>| {
            // The result takes the memory of the tensor before it.
            drop(self.upload(rows, cols, &nan)?);
            self.download(&way(&product)?)
        };
        let want = values(&|p| self.tiled_by(p, false))?;
        let whole = values(&|p| self.wgmma_in(p, 1))?;
        let in_segments = values(&|p| self.wgmma_in(p, p.segments()))?;
        let largest = want.iter().map(|v| v.abs()).fold(0.0, f32::max);
        let mut difference = 0.0_f32;
        for got in [whole, in_segments] {
            if !got.iter().chain(&want).all(|value| value.is_finite()) {
                return Ok(f32::INFINITY);
            }
            let pairs = got.iter().zip(&want);
            difference = pairs.map(|(a, b)| (a - b).abs()).fold(difference, f32::max);
        }
        Ok(difference / largest)
    }
}

/// Types of weights that are one bf16 each.
const TERMED: [DType; 2] = [DType::F8E4m3, DType::Bf16];

/// What a trial multiplies.
struct Trial {
    dtype: DType,
    /// Bytes of the weight: of every sign and magnitude except NaN.
    codes: Vec<u8>,
    /// Activations of many magnitudes.
    values: Vec<f32>,
}

impl Trial {
    fn new(dtype: DType) -> Self {
        let (rows, cols, inner) = TRIAL;
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        // The upper byte of a bf16, which has most of the exponent, stays in the middle.
        let code = |at: usize, drawn: u8| match dtype {
            DType::Bf16 if at % 2 == 1 => drawn & 0x83 | 0x3c,
            DType::Bf16 => drawn,
            _ if drawn & 0x7f == 0x7f => drawn ^ 1,
            _ => drawn,
        };
        let codes = (0..cols * dtype.row_bytes(inner)).map(|at| code(at, next() as u8));
        Self {
            dtype,
            codes: codes.collect(),
            values: (0..rows * inner)
                .map(|_| (next() as f32 / 8_388_608.0 - 1.0) * (next() % 64) as f32)
                .collect(),
        }
    }

    fn weight(&self) -> Result<HostMatrix, KernelError> {
        let (_, cols, inner) = TRIAL;
        let blocks_per_row = inner.div_ceil(SCALE_BLOCK);
        let scales = self.dtype.format().scales_apart.then(|| BlockScales {
            values: vec![0.25; cols.div_ceil(SCALE_BLOCK) * blocks_per_row].into(),
            blocks_per_row,
        });
        HostMatrix::new(self.codes.clone().into(), self.dtype, cols, inner, scales)
    }
}

/// Number of blocks of outputs and of rows.
fn tiles(product: &Product<'_>) -> [usize; 2] {
    [
        product.weight.rows.div_ceil(TILE),
        product.rows.div_ceil(TILE),
    ]
}
