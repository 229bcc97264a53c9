//! Routed experts: called by the host, or from a bank by the router's choice on the device.

use hearth_cuda::{Activations, CudaBackend, CudaWeight};
use hearth_kernels::ops::*;
use hearth_kernels::{DType, ExpertCall, ExpertWeights, HostMatrix, RouterSpec, reference};

use crate::common::*;
use crate::linear::dtypes;
use crate::route::SIGMOID;
use crate::support::{Gpu, gpu, on_all_activations, own, seen};

pub(crate) const EXPERTS: usize = 5;
const TOP_K: usize = 3;
const SPEC: RouterSpec = RouterSpec {
    top_k: TOP_K,
    ..SIGMOID
};

/// A layer's experts, and tokens with their router logits.
pub(crate) struct Layer {
    host: Vec<[HostMatrix; 3]>,
    weights: Vec<[CudaWeight; 3]>,
    hidden: usize,
    tokens: usize,
    experts: usize,
    x: Vec<f32>,
    /// `[tokens, experts]`; every token chooses expert 1, and none chooses expert 3.
    logits: Vec<f32>,
}

impl Layer {
    pub(crate) fn new(
        gpu: &CudaBackend,
        dtypes: [DType; 2],
        shape: (usize, usize),
        tokens: usize,
    ) -> Self {
        Self::of(gpu, dtypes, shape, tokens, EXPERTS)
    }

    fn of(
        gpu: &CudaBackend,
        dtypes: [DType; 2],
        (hidden, inner): (usize, usize),
        tokens: usize,
        experts: usize,
    ) -> Self {
        let mut rng = Rng(tokens as u64);
        let mut expert = || {
            [
                random_matrix(&mut rng, inner, hidden, dtypes[0]),
                random_matrix(&mut rng, inner, hidden, dtypes[0]),
                random_matrix(&mut rng, hidden, inner, dtypes[1]),
            ]
        };
        let host: Vec<_> = (0..experts).map(|_| expert()).collect();
        // Loaded in reverse order: nothing may depend on an expert's address.
        let load = |matrices: &[HostMatrix; 3]| matrices.each_ref().map(|m| gpu.weight(m).unwrap());
        let mut weights: Vec<_> = host.iter().rev().map(load).collect();
        weights.reverse();
        let x = rng.normals(tokens * hidden);
        let mut logits = rng.normals(tokens * experts);
        for token in logits.chunks_mut(experts) {
            token[1] = 5.0;
            token[3] = -9.0;
        }
        Self {
            host,
            weights,
            hidden,
            tokens,
            experts,
            x,
            logits,
        }
    }

    /// Each expert's rows and weights.
    fn calls(&self, gpu: &CudaBackend) -> Vec<(Vec<u32>, Vec<f32>)> {
        let logits = gpu.upload(self.tokens, self.experts, &self.logits).unwrap();
        let chosen = gpu.route(&logits, None, SPEC).unwrap();
        let routing = gpu.routing(chosen).unwrap();
        let mut calls = vec![(Vec::new(), Vec::new()); self.experts];
        for (slot, (&expert, &weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
            let (rows, weights) = &mut calls[expert as usize];
            rows.push((slot / TOP_K) as u32);
            weights.push(weight);
        }
        calls
    }

    /// Runs the host's calls in several invocations of the given numbers of experts.
    pub(crate) fn called(&self, gpu: &CudaBackend, goes: &[usize]) -> Vec<f32> {
        let calls = self.calls(gpu);
        let x = gpu.upload(self.tokens, self.hidden, &self.x).unwrap();
        let mut sum = gpu
            .expert_sum(self.tokens, self.hidden, self.experts)
            .unwrap();
        let mut first = 0;
        for (index, &count) in goes.iter().enumerate() {
            let calls: Vec<_> = (first..first + count)
                .map(|e| ExpertCall {
                    expert: e as u32,
                    gate: &self.weights[e][0],
                    up: &self.weights[e][1],
                    down: &self.weights[e][2],
                    rows: &calls[e].0,
                    weights: &calls[e].1,
                })
                .collect();
            let is_last = index + 1 == goes.len();
            gpu.experts(&mut sum, &x, &calls, is_last).unwrap();
            first += count;
        }
        let total = gpu.expert_total(sum).unwrap();
        gpu.download(&total).unwrap()
    }

    /// Runs the experts of a bank.
    pub(crate) fn banked(&self, gpu: &CudaBackend) -> Vec<f32> {
        let experts: Vec<_> = self
            .weights
            .iter()
            .map(|[gate, up, down]| ExpertWeights { gate, up, down })
            .collect();
        let bank = gpu.expert_bank(&experts).unwrap().unwrap();
        let logits = gpu.upload(self.tokens, self.experts, &self.logits).unwrap();
        let chosen = gpu.route(&logits, None, SPEC).unwrap();
        let x = gpu.upload(self.tokens, self.hidden, &self.x).unwrap();
        let out = gpu.banked_experts(&x, &chosen, &bank).unwrap();
        gpu.download(&out).unwrap()
    }

    /// The reference, with activations rounded as in the products.
    fn reference(&self, gpu: &Gpu) -> Vec<f32> {
        let mut out = vec![0.0; self.tokens * self.hidden];
        for ([gate, up, down], (rows, weights)) in self.host.iter().zip(self.calls(gpu)) {
            for (&row, weight) in rows.iter().zip(weights) {
                let x = &self.x[row as usize * self.hidden..][..self.hidden];
                let x = seen(gpu.activations(), gate.dtype(), x, gate.cols());
                let gated = reference::linear(&x, 1, gate, None);
                let raised = reference::linear(&x, 1, up, None);
                let mut inner = vec![0.0; gate.rows()];
                reference::silu_mul(&gated, &raised, &mut inner);
                let inner = seen(gpu.activations(), down.dtype(), &inner, down.cols());
                let y = reference::linear(&inner, 1, down, None);
                for (out, y) in out[row as usize * self.hidden..].iter_mut().zip(y) {
                    *out += weight * y;
                }
            }
        }
        out
    }

    /// One of the tokens by itself.
    fn token(&self, token: usize) -> Self {
        Self {
            host: self.host.clone(),
            weights: self.weights.clone(),
            hidden: self.hidden,
            tokens: 1,
            experts: self.experts,
            x: self.x[token * self.hidden..][..self.hidden].to_vec(),
            logits: self.logits[token * self.experts..][..self.experts].to_vec(),
        }
    }
}

/// Relative error bound. The reference rounds the inner activations where the kernels do, but they are not the same to
/// the last bit, and one near the middle of two numbers may be rounded to the other:
/// a step of its type, relative to the size of a sum of many.
fn relative(activations: Activations) -> f32 {
    match activations {
        Activations::F32 => 4e-5,
        Activations::Bf16 => 2f32.powi(-8),
        Activations::Fp8 => 2f32.powi(-4),
    }
}

#[test]
fn experts_agree_with_the_reference_called_and_banked() {
    on_all_activations(|gpu| {
        for &dtype in dtypes(gpu) {
            // Few tokens per expert use the decode kernel, many the other; 70 for one expert are more than a tile.
            for (shape, tokens) in [((70, 200), 1), ((129, 31), 9), ((64, 136), 70)] {
                let layer = Layer::new(gpu, [dtype; 2], shape, tokens);
                let want = layer.reference(gpu);
                let size = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
                let bound = relative(gpu.activations()) * size;
                let what = format!("{:?} {} {shape:?}", gpu.activations(), dtype.name());
                let got = layer.called(gpu, &[EXPERTS]);
                assert_close(&got, &want, |_| bound, &what);
                assert_same_bits(&layer.banked(gpu), &got, &what);
            }
        }
    });
}

#[test]
fn experts_give_the_same_bits_in_any_goes_and_batches() {
    on_all_activations(|gpu| {
        for dtype in [DType::F8E4m3, DType::Bf16] {
            // One expert has all tokens, more than a tile by mma.sync and by wgmma; one has none; the others have fewer.
            for tokens in [70, 150] {
                let layer = Layer::new(gpu, [dtype; 2], (200, 150), tokens);
                let what = format!("{:?} {} {tokens}", gpu.activations(), dtype.name());
                let whole = layer.called(gpu, &[EXPERTS]);
                for goes in [&[2, 3][..], &[1, 1, 1, 1, 1]] {
                    assert_same_bits(&layer.called(gpu, goes), &whole, &what);
                }
                assert_same_bits(&layer.banked(gpu), &whole, &what);
                for token in [0, 63, 69, tokens - 1] {
                    let alone = layer.token(token);
                    let want = &whole[token * 200..][..200];
                    assert_same_bits(&alone.called(gpu, &[EXPERTS]), want, &what);
                    assert_same_bits(&alone.banked(gpu), want, &what);
                }
            }
        }
    });
}

#[test]
fn experts_run_in_as_many_passes_as_the_budget_needs() {
    let new = |gpu: &CudaBackend| Layer::new(gpu, [DType::Bf16; 2], (2048, 8), 300);
    let want = {
        let gpu = gpu(Activations::F32);
        new(&gpu).banked(&gpu)
    };
    let budget_bytes = 18 << 20;
    let gpu = own(budget_bytes);
    let layer = new(&gpu);
    // A slot's inner activations, their terms and its output; in addition the tokens, their terms and the sum.
    let (slot_bytes, token_bytes) = (8 * 4 + 128 * 6 + 2048 * 4, 2048 * (4 + 6 + 4));
    let at_once = layer.tokens * (TOP_K * slot_bytes + token_bytes);
    assert!(at_once as u64 > budget_bytes - gpu.memory_bytes().0);
    assert_same_bits(&layer.banked(&gpu), &want, "banked");
    assert_same_bits(&layer.called(&gpu, &[EXPERTS]), &want, "called");
}

#[test]
fn gate_and_down_may_differ_in_type() {
    on_all_activations(|gpu| {
        let dtypes = [DType::F8E4m3, DType::F32];
        let layer = Layer::new(gpu, dtypes, (40, 150), 9);
        let want = layer.reference(gpu);
        let size = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
        let bound = relative(gpu.activations()) * size;
        let got = layer.called(gpu, &[EXPERTS]);
        assert_close(&got, &want, |_| bound, "mixed");
        assert_same_bits(&layer.banked(gpu), &got, "mixed");
    });
}

#[test]
fn experts_that_are_not_alike_have_no_bank_and_run_in_their_order() {
    let gpu = gpu(Activations::F32);
    let mut layer = Layer::new(&gpu, [DType::Bf16; 2], (70, 40), 9);
    let other = Layer::new(&gpu, [DType::F16; 2], (70, 24), 9);
    layer.host[1].clone_from(&other.host[1]);
    layer.weights[1].clone_from(&other.weights[1]);
    let experts: Vec<_> = layer
        .weights
        .iter()
        .map(|[gate, up, down]| ExpertWeights { gate, up, down })
        .collect();
    assert!(gpu.expert_bank(&experts).unwrap().is_none());
    assert!(gpu.expert_bank(&[]).unwrap().is_none());
    let got = layer.called(&gpu, &[EXPERTS]);
    let want = layer.reference(&gpu);
    let size = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
    assert_close(&got, &want, |_| 4e-5 * size, "unlike experts");
    assert_same_bits(&layer.called(&gpu, &[1; EXPERTS]), &got, "one by one");
}

#[test]
fn no_calls_and_calls_without_rows_give_zeros() {
    let gpu = gpu(Activations::F32);
    let layer = Layer::new(&gpu, [DType::Bf16; 2], (70, 40), 3);
    let zeros = vec![0.0; 3 * 70];
    assert_same_bits(&layer.called(&gpu, &[0]), &zeros, "no calls");
    let x = gpu.upload(3, 70, &layer.x).unwrap();
    let [gate, up, down] = &layer.weights[0];
    let call = ExpertCall {
        expert: 0,
        gate,
        up,
        down,
        rows: &[],
        weights: &[],
    };
    let mut sum = gpu.expert_sum(3, 70, EXPERTS).unwrap();
    gpu.experts(&mut sum, &x, &[call], false).unwrap();
    gpu.experts(&mut sum, &x, &[], true).unwrap();
    let total = gpu.expert_total(sum).unwrap();
    assert_same_bits(&gpu.download(&total).unwrap(), &zeros, "no rows");
    // No calls after some: the partial sums are the total.
    let whole = layer.called(&gpu, &[EXPERTS]);
    assert_same_bits(&layer.called(&gpu, &[2, 0, 3, 0]), &whole, "none last");
    let none = Layer::new(&gpu, [DType::Bf16; 2], (70, 40), 0);
    assert!(none.called(&gpu, &[EXPERTS]).is_empty() && none.banked(&gpu).is_empty());
}

#[test]
fn slots_sorted_on_the_device_are_those_sorted_on_the_host() {
    // More slots than the sort's warps hold at once, and tokens with the same choice.
    let gpu = gpu(Activations::Bf16);
    let layer = Layer::new(&gpu, [DType::F8E4m3; 2], (16, 16), 700);
    let banked = layer.banked(&gpu);
    assert_same_bits(&banked, &layer.called(&gpu, &[EXPERTS]), "sorted");
}

#[test]
fn the_last_of_as_many_experts_as_the_sort_takes_is_run() {
    const MOST: usize = 512;
    let gpu = gpu(Activations::Bf16);
    // Sorted with the choice, and by a kernel of its own.
    for tokens in [3, 20] {
        let mut layer = Layer::of(&gpu, [DType::F8E4m3; 2], (16, 16), tokens, MOST);
        for token in layer.logits.chunks_mut(MOST) {
            token[MOST - 1] = 6.0;
        }
        let [(rows, _)] = &layer.calls(&gpu)[MOST - 1..] else {
            panic!("{MOST} experts");
        };
        assert_eq!(rows.len(), tokens);
        let called = layer.called(&gpu, &[MOST]);
        assert_same_bits(&layer.banked(&gpu), &called, &format!("{tokens} tokens"));
    }
}
