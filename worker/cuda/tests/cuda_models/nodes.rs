//! A decode step has few graph nodes, and computes the bits of the operations that its kernels take the place of.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_cuda::{Activations, CudaBackend};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::{Batch, Model, Observer, modules};
use hearth_residency::Resident;

use crate::device::gpu_with;
use crate::support::checkpoints;

/// Most nodes of a layer with dense grouped-query attention.
const MOST_DENSE_NODES: usize = 12;
/// Most nodes of a layer with latent attention and routed experts.
const MOST_EXPERT_NODES: usize = 18;
pub(crate) const BLOCK_TOKENS: usize = 16;
/// Positions from which attention runs in splits, with a kernel that merges them.
const LONG: usize = 600;
const BLOCKS: usize = 4;

/// Sees every intermediate, so that operations run one by one.
struct Sees(usize);

impl Observer<CudaBackend> for Sees {
    fn tensor(
        &mut self,
        name: &'static str,
        layer: Option<usize>,
        backend: &CudaBackend,
        x: &hearth_cuda::CudaTensor,
    ) {
        let values = backend.download(x).unwrap();
        assert!(
            values.iter().all(|v| v.is_finite()),
            "{name} of layer {layer:?}"
        );
        self.0 += 1;
    }
}

pub(crate) fn case(name: &str) -> PathBuf {
    let mut all = checkpoints().into_iter();
    all.find(|dir| dir.ends_with(name)).unwrap()
}

/// The first layers of a model.
pub(crate) fn model(dir: &Path, layers: usize, backend: &Arc<CudaBackend>) -> Model<CudaBackend> {
    let mut config = ModelConfig::read(dir).unwrap();
    assert!(layers <= config.layers, "{} layers", config.layers);
    config.layers = layers;
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = modules(&config).unwrap();
    let residency = Resident::open(&checkpoint, specs, Arc::clone(backend)).unwrap();
    Model::new(config, Arc::clone(backend), Arc::new(residency)).unwrap()
}

fn batch(tokens: &[u32], start: usize) -> Batch {
    Batch {
        tokens: tokens.to_vec(),
        spans: vec![Span {
            first_row: 0,
            rows: tokens.len(),
            start,
            blocks: (0..BLOCKS as u32).map(BlockId).collect(),
        }],
        logit_rows: vec![tokens.len() as u32 - 1],
    }
}

/// A step of one token of each of `rows` sequences, which share what was before `start`.
fn step(rows: usize, start: usize) -> Batch {
    let of_sequence = |row: usize| {
        let mut blocks: Vec<_> = (0..start as u32 / BLOCK_TOKENS as u32)
            .map(BlockId)
            .collect();
        blocks.push(BlockId((start / BLOCK_TOKENS + row) as u32));
        Span {
            first_row: row,
            rows: 1,
            start,
            blocks,
        }
    };
    Batch {
        tokens: vec![5; rows],
        spans: (0..rows).map(of_sequence).collect(),
        logit_rows: (0..rows as u32).collect(),
    }
}

/// Nodes of a step of `rows` tokens at `start` through the first `layers` layers. The cache is zeros before them.
fn nodes(
    dir: &Path,
    layers: usize,
    backend: &Arc<CudaBackend>,
    (rows, start): (usize, usize),
) -> usize {
    let model = model(dir, layers, backend);
    let layout = model.kv_layout(BLOCK_TOKENS, KvDType::Bf16);
    let blocks = start / BLOCK_TOKENS + rows;
    let mut kv = backend.kv_alloc(layout, blocks).unwrap();
    let before = backend.graph_counts().1;
    for position in start..start + 3 {
        model
            .forward(&step(rows, position), &mut kv, &mut ())
            .unwrap();
    }
    assert!(backend.graph_counts().1 > before, "no graph was launched");
    backend.last_graph_nodes()
}

#[test]
fn a_layer_of_a_decode_step_has_few_nodes() {
    for activations in [Activations::F32, Activations::Bf16] {
        let backend = gpu_with(activations);
        for (name, layers, most) in [
            ("qwen3", 2, MOST_DENSE_NODES),
            ("llama3", 2, MOST_DENSE_NODES),
            ("qwen2", 2, MOST_DENSE_NODES),
            ("deepseek_v3", 3, MOST_EXPERT_NODES),
            ("deepseek_v3_fp8", 2, MOST_EXPERT_NODES),
        ] {
            let dir = case(name);
            for at in [(1, LONG), (8, LONG)] {
                let [whole, less] =
                    [layers, layers - 1].map(|depth| nodes(&dir, depth, &backend, at));
                let of_layer = whole - less;
                let what = format!("{name}, {activations:?}, {} rows at {}", at.0, at.1);
                println!("{what}: {of_layer} nodes a layer, {whole} in all");
                assert!(of_layer <= most, "{what}: {of_layer} nodes");
            }
        }
    }
}

#[test]
fn what_an_observer_sees_changes_no_bit() {
    for activations in [Activations::F32, Activations::Bf16] {
        let backend = gpu_with(activations);
        for dir in checkpoints() {
            observed_bits(&backend, &dir);
        }
    }
}

/// Compares a prompt and two steps with and without an observer.
fn observed_bits(backend: &Arc<CudaBackend>, dir: &Path) {
    let layers = ModelConfig::read(dir).unwrap().layers;
    let model = model(dir, layers, backend);
    let layout = model.kv_layout(BLOCK_TOKENS, KvDType::Bf16);
    let mut answers = Vec::new();
    for is_seen in [false, true] {
        let mut kv = backend.kv_alloc(layout, BLOCKS).unwrap();
        let mut logits = Vec::new();
        for (tokens, start) in [(&[3, 1, 4, 1, 5][..], 0), (&[9], 5), (&[2], 6)] {
            let batch = batch(tokens, start);
            let mut sees = Sees(0);
            let row = match is_seen {
                true => model.forward(&batch, &mut kv, &mut sees).unwrap(),
                false => model.forward(&batch, &mut kv, &mut ()).unwrap(),
            };
            assert_eq!(sees.0 > 0, is_seen);
            logits.extend(row.iter().map(|v| v.to_bits()));
        }
        let blocks: Vec<BlockId> = (0..BLOCKS as u32).map(BlockId).collect();
        let cached: Vec<_> = (0..layers)
            .map(|layer| backend.kv_read(&kv, layer, &blocks, 0, 7).unwrap())
            .collect();
        answers.push((logits, cached));
    }
    assert!(answers[0] == answers[1], "{}", dir.display());
}
