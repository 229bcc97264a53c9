//! The order in which experts are added, bit for bit.

use hearth_cuda::{Activations, CudaBackend, CudaTensor, CudaWeight};
use hearth_kernels::ops::*;
use hearth_kernels::{
    DType, ExpertCall, ExpertProducts, ExpertWeights, RouterSpec, Routing, reference,
};

use crate::common::*;
use crate::route::SIGMOID;
use crate::support::gpu;

const EXPERTS: usize = 21;
const HIDDEN: usize = 40;
const INNER: usize = 24;
const TOKENS: usize = 5;
const TOP_K: usize = 7;

struct Layer<'a> {
    gpu: &'a CudaBackend,
    weights: Vec<[CudaWeight; 3]>,
    x: CudaTensor,
    /// Rows and weights of each expert.
    calls: Vec<(Vec<u32>, Vec<f32>)>,
}

impl Layer<'_> {
    /// Runs some experts in invocations of `group` of them, weighted or not.
    fn run(&self, experts: &[usize], group: usize, weighted: bool) -> Vec<f32> {
        let ones = [1.0; TOKENS];
        let mut sum = self.gpu.expert_sum(TOKENS, HIDDEN, EXPERTS).unwrap();
        let count = experts.len().div_ceil(group);
        for (index, part) in experts.chunks(group).enumerate() {
            let call = |&expert: &usize| {
                let [gate, up, down] = &self.weights[expert];
                let (rows, weights) = &self.calls[expert];
                let weights = if weighted {
                    &weights[..]
                } else {
                    &ones[..rows.len()]
                };
                ExpertCall {
                    expert: expert as u32,
                    gate,
                    up,
                    down,
                    rows,
                    weights,
                }
            };
            let calls: Vec<_> = part.iter().map(call).collect();
            let is_last = index + 1 == count;
            self.gpu
                .experts(&mut sum, &self.x, &calls, is_last)
                .unwrap();
        }
        let total = self.gpu.expert_total(sum).unwrap();
        self.gpu.download(&total).unwrap()
    }
}

#[test]
fn experts_are_added_by_the_tree_called_and_banked() {
    let gpu = gpu(Activations::F32);
    let mut rng = Rng(6);
    let mut matrix = |rows, cols| {
        let matrix = random_matrix(&mut rng, rows, cols, DType::Bf16);
        gpu.weight(&matrix).unwrap()
    };
    let weights: Vec<_> = (0..EXPERTS)
        .map(|_| {
            [
                matrix(INNER, HIDDEN),
                matrix(INNER, HIDDEN),
                matrix(HIDDEN, INNER),
            ]
        })
        .collect();
    let x = gpu
        .upload(TOKENS, HIDDEN, &rng.normals(TOKENS * HIDDEN))
        .unwrap();
    let logits = rng.normals(TOKENS * EXPERTS);
    let logits = gpu.upload(TOKENS, EXPERTS, &logits).unwrap();
    let spec = RouterSpec {
        top_k: TOP_K,
        ..SIGMOID
    };
    let routing = gpu
        .routing(gpu.route(&logits, None, spec).unwrap())
        .unwrap();
    let mut calls = vec![(Vec::new(), Vec::new()); EXPERTS];
    for (slot, (&expert, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
        calls[expert as usize].0.push((slot / TOP_K) as u32);
        calls[expert as usize].1.push(weight);
    }
    let layer = Layer {
        gpu: &gpu,
        weights,
        x,
        calls,
    };
    let outputs: Vec<_> = (0..EXPERTS).map(|e| layer.run(&[e], 1, false)).collect();
    let want: Vec<f32> = (0..TOKENS * HIDDEN)
        .map(|at| {
            let chosen = at / HIDDEN * TOP_K..(at / HIDDEN + 1) * TOP_K;
            let of = |slot: usize| {
                let expert = routing.experts[slot] as usize;
                (expert, routing.weights[slot], outputs[expert][at])
            };
            let chosen: Vec<_> = chosen.map(of).collect();
            reference::expert_sum(&chosen, EXPERTS)
        })
        .collect();
    let all: Vec<usize> = (0..EXPERTS).collect();
    for group in [1, 2, 5, EXPERTS] {
        let what = format!("groups of {group}");
        assert_same_bits(&layer.run(&all, group, true), &want, &what);
    }
    let listed: Vec<_> = layer
        .weights
        .iter()
        .map(|[gate, up, down]| ExpertWeights { gate, up, down })
        .collect();
    let bank = gpu.expert_bank(&listed).unwrap().unwrap();
    let chosen = gpu.route(&logits, None, spec).unwrap();
    let banked = gpu.banked_experts(&layer.x, &chosen, &bank).unwrap();
    assert_same_bits(&gpu.download(&banked).unwrap(), &want, "banked");
}

#[test]
fn products_that_were_computed_apart_are_added_by_the_tree() {
    let gpu = gpu(Activations::F32);
    let mut rng = Rng(9);
    let count = TOKENS * TOP_K;
    let routing = Routing {
        top_k: TOP_K,
        experts: (0..count)
            .map(|i| (i % TOP_K * 3 + i / TOP_K % 3) as u32)
            .collect(),
        weights: vec![f32::NAN; count],
    };
    let rows: Vec<u32> = (0..count).map(|i| (i * 4 % count) as u32).collect();
    let products = rng.normals(count * HIDDEN);
    let want: Vec<f32> = (0..TOKENS * HIDDEN)
        .map(|at| {
            let (token, column) = (at / HIDDEN, at % HIDDEN);
            let of = |choice: usize| {
                let product = products[rows[choice] as usize * HIDDEN + column];
                (routing.experts[choice] as usize, 1.0, product)
            };
            let chosen: Vec<_> = (token * TOP_K..(token + 1) * TOP_K).map(of).collect();
            reference::expert_sum(&chosen, EXPERTS)
        })
        .collect();
    let x = gpu.upload(count, HIDDEN, &products).unwrap();
    let of = ExpertProducts {
        experts: EXPERTS,
        routing: &routing,
        rows: &rows,
    };
    let sum = gpu.product_sum(&x, of).unwrap();
    assert_same_bits(&gpu.download(&sum).unwrap(), &want, "products");
}
