//! The hardware's limits: reads whose values are only summed, and products that never leave registers.

use super::Simd;

/// Independent chains: enough to hide the latency of any of these instructions.
const CHAINS: usize = 12;

/// Sums `data`, reading it as one stream and prefetching `prefetch_bytes` ahead (0: none).
#[inline(always)]
pub(crate) fn read<S: Simd>(simd: S, data: &[f32], prefetch_bytes: usize) -> f32 {
    let mut sums = [simd.zero(); 8];
    for chunk in data.chunks_exact(8 * S::LANES) {
        let p = chunk.as_ptr();
        if prefetch_bytes > 0 {
            for line in 0..8 * S::LANES * 4 / 64 {
                simd.prefetch(p.cast::<u8>().wrapping_add(prefetch_bytes + line * 64));
            }
        }
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the chunk holds eight vectors.
            *sum = simd.add(*sum, unsafe { simd.load(p.add(i * S::LANES)) });
        }
    }
    let mut total = simd.zero();
    for sum in sums {
        total = simd.add(total, sum);
    }
    simd.reduce_add(total)
}

/// Computes `steps` products of vectors in each of [`CHAINS`] chains; returns the number of multiply-adds.
#[inline(always)]
pub(crate) fn multiply<S: Simd>(simd: S, steps: usize) -> usize {
    let mut sums = [simd.zero(); CHAINS];
    for _ in 0..steps {
        let x = simd.splat(std::hint::black_box(1.0));
        for sum in &mut sums {
            *sum = simd.fma(x, x, *sum);
        }
    }
    let mut total = simd.zero();
    for sum in sums {
        total = simd.add(total, sum);
    }
    std::hint::black_box(simd.reduce_add(total));
    steps * CHAINS * S::LANES
}
