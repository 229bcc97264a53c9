//! Norms, gating, rotation, embedding.

use hearth_kernels::ops::*;
use hearth_kernels::{RopeLayout, RopeTable, SampleFault, SampleSpec, reference};

use crate::common::*;
use crate::support::{Gpu, plain};

fn norm(gpu: &Gpu, x: &[f32], rows: usize, weight: &[f32]) -> Vec<f32> {
    let x = gpu.upload(rows, x.len() / rows, x).unwrap();
    let weight = gpu.vector(weight).unwrap();
    gpu.download(&gpu.rms_norm(&x, &weight, 1e-6).unwrap())
        .unwrap()
}

#[test]
fn rms_norm_agrees_with_the_reference_for_any_width() {
    let gpu = plain();
    let mut rng = Rng(1);
    for cols in [1, 7, 16, 31, 127, 128, 255, 256, 257, 576, 1000, 4100] {
        let x = rng.normals(3 * cols);
        let weight = rng.normals(cols);
        let mut want = vec![0.0; 3 * cols];
        for row in 0..3 {
            let at = row * cols..(row + 1) * cols;
            reference::rms_norm(&x[at.clone()], &weight, 1e-6, &mut want[at]);
        }
        // The mean of squares is accurate to about 2^-22, its root to half of that, quotient and products to 2^-24.
        let bound = |i: usize| want[i].abs() * 1e-6;
        assert_close(&norm(&gpu, &x, 3, &weight), &want, bound, "rms_norm");
    }
}

#[test]
fn rms_norm_of_groups_is_the_norm_of_each_and_rows_do_not_touch_each_other() {
    let gpu = plain();
    let mut rng = Rng(2);
    for width in [24, 300] {
        let (rows, cols) = (11, 6 * width);
        let x = rng.normals(rows * cols);
        let weight = rng.normals(width);
        let whole = norm(&gpu, &x, rows, &weight);
        assert_same_bits(&norm(&gpu, &x, rows * 6, &weight), &whole, "groups");
        for row in [0, 7, 10] {
            let alone = norm(&gpu, &x[row * cols..(row + 1) * cols], 1, &weight);
            assert_same_bits(&alone, &whole[row * cols..(row + 1) * cols], "alone");
        }
    }
}

#[test]
fn a_row_of_zeros_has_norm_zero_and_nan_stays_in_its_row() {
    let gpu = plain();
    let mut x = vec![0.0; 60];
    x[25] = f32::NAN;
    x[45] = 1e30;
    let y = norm(&gpu, &x, 3, &[2.0; 20]);
    assert!(y[..20].iter().all(|&v| v == 0.0));
    assert!(y[20..40].iter().all(|v| v.is_nan()));
    // The square of 1e30 is infinite in f32 but not in the reference's f64; no model has numbers of that size.
    assert!(y[40..].iter().all(|v| v.is_finite()));
}

#[test]
fn add_rms_norm_is_the_sum_and_then_the_norm() {
    let gpu = plain();
    let mut rng = Rng(4);
    for (cols, width) in [(33, 33), (33, 11), (600, 600), (256, 256), (1028, 1028)] {
        let (a, b) = (rng.normals(5 * cols), rng.normals(5 * cols));
        let weight = gpu.vector(&rng.normals(width)).unwrap();
        let mut residual = gpu.upload(5, cols, &a).unwrap();
        let delta = gpu.upload(5, cols, &b).unwrap();
        let y = gpu
            .add_rms_norm(&mut residual, &delta, &weight, 1e-6)
            .unwrap();
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_same_bits(&gpu.download(&residual).unwrap(), &sum, "sum");
        let norm = gpu.rms_norm(&residual, &weight, 1e-6).unwrap();
        let want = gpu.download(&norm).unwrap();
        assert_same_bits(&gpu.download(&y).unwrap(), &want, "norm");
        gpu.add_assign(&mut residual, &delta).unwrap();
        let twice: Vec<f32> = sum.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_same_bits(&gpu.download(&residual).unwrap(), &twice, "add_assign");
    }
}

fn silu(gpu: &Gpu, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let gate = gpu.upload(1, gate.len(), gate).unwrap();
    let up = gpu.upload(1, up.len(), up).unwrap();
    gpu.download(&gpu.silu_mul(gate, &up).unwrap()).unwrap()
}

#[test]
fn silu_agrees_with_the_reference_over_its_whole_range() {
    let gpu = plain();
    let mut gate: Vec<f32> = (-2000..2000).map(|i| i as f32 * 0.06).collect();
    gate.extend([0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30, f32::MIN_POSITIVE]);
    let up: Vec<f32> = (0..gate.len()).map(|i| 0.5 + (i % 7) as f32).collect();
    let mut want = vec![0.0; gate.len()];
    reference::silu_mul(&gate, &up, &mut want);
    // Roundings of 2^-24 and an exponential accurate to 2^-22. Below -87 the result,
    // under 1e-35, may be any number of that size.
    let bound = |i: usize| want[i].abs() * 6e-7 + 1e-34;
    assert_close(&silu(&gpu, &gate, &up), &want, bound, "silu");
    let got = silu(
        &gpu,
        &[f32::NAN, f32::INFINITY, 1.0, f32::NEG_INFINITY],
        &[1.0, 1.0, f32::NAN, 1.0],
    );
    assert!(got[0].is_nan() && got[1] == f32::INFINITY && got[2].is_nan());
    // The reference gives NaN too: -inf / inf.
    let mut special = [0.0];
    reference::silu_mul(&[f32::NEG_INFINITY], &[1.0], &mut special);
    assert!(same_bits(&got[3..], &special), "{} {}", got[3], special[0]);
}

#[test]
fn an_element_of_silu_does_not_depend_on_where_it_lies() {
    let gpu = plain();
    let gate = Rng(5).normals(1100);
    let ones = vec![1.0; gate.len()];
    let whole = silu(&gpu, &gate, &ones);
    for len in [1, 3, 15, 17, 33, 1023, 1025] {
        let at = gate.len() - len..;
        let tail = silu(&gpu, &gate[at.clone()], &ones[at.clone()]);
        assert_same_bits(&tail, &whole[at], "tail");
    }
}

#[test]
fn rope_agrees_with_the_reference_in_both_layouts() {
    let gpu = plain();
    let mut rng = Rng(6);
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        for (heads, head_dim, first, pairs) in [
            (3, 20, 0, 9),
            (1, 8, 0, 4),
            (17, 6, 0, 3),
            (2, 64, 0, 32),
            (9, 48, 32, 8),
            (3, 21, 2, 9),
        ] {
            let table = RopeTable {
                inv_freq: (0..pairs).map(|i| 0.5f32.powi(i)).collect(),
                magnitude: 1.3,
                layout,
            };
            let positions = [0, 1, 77, 131_071];
            let cols = heads * head_dim;
            let x = rng.normals(4 * cols);
            let mut want = x.clone();
            reference::rope(&mut want, (heads, first), &positions, &table);
            let mut y = gpu.upload(4, cols, &x).unwrap();
            gpu.rope(&mut y, (heads, first), &positions, &table)
                .unwrap();
            let got = gpu.download(&y).unwrap();
            // Angles are equal; sine and cosine are accurate to two units in the last place, 2^-22.
            let bound = |i: usize| {
                let head = &x[i / head_dim * head_dim..][..head_dim];
                head.iter().fold(0f32, |most, v| most.max(v.abs())) * 2f32.powi(-20)
            };
            assert_close(&got, &want, bound, "rope");
            for row in [0, 3] {
                let mut alone = gpu.upload(1, cols, &x[row * cols..][..cols]).unwrap();
                gpu.rope(&mut alone, (heads, first), &positions[row..=row], &table)
                    .unwrap();
                let alone = gpu.download(&alone).unwrap();
                assert_same_bits(&alone, &got[row * cols..][..cols], "alone");
            }
            // Columns before and after the rotary part are unchanged.
            for (got, x) in got.chunks(head_dim).zip(x.chunks(head_dim)) {
                for rest in [0..first, first + 2 * pairs as usize..head_dim] {
                    assert_same_bits(&got[rest.clone()], &x[rest], "rest");
                }
            }
        }
    }
}

#[test]
fn embedding_takes_rows_of_any_type() {
    let gpu = plain();
    let mut rng = Rng(7);
    for dtype in DTYPES {
        for cols in [150, 1, 1028] {
            let table = random_matrix(&mut rng, 200, cols, dtype);
            let want = reference::dequant(&table);
            let slice = gpu.weight(&table.row_slice(100, 100).unwrap()).unwrap();
            let table = gpu.weight(&table).unwrap();
            let tokens = [199, 0, 128, 0, 127];
            let x = gpu.embed(&table, &tokens).unwrap();
            let x = gpu.download(&x).unwrap();
            for (row, token) in x.chunks(cols).zip(tokens) {
                assert_same_bits(row, &want[token as usize * cols..][..cols], "row");
            }
            let x = gpu.embed(&slice, &[28]).unwrap();
            let x = gpu.download(&x).unwrap();
            assert_same_bits(&x, &want[128 * cols..][..cols], "row of a slice");
            let none = gpu.embed(&table, &[]).unwrap();
            assert_eq!(gpu.shape(&none), (0, cols));
        }
    }
}

#[test]
fn embedding_takes_tokens_that_have_not_left_the_device() {
    let gpu = plain();
    let mut rng = Rng(8);
    let tokens = [19, 0, 7];
    let vocab = 20;
    let mut logits = vec![0.0; 4 * vocab];
    for (row, token) in tokens.iter().enumerate() {
        logits[row * vocab + token] = 1.0;
    }
    // A row without a token has some embedding, and the others have theirs.
    logits[3 * vocab + 5] = f32::NAN;
    for dtype in DTYPES {
        let cols = 150;
        let table = random_matrix(&mut rng, vocab, cols, dtype);
        let want = reference::dequant(&table);
        let table = gpu.weight(&table).unwrap();
        for rows in [8, 200] {
            // Recorded, or launched at once.
            gpu.begin_pass(rows).unwrap();
            let x = gpu.upload(4, vocab, &logits).unwrap();
            let chosen = gpu.sample(&x, &vec![SampleSpec::default(); 4]).unwrap();
            gpu.begin_pass(rows).unwrap();
            let picked = [2, 0, 0, 3, 1];
            let y = gpu.embed_chosen(&table, &chosen, &picked).unwrap();
            let landed = gpu.landed(&chosen).unwrap();
            let expected = tokens.map(|token| Ok(token as u32));
            assert_eq!(landed[..3], expected);
            assert!(
                matches!(landed[3], Err(SampleFault::NotFinite { token: 5, value }) if value.is_nan())
            );
            let y = gpu.download(&y).unwrap();
            for (row, index) in y.chunks(cols).zip(picked).filter(|(_, index)| *index < 3) {
                let token = tokens[index as usize];
                assert_same_bits(row, &want[token * cols..][..cols], "row");
            }
            let error = gpu.embed_chosen(&table, &chosen, &[4]).err().unwrap();
            assert!(error.to_string().contains("row 4 of 4"), "{error}");
        }
    }
}
