//! Products with weights against the reference.

use hearth_cuda::Activations;
use hearth_kernels::ops::*;
use hearth_kernels::{DType, HostMatrix, reference};

use crate::common::*;
use crate::support::{Gpu, gpu, on_all_activations, seen};

/// Element types of the weights that these activations enter in different ways.
pub(crate) fn dtypes(gpu: &Gpu) -> &'static [DType] {
    match gpu.activations() {
        Activations::Fp8 => &[DType::F8E4m3, DType::Bf16],
        _ => &DTYPES,
    }
}

pub(crate) fn linear(gpu: &Gpu, x: &[f32], rows: usize, w: &HostMatrix) -> Vec<f32> {
    let x = gpu.upload(rows, w.cols(), x).unwrap();
    let w = gpu.weight(w).unwrap();
    gpu.download(&gpu.linear(&x, &w, None).unwrap()).unwrap()
}

pub(crate) fn what(gpu: &Gpu, w: &HostMatrix, rows: usize) -> String {
    let (outputs, cols) = (w.rows(), w.cols());
    let dtype = w.dtype().name();
    format!(
        "{:?} {dtype} [{outputs}, {cols}] x {rows}",
        gpu.activations()
    )
}

/// Bound of |got - reference| for each output, where the reference takes the activations as the products see them: the
/// remaining error is the rounding of sums, relative to `Σ |x[k] w[k]|`. A k step has up to nine products of terms,
/// each added by an instruction that may truncate where the reference would round (2^-23); the sum over columns then
/// carries far less than cols * 2^-24. FP8 tensor cores keep 13 or 14 bits of a step's sum.
pub(crate) fn bounds(gpu: &Gpu, x: &[f32], rows: usize, w: &HostMatrix) -> Vec<f32> {
    let step = match gpu.activations() {
        Activations::Fp8 => 2f32.powi(-12),
        Activations::F32 | Activations::Bf16 => 12.0 * 2f32.powi(-23),
    };
    let relative = step + w.cols() as f32 * 2f32.powi(-26);
    let magnitudes: Vec<f32> = x.iter().map(|v| v.abs()).collect();
    let weights: Vec<f32> = reference::dequant(w).iter().map(|v| v.abs()).collect();
    let mut bounds = Vec::with_capacity(rows * w.rows());
    for row in magnitudes.chunks(w.cols()) {
        for weights in weights.chunks(w.cols()) {
            bounds.push(relative * reference::linear_row(row, weights) + 1e-30);
        }
    }
    bounds
}

#[test]
fn linear_agrees_with_the_reference_over_odd_shapes() {
    on_all_activations(|gpu| {
        let mut rng = Rng(1);
        for &dtype in dtypes(gpu) {
            for (outputs, cols) in [
                (5, 1),
                (130, 7),
                (40, 127),
                (129, 129),
                (20, 640),
                (133, 700),
            ] {
                let w = random_matrix(&mut rng, outputs, cols, dtype);
                for rows in [1, 3, 8, 9, 65] {
                    let x = rng.normals(rows * cols);
                    let enters = seen(gpu.activations(), dtype, &x, cols);
                    let want = reference::linear(&enters, rows, &w, None);
                    let got = linear(gpu, &x, rows, &w);
                    let bounds = bounds(gpu, &enters, rows, &w);
                    assert_close(&got, &want, |i| bounds[i], &what(gpu, &w, rows));
                }
            }
        }
    });
}

#[test]
fn every_tile_of_a_grid_is_computed_once() {
    // Tiles run in groups of 4 or 8 rows of 64 tokens, or of 8 rows of 128; here the last group is partial, and
    // outputs span several columns of tiles.
    on_all_activations(|gpu| {
        let mut rng = Rng(4);
        let w = random_matrix(&mut rng, 300, 40, DType::F8E4m3);
        for rows in [330, 1100] {
            let x = rng.normals(rows * 40);
            let enters = seen(gpu.activations(), w.dtype(), &x, 40);
            let want = reference::linear(&enters, rows, &w, None);
            let got = linear(gpu, &x, rows, &w);
            let bounds = bounds(gpu, &enters, rows, &w);
            assert_close(&got, &want, |i| bounds[i], &what(gpu, &w, rows));
        }
    });
}

#[test]
fn rounded_activations_are_as_near_as_their_type() {
    // bf16 keeps 8 bits of a number; e4m3 keeps 4 of one that is not small compared with the largest of its 128
    // columns, and half of 2^-9 of the scale for others.
    on_all_activations(|gpu| {
        let mut rng = Rng(2);
        let (outputs, cols) = (33, 300);
        let w = random_matrix(&mut rng, outputs, cols, DType::F8E4m3);
        let x = rng.normals(9 * cols);
        let step = match gpu.activations() {
            Activations::F32 => return,
            Activations::Bf16 => 2f32.powi(-9),
            Activations::Fp8 => 2f32.powi(-4),
        };
        // Normal numbers are at most 3.5, so the scale is at most 2^-7, and half a step of the smallest codes 2^-17.
        let errors: Vec<f32> = x.iter().map(|v| v.abs() * step + 2f32.powi(-17)).collect();
        let weights: Vec<f32> = reference::dequant(&w).iter().map(|v| v.abs()).collect();
        let want = reference::linear(&x, 9, &w, None);
        let got = linear(gpu, &x, 9, &w);
        let bound = |i: usize| {
            let (row, output) = (i / outputs, i % outputs);
            let errors = &errors[row * cols..][..cols];
            1.01 * reference::linear_row(errors, &weights[output * cols..][..cols])
        };
        assert_close(&got, &want, bound, &what(gpu, &w, 9));
        let is_exact = got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(!is_exact, "{:?} rounds nothing", gpu.activations());
    });
}

/// Near ties among its logits decide which expert runs.
#[test]
fn a_router_rounds_no_activation_and_leaves_the_products_after_it_alone() {
    let mut rng = Rng(6);
    let (experts, cols) = (40, 600);
    for dtype in [DType::F32, DType::Bf16, DType::F8E4m3] {
        let w = random_matrix(&mut rng, experts, cols, dtype);
        for rows in [1, 30] {
            let x = rng.normals(rows * cols);
            let exact = linear(&gpu(Activations::F32), &x, rows, &w);
            on_all_activations(|gpu| {
                let what = what(gpu, &w, rows);
                let plain = linear(gpu, &x, rows, &w);
                let x = gpu.upload(rows, cols, &x).unwrap();
                let w = gpu.weight(&w).unwrap();
                let routed = gpu.router_linear(&x, &w).unwrap();
                assert_same_bits(&gpu.download(&routed).unwrap(), &exact, &what);
                let after = gpu.linear(&x, &w, None).unwrap();
                assert_same_bits(&gpu.download(&after).unwrap(), &plain, &what);
                let again = gpu.router_linear(&x, &w).unwrap();
                assert_same_bits(&gpu.download(&again).unwrap(), &exact, &what);
            });
        }
    }
}

#[test]
fn bias_is_added_last() {
    on_all_activations(|gpu| {
        let mut rng = Rng(3);
        let (outputs, cols) = (140, 600);
        let w = random_matrix(&mut rng, outputs, cols, DType::Bf16);
        let bias = rng.normals(outputs);
        let weight = gpu.weight(&w).unwrap();
        let vector = gpu.vector(&bias).unwrap();
        for rows in [1, 8, 9] {
            let x = gpu.upload(rows, cols, &rng.normals(rows * cols)).unwrap();
            let plain = gpu.linear(&x, &weight, None).unwrap();
            let biased = gpu.linear(&x, &weight, Some(&vector)).unwrap();
            let want: Vec<f32> = gpu
                .download(&plain)
                .unwrap()
                .chunks(outputs)
                .flat_map(|row| {
                    row.iter()
                        .zip(&bias)
                        .map(|(y, b)| y + b)
                        .collect::<Vec<_>>()
                })
                .collect();
            assert_same_bits(&gpu.download(&biased).unwrap(), &want, "bias");
        }
    });
}

#[test]
fn every_fp8_code_but_nan_is_exact() {
    // One code per row, in every column; x picks one column, so y is the code's value itself.
    let cols = 200;
    let numbers: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
    let codes: Vec<u8> = numbers.iter().flat_map(|&code| vec![code; cols]).collect();
    let scales = block_scales(vec![1.0; 4], cols);
    let rows = numbers.len();
    let w = HostMatrix::new(misaligned(codes), DType::F8E4m3, rows, cols, Some(scales)).unwrap();
    on_all_activations(|gpu| {
        // The scale of FP8 activations is the rounded 1/448.
        let relative = match gpu.activations() {
            Activations::Fp8 => 2f32.powi(-23),
            _ => 0.0,
        };
        for tokens in [1, 9] {
            for column in [0, 17, 63, 64, 127, 128, 191, 199] {
                let mut x = vec![0.0; tokens * cols];
                (0..tokens).for_each(|t| x[t * cols + column] = 1.0);
                let y = linear(gpu, &x, tokens, &w);
                let value = |i: usize| hearth_kernels::convert::e4m3_to_f32(numbers[i % rows]);
                let want: Vec<f32> = (0..y.len()).map(value).collect();
                assert_close(&y, &want, |i| want[i].abs() * relative, "codes");
            }
        }
    });
}

#[test]
fn an_fp8_weight_with_nan_is_refused() {
    let (rows, cols) = (300, 260);
    let gpu = gpu(Activations::F32);
    for (row, col, code) in [(0, 0, 0x7f), (130, 259, 0xff), (299, 128, 0x7f)] {
        let mut codes: Vec<u8> = (0..rows * cols).map(|i| (i % 0x7f) as u8).collect();
        codes[row * cols + col] = code;
        let scales = Some(block_scales(vec![1.0; 9], cols));
        let w = HostMatrix::new(misaligned(codes), DType::F8E4m3, rows, cols, scales).unwrap();
        let error = gpu.weight(&w).err().unwrap().to_string();
        let begins = "cuda: an FP8 weight [300, 260] holds NaN (codes 0x7f or 0xff)\n  ";
        assert!(error.starts_with(begins), "{error}");
        let (before, after) = (w.row_slice(0, row), w.row_slice(row + 1, rows - row - 1));
        assert!(gpu.weight(&before.unwrap()).is_ok() && gpu.weight(&after.unwrap()).is_ok());
    }
}

#[test]
fn what_is_not_finite_reaches_its_own_row_alone() {
    on_all_activations(|gpu| {
        let mut rng = Rng(4);
        for &dtype in dtypes(gpu) {
            let w = random_matrix(&mut rng, 33, 140, dtype);
            let mut x = rng.normals(9 * 140);
            x[4 * 140 + 139] = f32::NAN;
            x[6 * 140 + 3] = f32::INFINITY;
            // An infinity becomes e4m3's largest number, as in the reference's conversion.
            let saturates = (gpu.activations(), dtype) == (Activations::Fp8, DType::F8E4m3);
            for rows in [9, 8] {
                let y = linear(gpu, &x[..rows * 140], rows, &w);
                for t in 0..rows {
                    let finite = y[t * 33..(t + 1) * 33].iter().all(|v| v.is_finite());
                    let want = t != 4 && (t != 6 || saturates);
                    assert_eq!(finite, want, "{} row {t}", what(gpu, &w, rows));
                }
            }
        }
    });
}

#[test]
fn subnormal_f16_weights_count_in_full_and_negative_zero_is_a_zero() {
    // The smallest binary16 is 2^-24; a kernel that flushes it would give 0.
    let bits: Vec<u8> = [0x0001u16, 0x8001, 0x03ff, 0x8000]
        .iter()
        .flat_map(|b| b.to_le_bytes())
        .collect();
    let w = HostMatrix::new(misaligned(bits), DType::F16, 4, 1, None).unwrap();
    let gpu = gpu(Activations::F32);
    let tiny = 2f32.powi(-24);
    let want = [3.0 * tiny, -3.0 * tiny, 3.0 * 1023.0 * tiny, 0.0];
    assert_eq!(linear(&gpu, &[3.0], 1, &w), want);
    assert_eq!(linear(&gpu, &[3.0; 9], 9, &w), want.repeat(9));
}

#[test]
fn no_tokens_no_outputs_and_no_columns_are_shapes_like_others() {
    on_all_activations(|gpu| {
        for &dtype in dtypes(gpu) {
            let w = matrix(&[1.0; 12], 3, 4, dtype);
            assert_eq!(linear(gpu, &[], 0, &w), [0f32; 0]);
            let none = w.row_slice(1, 0).unwrap();
            assert_eq!(linear(gpu, &[1.0; 4], 1, &none), [0f32; 0]);
            let narrow = matrix(&[], 3, 0, dtype);
            for rows in [2, 9] {
                assert_eq!(linear(gpu, &[], rows, &narrow), vec![0f32; 3 * rows]);
            }
        }
    });
}
