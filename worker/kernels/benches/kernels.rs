//! Linear kernels compared with the machine's limits in the same run: weight bytes read per second as a fraction of
//! the read bandwidth for a few rows, multiply-adds as a fraction of the peak for many.
//!
//! `cargo bench -p hearth-kernels [-- avx2|avx512|scalar]`. Run it alone on the machine: neighbours distort it.

use std::time::Duration;

use bytes::Bytes;
use hearth_kernels::ops::*;
use hearth_kernels::probe::{peak_gflops, read_bandwidth_gbps};
use hearth_kernels::{
    AttentionSpec, BlockId, BlockScales, CpuBackend, CpuOptions, DType, ExpertCall, HostMatrix,
    Isa, KvDType, KvLayout, Span,
};

/// Weight bytes per measurement: several matrices, so that none is read from a cache twice.
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
        let peak = peak_gflops(isa)?;
        println!(
            "{}: reads {bandwidth:.1} GB/s; one core {:.0} GFLOP/s",
            backend.describe(),
            peak.f32
        );
        experts(&backend, &data, bandwidth)?;
        attention(&backend)?;
        for dtype in [DType::F8E4m3, DType::Bf16] {
            for (rows, cols) in [(2048, 7168), (7168, 2048)] {
                for tokens in [1, 2, 4, 8, 64, 512] {
                    let result = measure(&backend, &data, dtype, rows, cols, tokens)?;
                    let gflops = result.gbps * cols as f64 / dtype.row_bytes(cols) as f64
                        * 2.0
                        * tokens as f64;
                    println!(
                        "  {:8} [{rows}, {cols}] x {tokens:3}: {:9.0} µs  {:6.1} GB/s ({:.2} of reading)  {gflops:6.0} GFLOP/s ({:.2} of peak)",
                        dtype.name(),
                        result.micros,
                        result.gbps,
                        result.gbps / bandwidth,
                        gflops / (peak.f32 * threads as f64),
                    );
                }
            }
        }
    }
    Ok(())
}

/// Clock of a measurement: the CPU time of a single thread, which excludes time when others
/// had its CPU; with more threads, wall-clock time.
enum Clock {
    Cpu(Duration),
    Wall(std::time::Instant),
}

impl Clock {
    fn start(backend: &CpuBackend) -> Self {
        if backend.threads() == 1 {
            Self::Cpu(thread_cpu_time())
        } else {
            Self::Wall(std::time::Instant::now())
        }
    }

    fn seconds(&self) -> f64 {
        match self {
            Self::Cpu(begin) => (thread_cpu_time() - *begin).as_secs_f64(),
            Self::Wall(begin) => begin.elapsed().as_secs_f64(),
        }
    }
}

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes one `timespec`, which is valid; this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

struct Measured {
    micros: f64,
    gbps: f64,
}

/// Lower quartile of the run times, over enough matrices to exceed every cache.
fn measure(
    backend: &CpuBackend,
    data: &Bytes,
    dtype: DType,
    rows: usize,
    cols: usize,
    tokens: usize,
) -> Result<Measured, Box<dyn std::error::Error>> {
    let bytes = rows * dtype.row_bytes(cols);
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
        let begin = Clock::start(backend);
        std::hint::black_box(backend.linear(&x, &matrix, None)?);
        seconds.push(begin.seconds());
    }
    seconds.sort_by(f64::total_cmp);
    let seconds = seconds[count / 4];
    Ok(Measured {
        micros: seconds * 1e6,
        gbps: bytes as f64 / seconds / 1e9,
    })
}

/// Eight experts for one token, as one layer of a decode step reads them (FP8).
fn experts(
    backend: &CpuBackend,
    data: &Bytes,
    bandwidth: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    for (hidden, inner) in [(7168, 2048), (2048, 768)] {
        let bytes = hidden * inner;
        let matrix = |i: usize, rows: usize, cols: usize| {
            let scales = BlockScales {
                values: vec![0.01; rows.div_ceil(128) * cols.div_ceil(128)].into(),
                blocks_per_row: cols.div_ceil(128),
            };
            let part = data.slice(i * bytes..(i + 1) * bytes);
            HostMatrix::new(part, DType::F8E4m3, rows, cols, Some(scales))
        };
        let x = backend.upload(1, hidden, &vec![0.5; hidden])?;
        let mut seconds = Vec::new();
        for layer in 0..WEIGHT_BYTES / bytes / 24 {
            let mut weights = Vec::new();
            for i in 0..8 {
                let first = layer * 24 + i * 3;
                weights.push([
                    matrix(first, inner, hidden)?,
                    matrix(first + 1, inner, hidden)?,
                    matrix(first + 2, hidden, inner)?,
                ]);
            }
            let calls: Vec<_> = weights
                .iter()
                .enumerate()
                .map(|(expert, [gate, up, down])| ExpertCall {
                    expert: expert as u32,
                    gate,
                    up,
                    down,
                    rows: &[0],
                    weights: &[0.1],
                })
                .collect();
            let begin = Clock::start(backend);
            let mut sum = backend.expert_sum(1, hidden, 8)?;
            backend.experts(&mut sum, &x, &calls, true)?;
            backend.expert_total(sum)?;
            seconds.push(begin.seconds());
        }
        seconds.sort_by(f64::total_cmp);
        let gbps = 24.0 * bytes as f64 / seconds[seconds.len() / 4] / 1e9;
        println!(
            "  8 experts [{inner}, {hidden}] FP8, one token: {gbps:.1} GB/s ({:.2} of reading)",
            gbps / bandwidth
        );
    }
    Ok(())
}

/// One layer's attention for one token over 4096 positions, and for a chunk of 256 at their end.
fn attention(backend: &CpuBackend) -> Result<(), Box<dyn std::error::Error>> {
    let gqa = KvLayout {
        layers: 1,
        kv_heads: 4,
        k_dim: 128,
        v_dim: 128,
        value_in_key: false,
        block_tokens: 32,
        dtype: KvDType::Bf16,
    };
    let latent = KvLayout {
        kv_heads: 1,
        k_dim: 576,
        v_dim: 512,
        value_in_key: true,
        ..gqa
    };
    for (name, layout, heads) in [("GQA 32 of 4", gqa, 32), ("MLA 128", latent, 128)] {
        let total = 4096;
        let kv = backend.kv_alloc(layout, layout.blocks_for(total))?;
        let blocks: Vec<BlockId> = (0..layout.blocks_for(total) as u32).map(BlockId).collect();
        for rows in [1, 256] {
            let q = vec![0.1; rows * heads * layout.k_dim];
            let q = backend.upload(rows, heads * layout.k_dim, &q)?;
            let span = Span {
                first_row: 0,
                rows,
                start: total - rows,
                blocks: blocks.clone(),
            };
            let spec = AttentionSpec { heads, scale: 0.1 };
            let mut best = f64::INFINITY;
            for _ in 0..3 {
                let begin = Clock::start(backend);
                std::hint::black_box(backend.attention(
                    &q,
                    &kv,
                    0,
                    std::slice::from_ref(&span),
                    spec,
                )?);
                best = best.min(begin.seconds());
            }
            let products = rows * heads * total * (layout.k_dim + layout.v_dim);
            println!(
                "  attention {name}, {rows:3} x 4096: {:9.0} µs  {:6.0} GFLOP/s",
                best * 1e6,
                products as f64 * 2.0 / best / 1e9
            );
        }
    }
    Ok(())
}

/// Random bytes that are ordinary numbers in bfloat16 (2^-7 to 4) and never NaN in FP8.
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
