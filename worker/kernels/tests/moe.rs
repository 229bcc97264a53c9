//! Routing and experts.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{
    CpuBackend, DType, ExpertCall, HostMatrix, Isa, RouterScore, RouterSpec, Routing, reference,
};
use proptest::prelude::*;

const SIGMOID: RouterSpec = RouterSpec {
    score: RouterScore::Sigmoid,
    top_k: 2,
    groups: 1,
    top_groups: 1,
    normalize: true,
    scaling: 2.5,
};

fn route(logits: &[f32], bias: Option<&[f32]>, spec: RouterSpec) -> Routing {
    let backend = backend(Isa::detect(), 1);
    let bias = bias.map(|b| backend.vector(b).unwrap());
    backend
        .route(&upload(&backend, 1, logits), bias.as_ref(), spec)
        .unwrap()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[test]
fn bias_changes_the_choice_and_not_the_weight() {
    let logits = [2.0, 1.0, 0.0, -1.0];
    let plain = route(&logits, None, SIGMOID);
    assert_eq!(plain.experts, [0, 1]);
    let biased = route(&logits, Some(&[0.0, -9.0, 0.0, 9.0]), SIGMOID);
    assert_eq!(biased.experts, [0, 3]);
    let (a, b) = (sigmoid(2.0), sigmoid(-1.0));
    for (got, want) in biased.weights.iter().zip([a, b]) {
        assert!((got - want / (a + b) * 2.5).abs() < 1e-6);
    }
    let raw = RouterSpec {
        normalize: false,
        scaling: 1.0,
        ..SIGMOID
    };
    let raw = route(&logits, Some(&[0.0, -9.0, 0.0, 9.0]), raw);
    assert!((raw.weights[1] - b).abs() < 1e-7);
}

#[test]
fn a_group_is_judged_by_the_sum_of_its_two_best() {
    // Group 0 has the best single expert, group 1 the best pair; group 2 comes second by pairs.
    let logits = [3.0, -9.0, -9.0, 1.0, 1.1, -9.0, 0.5, 0.4, 0.3];
    let spec = RouterSpec {
        groups: 3,
        top_groups: 1,
        ..SIGMOID
    };
    assert_eq!(route(&logits, None, spec).experts, [3, 4]);
    let two = RouterSpec {
        top_groups: 2,
        top_k: 4,
        ..spec
    };
    // sigmoid(3) + sigmoid(-9) < sigmoid(0.5) + sigmoid(0.4): group 2 beats group 0.
    assert_eq!(route(&logits, None, two).experts, [3, 4, 6, 7]);
}

#[test]
fn ineligible_experts_lose_even_to_negative_scores() {
    let logits = [5.0, 5.0, -5.0, -5.0];
    let spec = RouterSpec {
        groups: 2,
        top_groups: 1,
        ..SIGMOID
    };
    // The bias makes every score negative; a masked expert must not win by counting as zero.
    let bias = [-3.0, -3.0, -1.0, -1.0];
    assert_eq!(route(&logits, Some(&bias), spec).experts, [2, 3]);
}

#[test]
fn ties_go_to_the_lower_index_and_nan_is_last() {
    assert_eq!(route(&[1.0; 8], None, SIGMOID).experts, [0, 1]);
    let nan = f32::NAN;
    assert_eq!(route(&[nan, 0.0, nan, -3.0], None, SIGMOID).experts, [1, 3]);
    assert_eq!(route(&[nan; 4], None, SIGMOID).experts, [0, 1]);
}

#[test]
fn softmax_weights_are_those_over_all_experts_unless_normalised() {
    let logits = [1.0, 3.0, 2.0, -1.0];
    let spec = RouterSpec {
        score: RouterScore::Softmax,
        normalize: false,
        scaling: 1.0,
        ..SIGMOID
    };
    let total: f32 = logits.iter().map(|x: &f32| x.exp()).sum();
    let got = route(&logits, None, spec);
    assert_eq!(got.experts, [1, 2]);
    assert!((got.weights[0] - 3f32.exp() / total).abs() < 1e-6);
    let normalised = RouterSpec {
        normalize: true,
        ..spec
    };
    let got = route(&logits, None, normalised);
    assert!((got.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
}

#[test]
fn routing_that_cannot_be_is_refused() {
    let backend = backend(Isa::Scalar, 1);
    let logits = backend.zeros(1, 8).unwrap();
    for spec in [
        RouterSpec {
            groups: 3,
            ..SIGMOID
        },
        RouterSpec {
            groups: 4,
            top_k: 3,
            ..SIGMOID
        },
        RouterSpec {
            top_k: 0,
            ..SIGMOID
        },
        RouterSpec {
            top_groups: 2,
            ..SIGMOID
        },
    ] {
        assert!(backend.route(&logits, None, spec).is_err(), "{spec:?}");
    }
    let bias = backend.vector(&[0.0; 7]).unwrap();
    let error = backend.route(&logits, Some(&bias), SIGMOID).err().unwrap();
    assert_eq!(error.to_string(), "route: 7 biases for 8 experts");
}

proptest! {
    #[test]
    fn every_token_gets_top_k_ascending_experts_of_eligible_groups(
        seed: u64,
        groups in 1usize..5,
        size in 1usize..6,
        top_groups in 1usize..5,
        top_k in 1usize..6,
        tokens in 0usize..5,
    ) {
        let top_groups = top_groups.min(groups);
        let spec = RouterSpec {
            top_k: top_k.min(top_groups * size),
            groups,
            top_groups,
            ..SIGMOID
        };
        let backend = backend(Isa::detect(), 3);
        let logits = Rng(seed).normals(tokens * groups * size);
        let logits = backend.upload(tokens, groups * size, &logits).unwrap();
        let routing = backend.route(&logits, None, spec).unwrap();
        prop_assert_eq!(routing.experts.len(), tokens * spec.top_k);
        for (experts, weights) in routing
            .experts
            .chunks(spec.top_k)
            .zip(routing.weights.chunks(spec.top_k))
        {
            prop_assert!(experts.windows(2).all(|w| w[0] < w[1]));
            let mut of: Vec<u32> = experts.iter().map(|e| e / size as u32).collect();
            of.dedup();
            prop_assert!(of.len() <= top_groups);
            prop_assert!((weights.iter().sum::<f32>() - spec.scaling).abs() < 1e-4);
        }
    }
}

/// A layer's experts and the calls of one batch.
struct Layer {
    experts: Vec<[HostMatrix; 3]>,
    hidden: usize,
    tokens: usize,
    x: Vec<f32>,
    /// Rows and weights of each expert.
    calls: Vec<(Vec<u32>, Vec<f32>)>,
}

impl Layer {
    fn new(dtype: DType, hidden: usize, inner: usize, tokens: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let experts = (0..5)
            .map(|_| {
                [
                    random_matrix(&mut rng, inner, hidden, dtype),
                    random_matrix(&mut rng, inner, hidden, dtype),
                    random_matrix(&mut rng, hidden, inner, dtype),
                ]
            })
            .collect();
        let calls = (0..5)
            .map(|e| {
                let rows: Vec<u32> = (0..tokens as u32)
                    .filter(|t| e != 3 && (t + e).is_multiple_of(1 + e % 3))
                    .collect();
                let weights = rows.iter().map(|_| rng.normal()).collect();
                (rows, weights)
            })
            .collect();
        Self {
            experts,
            hidden,
            tokens,
            x: rng.normals(tokens * hidden),
            calls,
        }
    }

    fn run(&self, backend: &CpuBackend, parts: &[std::ops::Range<usize>]) -> Vec<f32> {
        let x = upload(backend, self.tokens, &self.x);
        let mut sum = backend
            .expert_sum(self.tokens, self.hidden, self.experts.len())
            .unwrap();
        for (index, part) in parts.iter().enumerate() {
            let calls: Vec<_> = part
                .clone()
                .map(|e| ExpertCall {
                    expert: e as u32,
                    gate: &self.experts[e][0],
                    up: &self.experts[e][1],
                    down: &self.experts[e][2],
                    rows: &self.calls[e].0,
                    weights: &self.calls[e].1,
                })
                .collect();
            let is_last = index + 1 == parts.len();
            backend.experts(&mut sum, &x, &calls, is_last).unwrap();
        }
        let total = backend.expert_total(sum).unwrap();
        backend.download(&total).unwrap()
    }

    fn reference(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.tokens * self.hidden];
        for ([gate, up, down], (rows, weights)) in self.experts.iter().zip(&self.calls) {
            for (&row, weight) in rows.iter().zip(weights) {
                let x = &self.x[row as usize * self.hidden..][..self.hidden];
                let y = reference::expert(x, 1, gate, up, down);
                for (out, y) in out[row as usize * self.hidden..].iter_mut().zip(y) {
                    *out += weight * y;
                }
            }
        }
        out
    }
}

#[test]
fn experts_agree_with_the_reference() {
    for dtype in DTYPES {
        for (hidden, inner, tokens) in [(70, 200, 1), (129, 31, 9), (64, 256, 40)] {
            let layer = Layer::new(dtype, hidden, inner, tokens, 1);
            let want = layer.reference();
            // Outputs are sums of `inner` products of numbers as large as `hidden`: compare relative to their size.
            let size = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
            on_every_isa(2, |backend| {
                // Two layers of f32 rounding.
                let bound = 2e-5 * size;
                let got = layer.run(backend, std::slice::from_ref(&(0..5)));
                let what = format!("{} {} {hidden} {inner}", backend.isa(), dtype.name());
                assert_close(&got, &want, |_| bound, &what);
            });
        }
    }
}

#[test]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges are intended
fn experts_give_the_same_bits_split_over_calls_threads_and_batches() {
    for dtype in [DType::F8E4m3, DType::Bf16, DType::F32] {
        let layer = Layer::new(dtype, 200, 300, 20, 2);
        on_every_isa(1, |one| {
            let three = backend(one.isa(), 3);
            let what = format!("{} {}", one.isa(), dtype.name());
            let whole = layer.run(one, std::slice::from_ref(&(0..5)));
            for backend in [one, &three] {
                for parts in [
                    Vec::from([0..5]),
                    vec![0..2, 2..5],
                    vec![0..1, 1..2, 2..3, 3..5],
                ] {
                    assert_same_bits(&layer.run(backend, &parts), &whole, &what);
                }
            }
            for row in [0, 7, 19] {
                let alone = Layer {
                    experts: layer.experts.clone(),
                    hidden: layer.hidden,
                    tokens: 1,
                    x: layer.x[row * 200..(row + 1) * 200].to_vec(),
                    calls: layer
                        .calls
                        .iter()
                        .map(
                            |(rows, weights)| match rows.iter().position(|&r| r as usize == row) {
                                Some(i) => (vec![0], vec![weights[i]]),
                                None => (vec![], vec![]),
                            },
                        )
                        .collect(),
                };
                let got = alone.run(&three, std::slice::from_ref(&(0..5)));
                assert_same_bits(&got, &whole[row * 200..(row + 1) * 200], &what);
            }
        });
    }
}

#[test]
fn expert_calls_that_do_not_fit_are_refused() {
    let layer = Layer::new(DType::F32, 8, 4, 2, 3);
    let backend = backend(Isa::Scalar, 1);
    let x = upload(&backend, 2, &layer.x);
    let mut sum = backend.expert_sum(2, 8, 5).unwrap();
    let [gate, up, down] = &layer.experts[0];
    let good = ExpertCall {
        expert: 0,
        gate,
        up,
        down,
        rows: &[0, 1],
        weights: &[1.0, 1.0],
    };
    for bad in [
        ExpertCall { gate: down, ..good },
        ExpertCall { down: gate, ..good },
        ExpertCall {
            rows: &[0, 2],
            ..good
        },
        ExpertCall {
            weights: &[1.0],
            ..good
        },
        ExpertCall { expert: 5, ..good },
    ] {
        let error = backend.experts(&mut sum, &x, &[bad], true).err().unwrap();
        assert!(error.to_string().starts_with("experts: "), "{error}");
    }
    let error = backend.expert_total(sum).err().unwrap();
    assert!(error.to_string().starts_with("experts: "), "{error}");
}
