//! Choice of experts, compared with the reference.

use hearth_kernels::ops::*;
use hearth_kernels::{RouterScore, RouterSpec, Routing};

use crate::common::*;
use crate::support::{Gpu, plain, scalar};

pub(crate) const SIGMOID: RouterSpec = RouterSpec {
    score: RouterScore::Sigmoid,
    top_k: 2,
    groups: 1,
    top_groups: 1,
    normalize: true,
    scaling: 2.5,
};

fn route<B: Backend>(
    backend: &B,
    logits: &[f32],
    tokens: usize,
    bias: Option<&[f32]>,
    spec: RouterSpec,
) -> Routing {
    let bias = bias.map(|bias| backend.vector(bias).unwrap());
    let cols = logits.len().checked_div(tokens).unwrap_or(200);
    let logits = backend.upload(tokens, cols, logits).unwrap();
    let chosen = backend.route(&logits, bias.as_ref(), spec).unwrap();
    backend.routing(chosen).unwrap()
}

/// Asserts the same experts, and the same weights except for the rounding of an
/// exponential and of sums of up to 512 scores.
#[track_caller]
fn assert_routes(gpu: &Gpu, logits: &[f32], tokens: usize, bias: Option<&[f32]>, spec: RouterSpec) {
    let want = route(&scalar(), logits, tokens, bias, spec);
    let got = route(&**gpu, logits, tokens, bias, spec);
    let what = format!("{spec:?}");
    assert_eq!(got.top_k, want.top_k);
    assert_eq!(got.experts, want.experts, "{what}");
    let bound = |i: usize| want.weights[i].abs() * 2e-6;
    assert_close(&got.weights, &want.weights, bound, &what);
}

#[test]
fn choices_and_weights_agree_with_the_reference() {
    let gpu = plain();
    let mut rng = Rng(1);
    for score in [RouterScore::Sigmoid, RouterScore::Softmax] {
        for (experts, groups, top_groups, top_k) in [
            (1, 1, 1, 1),
            (8, 1, 1, 2),
            (31, 1, 1, 31),
            (60, 4, 2, 5),
            (128, 1, 1, 8),
            (256, 8, 4, 8),
            (32, 32, 7, 7),
            (512, 32, 3, 32),
        ] {
            for (normalize, scaling) in [(true, 2.5), (false, 1.0)] {
                let spec = RouterSpec {
                    score,
                    top_k,
                    groups,
                    top_groups,
                    normalize,
                    scaling,
                };
                let logits = rng.normals(5 * experts);
                assert_routes(&gpu, &logits, 5, None, spec);
                let bias: Vec<f32> = rng.normals(experts).iter().map(|v| v * 0.1).collect();
                assert_routes(&gpu, &logits, 5, Some(&bias), spec);
            }
        }
    }
}

#[test]
fn ties_go_to_the_lower_index_and_nan_is_last() {
    let gpu = plain();
    let nan = f32::NAN;
    for score in [RouterScore::Sigmoid, RouterScore::Softmax] {
        let spec = RouterSpec { score, ..SIGMOID };
        for logits in [
            vec![1.0; 8],
            vec![1.0; 70],
            vec![0.0, -0.0, -0.0, 0.0, -1.0],
            vec![200.0, -200.0, 200.0, 200.0],
        ] {
            assert_routes(&gpu, &logits, 1, None, spec);
            // Scores that are not equal, with sums including the bias that are.
            let bias: Vec<f32> = vec![-2.0; logits.len()];
            assert_routes(&gpu, &logits, 1, Some(&bias), spec);
        }
        for logits in [[nan, 0.0, nan, -3.0], [nan; 4], [nan, nan, nan, 1.0]] {
            let got = route(&*gpu, &logits, 1, None, spec);
            let want = route(&scalar(), &logits, 1, None, spec);
            assert_eq!(got.experts, want.experts, "{score:?} {logits:?}");
            let grouped = RouterSpec { groups: 2, ..spec };
            let got = route(&*gpu, &logits, 1, None, grouped);
            let want = route(&scalar(), &logits, 1, None, grouped);
            assert_eq!(got.experts, want.experts, "{score:?} {logits:?}");
        }
    }
}

#[test]
fn groups_and_bias_choose_as_the_reference_does() {
    let gpu = plain();
    // Group 0 has the best single expert, group 1 the best pair, group 2 is eligible only with two groups.
    let logits = [3.0, -9.0, -9.0, 1.0, 1.1, -9.0, 0.5, 0.4, 0.3];
    let spec = RouterSpec {
        groups: 3,
        ..SIGMOID
    };
    assert_eq!(route(&*gpu, &logits, 1, None, spec).experts, [3, 4]);
    let two = RouterSpec {
        top_groups: 2,
        top_k: 4,
        ..spec
    };
    assert_eq!(route(&*gpu, &logits, 1, None, two).experts, [3, 4, 6, 7]);
    // The bias makes every score negative; an expert that is not eligible must not win by counting as zero.
    let logits = [5.0, 5.0, -5.0, -5.0];
    let bias = [-3.0, -3.0, -1.0, -1.0];
    let spec = RouterSpec {
        groups: 2,
        ..SIGMOID
    };
    assert_eq!(route(&*gpu, &logits, 1, Some(&bias), spec).experts, [2, 3]);
    assert_routes(&gpu, &logits, 1, Some(&bias), spec);
}

#[test]
fn a_token_is_routed_alike_alone_and_in_any_batch() {
    let gpu = plain();
    let logits = Rng(2).normals(9 * 200);
    for score in [RouterScore::Sigmoid, RouterScore::Softmax] {
        let spec = RouterSpec {
            score,
            top_k: 6,
            groups: 8,
            top_groups: 3,
            ..SIGMOID
        };
        let whole = route(&*gpu, &logits, 9, None, spec);
        for token in 0..9 {
            let alone = route(&*gpu, &logits[token * 200..][..200], 1, None, spec);
            let at = token * 6..token * 6 + 6;
            assert_eq!(alone.experts, whole.experts[at.clone()]);
            assert_same_bits(&alone.weights, &whole.weights[at], "weights");
        }
        let none = route(&*gpu, &[], 0, None, spec);
        assert!(none.experts.is_empty());
    }
}

#[test]
fn the_choice_and_the_rows_cross_in_one_round_trip() {
    let gpu = plain();
    let mut rng = Rng(3);
    // Recorded steps and others, rows that are no multiple of four columns, and rows of several blocks.
    for (rows, cols, top_k) in [
        (1, 5, 1),
        (3, 64, 8),
        (2, 1030, 3),
        (32, 2052, 8),
        (300, 7, 2),
    ] {
        let logits = gpu.upload(rows, 64, &rng.normals(rows * 64)).unwrap();
        let x = rng.normals(rows * cols);
        let spec = RouterSpec { top_k, ..SIGMOID };
        gpu.begin_pass(rows).unwrap();
        let uploaded = gpu.upload(rows, cols, &x).unwrap();
        let choose = || gpu.route(&logits, None, spec).unwrap();
        let want = gpu.routing(choose()).unwrap();
        let chosen = choose();
        let before = gpu.waits();
        let (got, values) = gpu.routing_and_rows(chosen, &uploaded).unwrap();
        assert_eq!(gpu.waits() - before, 1, "[{rows}, {cols}]");
        assert_eq!(
            (got.top_k, &got.experts),
            (top_k, &want.experts),
            "[{rows}, {cols}]"
        );
        assert_same_bits(&got.weights, &want.weights, "weights");
        assert_same_bits(&values, &x, "rows");
    }
    let none = gpu.upload(0, 12, &[]).unwrap();
    let logits = gpu.upload(0, 64, &[]).unwrap();
    let chosen = gpu.route(&logits, None, SIGMOID).unwrap();
    let (got, values) = gpu.routing_and_rows(chosen, &none).unwrap();
    assert!(got.experts.is_empty() && values.is_empty());
}

#[test]
fn rows_that_exceed_the_pinned_memory_cross_in_pieces() {
    let gpu = plain();
    let (rows, cols) = (1025, 16 << 10);
    let x = gpu.zeros(rows, cols).unwrap();
    let logits = gpu.upload(rows, 8, &Rng(4).normals(rows * 8)).unwrap();
    let choose = || gpu.route(&logits, None, SIGMOID).unwrap();
    let want = gpu.routing(choose()).unwrap();
    let (got, values) = gpu.routing_and_rows(choose(), &x).unwrap();
    assert_eq!(got.experts, want.experts);
    assert!(values.len() == rows * cols && values.iter().all(|&v| v == 0.0));
}

#[test]
fn uploads_are_not_waited_for_and_arrive_in_order() {
    let gpu = plain();
    let mut rng = Rng(5);
    let small: Vec<_> = (0..100).map(|_| rng.normals(3 * 50)).collect();
    // The first one takes the pinned buffers.
    drop(gpu.upload(1, 1, &[0.0]).unwrap());
    let before = gpu.waits();
    let tensors: Vec<_> = small
        .iter()
        .map(|x| gpu.upload(3, 50, x).unwrap())
        .collect();
    // They may begin a buffer, whose copies of another test are waited for once.
    assert!(gpu.waits() - before <= 1);
    for (tensor, want) in tensors.iter().zip(&small) {
        assert_same_bits(&gpu.download(tensor).unwrap(), want, "small");
    }
    // More than all pinned buffers together, before anything has been waited for.
    let large: Vec<_> = (0..7).map(|_| rng.normals(300_000)).collect();
    let upload = |x: &Vec<f32>| gpu.upload(300, 1000, x).unwrap();
    let tensors: Vec<_> = large.iter().map(upload).collect();
    for (tensor, want) in tensors.iter().zip(&large) {
        assert_same_bits(&gpu.download(tensor).unwrap(), want, "large");
    }
}
