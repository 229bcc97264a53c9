//! Peak performance of this machine's cores and memory, for the profiler and for benchmarks that print ratios.

use std::time::Instant;

use crate::arch::{Isa, Kernels, PackedRows, RowSet, packed_len};
use crate::convert::bf16_bytes;
use crate::cpu::memory::{AlignedBuf, KernelScratch};
use crate::thread_pool::ThreadPool;
use crate::{BlockScales, DType, HostMatrix, KernelError, SCALE_BLOCK};

/// Prefetch distances to try; the best one differs from core to core.
const PREFETCH_BYTES: [usize; 3] = [0, 4096, 8192];

/// Duration of one arithmetic probe, in seconds.
const PEAK_SECONDS: f64 = 0.02;

/// Arithmetic probes of which the fastest counts.
const PEAK_ROUNDS: usize = 5;

/// Size of one timed part of the memory.
const SEGMENT_BYTES: usize = 16 << 20;

/// Least duration of the reads, in seconds: on a shared host, rates are halved and doubled for tens of milliseconds.
const READ_SECONDS: f64 = 0.5;

/// Measures how fast `threads` threads together read `bytes` bytes of memory, in GB/s (10^9 bytes per second).
///
/// The memory is read part by part, again and again, with each of a few prefetch distances; the result is the speed of the
/// fastest quarter of the parts with the best of these, which is little affected by neighbours on the machine. `bytes` should be several
/// times the last-level cache; the memory is allocated for the measurement.
///
/// # Errors
/// [`KernelError::OutOfMemory`], or [`KernelError::Device`] if threads cannot be started.
pub fn read_bandwidth_gbps(threads: usize, bytes: usize) -> Result<f64, KernelError> {
    let threads = threads.max(1);
    let elements = (bytes / 4).max(1 << 16);
    let mut data: Vec<f32> = Vec::new();
    data.try_reserve_exact(elements)
        .map_err(|_| KernelError::OutOfMemory {
            device: "cpu".into(),
            what: "the measurement of read bandwidth".into(),
            needed_bytes: elements as u64 * 4,
        })?;
    data.resize(elements, 1.0);
    let Some(kernels) = Isa::detect().kernels() else {
        return Ok(0.0);
    };
    let pool = ThreadPool::new(threads)?;
    let pieces = if threads == 1 { 1 } else { threads * 8 };
    let mut rates = PREFETCH_BYTES.map(|_| Vec::new());
    let all = Instant::now();
    while rates[0].is_empty() || all.elapsed().as_secs_f64() < READ_SECONDS {
        for (prefetch_bytes, rates) in PREFETCH_BYTES.into_iter().zip(&mut rates) {
            for segment in data.chunks(SEGMENT_BYTES / 4) {
                let piece_elements = segment.len().div_ceil(pieces);
                let begin = Instant::now();
                pool.run(pieces, |piece| {
                    let first = (piece.index * piece_elements).min(segment.len());
                    let last = (first + piece_elements).min(segment.len());
                    std::hint::black_box(kernels.read(&segment[first..last], prefetch_bytes));
                });
                rates.push(segment.len() as f64 * 4.0 / begin.elapsed().as_secs_f64() / 1e9);
            }
        }
    }
    Ok(rates.into_iter().map(upper_quartile).fold(0.0, f64::max))
}

/// The rate that a quarter of these exceed.
fn upper_quartile(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() * 3 / 4]
}

/// Arithmetic throughput of one core, in GFLOP/s (a multiply-add counts as two).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeakGflops {
    /// Peak of f32 multiply-adds, without loads.
    pub f32: f64,
    /// Products of bfloat16 weights with f32 activations of many tokens, as in prefill, from a core's cache.
    pub bf16: f64,
    /// The same with FP8 weights and a scale per 128×128 block.
    pub fp8: f64,
    /// The same with float16 weights.
    pub f16: f64,
    /// The same with float32 weights.
    pub f32_weights: f64,
}

/// Measures the calling thread's core with an instruction set.
///
/// # Errors
/// [`KernelError::IsaUnavailable`] if the CPU lacks it.
pub fn peak_gflops(isa: Isa) -> Result<PeakGflops, KernelError> {
    let kernels = isa.kernels_or_error()?;
    Ok(PeakGflops {
        f32: gflops(|steps| kernels.multiply(steps)),
        bf16: product_gflops(&*kernels, DType::Bf16)?,
        fp8: product_gflops(&*kernels, DType::F8E4m3)?,
        f16: product_gflops(&*kernels, DType::F16)?,
        f32_weights: product_gflops(&*kernels, DType::F32)?,
    })
}

/// Best of [`PEAK_ROUNDS`] measurements of `multiply(steps)`, which returns its number of multiply-adds: whoever shares
/// the core takes time from some of them.
fn gflops(mut multiply: impl FnMut(usize) -> usize) -> f64 {
    let mut steps = 1;
    (0..PEAK_ROUNDS)
        .map(|_| gflops_once(&mut multiply, &mut steps))
        .fold(0.0, f64::max)
}

/// Runs `multiply(steps)` with `steps` or more, long enough to be timed.
fn gflops_once(multiply: &mut impl FnMut(usize) -> usize, steps: &mut usize) -> f64 {
    loop {
        let begin = Instant::now();
        let products = multiply(*steps);
        let seconds = begin.elapsed().as_secs_f64();
        if seconds >= PEAK_SECONDS {
            return products as f64 * 2.0 / seconds / 1e9;
        }
        *steps *= 2;
    }
}

/// Matrix `[ROWS, COLS]` of ones, of which the largest fits a second-level cache.
fn ones(dtype: DType) -> Result<HostMatrix, KernelError> {
    const COUNT: usize = ROWS * COLS;
    let repeated = |one: &[u8]| one.repeat(COUNT);
    let bytes = match dtype {
        DType::F32 => repeated(&1_f32.to_le_bytes()),
        DType::F16 => repeated(&0x3c00_u16.to_le_bytes()),
        DType::Bf16 => bf16_bytes(&[1.0; COUNT]),
        DType::F8E4m3 => repeated(&[0x38]),
    };
    let blocks_per_row = COLS.div_ceil(SCALE_BLOCK);
    let scales = dtype.format().scales_apart.then(|| BlockScales {
        values: vec![1.0; ROWS.div_ceil(SCALE_BLOCK) * blocks_per_row].into(),
        blocks_per_row,
    });
    HostMatrix::new(bytes.into(), dtype, ROWS, COLS, scales)
}

/// Rows and columns of the matrix whose products are measured.
const ROWS: usize = 96;
const COLS: usize = 1024;

/// Speed of [`Kernels::linear`] with a matrix of a type.
fn product_gflops(kernels: &dyn Kernels, dtype: DType) -> Result<f64, KernelError> {
    const TOKENS: usize = 128;
    let matrix = ones(dtype)?;
    let packing = kernels.packing(dtype);
    let mut values = AlignedBuf::default();
    let values = values.f32s_mut(TOKENS * packed_len(COLS));
    for row in values.chunks_exact_mut(packed_len(COLS)) {
        kernels.pack(packing, &[1.0; COLS], row);
    }
    let x = PackedRows {
        values,
        packing,
        cols: COLS,
        rows: RowSet::Range {
            first: 0,
            count: TOKENS,
        },
    };
    let mut scratch = KernelScratch::default();
    let mut out = vec![0.0; ROWS * TOKENS];
    Ok(gflops(|steps| {
        for _ in 0..steps {
            kernels.linear(&matrix, 0..ROWS, &x, &mut scratch, &mut out);
            std::hint::black_box(&mut out);
        }
        steps * ROWS * COLS * TOKENS
    }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn probes_give_plausible_figures() {
        let bandwidth = read_bandwidth_gbps(2, 1 << 24).unwrap();
        assert!((0.1..10_000.0).contains(&bandwidth), "{bandwidth} GB/s");
        for isa in Isa::ALL {
            let Ok(peak) = peak_gflops(isa) else {
                assert!(!isa.is_available());
                let _ = writeln!(std::io::stderr(), "SKIPPED: this CPU has no {isa}");
                continue;
            };
            // Products also read their operands. Where others compute, a short measurement of either may be anything: it is
            // made again.
            let is_plausible = |peak: &PeakGflops| {
                let products = [peak.bf16, peak.fp8, peak.f16, peak.f32_weights];
                let mut products = products.into_iter();
                (0.01..10_000.0).contains(&peak.f32)
                    && products.all(|it| (0.01..peak.f32 * 2.0).contains(&it))
            };
            let mut again = (0..20).map(|_| peak_gflops(isa).unwrap());
            assert!(
                is_plausible(&peak) || again.any(|peak| is_plausible(&peak)),
                "{isa} {peak:?}"
            );
        }
    }
}
