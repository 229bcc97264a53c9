//! Linear kernels against the reference, and their batch invariance.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{CpuBackend, DType, HostMatrix, Isa, reference};

/// Bound of |fast - reference| for each output: the rounding of products and sums is relative to
/// `Σ |x[k] w[k]|`; f32 sums of K terms in 16 lanes carry far less than K * 2^-24.
fn bounds(x: &[f32], tokens: usize, w: &HostMatrix) -> Vec<f32> {
    let relative = 2f32.powi(-22) + w.cols() as f32 * 2f32.powi(-26);
    let magnitudes: Vec<f32> = x.iter().map(|v| v.abs()).collect();
    let weights: Vec<f32> = reference::dequant(w).iter().map(|v| v.abs()).collect();
    let mut bounds = vec![0.0; tokens * w.rows()];
    for t in 0..tokens {
        for r in 0..w.rows() {
            let x = &magnitudes[t * w.cols()..(t + 1) * w.cols()];
            let w_row = &weights[r * w.cols()..(r + 1) * w.cols()];
            bounds[t * w.rows() + r] = relative * reference::linear_row(x, w_row) + 1e-30;
        }
    }
    bounds
}

fn linear(backend: &CpuBackend, x: &[f32], tokens: usize, w: &HostMatrix) -> Vec<f32> {
    let x = backend.upload(tokens, w.cols(), x).unwrap();
    let y = backend.linear(&x, w, None).unwrap();
    assert_eq!(backend.shape(&y), (tokens, w.rows()));
    backend.download(&y).unwrap()
}

#[test]
fn linear_agrees_with_the_reference_over_odd_shapes() {
    let mut rng = Rng(1);
    for dtype in DTYPES {
        for cols in [1, 7, 31, 127, 129, 576, 1000, 4100] {
            let rows = 1 + rng.below(40);
            let w = random_matrix(&mut rng, rows, cols, dtype);
            for tokens in [1, 2, 3, 5, 8, 9, 64] {
                let x = rng.normals(tokens * cols);
                let want = reference::linear(&x, tokens, &w, None);
                on_every_isa(1, |backend| {
                    let got = linear(backend, &x, tokens, &w);
                    let bounds = bounds(&x, tokens, &w);
                    let what = format!(
                        "{} {} [{rows}, {cols}] x {tokens}",
                        backend.describe(),
                        dtype.name()
                    );
                    assert_close(&got, &want, |i| bounds[i], &what);
                });
            }
        }
    }
}

#[test]
fn an_output_is_the_same_bits_alone_in_any_batch_slice_and_on_any_number_of_threads() {
    let mut rng = Rng(2);
    for dtype in DTYPES {
        for cols in [7, 129, 576, 1000, 2100, 3300] {
            let rows = 140;
            let tokens = 70;
            let w = random_matrix(&mut rng, rows, cols, dtype);
            let x = rng.normals(tokens * cols);
            on_every_isa(1, |one| {
                let three = backend(one.isa(), 3);
                let what = format!("{} {} {cols}", one.isa(), dtype.name());
                let alone: Vec<f32> = (0..tokens)
                    .flat_map(|t| linear(one, &x[t * cols..(t + 1) * cols], 1, &w))
                    .collect();
                for batch in [2, 3, 4, 5, 6, 7, 8, 9, 13, 64, 70] {
                    let x = &x[..batch * cols];
                    let got = linear(one, x, batch, &w);
                    assert_same_bits(&got, &alone[..batch * rows], &what);
                    let got = linear(&three, x, batch, &w);
                    assert_same_bits(&got, &alone[..batch * rows], &what);
                }
                for (first, count) in [(0, 1), (1, 126), (127, 3), (130, 10)] {
                    let slice = w.row_slice(first, count).unwrap();
                    for batch in [1, 9] {
                        let got = linear(one, &x[..batch * cols], batch, &slice);
                        for t in 0..batch {
                            assert_same_bits(
                                &got[t * count..(t + 1) * count],
                                &alone[t * rows + first..][..count],
                                &what,
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn every_fp8_code_is_exact_and_nan_stays_in_its_row() {
    // One code per row, in every column position; x picks one column, so y is the code's value itself.
    let cols = 200;
    let codes: Vec<u8> = (0..256).flat_map(|code| vec![code as u8; cols]).collect();
    let scales = block_scales(vec![1.0; 4], cols);
    let w = HostMatrix::new(misaligned(codes), DType::F8E4m3, 256, cols, Some(scales)).unwrap();
    on_every_isa(1, |backend| {
        for tokens in [1, 9] {
            for column in [0, 1, 17, 63, 64, 100, 127, 128, 191, 192, 199] {
                let mut x = vec![0.0; tokens * cols];
                for t in 0..tokens {
                    x[t * cols + column] = 1.0;
                }
                let y = linear(backend, &x, tokens, &w);
                for t in 0..tokens {
                    for code in 0..=255u8 {
                        let want = hearth_kernels::convert::e4m3_to_f32(code);
                        let got = y[t * 256 + usize::from(code)];
                        assert!(
                            got == want || got.is_nan() && want.is_nan(),
                            "{}: code {code:#x} is {got}, not {want}",
                            backend.isa()
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn a_nan_weight_is_found_in_every_call_and_slice() {
    let (rows, cols) = (300, 260);
    let mut codes: Vec<u8> = (0..rows * cols).map(|i| (i % 0x7f) as u8).collect();
    for (row, col, code) in [(3, 0, 0x7f), (130, 259, 0xff), (299, 128, 0x7f)] {
        codes[row * cols + col] = code;
    }
    let scales = block_scales(vec![1.0; 9], cols);
    on_every_isa(1, |backend| {
        let w = misaligned(codes.clone());
        let w = HostMatrix::new(w, DType::F8E4m3, rows, cols, Some(scales.clone())).unwrap();
        for (first, count) in [(0, rows), (2, 2), (130, 1), (131, 168), (0, rows)] {
            let slice = w.row_slice(first, count).unwrap();
            for tokens in [1, 2, 9, 1] {
                let y = linear(backend, &vec![0.0; tokens * cols], tokens, &slice);
                for (i, y) in y.iter().enumerate() {
                    let row = first + i % count;
                    let want = [3, 130, 299].contains(&row);
                    assert_eq!(y.is_nan(), want, "{} row {row}", backend.isa());
                }
            }
        }
    });
}

#[test]
fn a_nan_or_infinite_activation_reaches_its_own_row_alone() {
    let mut rng = Rng(3);
    for dtype in DTYPES {
        let w = random_matrix(&mut rng, 33, 140, dtype);
        let mut x = rng.normals(9 * 140);
        x[4 * 140 + 139] = f32::NAN;
        x[6 * 140 + 3] = f32::INFINITY;
        on_every_isa(1, |backend| {
            let y = linear(backend, &x, 9, &w);
            for t in 0..9 {
                let finite = y[t * 33..(t + 1) * 33].iter().all(|v| v.is_finite());
                assert_eq!(finite, t != 4 && t != 6, "{} row {t}", backend.isa());
            }
        });
    }
}

#[test]
fn subnormal_f16_weights_count_in_full_and_negative_zero_is_a_zero() {
    // The smallest binary16 is 2^-24; a kernel that flushes it would give 0.
    let bits: Vec<u8> = [0x0001u16, 0x8001, 0x03ff, 0x8000]
        .iter()
        .flat_map(|b| b.to_le_bytes())
        .collect();
    let w = HostMatrix::new(misaligned(bits), DType::F16, 4, 1, None).unwrap();
    on_every_isa(1, |backend| {
        let y = linear(backend, &[3.0], 1, &w);
        let tiny = 2f32.powi(-24);
        assert_eq!(y, [3.0 * tiny, -3.0 * tiny, 3.0 * 1023.0 * tiny, 0.0]);
    });
}

#[test]
fn no_tokens_no_outputs_and_no_columns_are_shapes_like_others() {
    on_every_isa(2, |backend| {
        for dtype in DTYPES {
            let w = matrix(&[1.0; 12], 3, 4, dtype);
            assert_eq!(linear(backend, &[], 0, &w), [0f32; 0]);
            let none = w.row_slice(1, 0).unwrap();
            assert_eq!(linear(backend, &[1.0; 4], 1, &none), [0f32; 0]);
            let narrow = matrix(&[], 3, 0, dtype);
            assert_eq!(linear(backend, &[], 2, &narrow), [0f32; 6]);
        }
    });
}

#[test]
fn bias_is_added_and_shapes_that_do_not_fit_are_named() {
    let backend = backend(Isa::detect(), 1);
    let w = matrix(&[1.0, 2.0, 3.0, 4.0], 2, 2, DType::F32);
    let x = upload(&backend, 1, &[1.0, 1.0]);
    let bias = backend.vector(&[0.5, -0.5]).unwrap();
    let y = backend.linear(&x, &w, Some(&bias)).unwrap();
    assert_eq!(backend.download(&y).unwrap(), [3.5, 6.5]);
    let wide = upload(&backend, 1, &[1.0, 1.0, 1.0]);
    let error = backend.linear(&wide, &w, None).err().unwrap();
    assert_eq!(error.to_string(), "linear: x [1, 3] with W [2, 2]");
}
