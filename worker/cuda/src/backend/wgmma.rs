//! FP8 products by Hopper's wgmma, where its bits are those of `mma.sync`.
//!
//! Decode computes with `mma.sync`, and a prompt's tokens must get the bits that decode would give them. NVIDIA does not promise
//! that both instructions round alike, so it is tried once on the GPU at hand: with equal bits wgmma takes over all large products, with
//! other bits it is left alone and the log says so.

use hearth_kernels::{BlockScales, DType, HostMatrix, KernelError, SCALE_BLOCK};

use super::linear::tiled_args;
use super::{Activations, CudaBackend, Kernel};
use crate::compile::Variant;
use crate::queue::Args;

/// Outputs and tokens of a block, and its shared memory (the head of gemm_fp8_sm90.cu).
const TILE: usize = 128;
const SHARED_BYTES: u32 = 4 * 2 * 128 * 128 + 1024;
/// Rows and columns of the trial: more than a tile, no multiples of it.
const TRIAL: (usize, usize, usize) = (200, 328, 1408);

impl CudaBackend {
    /// Whether FP8 products may go by wgmma.
    pub(super) fn has_equal_wgmma(&self) -> bool {
        if self.activations != Activations::Fp8 || self.device.info.architecture() != "sm_90a" {
            return false;
        }
        *self.wgmma.get_or_init(|| match self.try_wgmma() {
            Ok(true) => true,
            Ok(false) => {
                tracing::info!(
                    "wgmma rounds unlike mma.sync on this GPU: FP8 products go by mma.sync"
                );
                false
            }
            Err(error) => {
                tracing::warn!(%error, "wgmma could not be tried: FP8 products go by mma.sync");
                false
            }
        })
    }

    /// Launches the wgmma kernel with the arguments of `linear_tiled`.
    pub(super) fn launch_wgmma(
        &self,
        (rows, cols): (usize, usize),
        args: Args,
    ) -> Result<(), KernelError> {
        let variant = Variant::plain("gemm_fp8_sm90");
        let kernel = Kernel::new(&variant, "gemm_fp8_sm90").shared(SHARED_BYTES);
        let grid = [cols.div_ceil(TILE), rows.div_ceil(TILE), 1];
        self.launch(kernel, grid, args)
    }

    /// One product both ways.
    fn try_wgmma(&self) -> Result<bool, KernelError> {
        let (rows, cols, inner) = TRIAL;
        // Codes of every sign and size but NaN; activations of many sizes.
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let codes: Vec<u8> = (0..cols * inner)
            .map(|_| {
                let code = next() as u8;
                if code & 0x7f == 0x7f { code ^ 1 } else { code }
            })
            .collect();
        let values: Vec<f32> = (0..rows * inner)
            .map(|_| (next() as f32 / 8_388_608.0 - 1.0) * (next() % 64) as f32)
            .collect();
        let blocks_per_row = inner.div_ceil(SCALE_BLOCK);
        let scales = BlockScales {
            values: vec![0.25; cols.div_ceil(SCALE_BLOCK) * blocks_per_row].into(),
            blocks_per_row,
        };
        let host = HostMatrix::new(codes.into(), DType::F8E4m3, cols, inner, Some(scales))?;
        let weight = self.load_weight(&host)?;
        let x = self.load_tensor(rows, inner, &values)?;
        let terms = self.terms(&x, DType::F8E4m3)?;
        let mut results = Vec::with_capacity(2);
        for is_wgmma in [false, true] {
            let y = self.tensor(rows, cols)?;
            let args = tiled_args(&y, &terms, &weight.0, 0);
            if is_wgmma {
                self.launch_wgmma(y.shape(), args)?;
            } else {
                self.launch_tiled(y.shape(), DType::F8E4m3, args)?;
            }
            let bytes = rows * cols * 4;
            results.push(self.queue.download(y.address(), bytes, <[u8]>::to_vec)?);
        }
        Ok(results[0] == results[1])
    }
}
