//! An output's bits do not depend on what else is in the batch, nor on the weight rows that are computed with it.

use std::process::Command;

use hearth_cuda::Activations;
use hearth_kernels::DType;
use hearth_kernels::ops::*;

use crate::common::*;
use crate::linear::{dtypes, linear, what};
use crate::support::{gpu, is_hardware, on_all_activations, skipped};

/// Environment variable that marks the process running on the model of another GPU.
const OTHER_GPU: &str = "HEARTH_TEST_OTHER_GPU";

#[test]
fn an_output_is_the_same_bits_alone_and_in_any_batch() {
    // Three partial sums, the last one short: with two, the order would not matter.
    let (outputs, cols, most) = (140, 1100, 130);
    on_all_activations(|gpu| {
        let mut rng = Rng(1);
        for &dtype in dtypes(gpu) {
            let w = random_matrix(&mut rng, outputs, cols, dtype);
            let x = rng.normals(most * cols);
            let whole = linear(gpu, &x, most, &w);
            for rows in [1, 7, 8, 9, 63, 64, 65] {
                let got = linear(gpu, &x[..rows * cols], rows, &w);
                let what = what(gpu, &w, rows);
                assert_same_bits(&got, &whole[..rows * outputs], &what);
            }
            for row in [1, 63, 64, 129] {
                let alone = linear(gpu, &x[row * cols..(row + 1) * cols], 1, &w);
                let what = what(gpu, &w, 1);
                assert_same_bits(&alone, &whole[row * outputs..][..outputs], &what);
            }
        }
    });
}

#[test]
fn many_rows_give_the_bits_of_few_to_either_side_of_a_tile() {
    // Five segments of which the last is short, whole or cut over blocks; columns that end inside a block; outputs that end
    // inside a tile, and are a multiple of four or not.
    let gpu = gpu(Activations::Bf16);
    let mut rng = Rng(5);
    for dtype in [DType::F8E4m3, DType::Bf16, DType::F16] {
        for (outputs, cols, most) in [(270, 2150, 300), (100, 2150, 129), (129, 512, 129)] {
            let w = random_matrix(&mut rng, outputs, cols, dtype);
            let weight = gpu.weight(&w).unwrap();
            let bias = gpu.vector(&rng.normals(outputs)).unwrap();
            let values = rng.normals(most * cols);
            let product = |values: &[f32]| {
                let x = gpu.upload(values.len() / cols, cols, values).unwrap();
                let y = gpu.linear(&x, &weight, Some(&bias)).unwrap();
                gpu.download(&y).unwrap()
            };
            let few: Vec<f32> = values.chunks(8 * cols).flat_map(product).collect();
            for rows in [9, 64, 65, 127, 128, 129, 300] {
                if rows > most {
                    continue;
                }
                let got = product(&values[..rows * cols]);
                let what = what(&gpu, &w, rows);
                assert_same_bits(&got, &few[..rows * outputs], &what);
            }
        }
    }
}

#[test]
fn a_slice_of_a_weight_gives_the_bits_of_the_whole() {
    let (outputs, cols) = (300, 260);
    on_all_activations(|gpu| {
        let mut rng = Rng(2);
        for &dtype in dtypes(gpu) {
            let w = random_matrix(&mut rng, outputs, cols, dtype);
            let x = rng.normals(9 * cols);
            for rows in [1, 9] {
                let x = &x[..rows * cols];
                let whole = linear(gpu, x, rows, &w);
                for (first, count) in [(0, 1), (1, 126), (127, 3), (130, 170)] {
                    let slice = w.row_slice(first, count).unwrap();
                    let got = linear(gpu, x, rows, &slice);
                    for (got, whole) in got.chunks(count).zip(whole.chunks(outputs)) {
                        let what = what(gpu, &slice, rows);
                        assert_same_bits(got, &whole[first..first + count], &what);
                    }
                }
            }
        }
    });
}

#[test]
fn a_product_that_fills_the_device_gives_the_bits_of_one_that_is_cut_into_segments() {
    on_all_activations(|gpu| {
        let mut rng = Rng(3);
        let (outputs, cols) = (2 * 128 * gpu.info().multiprocessors as usize, 1100);
        let dtype = match gpu.activations() {
            Activations::Fp8 => DType::F8E4m3,
            _ => DType::Bf16,
        };
        let w = random_matrix(&mut rng, outputs, cols, dtype);
        // By the kernels for few rows and for many.
        for rows in [1, 12] {
            let x = rng.normals(rows * cols);
            let whole = linear(gpu, &x, rows, &w);
            for first in [0, outputs - 128] {
                let slice = w.row_slice(first, 128).unwrap();
                let got = linear(gpu, &x, rows, &slice);
                for (got, whole) in got.chunks(128).zip(whole.chunks(outputs)) {
                    let what = what(gpu, &slice, rows);
                    assert_same_bits(got, &whole[first..first + 128], &what);
                }
            }
        }
    });
}

#[test]
fn what_was_split_once_follows_a_tensor_that_changes() {
    on_all_activations(|gpu| {
        let mut rng = Rng(4);
        let w = random_matrix(&mut rng, 20, 130, DType::F8E4m3);
        let (a, b) = (rng.normals(3 * 130), rng.normals(3 * 130));
        let weight = gpu.weight(&w).unwrap();
        let mut x = gpu.upload(3, 130, &a).unwrap();
        let before = gpu.linear(&x, &weight, None).unwrap();
        let delta = gpu.upload(3, 130, &b).unwrap();
        gpu.add_assign(&mut x, &delta).unwrap();
        let after = gpu.linear(&x, &weight, None).unwrap();
        let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let what = what(gpu, &w, 3);
        assert_same_bits(
            &gpu.download(&before).unwrap(),
            &linear(gpu, &a, 3, &w),
            &what,
        );
        assert_same_bits(
            &gpu.download(&after).unwrap(),
            &linear(gpu, &sum, 3, &w),
            &what,
        );
    });
}

#[test]
fn products_by_wgmma_are_tested_where_it_is() {
    // On such a GPU all tests of FP8 activations use wgmma, for every number of rows.
    let architecture = gpu(Activations::F32).info().architecture();
    if architecture == "sm_90a" {
        let numerics = gpu(Activations::Fp8).numerics();
        assert!(
            numerics.ends_with("wgmma"),
            "wgmma failed its trial: {numerics}"
        );
        for dtype in [DType::F8E4m3, DType::Bf16] {
            let is_used = gpu(Activations::Bf16).multiplies_by_wgmma(dtype);
            assert!(is_used, "{dtype:?}: wgmma failed its trial");
        }
        return;
    }
    skipped(&format!(
        "what wgmma (gemm_fp8_sm90) gives on hardware waits for a GPU of compute capability 9.0; this one is {architecture}"
    ));
    if !is_hardware() && std::env::var_os(OTHER_GPU).is_none() {
        // The model of another GPU, in its own process.
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["linear", "experts_agree", "experts_give"])
            .env("HEARTH_HOST_MODEL_CAPABILITY", "9.0")
            .env(OTHER_GPU, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains("products_by_wgmma_are_tested_where_it_is ... ok")
                && !String::from_utf8_lossy(&output.stderr).contains("what wgmma"),
            "{said}"
        );
    }
}
