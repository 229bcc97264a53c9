//! Latent attention's up-projections of each head.

use hearth_cuda::CudaKv;
use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, HostMatrix, KvDType, KvLayout, MlaHeads, Span, compose, reference};

use crate::common::*;
use crate::sequence::{LAYER, layout};
use crate::support::{Gpu, on_all_activations, plain};

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

/// Positions whose heads are expanded: more than one tile of any kernel.
const TOKENS: usize = 70;
/// Elements of the rotated part of a key.
const ROPE: usize = 10;

/// All positions, in blocks that are not in order.
fn span() -> Span {
    Span {
        first_row: 0,
        rows: TOKENS,
        start: 0,
        blocks: (0..5).map(|i| BlockId(4 - i)).collect(),
    }
}

/// A cache with these latents.
fn cached(gpu: &Gpu, latents: &[f32], dims: MlaHeads, dtype: KvDType) -> CudaKv {
    let layout = layout(1, dims.rank + ROPE, dims.rank, true, dtype);
    let mut kv = gpu.kv_alloc(layout, 5).unwrap();
    let keys = gpu.upload(TOKENS, layout.k_dim, latents).unwrap();
    gpu.kv_append(&mut kv, LAYER, &keys, None, &[span()])
        .unwrap();
    kv
}

/// What is stored of some heads `[TOKENS, heads * (nope + ROPE + v)]`, expanded in pieces of so many positions.
fn expanded(
    gpu: &Gpu,
    kv: &CudaKv,
    kv_b: &HostMatrix,
    (first, dims): (usize, MlaHeads),
    piece: usize,
) -> Vec<f32> {
    let layout = KvLayout {
        layers: 1,
        ..layout(
            dims.heads,
            dims.nope + ROPE,
            dims.v,
            false,
            gpu.kv_layout(kv).dtype,
        )
    };
    let mut out = gpu.kv_alloc(layout, 5).unwrap();
    let of_head = dims.nope + dims.v;
    let whole = gpu.weight(kv_b).unwrap();
    let part = gpu
        .weight_rows(&whole, first * of_head, dims.heads * of_head)
        .unwrap();
    // The part keeps the weight's memory.
    drop(whole);
    for start in (0..TOKENS).step_by(piece) {
        let to = Span {
            rows: piece.min(TOKENS - start),
            start,
            ..span()
        };
        let latents = (kv, LAYER, &span().blocks[..]);
        compose::expand_latents(&**gpu, latents, &part, dims, &mut out, &to).unwrap();
    }
    let rows = gpu.kv_rows(&out, 0, &span().blocks, 0, TOKENS).unwrap();
    gpu.download(&rows).unwrap()
}

#[test]
fn expanded_heads_agree_with_the_reference() {
    let gpu = plain();
    let mut rng = Rng(3);
    for dims in DIMS {
        let outputs = dims.heads * (dims.nope + dims.v);
        let latents = rng.normals(TOKENS * (dims.rank + ROPE));
        for dtype in DTYPES {
            let kv_b = random_matrix(&mut rng, outputs, dims.rank, dtype);
            for (kv_dtype, rounding) in [(F32, 0.0), (Bf16, 2f32.powi(-8))] {
                let kv = cached(&gpu, &latents, dims, kv_dtype);
                let stored = gpu.kv_rows(&kv, LAYER, &span().blocks, 0, TOKENS).unwrap();
                let stored = gpu.download(&stored).unwrap();
                let (keys, values) = reference::expand_latents(&stored, TOKENS, &kv_b, dims);
                let (k, v) = (keys.len() / TOKENS, values.len() / TOKENS);
                let want: Vec<f32> = (0..TOKENS)
                    .flat_map(|t| [&keys[t * k..][..k], &values[t * v..][..v]].concat())
                    .collect();
                let got = expanded(&gpu, &kv, &kv_b, (0, dims), TOKENS);
                let what = format!("{} {kv_dtype:?} {dims:?}", dtype.name());
                let bound = |i: usize| bound(dims.rank) + rounding * want[i].abs();
                assert_close(&got, &want, bound, &what);
            }
        }
    }
}

#[test]
fn an_expanded_head_is_the_same_bits_in_any_group_and_piece() {
    on_all_activations(|gpu| {
        let mut rng = Rng(4);
        for dims in DIMS {
            let outputs = dims.heads * (dims.nope + dims.v);
            let kv_b = random_matrix(&mut rng, outputs, dims.rank, DTYPES[3]);
            let latents = rng.normals(TOKENS * (dims.rank + ROPE));
            let kv = cached(gpu, &latents, dims, Bf16);
            let all = expanded(gpu, &kv, &kv_b, (0, dims), TOKENS);
            let one = MlaHeads { heads: 1, ..dims };
            for first in [0, dims.heads - 1] {
                for piece in [9, TOKENS] {
                    let got = expanded(gpu, &kv, &kv_b, (first, one), piece);
                    let width = dims.nope + ROPE + dims.v;
                    for (got, all) in got.chunks(width).zip(all.chunks(dims.heads * width)) {
                        let (keys, values) = all.split_at(dims.heads * (dims.nope + ROPE));
                        let key = &keys[first * (dims.nope + ROPE)..][..dims.nope + ROPE];
                        let want = [key, &values[first * dims.v..][..dims.v]].concat();
                        assert_same_bits(got, &want, &format!("head {first} of {dims:?}"));
                    }
                }
            }
        }
    });
}
