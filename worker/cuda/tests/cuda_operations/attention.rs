//! Attention over pages against the reference.

use hearth_cuda::Activations;
use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;
use hearth_kernels::{AttentionSpec, BlockId, KvLayout, Span};

use crate::common::*;
use crate::sequence::{LAYER, Part, Sequence, layout};
use crate::support::{BUDGET_BYTES, gpu, leave_nan, own, plain};

/// Sequences in every kind of layout: the tensor-core kernel takes bf16 pages with dimensions that are multiples of
/// 16, another kernel the rest.
pub(crate) fn sequences() -> Vec<Sequence> {
    vec![
        // Grouped queries.
        Sequence::new(layout(2, 64, 64, false, Bf16), 8, 150, 1),
        Sequence::new(layout(1, 48, 32, false, Bf16), 5, 70, 2),
        Sequence::new(layout(3, 20, 12, false, Bf16), 12, 80, 3),
        // A key head for each query head.
        Sequence::new(layout(3, 32, 48, false, Bf16), 3, 131, 4),
        Sequence::new(layout(4, 64, 64, false, F32), 4, 75, 5),
        // Latent: the value is the key's beginning.
        Sequence::new(layout(1, 96, 80, true, Bf16), 20, 66, 6),
        Sequence::new(layout(1, 83, 70, true, Bf16), 5, 68, 7),
        Sequence::new(layout(1, 576, 512, true, Bf16), 4, 70, 8),
        Sequence::new(layout(1, 96, 80, true, F32), 3, 40, 9),
        // Expanded latents of DeepSeek-V3.
        Sequence::new(layout(2, 192, 128, false, Bf16), 2, 130, 10),
    ]
}

#[test]
fn attention_agrees_with_the_reference() {
    // Values are averages of numbers of size 1. Scores are as large as 0.3 * 3 * sqrt(k_dim), at most 25, and carry an
    // f32 rounding of a few 2^-24 of that, so weights and averages are accurate to about 1e-6; queries and
    // probabilities that are rounded to bf16 carry 2^-9 of their size.
    for (activations, bound) in [(Activations::F32, 2e-5), (Activations::Bf16, 6e-2)] {
        let gpu = gpu(activations);
        for sequence in sequences() {
            let mut kv = gpu.kv_alloc(sequence.layout, 10).unwrap();
            let got = sequence.step(&*gpu, &mut kv, 0, sequence.tokens);
            let want: Vec<f32> = (0..sequence.tokens)
                .flat_map(|position| sequence.reference(position))
                .collect();
            let what = format!("{activations:?} {}", sequence.layout.fingerprint());
            assert_close(&got, &want, |_| bound, &what);
        }
    }
}

#[test]
fn contexts_over_several_splits_agree_with_the_reference() {
    let gpu = plain();
    let sequence = Sequence::new(layout(1, 16, 16, false, Bf16), 2, 1100, 1);
    let mut kv = gpu.kv_alloc(sequence.layout, 69).unwrap();
    let got = sequence.step(&*gpu, &mut kv, 0, sequence.tokens);
    for position in [0, 1, 63, 64, 127, 511, 512, 513, 700, 1023, 1024, 1099] {
        let want = sequence.reference(position);
        let got = &got[position * sequence.width()..][..sequence.width()];
        assert_close(got, &want, |_| 2e-5, &format!("position {position}"));
    }
}

/// Attends with one head over keys and values that grow with their position, so that scores lie far apart.
fn far_apart(layout: KvLayout, query: f32) -> Vec<f32> {
    let gpu = plain();
    let n = 200;
    let mut kv = gpu.kv_alloc(layout, 13).unwrap();
    let spread = |value: &dyn Fn(usize) -> f32, dim: usize| -> Vec<f32> {
        (0..n * dim)
            .map(|i| if i % dim == 0 { value(i / dim) } else { 0.0 })
            .collect()
    };
    let keys = spread(&|i| (i as f32 - 100.0) * 50.0, layout.k_dim);
    let values = spread(&|i| i as f32, layout.v_dim);
    let span = [Span {
        first_row: 0,
        rows: n,
        start: 0,
        blocks: (0..13).map(BlockId).collect(),
    }];
    let keys = gpu.upload(n, layout.k_dim, &keys).unwrap();
    let values = gpu.upload(n, layout.v_dim, &values).unwrap();
    gpu.kv_append(&mut kv, 0, &keys, Some(&values), &span)
        .unwrap();
    let q = gpu
        .upload(n, layout.k_dim, &spread(&|_| query, layout.k_dim))
        .unwrap();
    let spec = AttentionSpec {
        heads: 1,
        scale: 1.0,
    };
    let out = gpu.attention(&q, &kv, 0, &span, spec).unwrap();
    let out = gpu.download(&out).unwrap();
    out.chunks(layout.v_dim).map(|row| row[0]).collect()
}

#[test]
fn scores_far_apart_do_not_overflow() {
    for layout in [layout(1, 1, 1, false, F32), layout(1, 16, 16, false, Bf16)] {
        // All weight goes to the last key, or to the first.
        let last: Vec<f32> = (0..200).map(|i| i as f32).collect();
        for (query, want) in [(1.0, &last), (-1.0, &vec![0.0; 200])] {
            let got = far_apart(layout, query);
            assert_close(&got, want, |_| 1e-5, &layout.fingerprint());
        }
        // Scores of 1e33 are still numbers; beyond f32 they are not,
        // and the result is NaN or finite, but never a fault.
        let got = far_apart(layout, 1e29);
        assert_close(&got[101..], &last[101..], |_| 1e-5, &layout.fingerprint());
    }
}

#[test]
fn a_batch_without_rows_or_spans_attends_to_nothing() {
    let gpu = own(BUDGET_BYTES);
    for layout in [layout(1, 16, 16, false, Bf16), layout(1, 5, 7, false, F32)] {
        let kv = gpu.kv_alloc(layout, 1).unwrap();
        let spec = AttentionSpec {
            heads: 2,
            scale: 1.0,
        };
        let none = Span {
            first_row: 0,
            rows: 0,
            start: 0,
            blocks: Vec::new(),
        };
        for (rows, spans) in [(0, vec![]), (3, vec![]), (3, vec![none])] {
            let q = gpu.zeros(rows, 2 * layout.k_dim).unwrap();
            leave_nan(&gpu, rows, 2 * layout.v_dim);
            let out = gpu.attention(&q, &kv, 0, &spans, spec).unwrap();
            assert_eq!(gpu.shape(&out), (rows, 2 * layout.v_dim));
            let out = gpu.download(&out).unwrap();
            assert!(out.iter().all(|&v| v == 0.0));
        }
    }
}

#[test]
fn a_table_of_blocks_larger_than_what_is_staged_leaves_the_rest_in_place() {
    // Tables are sent to the device through a buffer of initially 1 MiB. The second call makes it grow between two
    // pieces of one operation, and then requests partial results of that size: they must not overlap the first piece.
    let gpu = own(BUDGET_BYTES);
    let sequence = Sequence::new(layout(1, 16, 512, false, Bf16), 16, 1100, 1);
    let mut kv = gpu.kv_alloc(sequence.layout, 69).unwrap();
    let part = |rows, start| Part {
        first_row: 0,
        rows,
        start,
        first_block: 0,
    };
    sequence.append(&*gpu, &mut kv, &[part(1100, 0)]);
    let last = [part(10, 1090)];
    let want = sequence.attend(&*gpu, &kv, &last);
    let cols = sequence.heads * sequence.layout.k_dim;
    let q = gpu.upload(10, cols, &sequence.q[1090 * cols..]).unwrap();
    let mut spans = sequence.spans(&last);
    spans[0].blocks.resize(300_000, BlockId(1));
    let out = gpu
        .attention(&q, &kv, LAYER, &spans, sequence.spec())
        .unwrap();
    assert_same_bits(&gpu.download(&out).unwrap(), &want, "a long table");
}
