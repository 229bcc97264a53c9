//! Every kernel of a model once, at sizes that leave remainders. `make test-gpu` also runs this under the CUDA
//! toolkit's tools, which are slow.

use hearth_cuda::Activations;
use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;
use hearth_kernels::{DType, MlaHeads, RopeLayout, RopeTable, SampleSpec};

use crate::common::*;
use crate::experts::{EXPERTS, Layer};
use crate::linear::linear;
use crate::route::SIGMOID;
use crate::sequence::{Sequence, layout};
use crate::support::{on_all_activations, plain};

#[test]
fn sanitizer_linear() {
    on_all_activations(|gpu| {
        for dtype in DTYPES {
            if gpu.activations() == Activations::Fp8 && dtype != DType::F8E4m3 {
                continue;
            }
            let mut rng = Rng(1);
            let w = random_matrix(&mut rng, 133, 530, dtype);
            for rows in [3, 67] {
                let x = rng.normals(rows * 530);
                let y = linear(gpu, &x, rows, &w);
                assert!(y.iter().all(|v| v.is_finite()));
            }
        }
    });
}

#[test]
fn sanitizer_experts() {
    on_all_activations(|gpu| {
        for tokens in [3, 70] {
            let layer = Layer::new(gpu, [DType::F8E4m3; 2], (130, 70), tokens);
            let called = layer.called(gpu, &[EXPERTS]);
            assert_same_bits(&layer.banked(gpu), &called, "experts");
        }
    });
}

#[test]
fn sanitizer_attention() {
    let gpu = plain();
    for (layout, heads) in [
        (layout(2, 64, 48, false, Bf16), 6),
        (layout(1, 80, 64, true, Bf16), 5),
        (layout(2, 7, 5, false, F32), 4),
    ] {
        let sequence = Sequence::new(layout, heads, 530, 1);
        let mut kv = gpu.kv_alloc(layout, 34).unwrap();
        for (start, rows) in [(0, 40), (40, 487), (527, 2), (529, 1)] {
            let out = sequence.step(&*gpu, &mut kv, start, rows);
            assert!(out.iter().all(|v| v.is_finite()));
        }
        let blocks = sequence.blocks(0);
        let record = gpu.kv_read(&kv, 1, &blocks, 517, 3).unwrap();
        gpu.kv_write(&mut kv, 1, &blocks, 13, &record).unwrap();
    }
}

#[test]
fn sanitizer_latent_projections() {
    let gpu = plain();
    let dims = MlaHeads {
        heads: 3,
        nope: 33,
        v: 65,
        rank: 70,
    };
    for dtype in DTYPES {
        let mut rng = Rng(1);
        let rows = dims.heads * (dims.nope + dims.v);
        let kv_b = gpu
            .weight(&random_matrix(&mut rng, rows, dims.rank, dtype))
            .unwrap();
        let q = rng.normals(35 * dims.heads * dims.nope);
        let q = gpu.upload(35, dims.heads * dims.nope, &q).unwrap();
        let latent = gpu.mla_absorb(&q, &kv_b, dims).unwrap();
        let out = gpu.mla_expand(&latent, &kv_b, dims).unwrap();
        let out = gpu.download(&out).unwrap();
        assert!(out.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn sanitizer_elementwise_and_routing() {
    let gpu = plain();
    let mut rng = Rng(1);
    let table = RopeTable {
        inv_freq: vec![0.5; 9],
        magnitude: 1.0,
        layout: RopeLayout::Interleaved,
    };
    for cols in [66, 1092] {
        let weight = gpu.vector(&rng.normals(cols)).unwrap();
        let embedding = random_matrix(&mut rng, 7, cols, DType::F8E4m3);
        let embedding = gpu.weight(&embedding).unwrap();
        gpu.begin_pass(3).unwrap();
        let x = gpu.embed(&embedding, &[6, 0, 3]).unwrap();
        let mut y = gpu.rms_norm(&x, &weight, 1e-6).unwrap();
        gpu.rope(&mut y, (3, 0), &[0, 5, 9], &table).unwrap();
        gpu.add_rms_norm(&mut y, &x, &weight, 1e-6).unwrap();
        gpu.add_assign(&mut y, &x).unwrap();
        let y = gpu.silu_mul(y, &x).unwrap();
        let (a, b) = (gpu.columns(&y, 3, 0, 5), gpu.columns(&y, 3, 5, 17));
        let y = gpu.interleave(&a.unwrap(), &b.unwrap(), 3).unwrap();
        let y = gpu.rows(&y, &[2, 0]).unwrap();
        let chosen = gpu.route(&y, None, SIGMOID).unwrap();
        assert_eq!(gpu.routing(chosen).unwrap().experts.len(), 4);
    }
}

#[test]
fn sanitizer_sampling() {
    let gpu = plain();
    let vocab = 3001;
    let logits = Rng(9).normals(3 * vocab);
    let x = gpu.upload(3, vocab, &logits).unwrap();
    let greedy = SampleSpec::default();
    let drawn = SampleSpec {
        quantile: 0xb333_3333_3333_3333,
        temperature: 0.8,
        top_k: 200,
        top_p: 0.9,
        min_p: 0.001,
        repetition_penalty: 1.2,
        frequency_penalty: 0.1,
        presence_penalty: 0.2,
        used: vec![(5, 2), (3000, 0)],
        biases: vec![(17, 1.5)],
        ..greedy.clone()
    };
    let masked = SampleSpec {
        allowed: Some(
            (0..vocab.div_ceil(32))
                .map(|word| 0x1111_1111 << (word % 4))
                .collect(),
        ),
        ..drawn.clone()
    };
    let tokens = gpu.sample(&x, &[greedy, drawn, masked]).unwrap();
    let tokens = gpu.landed(&tokens).unwrap();
    let best = (0..vocab)
        .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
        .unwrap();
    assert_eq!(tokens[0], Ok(best as u32));
    assert!(
        tokens
            .iter()
            .all(|token| token.as_ref().is_ok_and(|&t| (t as usize) < vocab))
    );
}
