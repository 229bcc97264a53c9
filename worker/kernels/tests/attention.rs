//! Attention over pages, latent attention's projections and the KV cache.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

mod common;

use common::*;
use hearth_kernels::ops::*;
use hearth_kernels::{
    AttentionSpec, BlockId, CpuBackend, CpuKv, CpuTensor, Isa, KvDType, KvLayout, MlaHeads, Span,
    reference,
};

const GQA: KvLayout = KvLayout {
    layers: 2,
    kv_heads: 3,
    k_dim: 20,
    v_dim: 12,
    value_in_key: false,
    block_tokens: 8,
    dtype: KvDType::Bf16,
};

const MHA: KvLayout = KvLayout {
    kv_heads: 6,
    k_dim: 64,
    v_dim: 64,
    block_tokens: 32,
    dtype: KvDType::F32,
    ..GQA
};

const LATENT: KvLayout = KvLayout {
    kv_heads: 1,
    k_dim: 83,
    v_dim: 70,
    value_in_key: true,
    block_tokens: 16,
    ..GQA
};

/// One sequence: keys and values of every position, and queries for them.
struct Sequence {
    layout: KvLayout,
    heads: usize,
    tokens: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Sequence {
    fn new(layout: KvLayout, heads: usize, tokens: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let exact = |v: f32| half(v, layout.dtype);
        Self {
            layout,
            heads,
            tokens,
            q: rng.normals(tokens * heads * layout.k_dim),
            k: rng
                .normals(tokens * layout.kv_heads * layout.k_dim)
                .into_iter()
                .map(exact)
                .collect(),
            v: rng
                .normals(tokens * layout.kv_heads * layout.v_dim)
                .into_iter()
                .map(exact)
                .collect(),
        }
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads,
            scale: 0.3,
        }
    }

    /// Blocks from `first` on, in descending order.
    fn blocks(&self, first: u32) -> Vec<BlockId> {
        let n = self.layout.blocks_for(self.tokens) as u32;
        (0..n).rev().map(|i| BlockId(first + i)).collect()
    }

    /// Appends and attends to rows `start..start + rows` in one go.
    fn step(
        &self,
        backend: &CpuBackend,
        kv: &mut CpuKv,
        blocks: &[BlockId],
        start: usize,
        rows: usize,
    ) -> Vec<f32> {
        let span = Span {
            first_row: 0,
            rows,
            start,
            blocks: blocks.to_vec(),
        };
        self.append(backend, kv, std::slice::from_ref(&span));
        let width = self.heads * self.layout.k_dim;
        let q = upload(
            backend,
            rows,
            &self.q[start * width..(start + rows) * width],
        );
        let out = backend.attention(&q, kv, 1, &[span], self.spec()).unwrap();
        backend.download(&out).unwrap()
    }

    /// Appends the keys and values of the spans' own positions, in layer 1.
    fn append(&self, backend: &CpuBackend, kv: &mut CpuKv, spans: &[Span]) {
        let rows: usize = spans.iter().map(|s| s.rows).sum();
        let (kw, vw) = (
            self.layout.kv_heads * self.layout.k_dim,
            self.layout.kv_heads * self.layout.v_dim,
        );
        let mut k = vec![0.0; rows * kw];
        let mut v = vec![0.0; rows * vw];
        for span in spans {
            for i in 0..span.rows {
                let (row, position) = (span.first_row + i, span.start + i);
                k[row * kw..(row + 1) * kw].copy_from_slice(&self.k[position * kw..][..kw]);
                v[row * vw..(row + 1) * vw].copy_from_slice(&self.v[position * vw..][..vw]);
            }
        }
        let k = upload(backend, rows, &k);
        let v = upload(backend, rows, &v);
        let v = (!self.layout.value_in_key).then_some(&v);
        backend.kv_append(kv, 1, &k, v, spans).unwrap();
    }

    /// Returns the reference's result for every position.
    fn reference(&self) -> Vec<f32> {
        let KvLayout {
            kv_heads,
            k_dim,
            v_dim,
            value_in_key,
            ..
        } = self.layout;
        let mut out = vec![0.0; self.tokens * self.heads * v_dim];
        for position in 0..self.tokens {
            for head in 0..self.heads {
                let kv_head = head / (self.heads / kv_heads);
                let keys: Vec<f32> = (0..=position)
                    .flat_map(|p| &self.k[(p * kv_heads + kv_head) * k_dim..][..k_dim])
                    .copied()
                    .collect();
                let values: Vec<f32> = (0..=position)
                    .flat_map(|p| {
                        if value_in_key {
                            &self.k[p * k_dim..][..v_dim]
                        } else {
                            &self.v[(p * kv_heads + kv_head) * v_dim..][..v_dim]
                        }
                    })
                    .copied()
                    .collect();
                let at = (position * self.heads + head) * v_dim;
                reference::attention_head(
                    &self.q[(position * self.heads + head) * k_dim..][..k_dim],
                    &keys,
                    &values,
                    v_dim,
                    self.spec().scale,
                    &mut out[at..at + v_dim],
                );
            }
        }
        out
    }
}

/// Rounds to a value that the cache stores exactly.
fn half(value: f32, dtype: KvDType) -> f32 {
    match dtype {
        KvDType::Bf16 => {
            hearth_kernels::convert::bf16_to_f32(hearth_kernels::convert::f32_to_bf16(value))
        }
        KvDType::F32 => value,
    }
}

fn cases() -> Vec<Sequence> {
    vec![
        Sequence::new(GQA, 12, 150, 1),
        Sequence::new(GQA, 3, 70, 2),
        Sequence::new(MHA, 6, 131, 3),
        Sequence::new(LATENT, 40, 100, 4),
        Sequence::new(LATENT, 5, 129, 5),
    ]
}

#[test]
fn attention_agrees_with_the_reference() {
    for sequence in cases() {
        let want = sequence.reference();
        on_every_isa(1, |backend| {
            let mut kv = backend.kv_alloc(sequence.layout, 40).unwrap();
            let blocks = sequence.blocks(2);
            let got = sequence.step(backend, &mut kv, &blocks, 0, sequence.tokens);
            // Values are averages of numbers of size 1; scores of size about 3 carry an f32 rounding of a few
            // 2^-22, so weights and averages are accurate to about 1e-6.
            assert_close(&got, &want, |_| 1e-5, backend.isa().name());
        });
    }
}

#[test]
fn attention_gives_the_same_bits_whatever_the_chunks_the_blocks_and_the_neighbours() {
    for sequence in cases() {
        on_every_isa(1, |one| {
            let three = backend(one.isa(), 3);
            let what = format!("{} {:?}", one.isa(), sequence.layout);
            let mut kv = one.kv_alloc(sequence.layout, 40).unwrap();
            let whole = sequence.step(one, &mut kv, &sequence.blocks(0), 0, sequence.tokens);
            for (backend, chunk) in [(one, 1), (&three, 7), (one, 64), (&three, 150), (one, 33)] {
                // Fresh blocks that hold NaN where nothing has been written yet.
                let mut kv = backend.kv_alloc(sequence.layout, 40).unwrap();
                let blocks = sequence.blocks(11);
                let tokens = blocks.len() * sequence.layout.block_tokens;
                let nan = vec![0xff; tokens * sequence.layout.token_layer_bytes()];
                backend.kv_write(&mut kv, 1, &blocks, 0, &nan).unwrap();
                let mut got = Vec::new();
                for start in (0..sequence.tokens).step_by(chunk) {
                    let rows = chunk.min(sequence.tokens - start);
                    got.extend(sequence.step(backend, &mut kv, &blocks, start, rows));
                }
                assert_same_bits(&got, &whole, &format!("{what} in chunks of {chunk}"));
            }
            batch_of_spans(one, &sequence, &whole);
            batch_of_spans(&three, &sequence, &whole);
        });
    }
}

/// Runs attention of some rows by themselves, into a tensor that others have written; `want` is that of all.
fn rows_by_themselves(
    backend: &CpuBackend,
    kv: &CpuKv,
    q: &CpuTensor,
    sequence: &Sequence,
    spans: &[Span],
    want: &[f32],
) {
    let rows = backend.shape(q).0;
    let width = want.len() / rows;
    let mut got = upload(backend, rows, &vec![7.0; want.len()]);
    for part in [&spans[..1], &spans[1..]] {
        backend
            .attention_rows(&mut got, q, kv, 1, part, sequence.spec())
            .unwrap();
    }
    let got = backend.download(&got).unwrap();
    for (row, (got, want)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
        let of_row = |span: &Span| (span.first_row..span.first_row + span.rows).contains(&row);
        match spans.iter().any(of_row) {
            true => assert_same_bits(got, want, "rows by themselves"),
            false => assert!(got.iter().all(|&v| v == 7.0), "nobody's row"),
        }
    }
    let mut narrow = backend.zeros(rows, width - 1).unwrap();
    let refused = backend.attention_rows(&mut narrow, q, kv, 1, spans, sequence.spec());
    assert!(refused.is_err());
}

/// Two copies of the sequence at different positions in one batch, the second span first, with a row between them
/// that belongs to neither.
fn batch_of_spans(backend: &CpuBackend, sequence: &Sequence, whole: &[f32]) {
    let layout = sequence.layout;
    let mut kv = backend.kv_alloc(layout, 60).unwrap();
    let (first, second) = (sequence.blocks(0), sequence.blocks(30));
    sequence.step(backend, &mut kv, &first, 0, 60);
    sequence.step(backend, &mut kv, &second, 0, 21);
    let spans = [
        Span {
            first_row: 6,
            rows: 9,
            start: 60,
            blocks: first,
        },
        Span {
            first_row: 0,
            rows: 5,
            start: 21,
            blocks: second,
        },
    ];
    let width = sequence.heads * layout.k_dim;
    let mut q = vec![0.0; 15 * width];
    for span in &spans {
        let from = span.start * width;
        q[span.first_row * width..][..span.rows * width]
            .copy_from_slice(&sequence.q[from..from + span.rows * width]);
    }
    let kw = layout.kv_heads * layout.k_dim;
    let vw = layout.kv_heads * layout.v_dim;
    let mut k = vec![0.0; 15 * kw];
    let mut v = vec![0.0; 15 * vw];
    for span in &spans {
        k[span.first_row * kw..][..span.rows * kw]
            .copy_from_slice(&sequence.k[span.start * kw..][..span.rows * kw]);
        v[span.first_row * vw..][..span.rows * vw]
            .copy_from_slice(&sequence.v[span.start * vw..][..span.rows * vw]);
    }
    let (q, k, v) = (
        upload(backend, 15, &q),
        upload(backend, 15, &k),
        upload(backend, 15, &v),
    );
    let v = (!layout.value_in_key).then_some(&v);
    backend.kv_append(&mut kv, 1, &k, v, &spans).unwrap();
    let out = backend
        .attention(&q, &kv, 1, &spans, sequence.spec())
        .unwrap();
    let out = backend.download(&out).unwrap();
    let width = sequence.heads * layout.v_dim;
    for span in &spans {
        assert_same_bits(
            &out[span.first_row * width..][..span.rows * width],
            &whole[span.start * width..][..span.rows * width],
            "span in a batch",
        );
    }
    assert!(out[5 * width..6 * width].iter().all(|&v| v == 0.0));
    rows_by_themselves(backend, &kv, &q, sequence, &spans, &out);
}

#[test]
fn scores_far_apart_do_not_overflow() {
    on_every_isa(1, |backend| {
        let layout = KvLayout {
            kv_heads: 1,
            k_dim: 1,
            v_dim: 1,
            layers: 1,
            block_tokens: 4,
            dtype: KvDType::F32,
            value_in_key: false,
        };
        let mut kv = backend.kv_alloc(layout, 50).unwrap();
        let n = 200;
        let keys: Vec<f32> = (0..n).map(|i| (i as f32 - 100.0) * 50.0).collect();
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let span = Span {
            first_row: 0,
            rows: n,
            start: 0,
            blocks: (0..50).map(BlockId).collect(),
        };
        let (k, v) = (upload(backend, n, &keys), upload(backend, n, &values));
        backend
            .kv_append(&mut kv, 0, &k, Some(&v), std::slice::from_ref(&span))
            .unwrap();
        let spec = AttentionSpec {
            heads: 1,
            scale: 1.0,
        };
        for (q, seen) in [(1.0, None), (-1.0, Some(0.0)), (1e30, None)] {
            let q = upload(backend, n, &vec![q; n]);
            let out = backend
                .attention(&q, &kv, 0, std::slice::from_ref(&span), spec)
                .unwrap();
            let out = backend.download(&out).unwrap();
            for (i, out) in out.iter().enumerate() {
                let want = seen.unwrap_or(i as f32);
                assert!((out - want).abs() < 1e-6, "{} {i}: {out}", backend.isa());
            }
        }
    });
}

#[test]
fn mla_projections_agree_with_the_reference_and_are_batch_invariant() {
    let mut rng = Rng(9);
    for (heads, nope, v, rank) in [(3, 17, 23, 70), (2, 128, 128, 512), (5, 8, 1, 129)] {
        let dims = MlaHeads {
            heads,
            nope,
            v,
            rank,
        };
        for dtype in DTYPES {
            let kv_b = random_matrix(&mut rng, heads * (nope + v), rank, dtype);
            let tokens = 9;
            let q = rng.normals(tokens * heads * nope);
            let latent = rng.normals(tokens * heads * rank);
            let absorbed = reference::mla_absorb(&q, tokens, &kv_b, dims);
            let expanded = reference::mla_expand(&latent, tokens, &kv_b, dims);
            on_every_isa(1, |one| {
                let three = backend(one.isa(), 3);
                let run = |backend: &CpuBackend, rows: usize| {
                    let q = upload(backend, rows, &q[..rows * heads * nope]);
                    let latent = upload(backend, rows, &latent[..rows * heads * rank]);
                    let q = backend.mla_absorb(&q, &kv_b, dims).unwrap();
                    let o = backend.mla_expand(&latent, &kv_b, dims).unwrap();
                    (backend.download(&q).unwrap(), backend.download(&o).unwrap())
                };
                let what = format!("{} {} {dims:?}", one.isa(), dtype.name());
                let (q, o) = run(one, tokens);
                // Sums of n products of size 1 are of size sqrt(n), and n steps each round by 2^-24 of that,
                // at random: n * 2^-24, eight sigma.
                let exact = 8.0 * nope as f32 * 2f32.powi(-24) + 1e-6;
                assert_close(&q, &absorbed, |_| exact, &what);
                assert_close(&o, &expanded, |_| 2e-6 * (rank as f32).sqrt(), &what);
                for rows in [1, 2, 5] {
                    for backend in [one, &three] {
                        let (q_part, o_part) = run(backend, rows);
                        assert_same_bits(&q_part, &q[..rows * heads * rank], &what);
                        assert_same_bits(&o_part, &o[..rows * heads * v], &what);
                    }
                }
            });
        }
    }
}

#[test]
fn kv_moves_between_caches_and_blocks_byte_by_byte() {
    let sequence = Sequence::new(GQA, 12, 50, 7);
    let backend = backend(Isa::detect(), 1);
    let blocks = sequence.blocks(0);
    let mut kv = backend.kv_alloc(GQA, 20).unwrap();
    let want = sequence.step(&backend, &mut kv, &blocks, 0, 50);
    let bytes = backend.kv_read(&kv, 1, &blocks, 3, 40).unwrap();
    assert_eq!(bytes.len(), 40 * GQA.token_layer_bytes());

    // A second cache with other blocks, filled in two parts, then one block moved within it.
    let mut other = backend.kv_alloc(GQA, 20).unwrap();
    let mut targets: Vec<BlockId> = (0..7).map(|i| BlockId(19 - i)).collect();
    let all = backend.kv_read(&kv, 1, &blocks, 0, 50).unwrap();
    let (head, tail) = all.split_at(13 * GQA.token_layer_bytes());
    backend.kv_write(&mut other, 1, &targets, 13, tail).unwrap();
    backend.kv_write(&mut other, 1, &targets, 0, head).unwrap();
    let block = GQA.block_tokens;
    let third = backend
        .kv_read(&other, 1, &targets, 2 * block, block)
        .unwrap();
    backend
        .kv_write(&mut other, 1, &[BlockId(0)], 0, &third)
        .unwrap();
    let junk = vec![0x11; GQA.block_tokens * GQA.token_layer_bytes()];
    backend
        .kv_write(&mut other, 1, &targets[2..3], 0, &junk)
        .unwrap();
    targets[2] = BlockId(0);
    assert_eq!(backend.kv_read(&other, 1, &targets, 3, 40).unwrap(), bytes);
    let got = sequence.step(&backend, &mut other, &targets, 49, 1);
    let row = 12 * GQA.v_dim;
    assert_same_bits(&got, &want[49 * row..], "after the move");
    // Layer 0 was never written.
    let untouched = backend.kv_read(&other, 0, &targets, 0, 50).unwrap();
    assert!(untouched.iter().all(|&b| b == 0));
}

#[test]
fn a_cache_takes_no_memory_before_it_is_written() {
    let backend = backend(Isa::detect(), 1);
    let resident = || -> usize {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages = status.split_whitespace().nth(1).unwrap();
        pages.parse::<usize>().unwrap() * 4096
    };
    let before = resident();
    let layout = KvLayout {
        layers: 64,
        kv_heads: 8,
        k_dim: 128,
        v_dim: 128,
        ..MHA
    };
    let kv = backend.kv_alloc(layout, 200).unwrap();
    assert!(200 * layout.block_bytes() > 1 << 30);
    assert!(resident() - before.min(resident()) < 64 << 20);
    drop(kv);
}

#[test]
fn spans_that_do_not_fit_are_refused_by_name() {
    let backend = backend(Isa::detect(), 2);
    let kv = backend.kv_alloc(GQA, 4).unwrap();
    let q = backend.zeros(4, 12 * GQA.k_dim).unwrap();
    let spec = AttentionSpec {
        heads: 12,
        scale: 1.0,
    };
    let span = |first_row, rows, start, blocks: &[u32]| Span {
        first_row,
        rows,
        start,
        blocks: blocks.iter().copied().map(BlockId).collect(),
    };
    for (spans, message) in [
        (
            vec![span(3, 2, 0, &[0])],
            "attention: span of rows 3+2 in a batch of 4",
        ),
        (
            vec![span(0, 2, 7, &[0])],
            "attention: tokens 7+2 in 1 blocks of 8",
        ),
        (vec![span(0, 1, 0, &[4])], "attention: block 4 of 4"),
        (
            vec![span(1, 2, 0, &[0]), span(0, 2, 0, &[1])],
            "attention: spans of rows 0+2 and 1+2 overlap",
        ),
    ] {
        let error = backend.attention(&q, &kv, 1, &spans, spec).err().unwrap();
        assert_eq!(error.to_string(), message);
    }
    assert!(backend.attention(&q, &kv, 2, &[], spec).is_err());
    assert!(backend.kv_read(&kv, 0, &[BlockId(9)], 0, 1).is_err());
}
