//! Latent attention's up-projections of each head.

use hearth_kernels::ops::*;
use hearth_kernels::{HostMatrix, MlaHeads, reference};

use crate::common::*;
use crate::support::{Gpu, plain};

const DIMS: [MlaHeads; 4] = [
    MlaHeads {
        heads: 3,
        nope: 20,
        v: 12,
        rank: 70,
    },
    MlaHeads {
        heads: 2,
        nope: 128,
        v: 128,
        rank: 192,
    },
    MlaHeads {
        heads: 1,
        nope: 1,
        v: 3,
        rank: 1,
    },
    MlaHeads {
        heads: 5,
        nope: 33,
        v: 65,
        rank: 130,
    },
];

fn absorb(gpu: &Gpu, x: &[f32], rows: usize, kv_b: &HostMatrix, dims: MlaHeads) -> Vec<f32> {
    let x = gpu.upload(rows, dims.heads * dims.nope, x).unwrap();
    let kv_b = gpu.weight(kv_b).unwrap();
    gpu.download(&gpu.mla_absorb(&x, &kv_b, dims).unwrap())
        .unwrap()
}

fn expand(gpu: &Gpu, x: &[f32], rows: usize, kv_b: &HostMatrix, dims: MlaHeads) -> Vec<f32> {
    let x = gpu.upload(rows, dims.heads * dims.rank, x).unwrap();
    let kv_b = gpu.weight(kv_b).unwrap();
    gpu.download(&gpu.mla_expand(&x, &kv_b, dims).unwrap())
        .unwrap()
}

/// Error bound: a head's weights are below 5 and its inputs about 1, so a sum of k products
/// carries a rounding of far less than k * 2^-20.
fn bound(k: usize) -> f32 {
    k as f32 * 2f32.powi(-20) + 1e-6
}

#[test]
fn projections_agree_with_the_reference() {
    let gpu = plain();
    let mut rng = Rng(1);
    for dims in DIMS {
        let outputs = dims.heads * (dims.nope + dims.v);
        for dtype in DTYPES {
            let kv_b = random_matrix(&mut rng, outputs, dims.rank, dtype);
            for rows in [0, 1, 9, 33] {
                let what = format!("{} {dims:?} x {rows}", dtype.name());
                let q = rng.normals(rows * dims.heads * dims.nope);
                let want = reference::mla_absorb(&q, rows, &kv_b, dims);
                let got = absorb(&gpu, &q, rows, &kv_b, dims);
                assert_close(&got, &want, |_| bound(dims.nope), &what);
                let latent = rng.normals(rows * dims.heads * dims.rank);
                let want = reference::mla_expand(&latent, rows, &kv_b, dims);
                let got = expand(&gpu, &latent, rows, &kv_b, dims);
                assert_close(&got, &want, |_| bound(dims.rank), &what);
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_alone_and_in_any_batch() {
    let gpu = plain();
    let mut rng = Rng(2);
    for dims in DIMS {
        let outputs = dims.heads * (dims.nope + dims.v);
        let kv_b = random_matrix(&mut rng, outputs, dims.rank, DTYPES[2]);
        let (q_cols, latent_cols) = (dims.heads * dims.nope, dims.heads * dims.rank);
        let q = rng.normals(40 * q_cols);
        let latent = rng.normals(40 * latent_cols);
        let absorbed = absorb(&gpu, &q, 40, &kv_b, dims);
        let expanded = expand(&gpu, &latent, 40, &kv_b, dims);
        for (first, rows) in [(0, 1), (3, 5), (31, 1), (32, 1), (0, 32), (30, 10)] {
            let part = |x: &[f32], cols: usize| x[first * cols..][..rows * cols].to_vec();
            let got = absorb(&gpu, &part(&q, q_cols), rows, &kv_b, dims);
            assert_same_bits(&got, &part(&absorbed, latent_cols), "mla_absorb");
            let got = expand(&gpu, &part(&latent, latent_cols), rows, &kv_b, dims);
            assert_same_bits(&got, &part(&expanded, dims.heads * dims.v), "mla_expand");
        }
    }
}
