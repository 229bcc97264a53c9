//! The order in which experts are added, bit for bit.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{
    CpuBackend, DType, ExpertCall, ExpertProducts, HostMatrix, Routing, reference,
};

const EXPERTS: usize = 21;
const HIDDEN: usize = 70;
const INNER: usize = 40;
const TOKENS: usize = 6;

/// Rows and weights of one expert.
type Call = (Vec<u32>, Vec<f32>);

/// Runs calls in invocations of `group` experts.
fn run(
    backend: &CpuBackend,
    experts: &[[HostMatrix; 3]],
    x: &[f32],
    calls: &[(usize, &Call)],
    group: usize,
) -> Vec<f32> {
    let x = backend.upload(TOKENS, HIDDEN, x).unwrap();
    let mut sum = backend.expert_sum(TOKENS, HIDDEN, EXPERTS).unwrap();
    let count = calls.len().div_ceil(group);
    for (index, part) in calls.chunks(group).enumerate() {
        let calls: Vec<_> = part
            .iter()
            .map(|&(expert, (rows, weights))| ExpertCall {
                expert: expert as u32,
                gate: &experts[expert][0],
                up: &experts[expert][1],
                down: &experts[expert][2],
                rows,
                weights,
            })
            .collect();
        let is_last = index + 1 == count;
        backend.experts(&mut sum, &x, &calls, is_last).unwrap();
    }
    backend
        .download(&backend.expert_total(sum).unwrap())
        .unwrap()
}

#[test]
fn experts_are_added_by_the_tree() {
    for dtype in [DType::F8E4m3, DType::Bf16] {
        let mut rng = Rng(5);
        let experts: Vec<_> = (0..EXPERTS)
            .map(|_| {
                [
                    random_matrix(&mut rng, INNER, HIDDEN, dtype),
                    random_matrix(&mut rng, INNER, HIDDEN, dtype),
                    random_matrix(&mut rng, HIDDEN, INNER, dtype),
                ]
            })
            .collect();
        let x = rng.normals(TOKENS * HIDDEN);
        // The last token chose all, the first one none, and nobody expert 9.
        let chose = |token: usize, expert: usize| {
            expert != 9
                && token > 0
                && (token + 1 == TOKENS || (token * 5 + expert).is_multiple_of(3))
        };
        let calls: Vec<Call> = (0..EXPERTS)
            .map(|expert| {
                let rows: Vec<u32> = (0..TOKENS)
                    .filter(|&token| chose(token, expert))
                    .map(|token| token as u32)
                    .collect();
                let weights = rows.iter().map(|_| rng.normal()).collect();
                (rows, weights)
            })
            .collect();
        let all: Vec<_> = calls.iter().enumerate().collect();
        on_every_isa(2, |backend| {
            let unweighted = |(rows, _): &Call| (rows.clone(), vec![1.0; rows.len()]);
            let outputs: Vec<Vec<f32>> = all
                .iter()
                .map(|&(expert, call)| {
                    let alone = unweighted(call);
                    run(backend, &experts, &x, &[(expert, &alone)], 1)
                })
                .collect();
            let want: Vec<f32> = (0..TOKENS * HIDDEN)
                .map(|at| {
                    let token = (at / HIDDEN) as u32;
                    let of = |&(expert, (rows, weights)): &(usize, &Call)| {
                        let place = rows.iter().position(|row| *row == token)?;
                        Some((expert, weights[place], outputs[expert][at]))
                    };
                    let chosen: Vec<_> = all.iter().filter_map(of).collect();
                    reference::expert_sum(&chosen, EXPERTS)
                })
                .collect();
            for group in [1, 2, 5, EXPERTS] {
                let what = format!("{} {} groups of {group}", backend.isa(), dtype.name());
                let got = run(backend, &experts, &x, &all, group);
                assert_same_bits(&got, &want, &what);
            }
        });
    }
}

/// A choice of experts, products in no order, and their sum by the reference.
fn products(rng: &mut Rng) -> (Routing, Vec<u32>, Vec<f32>, Vec<f32>) {
    const TOP_K: usize = 5;
    let count = TOKENS * TOP_K;
    let routing = Routing {
        top_k: TOP_K,
        experts: (0..count)
            .map(|i| (i % TOP_K * 4 + i / TOP_K % 5) as u32)
            .collect(),
        weights: vec![f32::NAN; count],
    };
    let rows: Vec<u32> = (0..count).map(|i| (i * 7 % count) as u32).collect();
    let products = rng.normals(count * HIDDEN);
    let want = (0..TOKENS * HIDDEN)
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
    (routing, rows, products, want)
}

#[test]
fn products_that_were_computed_apart_are_added_by_the_tree() {
    let (routing, rows, products, want) = products(&mut Rng(9));
    on_every_isa(2, |backend| {
        let x = backend.upload(rows.len(), HIDDEN, &products).unwrap();
        let of = |experts, rows| ExpertProducts {
            experts,
            routing: &routing,
            rows,
        };
        let sum = backend.product_sum(&x, of(EXPERTS, &rows)).unwrap();
        let what = format!("{}", backend.isa());
        assert_same_bits(&backend.download(&sum).unwrap(), &want, &what);
        assert!(backend.product_sum(&x, of(EXPERTS, &rows[1..])).is_err());
        assert!(backend.product_sum(&x, of(20, &rows)).is_err());
        let outside = vec![rows.len() as u32; rows.len()];
        assert!(backend.product_sum(&x, of(EXPERTS, &outside)).is_err());
    });
}
