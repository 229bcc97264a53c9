//! Linear kernels beside what the machine gives in the same run: weight bytes read per second as a part of
//! the read bandwidth for a few rows, multiply-adds as a part of the peak for many.
//!
//! `cargo bench -p hearth-kernels [-- avx2|avx512|scalar]`. Run it alone on the machine: neighbours distort it.

use std::time::Instant;

use bytes::Bytes;
use hearth_kernels::probe::{peak_gflops, read_bandwidth_gbps};
use hearth_kernels::{
    Backend, BlockScales, CpuBackend, CpuOptions, DType, HostMatrix, Isa, Precision,
};

/// Weights of one measurement: several matrices, so that none is read from a cache twice.
const WEIGHT_BYTES: usize = 1 << 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let named = std::env::args().find_map(|arg| arg.parse::<Isa>().ok());
    let isa = named.unwrap_or_else(Isa::detect);
    let data = Bytes::from(random_codes(WEIGHT_BYTES));
    for threads in [1, std::thread::available_parallelism()?.get()] {
        let backend = CpuBackend::new(CpuOptions {
            isa: Some(isa),
            threads,
            ..CpuOptions::default()
        })?;
        let bandwidth = read_bandwidth_gbps(threads, WEIGHT_BYTES)?;
        let peak = peak_gflops(isa).ok_or("the CPU lacks the instruction set")?;
        println!(
            "{}: reads {bandwidth:.1} GB/s; one core {:.0} GFLOP/s ({:.0} in f32)",
            backend.describe(),
            peak.fast,
            peak.f32
        );
        for dtype in [DType::F8E4m3, DType::Bf16] {
            for (rows, cols) in [(2048, 7168), (7168, 2048)] {
                for tokens in [1, 2, 4, 8, 16, 64, 512] {
                    let result = measure(&backend, &data, dtype, rows, cols, tokens)?;
                    let gflops = result.gbps / dtype.size_bytes() as f64 * 2.0 * tokens as f64;
                    println!(
                        "  {:8} [{rows}, {cols}] x {tokens:3}: {:9.0} µs  {:6.1} GB/s ({:.2} of reading)  {gflops:6.0} GFLOP/s ({:.2} of peak)",
                        dtype.name(),
                        result.micros,
                        result.gbps,
                        result.gbps / bandwidth,
                        gflops / (peak.fast * threads as f64),
                    );
                }
            }
        }
    }
    Ok(())
}

struct Measured {
    micros: f64,
    gbps: f64,
}

/// The fastest quarter of the runs over enough matrices to leave every cache.
fn measure(
    backend: &CpuBackend,
    data: &Bytes,
    dtype: DType,
    rows: usize,
    cols: usize,
    tokens: usize,
) -> Result<Measured, Box<dyn std::error::Error>> {
    let bytes = rows * cols * dtype.size_bytes();
    let count = if tokens > 16 { 4 } else { WEIGHT_BYTES / bytes };
    let scales = (dtype == DType::F8E4m3).then(|| BlockScales {
        values: vec![0.01; rows.div_ceil(128) * cols.div_ceil(128)].into(),
        blocks_per_row: cols.div_ceil(128),
    });
    let x = backend.upload(tokens, cols, &vec![0.5; tokens * cols])?;
    let mut seconds = Vec::with_capacity(count);
    for i in 0..count {
        let part = data.slice(i * bytes..(i + 1) * bytes);
        let matrix = HostMatrix::new(part, dtype, rows, cols, scales.clone())?;
        let begin = Instant::now();
        std::hint::black_box(backend.linear(&x, &matrix, None, Precision::Fast)?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let seconds = seconds[count / 4];
    Ok(Measured {
        micros: seconds * 1e6,
        gbps: bytes as f64 / seconds / 1e9,
    })
}

/// Random bytes that are ordinary numbers as bfloat16 (2^-7 to 4) and never NaN as FP8.
fn random_codes(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    (0..len)
        .map(|i| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 56) as u8;
            if i % 2 == 0 {
                bits & 0xf7
            } else {
                0x3c | bits & 0x83
            }
        })
        .collect()
}
