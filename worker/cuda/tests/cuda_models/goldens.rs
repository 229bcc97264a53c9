//! Agreement with transformers in float32 on the stored weights: the bounds of the
//! CPU's fast kernels also apply to the GPU's.

use std::path::Path;

use hearth_cuda::{Activations, CudaBackend, CudaKv};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::{Batch, Model};

use crate::device::{gpu, gpu_with, model};
use crate::support::checkpoints;

/// Error bound of fast kernels with a BF16 cache; exact activations and an F32 cache stay far below.
const FAST_ERROR_STDS: f32 = 2e-2;
/// Error bound with exact activations and cache: only the order of sums differs from the reference, and the bound is
/// that of the CPU's scalar kernels.
pub(crate) const EXACT_ERROR_STDS: f32 = 5e-5;
/// Lead from which the best token must be the same.
const CLEAR_LEAD_STDS: f32 = 0.1;
const BLOCK_TOKENS: usize = 16;

pub(crate) struct Golden {
    pub(crate) tokens: Vec<u32>,
    pub(crate) continuation: Vec<u32>,
    logits: Vec<f32>,
}

impl Golden {
    pub(crate) fn load(dir: &Path) -> Self {
        let file = std::fs::read(dir.join("golden.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            tensors.tensor(name).unwrap().data().as_chunks().0.to_vec()
        };
        let tokens = |name| words(name).into_iter().map(u32::from_le_bytes).collect();
        Self {
            tokens: tokens("tokens"),
            continuation: tokens("continuation"),
            logits: words("logits")
                .into_iter()
                .map(f32::from_le_bytes)
                .collect(),
        }
    }
}

/// One sequence whose blocks are neither adjacent nor in order.
pub(crate) struct Runner {
    model: Model<CudaBackend>,
    kv: CudaKv,
    blocks: Vec<BlockId>,
    len: usize,
}

impl Runner {
    pub(crate) fn new(model: Model<CudaBackend>, dtype: KvDType, tokens: usize) -> Self {
        let layout = model.kv_layout(BLOCK_TOKENS, dtype);
        let count = layout.blocks_for(tokens);
        Self {
            kv: model.backend().kv_alloc(layout, 37).unwrap(),
            blocks: (0..count).map(|b| BlockId((b * 23 % 37) as u32)).collect(),
            model,
            len: 0,
        }
    }

    /// Returns the logits of every appended token.
    pub(crate) fn step(&mut self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let batch = Batch {
            tokens: tokens.to_vec(),
            spans: vec![Span {
                first_row: 0,
                rows: tokens.len(),
                start: self.len,
                blocks: self.blocks.clone(),
            }],
            logit_rows: (0..tokens.len() as u32).collect(),
        };
        self.len += tokens.len();
        let logits = self.model.forward(&batch, &mut self.kv, &mut ()).unwrap();
        let vocab = self.model.config().vocab_size;
        logits.chunks(vocab).map(<[f32]>::to_vec).collect()
    }
}

#[test]
fn logits_of_every_architecture_hold() {
    let gpu = gpu();
    for dir in checkpoints() {
        for (dtype, bound) in [
            (KvDType::F32, EXACT_ERROR_STDS),
            (KvDType::Bf16, FAST_ERROR_STDS),
        ] {
            let golden = Golden::load(&dir);
            let mut runner = Runner::new(model(&dir, gpu.clone()), dtype, golden.tokens.len());
            let got = runner.step(&golden.tokens);
            let error = worst_error(&got, &golden);
            println!(
                "{:24} {dtype:?} cache: worst error {error:.6} standard deviations",
                name(&dir)
            );
            assert!(
                error <= bound,
                "{}, {dtype:?} cache: off by {error}",
                name(&dir)
            );
        }
    }
}

#[test]
fn continuations_of_every_architecture_hold_and_decode_goes_by_graphs() {
    let gpu = gpu();
    for dir in checkpoints() {
        let golden = Golden::load(&dir);
        let tokens = golden.tokens.len() + golden.continuation.len();
        let mut runner = Runner::new(model(&dir, gpu.clone()), KvDType::Bf16, tokens);
        let mut logits = runner.step(&golden.tokens);
        let mut got = Vec::new();
        while got.len() < golden.continuation.len() {
            let token = argmax(logits.last().unwrap());
            got.push(token);
            logits = runner.step(&[token]);
        }
        assert_eq!(got, golden.continuation, "{}", name(&dir));
    }
    let (made, launched) = gpu.graph_counts();
    println!("{made} graphs, launched {launched} times");
    assert!(
        made > 0 && launched > 2 * made,
        "{made} graphs, launched {launched} times"
    );
}

/// Rounded activations are allowed to differ: in a router's near tie another expert may be chosen. On the whole they
/// compute the same model, and the difference is printed.
#[test]
fn rounded_activations_stay_near() {
    for (activations, bound) in [(Activations::Bf16, 0.02), (Activations::Fp8, 0.4)] {
        let gpu = gpu_with(activations);
        let fp8 = checkpoints()
            .into_iter()
            .filter(|dir| name(dir).ends_with("fp8"));
        for dir in fp8 {
            let golden = Golden::load(&dir);
            let tokens = golden.tokens.len();
            let mut runner = Runner::new(model(&dir, gpu.clone()), KvDType::Bf16, tokens);
            let got = runner.step(&golden.tokens).concat();
            let square = |(g, w): (&f32, &f32)| (g - w) * (g - w);
            let mean = got.iter().zip(&golden.logits).map(square).sum::<f32>() / got.len() as f32;
            let error = mean.sqrt() / std(&golden.logits);
            println!(
                "{:24} {activations:?} activations: off by {error:.4} standard deviations",
                name(&dir)
            );
            assert!(error <= bound, "{}: off by {error}", name(&dir));
        }
    }
}

/// Largest error at any position in standard deviations; asserts the best token where it leads clearly.
pub(crate) fn worst_error(got: &[Vec<f32>], golden: &Golden) -> f32 {
    let vocab = golden.logits.len() / golden.tokens.len();
    let mut worst = 0.0_f32;
    for (got, want) in got.iter().zip(golden.logits.chunks(vocab)) {
        assert!(got.iter().all(|x| x.is_finite()));
        let spread = std(want);
        let differences = got.iter().zip(want).map(|(g, w)| (g - w).abs());
        worst = worst.max(differences.fold(0.0, f32::max) / spread);
        if lead(want) > CLEAR_LEAD_STDS * spread {
            assert_eq!(argmax(got), argmax(want));
        }
    }
    worst
}

pub(crate) fn argmax(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}

fn std(row: &[f32]) -> f32 {
    let mean = row.iter().sum::<f32>() / row.len() as f32;
    let square = |x: &f32| (x - mean) * (x - mean);
    (row.iter().map(square).sum::<f32>() / row.len() as f32).sqrt()
}

fn lead(row: &[f32]) -> f32 {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}

pub(crate) fn name(dir: &Path) -> String {
    dir.file_name().unwrap().to_string_lossy().into_owned()
}
