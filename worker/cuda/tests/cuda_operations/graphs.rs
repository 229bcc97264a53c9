//! Small steps run as a CUDA graph once they have been seen, with the bits of the first run.

use hearth_cuda::{CudaBackend, CudaBank, CudaKv, CudaTensor, CudaVector, CudaWeight};
use hearth_kernels::KvDType::Bf16;
use hearth_kernels::ops::*;
use hearth_kernels::{AttentionSpec, BlockId, DType, ExpertWeights, RopeLayout, RopeTable, Span};

use crate::common::*;
use crate::route::SIGMOID;
use crate::sequence::layout;
use crate::support::{BUDGET_BYTES, own};

const HIDDEN: usize = 32;
const VOCAB: usize = 50;

/// A tiny model whose layers share their weights.
struct Model<'a> {
    gpu: &'a CudaBackend,
    table: CudaWeight,
    norm: CudaVector,
    qkv: Vec<CudaWeight>,
    router: CudaWeight,
    bank: CudaBank,
    kv: CudaKv,
}

/// A row of a step: the token, its position, and the block of its sequence.
#[derive(Clone, Copy)]
struct Row(u32, u32, u32);

impl<'a> Model<'a> {
    fn new(gpu: &'a CudaBackend) -> Self {
        let mut rng = Rng(1);
        let mut load = |rows, dtype| {
            let matrix = random_matrix(&mut rng, rows, HIDDEN, dtype);
            gpu.weight(&matrix).unwrap()
        };
        let experts: Vec<_> = (0..4)
            .map(|_| [0; 3].map(|_| load(HIDDEN, DType::F8E4m3)))
            .collect();
        let listed: Vec<_> = experts
            .iter()
            .map(|[gate, up, down]| ExpertWeights { gate, up, down })
            .collect();
        Self {
            gpu,
            table: load(VOCAB, DType::Bf16),
            norm: gpu.vector(&[0.5; HIDDEN]).unwrap(),
            qkv: (0..3).map(|_| load(HIDDEN, DType::Bf16)).collect(),
            router: load(experts.len(), DType::F32),
            bank: gpu.expert_bank(&listed).unwrap().unwrap(),
            kv: gpu.kv_alloc(layout(2, 16, 16, false, Bf16), 40).unwrap(),
        }
    }

    /// Runs one step through the first `layers` layers; returns the input of each row's head.
    fn step(&mut self, rows: &[Row], layers: usize) -> Vec<f32> {
        let gpu = self.gpu;
        let ids: Vec<u32> = rows.iter().map(|row| row.0).collect();
        gpu.begin_pass(ids.len()).unwrap();
        let mut residual = gpu.embed(&self.table, &ids).unwrap();
        let mut x = gpu.rms_norm(&residual, &self.norm, 1e-6).unwrap();
        for layer in 0..layers {
            let delta = self.attend(layer, &x, rows);
            x = gpu
                .add_rms_norm(&mut residual, &delta, &self.norm, 1e-6)
                .unwrap();
            let delta = self.experts(&x);
            x = gpu
                .add_rms_norm(&mut residual, &delta, &self.norm, 1e-6)
                .unwrap();
        }
        gpu.download(&x).unwrap()
    }

    fn attend(&mut self, layer: usize, x: &CudaTensor, rows: &[Row]) -> CudaTensor {
        let gpu = self.gpu;
        let projected: Vec<_> = self
            .qkv
            .iter()
            .map(|w| gpu.linear(x, w, None).unwrap())
            .collect();
        let [mut q, mut k, v] = <[CudaTensor; 3]>::try_from(projected).ok().unwrap();
        let positions: Vec<u32> = rows.iter().map(|row| row.1).collect();
        let rope = RopeTable {
            inv_freq: (0..8).map(|i| 0.3f32.powi(i)).collect(),
            magnitude: 1.0,
            layout: RopeLayout::Half,
        };
        gpu.rope(&mut q, (2, 0), &positions, &rope).unwrap();
        gpu.rope(&mut k, (2, 0), &positions, &rope).unwrap();
        let span = |(first_row, row): (usize, &Row)| Span {
            first_row,
            rows: 1,
            start: row.1 as usize,
            blocks: vec![BlockId(row.2)],
        };
        let spans: Vec<Span> = rows.iter().enumerate().map(span).collect();
        gpu.kv_append(&mut self.kv, layer, &k, Some(&v), &spans)
            .unwrap();
        let spec = AttentionSpec {
            heads: 2,
            scale: 0.25,
        };
        gpu.attention(&q, &self.kv, layer, &spans, spec).unwrap()
    }

    fn experts(&self, x: &CudaTensor) -> CudaTensor {
        let gpu = self.gpu;
        let logits = gpu.linear(x, &self.router, None).unwrap();
        let chosen = gpu.route(&logits, None, SIGMOID).unwrap();
        gpu.banked_experts(x, &chosen, &self.bank).unwrap()
    }
}

const FIRST: [Row; 3] = [Row(3, 0, 0), Row(7, 0, 1), Row(49, 0, 2)];
const SECOND: [Row; 3] = [Row(9, 1, 0), Row(0, 1, 1), Row(7, 1, 2)];

#[test]
fn a_step_that_was_seen_goes_by_a_graph_with_the_same_bits() {
    let gpu = own(BUDGET_BYTES);
    let mut model = Model::new(&gpu);
    let launched = || gpu.graph_counts().1;
    let want = model.step(&FIRST, 1);
    assert_eq!(gpu.graph_counts(), (0, 0));
    for _ in 0..3 {
        assert_same_bits(&model.step(&FIRST, 1), &want, "again");
    }
    let (made, before) = gpu.graph_counts();
    assert!(made >= 1 && before >= 2, "{made} made, {before} launched");

    // Other tokens and positions, then fewer rows: the same kernels with other arguments.
    let second = model.step(&SECOND, 1);
    let alone = model.step(&SECOND[..1], 1);
    assert_same_bits(&alone, &second[..HIDDEN], "one row of the step");
    assert!(launched() > before, "{:?}", gpu.graph_counts());

    // Another shape in between, itself often enough to become a graph.
    let deep = model.step(&SECOND, 2);
    for _ in 0..3 {
        assert_same_bits(&model.step(&SECOND, 2), &deep, "two layers");
        assert_same_bits(&model.step(&SECOND, 1), &second, "after another shape");
    }
    assert!(gpu.graph_counts().0 >= 2, "{:?}", gpu.graph_counts());
    assert_same_bits(&model.step(&FIRST, 1), &want, "the first step again");
}

#[test]
fn a_graph_gives_the_bits_of_kernels_launched_one_by_one() {
    let gpu = own(BUDGET_BYTES);
    let (eager, by_graph) = (own_model_bits(&gpu, false), own_model_bits(&gpu, true));
    assert_same_bits(&by_graph, &eager, "by graph");
}

/// Result of the second step, after other steps of its shape (`seen`) or as the first of its shape.
fn own_model_bits(gpu: &CudaBackend, seen: bool) -> Vec<f32> {
    let mut model = Model::new(gpu);
    if !seen {
        // Two layers write the first layer's cache as one layer does.
        model.step(&FIRST, 2);
        let before = gpu.graph_counts().1;
        let second = model.step(&SECOND, 1);
        assert_eq!(gpu.graph_counts().1, before);
        return second;
    }
    for _ in 0..3 {
        model.step(&FIRST, 1);
    }
    let before = gpu.graph_counts().1;
    let second = model.step(&SECOND, 1);
    assert!(gpu.graph_counts().1 > before);
    second
}

#[test]
fn a_prompt_is_launched_as_it_comes_and_leaves_graphs_alone() {
    let gpu = own(BUDGET_BYTES);
    let mut model = Model::new(&gpu);
    let rows: Vec<Row> = (0..33).map(|i| Row(i, 0, i)).collect();
    let want = model.step(&rows, 1);
    assert_same_bits(&model.step(&rows, 1), &want, "again");
    assert_eq!(gpu.graph_counts(), (0, 0));
    for _ in 0..3 {
        let small = model.step(&rows[..32], 1);
        assert_same_bits(&small, &want[..32 * HIDDEN], "32 rows");
    }
    assert!(gpu.graph_counts().1 >= 1);
    assert_same_bits(&model.step(&rows, 1), &want, "after graphs");
}
