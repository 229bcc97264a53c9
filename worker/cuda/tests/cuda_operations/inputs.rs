//! Operations of several steps in one launch have the bits of those steps one after the other.

use hearth_cuda::{Activations, CudaTensor};
use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;
use hearth_kernels::{
    BlockId, DType, Heads, KvDType, Latents, MlaHeads, RopeLayout, RopeTable, Span, compose,
};

use crate::common::*;
use crate::sequence::layout;
use crate::support::{Gpu, gpu, on_all_activations, plain};

/// Columns of three segments, the last one not whole: sums of few rows are left in parts.
const WIDE: usize = 1100;
const ROWS: usize = 5;

fn rope(pairs: usize, layout: RopeLayout) -> RopeTable {
    RopeTable {
        inv_freq: (0..pairs).map(|i| 0.7_f32.powi(i as i32)).collect(),
        magnitude: 1.25,
        layout,
    }
}

/// Two sequences, with a row between them that belongs to none.
fn spans() -> Vec<Span> {
    let span = |first_row, rows, start, block| Span {
        first_row,
        rows,
        start,
        blocks: (block..block + 3).map(BlockId).collect(),
    };
    vec![span(0, 2, 17, 0), span(3, 2, 30, 5)]
}

const POSITIONS: [u32; ROWS] = [17, 18, 4, 30, 31];

fn input(gpu: &Gpu, rng: &mut Rng, rows: usize, cols: usize) -> CudaTensor {
    gpu.upload(rows, cols, &rng.normals(rows * cols)).unwrap()
}

/// Products `[ROWS, cols]` of wide rows, in parts.
fn product(gpu: &Gpu, seed: u64, cols: usize, has_bias: bool) -> CudaTensor {
    let mut rng = Rng(seed);
    let x = input(gpu, &mut rng, ROWS, WIDE);
    let w = gpu
        .weight(&random_matrix(&mut rng, cols, WIDE, DType::Bf16))
        .unwrap();
    let bias = gpu.vector(&rng.normals(cols)).unwrap();
    gpu.linear(&x, &w, has_bias.then_some(&bias)).unwrap()
}

fn bits(gpu: &Gpu, x: &CudaTensor) -> Vec<u32> {
    let values = gpu.download(x).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn products_of_the_same_rows_have_the_bits_of_each() {
    on_all_activations(|gpu| {
        let mut rng = Rng(1);
        for dtype in [DType::Bf16, DType::F8E4m3, DType::F32] {
            for rows in [1, 8, 9] {
                let x = input(gpu, &mut rng, rows, WIDE);
                let bias = gpu.vector(&rng.normals(200)).unwrap();
                let weights = [200, 129, 3].map(|n| {
                    let matrix = random_matrix(&mut rng, n, WIDE, dtype);
                    gpu.weight(&matrix).unwrap()
                });
                let [q, k, v] = &weights;
                let products = [(q, Some(&bias)), (k, None), (v, None)];
                let joint = gpu.linears(&x, &products).unwrap();
                assert_eq!(joint.len(), 3);
                for ((w, bias), got) in products.iter().zip(&joint) {
                    let want = gpu.linear(&x, w, *bias).unwrap();
                    assert_eq!(bits(gpu, got), bits(gpu, &want), "{dtype:?}, {rows} rows");
                }
            }
        }
    });
}

/// What reads a sum in parts adds it as `download` does, which needs it whole.
#[test]
fn readers_of_sums_in_parts_see_their_bits() {
    on_all_activations(|gpu| {
        let mut rng = Rng(2);
        let (cols, weight) = (300, rng.normals(300));
        let norm = gpu.vector(&weight).unwrap();
        let whole = |seed, has_bias| {
            let values = gpu.download(&product(gpu, seed, cols, has_bias)).unwrap();
            gpu.upload(ROWS, cols, &values).unwrap()
        };
        let part = |seed, has_bias| product(gpu, seed, cols, has_bias);
        let residual = rng.normals(ROWS * cols);
        let down = random_matrix(&mut rng, 70, cols, DType::Bf16);
        let down = gpu.weight(&down).unwrap();
        // Terms that the norm and the gate store are those that a product would make of their results.
        let again = |x: &CudaTensor| {
            let x = gpu.upload(ROWS, cols, &gpu.download(x).unwrap()).unwrap();
            bits(gpu, &gpu.linear(&x, &down, None).unwrap())
        };
        let normed = |delta: &CudaTensor| {
            let mut residual = gpu.upload(ROWS, cols, &residual).unwrap();
            let y = gpu.add_rms_norm(&mut residual, delta, &norm, 1e-6).unwrap();
            let next = bits(gpu, &gpu.linear(&y, &down, None).unwrap());
            assert_eq!(next, again(&y), "terms of a norm");
            (bits(gpu, &residual), bits(gpu, &y))
        };
        assert_eq!(normed(&part(5, true)), normed(&whole(5, true)));
        let sum = gpu.sum(part(6, false), part(7, true)).unwrap();
        let mut apart = whole(6, false);
        gpu.add_assign(&mut apart, &whole(7, true)).unwrap();
        assert_eq!(normed(&sum), normed(&apart));
        assert_eq!(bits(gpu, &sum), bits(gpu, &apart));
        let gated = gpu.silu_mul(part(8, false), &part(9, true)).unwrap();
        let want = gpu.silu_mul(whole(8, false), &whole(9, true)).unwrap();
        assert_eq!(bits(gpu, &gated), bits(gpu, &want));
        let next = bits(gpu, &gpu.linear(&gated, &down, None).unwrap());
        assert_eq!(next, again(&want), "terms of a gate");
        let alone = gpu.rms_norm(&part(5, true), &norm, 1e-6).unwrap();
        let want = gpu.rms_norm(&whole(5, true), &norm, 1e-6).unwrap();
        assert_eq!(bits(gpu, &alone), bits(gpu, &want));
    });
}

#[test]
fn heads_are_cached_as_by_single_operations() {
    let gpu = plain();
    for (dim, pairs, form) in [
        (16, 8, RopeLayout::Half),
        (18, 9, RopeLayout::Half),
        (130, 33, RopeLayout::Interleaved),
        (256, 128, RopeLayout::Half),
    ] {
        for (dtype, has_norms) in [(Bf16, true), (F32, false)] {
            heads_once(&gpu, dim, &rope(pairs, form), dtype, has_norms);
        }
    }
}

fn heads_once(gpu: &Gpu, dim: usize, rope: &RopeTable, dtype: KvDType, has_norms: bool) {
    let (heads, kv_heads) = (6, 2);
    let layout = layout(kv_heads, dim, dim, false, dtype);
    let mut rng = Rng(3);
    let norms = [0; 2].map(|_| gpu.vector(&rng.normals(dim)).unwrap());
    let blocks: Vec<BlockId> = (0..10).map(BlockId).collect();
    let mut seen = Vec::new();
    for is_fused in [true, false] {
        let mut kv = gpu.kv_alloc(layout, 10).unwrap();
        let of = Heads {
            q: product(gpu, 10, heads * dim, true),
            k: product(gpu, 11, kv_heads * dim, true),
            v: product(gpu, 12, kv_heads * dim, false),
            norms: has_norms.then_some((&norms[0], &norms[1])),
            eps: 1e-6,
            head_dim: dim,
            positions: &POSITIONS,
            rope,
        };
        let q = match is_fused {
            true => gpu.cache_heads(&mut kv, 1, &spans(), of).unwrap(),
            false => compose::cache_heads(&**gpu, &mut kv, 1, &spans(), of).unwrap(),
        };
        let layers = [0, 1].map(|layer| gpu.kv_read(&kv, layer, &blocks, 0, 160).unwrap());
        seen.push((bits(gpu, &q), layers));
    }
    assert!(seen[0].1[1].iter().any(|&byte| byte != 0));
    assert!(seen[0] == seen[1], "heads of {dim}, {dtype:?}");
}

#[test]
fn latents_are_cached_and_queries_absorbed_as_by_single_operations() {
    on_all_activations(|gpu| {
        for (rank, rotated, pairs, q_rank) in [
            (37, 10, 5, Some(43)),
            (512, 64, 32, Some(300)),
            (144, 16, 8, None),
        ] {
            for dtype in [Bf16, F32] {
                latents_once(
                    gpu,
                    (rank, rotated),
                    &rope(pairs, RopeLayout::Interleaved),
                    q_rank,
                    dtype,
                );
            }
        }
    });
}

fn latents_once(
    gpu: &Gpu,
    (rank, rotated): (usize, usize),
    rope: &RopeTable,
    q_rank: Option<usize>,
    dtype: KvDType,
) {
    let layout = layout(1, rank + rotated, rank, true, dtype);
    let mut rng = Rng(4);
    let kv_norm = gpu.vector(&rng.normals(rank)).unwrap();
    let q_norm = gpu.vector(&rng.normals(q_rank.unwrap_or(1))).unwrap();
    let dims = MlaHeads {
        heads: 3,
        nope: 21,
        v: 19,
        rank,
    };
    let kv_b = random_matrix(
        &mut rng,
        dims.heads * (dims.nope + dims.v),
        rank,
        DType::Bf16,
    );
    let kv_b = gpu.weight(&kv_b).unwrap();
    let q_b = random_matrix(&mut rng, 90, q_rank.unwrap_or(1), DType::Bf16);
    let q_b = gpu.weight(&q_b).unwrap();
    let blocks: Vec<BlockId> = (0..10).map(BlockId).collect();
    let mut seen = Vec::new();
    for is_fused in [true, false] {
        let mut kv = gpu.kv_alloc(layout, 10).unwrap();
        let of = Latents {
            kv_a: product(gpu, 20, rank + rotated, false),
            kv_norm: &kv_norm,
            q_a: q_rank.map(|q_rank| (product(gpu, 21, q_rank, false), &q_norm)),
            rank,
            eps: 1e-6,
            positions: &POSITIONS,
            rope,
        };
        let q = product(gpu, 22, dims.heads * (dims.nope + rotated), false);
        let (q_a, query) = match is_fused {
            true => (
                gpu.cache_latents(&mut kv, 1, &spans(), of).unwrap(),
                gpu.latent_queries(&q, &kv_b, dims, &POSITIONS, rope)
                    .unwrap(),
            ),
            false => (
                compose::cache_latents(&**gpu, &mut kv, 1, &spans(), of).unwrap(),
                compose::latent_queries(&**gpu, &q, &kv_b, dims, &POSITIONS, rope).unwrap(),
            ),
        };
        // The next product reads the terms that were stored with the norm.
        let next = q_a.as_ref().map(|q_a| gpu.linear(q_a, &q_b, None).unwrap());
        let layers = [0, 1].map(|layer| gpu.kv_read(&kv, layer, &blocks, 0, 160).unwrap());
        seen.push((
            [q_a, next].map(|x| x.map(|x| bits(gpu, &x))),
            bits(gpu, &query),
            layers,
        ));
    }
    assert!(seen[0].2[1].iter().any(|&byte| byte != 0));
    assert!(seen[0] == seen[1], "rank {rank}, {dtype:?}");
}

#[test]
fn terms_that_expansion_stores_are_those_of_its_result() {
    for activations in [Activations::F32, Activations::Bf16] {
        let gpu = gpu(activations);
        let mut rng = Rng(5);
        for (heads, v, rows) in [(3, 19, 5), (2, 64, 8), (3, 12, 40)] {
            let dims = MlaHeads {
                heads,
                nope: 7,
                v,
                rank: 70,
            };
            let kv_b = random_matrix(&mut rng, heads * (7 + v), 70, DType::F8E4m3);
            let kv_b = gpu.weight(&kv_b).unwrap();
            let o = random_matrix(&mut rng, 40, heads * v, DType::Bf16);
            let o = gpu.weight(&o).unwrap();
            let latent = input(&gpu, &mut rng, rows, heads * 70);
            let out = gpu.mla_expand(&latent, &kv_b, dims).unwrap();
            let got = bits(&gpu, &gpu.linear(&out, &o, None).unwrap());
            let again = gpu.download(&out).unwrap();
            let again = gpu.upload(rows, heads * v, &again).unwrap();
            assert_eq!(got, bits(&gpu, &gpu.linear(&again, &o, None).unwrap()));
        }
    }
}
