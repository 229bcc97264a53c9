//! Keys and values that are expanded from cached latents, and attention over them.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{
    AttentionSpec, BlockId, CpuBackend, CpuKv, HostMatrix, KvDType, KvLayout, MlaHeads, Span,
    compose, reference,
};

const TOKENS: usize = 45;
const LAYER: usize = 1;
const ROPE: usize = 6;

const DIMS: [MlaHeads; 3] = [
    MlaHeads {
        heads: 3,
        nope: 17,
        v: 23,
        rank: 70,
    },
    MlaHeads {
        heads: 4,
        nope: 26,
        v: 32,
        rank: 128,
    },
    MlaHeads {
        heads: 5,
        nope: 8,
        v: 1,
        rank: 129,
    },
];

fn latent_layout(dims: MlaHeads, dtype: KvDType) -> KvLayout {
    KvLayout {
        layers: 2,
        kv_heads: 1,
        k_dim: dims.rank + ROPE,
        v_dim: dims.rank,
        value_in_key: true,
        block_tokens: 8,
        dtype,
    }
}

fn expanded_layout(dims: MlaHeads, dtype: KvDType) -> KvLayout {
    KvLayout {
        layers: 1,
        kv_heads: dims.heads,
        k_dim: dims.nope + ROPE,
        v_dim: dims.v,
        value_in_key: false,
        ..latent_layout(dims, dtype)
    }
}

/// All positions of the sequence; its blocks are not in order.
fn span() -> Span {
    Span {
        first_row: 0,
        rows: TOKENS,
        start: 0,
        blocks: (0..6).map(|i| BlockId(5 - i)).collect(),
    }
}

/// A cache with these latents `[TOKENS, rank + rope]`, and what it stored of them.
fn stored(
    backend: &CpuBackend,
    dims: MlaHeads,
    dtype: KvDType,
    latents: &[f32],
) -> (CpuKv, Vec<f32>) {
    let layout = latent_layout(dims, dtype);
    let mut kv = backend.kv_alloc(layout, 6).unwrap();
    let keys = upload(backend, TOKENS, latents);
    backend
        .kv_append(&mut kv, LAYER, &keys, None, &[span()])
        .unwrap();
    let rows = backend.kv_rows(&kv, LAYER, &span().blocks, 0, TOKENS);
    let rows = backend.download(&rows.unwrap()).unwrap();
    (kv, rows)
}

/// Keys and values of some heads, expanded in pieces of so many positions.
fn expanded(
    backend: &CpuBackend,
    kv: &CpuKv,
    kv_b: &HostMatrix,
    (first, dims): (usize, MlaHeads),
    piece: usize,
) -> CpuKv {
    let layout = expanded_layout(dims, backend.kv_layout(kv).dtype);
    let mut out = backend.kv_alloc(layout, 6).unwrap();
    let of_head = dims.nope + dims.v;
    let kv_b = backend.weight_rows(kv_b, first * of_head, dims.heads * of_head);
    let kv_b = kv_b.unwrap();
    for start in (0..TOKENS).step_by(piece) {
        let to = Span {
            rows: piece.min(TOKENS - start),
            start,
            ..span()
        };
        let latents = (kv, LAYER, &span().blocks[..]);
        compose::expand_latents(backend, latents, &kv_b, dims, &mut out, &to).unwrap();
    }
    out
}

fn rows(backend: &CpuBackend, kv: &CpuKv) -> Vec<f32> {
    let rows = backend.kv_rows(kv, 0, &span().blocks, 0, TOKENS).unwrap();
    backend.download(&rows).unwrap()
}

/// Columns of a token's keys and values that belong to one head of so many.
fn of_head(token: &[f32], head: usize, dims: MlaHeads) -> Vec<f32> {
    let (keys, values) = token.split_at(dims.heads * (dims.nope + ROPE));
    let key = &keys[head * (dims.nope + ROPE)..][..dims.nope + ROPE];
    [key, &values[head * dims.v..][..dims.v]].concat()
}

#[test]
fn what_is_cached_is_read_as_it_is_stored() {
    let mut rng = Rng(1);
    for dtype in [KvDType::Bf16, KvDType::F32] {
        let layout = KvLayout {
            kv_heads: 2,
            k_dim: 5,
            v_dim: 3,
            value_in_key: false,
            ..latent_layout(DIMS[0], dtype)
        };
        let backend = backend(hearth_kernels::Isa::Scalar, 1);
        let mut kv = backend.kv_alloc(layout, 6).unwrap();
        let (keys, values) = (rng.normals(TOKENS * 10), rng.normals(TOKENS * 6));
        let (k, v) = (
            upload(&backend, TOKENS, &keys),
            upload(&backend, TOKENS, &values),
        );
        backend
            .kv_append(&mut kv, LAYER, &k, Some(&v), &[span()])
            .unwrap();
        let got = backend.kv_rows(&kv, LAYER, &span().blocks, 7, 21).unwrap();
        assert_eq!(backend.shape(&got), (21, 16));
        let round = |value: f32| match dtype {
            KvDType::Bf16 => {
                f32::from_bits(u32::from(hearth_kernels::convert::f32_to_bf16(value)) << 16)
            }
            KvDType::F32 => value,
        };
        let want: Vec<f32> = (7..28)
            .flat_map(|token| [&keys[token * 10..][..10], &values[token * 6..][..6]].concat())
            .map(round)
            .collect();
        assert_same_bits(&backend.download(&got).unwrap(), &want, "kv_rows");
    }
}

#[test]
fn expanded_heads_agree_with_the_reference_and_are_the_same_in_any_group() {
    let mut rng = Rng(2);
    for dims in DIMS {
        for weights in DTYPES {
            let outputs = dims.heads * (dims.nope + dims.v);
            let kv_b = random_matrix(&mut rng, outputs, dims.rank, weights);
            let latents = rng.normals(TOKENS * (dims.rank + ROPE));
            for dtype in [KvDType::Bf16, KvDType::F32] {
                on_every_isa(1, |one| {
                    let what = format!("{} {} {dtype:?} {dims:?}", one.isa(), weights.name());
                    let (kv, stored) = stored(one, dims, dtype, &latents);
                    let all = rows(one, &expanded(one, &kv, &kv_b, (0, dims), TOKENS));
                    let (keys, values) = reference::expand_latents(&stored, TOKENS, &kv_b, dims);
                    let (k, v) = (keys.len() / TOKENS, values.len() / TOKENS);
                    let want: Vec<f32> = (0..TOKENS)
                        .flat_map(|t| [&keys[t * k..][..k], &values[t * v..][..v]].concat())
                        .collect();
                    // The sum's rounding, and that of what is stored.
                    let sum = 2e-6 * (dims.rank as f32).sqrt();
                    let rounding = match dtype {
                        KvDType::Bf16 => 2f32.powi(-8),
                        KvDType::F32 => 0.0,
                    };
                    assert_close(&all, &want, |i| sum + rounding * want[i].abs(), &what);

                    let three = backend(one.isa(), 3);
                    for (heads, piece) in [(dims.heads, 16), (1, TOKENS), (1, 7)] {
                        for first in 0..=dims.heads - heads {
                            let part = MlaHeads { heads, ..dims };
                            let got =
                                rows(&three, &expanded(&three, &kv, &kv_b, (first, part), piece));
                            for head in 0..heads {
                                for (got, all) in got
                                    .chunks(got.len() / TOKENS)
                                    .zip(all.chunks(all.len() / TOKENS))
                                {
                                    let got = of_head(got, head, part);
                                    let all = of_head(all, first + head, dims);
                                    assert_same_bits(&got, &all, &what);
                                }
                            }
                        }
                    }
                });
            }
        }
    }
}

/// The two forms of latent attention are one function (DeepSeek-V2, section 2.1.2).
#[test]
fn attention_over_expanded_heads_is_that_over_latents_with_absorbed_queries() {
    let mut rng = Rng(3);
    for dims in DIMS {
        let outputs = dims.heads * (dims.nope + dims.v);
        let values = rng.normals(outputs * dims.rank);
        // Scores of size 1, as of trained weights.
        let values: Vec<f32> = values
            .iter()
            .map(|v| v / (dims.rank as f32).sqrt())
            .collect();
        let kv_b = matrix(&values, outputs, dims.rank, hearth_kernels::DType::F32);
        let latents = rng.normals(TOKENS * (dims.rank + ROPE));
        let q_nope = rng.normals(TOKENS * dims.heads * dims.nope);
        let q_rope = rng.normals(TOKENS * dims.heads * ROPE);
        let spec = AttentionSpec {
            heads: dims.heads,
            scale: 1.0 / ((dims.nope + ROPE) as f32).sqrt(),
        };
        on_every_isa(1, |backend| {
            let (kv, _) = stored(backend, dims, KvDType::F32, &latents);
            let q_nope = upload(backend, TOKENS, &q_nope);
            let q_rope = upload(backend, TOKENS, &q_rope);
            let q = backend.mla_absorb(&q_nope, &kv_b, dims).unwrap();
            let q = backend.interleave(&q, &q_rope, dims.heads).unwrap();
            let latent = backend.attention(&q, &kv, LAYER, &[span()], spec).unwrap();
            let want = backend.mla_expand(&latent, &kv_b, dims).unwrap();

            let heads = expanded(backend, &kv, &kv_b, (0, dims), TOKENS);
            let q = backend.interleave(&q_nope, &q_rope, dims.heads).unwrap();
            let got = backend.attention(&q, &heads, 0, &[span()], spec).unwrap();
            let [got, want] = [got, want].map(|x| backend.download(&x).unwrap());
            // Averages of values of size 1, whose weights carry the rounding of scores of size 3.
            let what = format!("{} {dims:?}", backend.isa());
            assert_close(&got, &want, |_| 2e-5, &what);
        });
    }
}
