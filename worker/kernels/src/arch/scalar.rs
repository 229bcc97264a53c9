//! The reference kernels behind the kernels' interface.

use std::ops::Range;

use super::{AbsorbTask, AttentionTask, Isa, Kernels, PackedRows, Packing};
use crate::convert::bf16_to_f32;
use crate::cpu::memory::KernelScratch;
use crate::{DType, HostMatrix, KvDType, reference};

/// Scalar kernels, which run anywhere.
pub(crate) struct Scalar;

impl Kernels for Scalar {
    fn isa(&self) -> Isa {
        Isa::Scalar
    }

    fn names(&self) -> &'static [&'static str] {
        &["scalar-any-reference"]
    }

    fn packing(&self, _dtype: DType) -> Packing {
        Packing::InOrder
    }

    fn pack(&self, _packing: Packing, x: &[f32], out: &mut [f32]) {
        out[..x.len()].copy_from_slice(x);
        out[x.len()..].fill(0.0);
    }

    fn linear(
        &self,
        w: &HostMatrix,
        rows: Range<usize>,
        x: &PackedRows<'_>,
        _scratch: &mut KernelScratch,
        out: &mut [f32],
    ) {
        let mut weight = vec![0.0; w.cols()];
        for (i, row) in rows.enumerate() {
            reference::dequant_row(w, row, &mut weight);
            for t in 0..x.len() {
                out[i * x.len() + t] = reference::linear_row(&x.row(t)[..x.cols], &weight);
            }
        }
    }

    fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        reference::rms_norm(x, weight, eps, out);
    }

    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        reference::silu_mul(gate, up, out);
    }

    fn attention(&self, task: &AttentionTask<'_>, _scratch: &mut KernelScratch, out: &mut [f32]) {
        let layout = task.kv.layout;
        let total = task.first_position + task.rows;
        let mut keys = Vec::with_capacity(total * layout.k_dim);
        let mut values = Vec::with_capacity(total * layout.v_dim);
        for position in 0..total {
            extend(&mut keys, task.kv.key(position, task.kv_head), layout.dtype);
            let value = task.kv.value(position, task.kv_head);
            extend(&mut values, value, layout.dtype);
        }
        for row in 0..task.rows {
            let seen = task.first_position + row + 1;
            for head in 0..task.heads {
                let at = (row * task.heads + head) * layout.v_dim;
                reference::attention_head(
                    task.query(row, head),
                    &keys[..seen * layout.k_dim],
                    &values[..seen * layout.v_dim],
                    layout.v_dim,
                    task.scale,
                    &mut out[at..at + layout.v_dim],
                );
            }
        }
    }

    fn mla_absorb(&self, task: &AbsorbTask<'_>, _scratch: &mut KernelScratch, out: &mut [f32]) {
        let dims = task.dims;
        let mut weight = vec![0.0; dims.rank];
        let mut sums = vec![0f64; task.rows * dims.rank];
        for i in 0..dims.nope {
            let row = task.head * (dims.nope + dims.v) + i;
            reference::dequant_row(task.kv_b, row, &mut weight);
            for t in 0..task.rows {
                let at = ((task.first_row + t) * dims.heads + task.head) * dims.nope + i;
                let q = f64::from(task.q_nope[at]);
                for (sum, w) in sums[t * dims.rank..].iter_mut().zip(&weight) {
                    *sum += q * f64::from(*w);
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum as f32;
        }
    }

    fn read(&self, data: &[f32], _prefetch_bytes: usize) -> f32 {
        let mut sums = [0.0; 16];
        for chunk in data.chunks_exact(16) {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += value;
            }
        }
        sums.iter().sum()
    }

    fn multiply(&self, steps: usize) -> usize {
        const PRODUCTS: usize = 64;
        let x = std::hint::black_box([1.0; PRODUCTS]);
        let mut total = 0.0;
        for _ in 0..steps {
            total += reference::linear_row(std::hint::black_box(&x), &x);
        }
        std::hint::black_box(total);
        steps * PRODUCTS
    }
}

/// Appends stored elements as f32.
fn extend(out: &mut Vec<f32>, bytes: &[u8], dtype: KvDType) {
    match dtype {
        KvDType::Bf16 => out.extend(
            bytes
                .chunks_exact(2)
                .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))),
        ),
        KvDType::F32 => out.extend(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        ),
    }
}
