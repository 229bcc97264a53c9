//! Norms, gating, rotation and the operations that move columns and rows.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{CpuBackend, CpuTensor, DType, RopeLayout, RopeTable, reference};
use proptest::prelude::*;

fn download(backend: &CpuBackend, x: &CpuTensor) -> Vec<f32> {
    backend.download(x).unwrap()
}

#[test]
fn rms_norm_agrees_with_the_reference_for_any_width() {
    let mut rng = Rng(1);
    for cols in [1, 7, 16, 31, 127, 129, 576, 1000] {
        let x = rng.normals(3 * cols);
        let weight = rng.normals(cols);
        let mut want = vec![0.0; 3 * cols];
        for row in 0..3 {
            let at = row * cols..(row + 1) * cols;
            reference::rms_norm(&x[at.clone()], &weight, 1e-6, &mut want[at]);
        }
        on_every_isa(1, |backend| {
            let weight = backend.vector(&weight).unwrap();
            let y = backend
                .rms_norm(&upload(backend, 3, &x), &weight, 1e-6)
                .unwrap();
            // The mean of squares is accurate to about 2^-22, its root to half of that, products to 2^-24.
            let bound = |i: usize| want[i].abs() * 1e-6;
            assert_close(&download(backend, &y), &want, bound, backend.isa().name());
        });
    }
}

#[test]
fn rms_norm_of_groups_is_the_norm_of_each_and_rows_do_not_touch_each_other() {
    let mut rng = Rng(2);
    let x = rng.normals(40 * 6 * 24);
    on_every_isa(1, |one| {
        let three = backend(one.isa(), 3);
        let weight = one.vector(&Rng(3).normals(24)).unwrap();
        let whole = one.rms_norm(&upload(one, 40, &x), &weight, 1e-5).unwrap();
        let split = one.rms_norm(&upload(one, 240, &x), &weight, 1e-5).unwrap();
        assert_same_bits(&download(one, &whole), &download(one, &split), "groups");
        let threads = three
            .rms_norm(&upload(&three, 40, &x), &weight, 1e-5)
            .unwrap();
        assert_same_bits(
            &download(one, &whole),
            &download(&three, &threads),
            "threads",
        );
        for row in [0, 17, 39] {
            let alone = upload(one, 1, &x[row * 144..(row + 1) * 144]);
            let alone = one.rms_norm(&alone, &weight, 1e-5).unwrap();
            let whole = &download(one, &whole)[row * 144..(row + 1) * 144];
            assert_same_bits(&download(one, &alone), whole, "alone");
        }
    });
}

#[test]
fn a_row_of_zeros_has_norm_zero_and_nan_stays_nan() {
    on_every_isa(1, |backend| {
        let weight = backend.vector(&[2.0; 20]).unwrap();
        let mut x = vec![0.0; 60];
        x[25] = f32::NAN;
        x[45] = 1e30;
        let y = backend
            .rms_norm(&upload(backend, 3, &x), &weight, 1e-6)
            .unwrap();
        let y = download(backend, &y);
        assert!(y[..20].iter().all(|&v| v == 0.0));
        assert!(y[20..40].iter().all(|v| v.is_nan()));
    });
}

#[test]
fn add_rms_norm_is_the_sum_and_then_the_norm() {
    let mut rng = Rng(4);
    let (a, b) = (rng.normals(5 * 33), rng.normals(5 * 33));
    on_every_isa(2, |backend| {
        let weight = backend.vector(&[0.5; 33]).unwrap();
        let mut residual = upload(backend, 5, &a);
        let y = backend
            .add_rms_norm(&mut residual, &upload(backend, 5, &b), &weight, 1e-6)
            .unwrap();
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_same_bits(&download(backend, &residual), &sum, "sum");
        let norm = backend.rms_norm(&residual, &weight, 1e-6).unwrap();
        assert_same_bits(&download(backend, &y), &download(backend, &norm), "norm");
    });
}

#[test]
fn silu_agrees_with_the_reference_over_its_whole_range() {
    let mut gate: Vec<f32> = (-2000..2000).map(|i| i as f32 * 0.06).collect();
    gate.extend([0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30, f32::MIN_POSITIVE]);
    let up: Vec<f32> = (0..gate.len()).map(|i| 0.5 + (i % 7) as f32).collect();
    let mut want = vec![0.0; gate.len()];
    reference::silu_mul(&gate, &up, &mut want);
    on_every_isa(1, |backend| {
        let (g, u) = (upload(backend, 1, &gate), upload(backend, 1, &up));
        let got = download(backend, &backend.silu_mul(g, &u).unwrap());
        // Five roundings of 2^-24 and a polynomial accurate to 2^-23. Below -87 the result, under 1e-35, may be
        // any number of that size.
        let bound = |i: usize| want[i].abs() * 6e-7 + 1e-34;
        assert_close(&got, &want, bound, backend.isa().name());
        let special = upload(backend, 1, &[f32::NAN, f32::INFINITY, 1.0]);
        let ones = upload(backend, 1, &[1.0, 1.0, f32::NAN]);
        let got = download(backend, &backend.silu_mul(special, &ones).unwrap());
        assert!(got[0].is_nan() && got[1] == f32::INFINITY && got[2].is_nan());
    });
}

#[test]
fn an_element_of_silu_does_not_depend_on_where_it_lies() {
    let gate = Rng(5).normals(64);
    on_every_isa(1, |backend| {
        let run = |gate: &[f32]| {
            let ones = vec![1.0; gate.len()];
            let (g, u) = (upload(backend, 1, gate), upload(backend, 1, &ones));
            download(backend, &backend.silu_mul(g, &u).unwrap())
        };
        let whole = run(&gate);
        for len in [1, 3, 15, 17, 33] {
            assert_same_bits(&run(&gate[64 - len..]), &whole[64 - len..], "tail");
        }
    });
}

#[test]
fn rope_agrees_with_the_reference_in_both_layouts() {
    let mut rng = Rng(6);
    for layout in [RopeLayout::Half, RopeLayout::Interleaved] {
        let table = RopeTable {
            inv_freq: (0..9).map(|i| 0.5f32.powi(i)).collect(),
            magnitude: 1.3,
            layout,
        };
        let positions = [0, 1, 77, 131_071];
        let x = rng.normals(4 * 3 * 20);
        let mut want = x.clone();
        reference::rope(&mut want, (3, 2), &positions, &table);
        assert_ne!(want[20..40], x[20..40]);
        on_every_isa(3, |backend| {
            let mut y = upload(backend, 4, &x);
            backend.rope(&mut y, (3, 2), &positions, &table).unwrap();
            assert_same_bits(&download(backend, &y), &want, backend.isa().name());
        });
    }
}

#[test]
fn rope_turns_pairs_by_their_angle() {
    // A quarter turn: (1, 0) becomes (0, 1). Columns after the rotary part are unchanged.
    let quarter = std::f32::consts::FRAC_PI_2;
    for (layout, want) in [
        (RopeLayout::Half, [0.0, 5.0, 1.0, 6.0, 7.0]),
        (RopeLayout::Interleaved, [-5.0, 1.0, 0.0, 6.0, 7.0]),
    ] {
        let table = RopeTable {
            inv_freq: vec![quarter, 0.0],
            magnitude: 1.0,
            layout,
        };
        let mut head = [1.0, 5.0, 0.0, 6.0, 7.0];
        reference::rope_head(&mut head, 1, &table);
        for (got, want) in head.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{layout:?} {head:?}");
        }
    }
}

#[test]
fn embedding_takes_rows_of_any_type() {
    let mut rng = Rng(7);
    for dtype in DTYPES {
        let table = random_matrix(&mut rng, 200, 150, dtype);
        let want = reference::dequant(&table);
        on_every_isa(2, |backend| {
            let x = backend.embed(&table, &[199, 0, 128, 0]).unwrap();
            let x = download(backend, &x);
            for (i, token) in [199, 0, 128, 0].into_iter().enumerate() {
                assert_same_bits(&x[i * 150..][..150], &want[token * 150..][..150], "row");
            }
        });
    }
    let backend = backend(hearth_kernels::Isa::Scalar, 1);
    let table = matrix(&[0.0; 4], 2, 2, DType::F32);
    let error = backend.embed(&table, &[2]).err().unwrap();
    assert_eq!(error.to_string(), "embed: token 2 of a vocabulary of 2");
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let backend = backend(hearth_kernels::Isa::Scalar, 1);
    let x = backend.zeros(2, 6).unwrap();
    let y = backend.zeros(2, 5).unwrap();
    let weight = backend.vector(&[1.0; 4]).unwrap();
    let table = RopeTable {
        inv_freq: vec![1.0; 2],
        magnitude: 1.0,
        layout: RopeLayout::Half,
    };
    assert!(backend.rms_norm(&x, &weight, 0.0).is_err());
    assert!(backend.columns(&x, 2, 2, 2).is_err());
    assert!(backend.columns(&x, 4, 0, 1).is_err());
    assert!(backend.interleave(&x, &y, 2).is_err());
    assert!(backend.rows(&x, &[2]).is_err());
    assert!(backend.upload(2, 2, &[0.0]).is_err());
    let mut z = backend.zeros(2, 6).unwrap();
    assert!(backend.rope(&mut z, (2, 0), &[0, 1], &table).is_err());
    assert!(backend.rope(&mut z, (1, 0), &[0], &table).is_err());
    assert!(backend.add_assign(&mut z, &y).is_err());
    assert!(backend.silu_mul(z, &y).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn columns_and_interleave_are_inverse(
        rows in 0usize..4,
        groups in 1usize..5,
        a in 0usize..7,
        b in 1usize..7,
        seed: u64,
    ) {
        let backend = backend(hearth_kernels::Isa::Scalar, 1);
        let x = Rng(seed).normals(rows * groups * (a + b));
        let tensor = backend.upload(rows, groups * (a + b), &x).unwrap();
        let first = backend.columns(&tensor, groups, 0, a).unwrap();
        let second = backend.columns(&tensor, groups, a, b).unwrap();
        prop_assert_eq!(backend.shape(&first), (rows, groups * a));
        let joined = backend.interleave(&first, &second, groups).unwrap();
        prop_assert!(same_bits(&backend.download(&joined).unwrap(), &x));
    }

    #[test]
    fn rows_picks_rows(rows in 1usize..9, cols in 1usize..20, picks in prop::collection::vec(0usize..9, 0..12)) {
        let backend = backend(hearth_kernels::Isa::Scalar, 1);
        let x = Rng(8).normals(rows * cols);
        let picks: Vec<u32> = picks.into_iter().map(|p| (p % rows) as u32).collect();
        let picked = backend.rows(&upload(&backend, rows, &x), &picks).unwrap();
        let picked = backend.download(&picked).unwrap();
        for (i, &pick) in picks.iter().enumerate() {
            let want = &x[pick as usize * cols..][..cols];
            prop_assert!(same_bits(&picked[i * cols..][..cols], want));
        }
    }

    #[test]
    fn put_tile_changes_the_elements_of_the_tile_alone(
        (rows, cols) in (1usize..9, 1usize..20), (row, col) in (0usize..9, 0usize..20), (count, width) in (0usize..9, 0usize..20),
    ) {
        let backend = backend(hearth_kernels::Isa::Scalar, 1);
        let (row, col) = (row % rows, col % cols);
        let (count, width) = (count % (rows - row + 1), width % (cols - col + 1));
        let before = Rng(8).normals(rows * cols);
        let tile = Rng(9).normals(count * width);
        let mut x = upload(&backend, rows, &before);
        backend.put_tile(&mut x, (row, col), &backend.upload(count, width, &tile).unwrap()).unwrap();
        let mut want = before;
        for i in 0..count {
            want[(row + i) * cols + col..][..width].copy_from_slice(&tile[i * width..][..width]);
        }
        prop_assert!(same_bits(&backend.download(&x).unwrap(), &want));
    }
}
