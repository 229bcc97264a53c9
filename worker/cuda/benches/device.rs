//! The CUDA backend compared with its GPU's limits: the goals of docs/benchmarks.md, one line each.
//!
//!     cargo bench -p hearth-cuda [-- linear | experts | attention | copies | compile]
//!
//! Shapes are DeepSeek-V3's and Qwen3's. Times are medians of runs of several launches
//! each; docs/benchmarks/gpu.sh measures other engines.
#![allow(clippy::unwrap_used)] // a benchmark that cannot set itself up has failed

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearth_cuda::{Activations, CudaBackend, CudaKv, CudaOptions, CudaTensor, CudaWeight};
use hearth_kernels::ops::*;
use hearth_kernels::{
    AttentionSpec, BlockId, BlockScales, DType, ExpertWeights, HostMatrix, KvDType, KvLayout,
    MlaHeads, RopeLayout, RopeTable, RouterScore, RouterSpec, SCALE_BLOCK, Span,
};

/// Launches per run, and runs per figure.
const LAUNCHES: usize = 8;
const RUNS: usize = 9;
/// Time after which a figure is of fewer runs.
const MOST: Duration = Duration::from_secs(1);
/// Number of weight sets used in turn, so that no cache holds the next one.
const SETS: usize = 4;

fn main() {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let gpu = open(Activations::F32);
    let info = gpu.info();
    let read_gbps = gpu.read_bandwidth_gbps(2 << 30).unwrap();
    println!(
        "{} sm_{}{}, reads {read_gbps:.0} GB/s",
        info.name, info.capability.0, info.capability.1
    );
    if is_wanted("compile") {
        compile();
    }
    if is_wanted("copies") {
        copies(&gpu);
    }
    if is_wanted("linear") {
        for activations in [Activations::F32, Activations::Bf16] {
            decode_rows(activations, read_gbps);
        }
        for activations in [Activations::F32, Activations::Bf16, Activations::Fp8] {
            prefill_rows(activations);
        }
    }
    if is_wanted("experts") {
        for activations in [Activations::F32, Activations::Bf16, Activations::Fp8] {
            experts(activations);
        }
    }
    if is_wanted("attention") {
        for activations in [Activations::Bf16, Activations::F32] {
            attention(&open(activations));
        }
        if info.architecture() == "sm_90a" {
            println!("attention by mma.sync:");
            attention(&open_by(CudaOptions {
                activations: Activations::Bf16,
                without_wgmma: true,
                ..CudaOptions::default()
            }));
        }
    }
}

fn open(activations: Activations) -> CudaBackend {
    open_by(CudaOptions {
        activations,
        ..CudaOptions::default()
    })
}

fn open_by(options: CudaOptions) -> CudaBackend {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap());
    CudaBackend::new(CudaOptions {
        kernel_cache: vec![home.join(".cache/hearth/kernels")],
        ..options
    })
    .unwrap()
}

/// Median seconds per call in steps of `rows` rows: small ones are launched as graphs, as they are when a model decodes.
fn step_seconds(gpu: &CudaBackend, rows: usize, mut call: impl FnMut(usize)) -> f64 {
    seconds(gpu, |i| {
        if i == 0 {
            gpu.begin_pass(rows).unwrap();
        }
        call(i);
    })
}

/// Median seconds per call.
fn seconds(gpu: &CudaBackend, mut call: impl FnMut(usize)) -> f64 {
    let began = Instant::now();
    let mut runs = Vec::new();
    // The first does not count.
    while runs.len() <= RUNS && (runs.len() < 3 || began.elapsed() < MOST) {
        gpu.synchronize().unwrap();
        let began = Instant::now();
        (0..LAUNCHES).for_each(&mut call);
        gpu.synchronize().unwrap();
        runs.push(began.elapsed().as_secs_f64() / LAUNCHES as f64);
    }
    let mut counted = runs.split_off(1);
    counted.sort_by(f64::total_cmp);
    counted[counted.len() / 2]
}

/// Arbitrary numbers, the same in every run.
fn values(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0)
        .collect()
}

fn weight(gpu: &CudaBackend, dtype: DType, rows: usize, cols: usize, salt: usize) -> CudaWeight {
    let bytes = weight_bytes(rows * dtype.row_bytes(cols), salt);
    let blocks_per_row = cols.div_ceil(SCALE_BLOCK);
    let scales = (dtype == DType::F8E4m3).then(|| BlockScales {
        values: vec![0.01; rows.div_ceil(SCALE_BLOCK) * blocks_per_row].into(),
        blocks_per_row,
    });
    gpu.weight(&HostMatrix::new(bytes, dtype, rows, cols, scales).unwrap())
        .unwrap()
}

/// Bytes of a matrix, others for another salt.
fn weight_bytes(bytes: usize, salt: usize) -> Bytes {
    /// More than the largest matrix has.
    const PATTERN_BYTES: usize = 300 << 20;
    static PATTERN: OnceLock<Bytes> = OnceLock::new();
    let pattern = PATTERN.get_or_init(|| {
        (0..PATTERN_BYTES)
            // No NaN in FP8, no large exponent in BF16.
            .map(|i| ((i * 31 + i / 251) % 112) as u8 & 0xbf)
            .collect()
    });
    let first = (salt * 4096) % (PATTERN_BYTES - bytes);
    pattern.slice(first..first + bytes)
}

fn tensor(gpu: &CudaBackend, rows: usize, cols: usize) -> CudaTensor {
    gpu.upload(rows, cols, &values(rows * cols)).unwrap()
}

/// A copy whose terms have not been split yet: copy and split are both part of a step's cost.
fn fresh(gpu: &CudaBackend, x: &CudaTensor) -> CudaTensor {
    let cols = gpu.shape(x).1;
    gpu.columns(x, 1, 0, cols).unwrap()
}

/// Decode: weight bytes per second, compared with the device's read bandwidth.
fn decode_rows(activations: Activations, read_gbps: f64) {
    let gpu = &open(activations);
    for dtype in [DType::F8E4m3, DType::Bf16] {
        for (rows, cols) in [(18_432, 7168), (7168, 18_432), (24_576, 1536), (4096, 7168)] {
            let weights: Vec<CudaWeight> = (0..SETS)
                .map(|s| weight(gpu, dtype, rows, cols, s))
                .collect();
            for batch in [1, 4, 8] {
                let x = tensor(gpu, batch, cols);
                let time = step_seconds(gpu, batch, |i| {
                    drop(
                        gpu.linear(&fresh(gpu, &x), &weights[i % SETS], None)
                            .unwrap(),
                    )
                });
                let gbps = (rows * dtype.row_bytes(cols)) as f64 / time / 1e9;
                println!(
                    "decode {:8} [{rows}, {cols}] batch {batch}, {activations:?} activations: {:.1} us, {gbps:.0} GB/s, {:.2} of reading",
                    dtype.name(),
                    time * 1e6,
                    gbps / read_gbps
                );
            }
        }
    }
}

/// Prefill of 4096 tokens, in TFLOPS.
fn prefill_rows(activations: Activations) {
    let gpu = open(activations);
    let tokens = 4096;
    for (rows, cols) in [
        (24_576, 1536),
        (32_768, 512),
        (7168, 16_384),
        (4096, 7168),
        (7168, 2048),
    ] {
        let w = weight(&gpu, DType::F8E4m3, rows, cols, 1);
        let x = tensor(&gpu, tokens, cols);
        let time = seconds(&gpu, |_| {
            drop(gpu.linear(&fresh(&gpu, &x), &w, None).unwrap())
        });
        let tflops = 2.0 * (tokens * rows * cols) as f64 / time / 1e12;
        println!(
            "prefill FP8 [{rows}, {cols}] × {tokens}, {activations:?} activations: {:.2} ms, {tflops:.0} TFLOPS",
            time * 1e3
        );
    }
}

/// 256 experts of 2048×7168, 8 per token.
fn experts(activations: Activations) {
    let gpu = open(activations);
    let (count, hidden, inter, top_k) = (256, 7168, 2048, 8);
    let matrices: Vec<[CudaWeight; 3]> = (0..count)
        .map(|e| {
            let [gate, up] = [0, 1].map(|m| weight(&gpu, DType::F8E4m3, inter, hidden, 3 * e + m));
            [
                gate,
                up,
                weight(&gpu, DType::F8E4m3, hidden, inter, 3 * e + 2),
            ]
        })
        .collect();
    let bank = |count: usize| {
        let list: Vec<ExpertWeights<'_, CudaWeight>> = matrices[..count]
            .iter()
            .map(|[gate, up, down]| ExpertWeights { gate, up, down })
            .collect();
        gpu.expert_bank(&list).unwrap().unwrap()
    };
    let run = |bank: &_, count: usize, top_k: usize, tokens: usize| {
        let x = tensor(&gpu, tokens, hidden);
        let logits = tensor(&gpu, tokens, count);
        let spec = RouterSpec {
            score: RouterScore::Sigmoid,
            top_k,
            groups: 8,
            top_groups: 4,
            normalize: true,
            scaling: 2.5,
        };
        let chosen = gpu.route(&logits, None, spec).unwrap();
        let time = step_seconds(&gpu, tokens, |_| {
            drop(gpu.banked_experts(&x, &chosen, bank).unwrap());
        });
        let tflops = 6.0 * (tokens * top_k * hidden * inter) as f64 / time / 1e12;
        println!(
            "experts {tokens} tokens, {top_k} of {count}, {activations:?} activations: {:.2} ms, {tflops:.1} TFLOPS",
            time * 1e3
        );
    };
    let all = bank(count);
    for tokens in [1, 8, 64, 4096, 8192] {
        run(&all, count, top_k, tokens);
    }
    // A GPU's share of the experts and of the choices, when four have them and read a long prompt: 1024 rows an expert.
    run(&bank(count / 4), count / 4, top_k / 4, 32_768);
}

/// Causal attention of a whole prompt, and of one token after it.
fn attention(gpu: &CudaBackend) {
    let activations = gpu.activations();
    let shapes = [
        ("GQA 32/8 × 128", 32, 8, 128, 128, false),
        ("MLA 192/128", 32, 32, 192, 128, false),
        ("MLA absorbed", 128, 1, 576, 512, true),
    ];
    for (name, heads, kv_heads, k_dim, v_dim, value_in_key) in shapes {
        let layout = KvLayout {
            layers: 1,
            kv_heads,
            k_dim,
            v_dim,
            value_in_key,
            block_tokens: 64,
            dtype: KvDType::Bf16,
        };
        for context in [8192, 32_768] {
            let blocks: Vec<BlockId> = (0..context as u32 / 64).map(BlockId).collect();
            let kv = filled_cache(gpu, layout, &blocks);
            let spec = AttentionSpec { heads, scale: 0.1 };
            let prompt = if value_in_key { 512 } else { context };
            for rows in [prompt, 1] {
                let q = tensor(gpu, rows, heads * k_dim);
                let span = Span {
                    first_row: 0,
                    rows,
                    start: context - rows,
                    blocks: blocks.clone(),
                };
                let time = step_seconds(gpu, rows, |_| {
                    drop(
                        gpu.attention(&q, &kv, 0, std::slice::from_ref(&span), spec)
                            .unwrap(),
                    )
                });
                let pairs = rows * (context - rows) + rows * (rows + 1) / 2;
                let tflops = 2.0 * (pairs * heads * (k_dim + v_dim)) as f64 / time / 1e12;
                let gbps = (context * layout.token_layer_bytes()) as f64 / time / 1e9;
                println!(
                    "attention {name}, {rows} rows at {context}, {activations:?} activations: {:.2} ms, {tflops:.0} TFLOPS, {gbps:.0} GB/s of KV",
                    time * 1e3
                );
            }
        }
    }
}

/// A cache with numbers in it: a GPU that multiplies zeros needs less power, and its clock is higher.
fn filled_cache(gpu: &CudaBackend, layout: KvLayout, blocks: &[BlockId]) -> CudaKv {
    let mut kv = gpu.kv_alloc(layout, blocks.len()).unwrap();
    for (i, piece) in blocks.chunks(32).enumerate() {
        let bytes = weight_bytes(piece.len() * layout.block_layer_bytes(), i);
        gpu.kv_write(&mut kv, 0, piece, 0, &bytes).unwrap();
    }
    kv
}

/// A mapped file compared with page-locked memory.
fn copies(gpu: &CudaBackend) {
    let path = std::env::temp_dir().join(format!("hearth-copies-{}", std::process::id()));
    std::fs::write(&path, vec![7_u8; 1 << 30]).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    // SAFETY: no one else has the file open any more.
    let mapped = Bytes::from_owner(unsafe { memmap2::Mmap::map(&file) }.unwrap());
    let rates = gpu.measure_copies(&mapped).unwrap();
    println!(
        "copies {:.1} GB/s from a mapped file, {:.1} GB/s from pinned memory: {:.2}",
        rates.mapped_gbps,
        rates.pinned_gbps,
        rates.mapped_gbps / rates.pinned_gbps
    );
}

/// The first decode step of a model's kernels, without a cache and with one.
fn compile() {
    let directory = std::env::temp_dir().join(format!("hearth-compile-{}", std::process::id()));
    for what in ["cold", "cached"] {
        let began = Instant::now();
        let gpu = Arc::new(
            CudaBackend::new(CudaOptions {
                kernel_cache: vec![directory.clone()],
                ..CudaOptions::default()
            })
            .unwrap(),
        );
        let opened_s = began.elapsed().as_secs_f64();
        first_use(&gpu);
        let total_s = began.elapsed().as_secs_f64();
        println!(
            "compile {what}: {:.2} s for all kernels of a model (opening the GPU {opened_s:.2} s)",
            total_s - opened_s
        );
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// Every kernel that a DeepSeek-V3 step uses.
fn first_use(gpu: &CudaBackend) {
    let table = weight(gpu, DType::Bf16, 64, 256, 0);
    let w = weight(gpu, DType::F8E4m3, 256, 256, 1);
    let layout = KvLayout {
        layers: 1,
        kv_heads: 1,
        k_dim: 576,
        v_dim: 512,
        value_in_key: true,
        block_tokens: 64,
        dtype: KvDType::Bf16,
    };
    let mut kv = gpu.kv_alloc(layout, 1).unwrap();
    let list = [
        ExpertWeights {
            gate: &w,
            up: &w,
            down: &w,
        },
        ExpertWeights {
            gate: &w,
            up: &w,
            down: &w,
        },
    ];
    let bank = gpu.expert_bank(&list).unwrap().unwrap();
    let norm = gpu.vector(&[1.0; 256]).unwrap();
    gpu.begin_pass(2).unwrap();
    let x = gpu.embed(&table, &[1, 2]).unwrap();
    let x = gpu.rms_norm(&x, &norm, 1e-6).unwrap();
    let y = gpu.linear(&x, &w, None).unwrap();
    latent_projections(gpu, &y, &w);
    let span = Span {
        first_row: 0,
        rows: 2,
        start: 0,
        blocks: vec![BlockId(0)],
    };
    let key = tensor(gpu, 2, 576);
    gpu.kv_append(&mut kv, 0, &key, None, std::slice::from_ref(&span))
        .unwrap();
    let q = tensor(gpu, 2, 16 * 576);
    let spec = AttentionSpec {
        heads: 16,
        scale: 0.1,
    };
    drop(gpu.attention(&q, &kv, 0, &[span], spec).unwrap());
    let spec = RouterSpec {
        score: RouterScore::Sigmoid,
        top_k: 1,
        groups: 1,
        top_groups: 1,
        normalize: true,
        scaling: 1.0,
    };
    let chosen = gpu
        .route(&gpu.columns(&y, 1, 0, 2).unwrap(), None, spec)
        .unwrap();
    let gate = gpu.columns(&y, 1, 0, 2).unwrap();
    let up = gpu.columns(&y, 1, 0, 2).unwrap();
    drop(gpu.silu_mul(gate, &up).unwrap());
    let mut out = gpu.banked_experts(&x, &chosen, &bank).unwrap();
    gpu.add_assign(&mut out, &y).unwrap();
    gpu.download(&out).unwrap();
}

/// Rotation and both up-projections of latent attention.
fn latent_projections(gpu: &CudaBackend, y: &CudaTensor, w: &CudaWeight) {
    let mut rotated = gpu.columns(y, 2, 0, 64).unwrap();
    let table = RopeTable {
        inv_freq: vec![0.5; 32],
        magnitude: 1.0,
        layout: RopeLayout::Interleaved,
    };
    gpu.rope(&mut rotated, (2, 0), &[0, 1], &table).unwrap();
    let dims = MlaHeads {
        heads: 2,
        nope: 64,
        v: 64,
        rank: 256,
    };
    let absorbed = gpu.mla_absorb(&rotated, w, dims).unwrap();
    drop(gpu.mla_expand(&absorbed, w, dims).unwrap());
}
