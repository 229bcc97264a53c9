//! Operands that do not fit each other are refused with the same messages as on the CPU.

use hearth_kernels::ops::*;
use hearth_kernels::{
    AttentionSpec, BlockId, DType, ExpertCall, Heads, KernelError, KvDType, KvLayout, MlaHeads,
    RopeLayout, RopeTable, RouterScore, RouterSpec, Span,
};

use crate::common::*;
use crate::support::{own, plain, scalar};

const LAYOUT: KvLayout = KvLayout {
    layers: 2,
    kv_heads: 3,
    k_dim: 20,
    v_dim: 12,
    value_in_key: false,
    block_tokens: 8,
    dtype: KvDType::Bf16,
};

const ROUTER: RouterSpec = RouterSpec {
    score: RouterScore::Sigmoid,
    top_k: 2,
    groups: 1,
    top_groups: 1,
    normalize: true,
    scaling: 2.5,
};

/// Error of each call; none of them may succeed.
#[derive(Default)]
struct Answers(Vec<String>);

impl Answers {
    #[track_caller]
    fn add<T>(&mut self, result: Result<T, KernelError>) {
        match result {
            Err(error @ KernelError::Shape { .. }) => self.0.push(error.to_string()),
            Err(other) => panic!("not a fault of shape: {other}"),
            Ok(_) => panic!("accepted after {:?}", self.0.last()),
        }
    }
}

fn elementwise<B: Backend>(backend: &B, answers: &mut Answers) {
    let x = backend.zeros(2, 6).unwrap();
    let y = backend.zeros(2, 5).unwrap();
    let mut z = backend.zeros(2, 6).unwrap();
    let weight = backend.vector(&[1.0; 4]).unwrap();
    let none = backend.vector(&[]).unwrap();
    let table = RopeTable {
        inv_freq: vec![1.0; 2],
        magnitude: 1.0,
        layout: RopeLayout::Half,
    };
    answers.add(backend.upload(2, 2, &[0.0]));
    answers.add(backend.rms_norm(&x, &weight, 0.0));
    answers.add(backend.rms_norm(&x, &none, 0.0));
    answers.add(backend.add_rms_norm(&mut z, &y, &weight, 0.0));
    answers.add(backend.silu_mul(backend.zeros(2, 6).unwrap(), &y));
    answers.add(backend.columns(&x, 2, 2, 2));
    answers.add(backend.columns(&x, 4, 0, 1));
    answers.add(backend.columns(&x, 0, 0, 1));
    answers.add(backend.interleave(&x, &y, 2));
    answers.add(backend.rows(&x, &[2]));
    answers.add(backend.put_tile(&mut z, (1, 0), &y));
    answers.add(backend.put_tile(&mut z, (usize::MAX, 0), &y));
    answers.add(backend.put_tile(&mut z, (0, 2), &y));
    answers.add(backend.rope(&mut z, (2, 0), &[0, 1], &table));
    answers.add(backend.rope(&mut z, (1, 0), &[0], &table));
    answers.add(backend.rope(&mut z, (0, 0), &[0, 1], &table));
    answers.add(backend.add_assign(&mut z, &y));
}

fn products<B: Backend>(backend: &B, answers: &mut Answers) {
    let w = backend
        .weight(&matrix(&[1.0; 12], 3, 4, DType::Bf16))
        .unwrap();
    let down = backend
        .weight(&matrix(&[1.0; 12], 4, 3, DType::Bf16))
        .unwrap();
    let x = backend.zeros(2, 4).unwrap();
    let wide = backend.zeros(2, 5).unwrap();
    let short = backend.vector(&[1.0; 2]).unwrap();
    answers.add(backend.linear(&wide, &w, None));
    answers.add(backend.linear(&x, &w, Some(&short)));
    answers.add(backend.embed(&w, &[0, 3]));
    answers.add(backend.weight_rows(&w, 2, 2));
    answers.add(backend.weight_rows(&w, usize::MAX, 2));
    let heads = MlaHeads {
        heads: 1,
        nope: 2,
        v: 1,
        rank: 4,
    };
    answers.add(backend.mla_absorb(&x, &w, heads));
    answers.add(backend.mla_expand(&wide, &w, heads));
    answers.add(backend.mla_expand(&x, &w, MlaHeads { v: 2, ..heads }));

    let good = ExpertCall {
        expert: 0,
        gate: &w,
        up: &w,
        down: &down,
        rows: &[0, 1],
        weights: &[1.0, 1.0],
    };
    for bad in [
        ExpertCall {
            gate: &down,
            ..good
        },
        ExpertCall { down: &w, ..good },
        ExpertCall {
            rows: &[0, 2],
            ..good
        },
        ExpertCall {
            weights: &[1.0],
            ..good
        },
        ExpertCall { expert: 1, ..good },
    ] {
        let mut sum = backend.expert_sum(2, 4, 1).unwrap();
        answers.add(backend.experts(&mut sum, &x, &[bad], true));
    }
}

fn routing<B: Backend>(backend: &B, answers: &mut Answers) {
    let logits = backend.zeros(1, 8).unwrap();
    for (groups, top_k, top_groups) in [(3, 2, 1), (4, 3, 1), (1, 0, 1), (1, 2, 2), (0, 2, 1)] {
        let spec = RouterSpec {
            groups,
            top_k,
            top_groups,
            ..ROUTER
        };
        answers.add(backend.route(&logits, None, spec));
    }
    let bias = backend.vector(&[0.0; 7]).unwrap();
    answers.add(backend.route(&logits, Some(&bias), ROUTER));
}

fn cache<B: Backend>(backend: &B, answers: &mut Answers) {
    let v_dim = 21;
    let latent = KvLayout {
        value_in_key: true,
        v_dim,
        ..LAYOUT
    };
    answers.add(backend.kv_alloc(latent, 1));
    let odd = KvLayout {
        block_tokens: 6,
        ..LAYOUT
    };
    answers.add(backend.kv_alloc(odd, 1));
    let mut kv = backend.kv_alloc(LAYOUT, 4).unwrap();
    let q = backend.zeros(4, 12 * LAYOUT.k_dim).unwrap();
    let (k, v) = (backend.zeros(4, 60).unwrap(), backend.zeros(4, 36).unwrap());
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
    for spans in [
        vec![span(3, 2, 0, &[0])],
        vec![span(0, 2, 7, &[0])],
        vec![span(0, 1, 0, &[4])],
    ] {
        answers.add(backend.attention(&q, &kv, 1, &spans, spec));
        answers.add(backend.kv_append(&mut kv, 1, &k, Some(&v), &spans));
    }
    let overlap = [span(1, 2, 0, &[0]), span(0, 2, 0, &[1])];
    answers.add(backend.attention(&q, &kv, 1, &overlap, spec));
    answers.add(backend.attention(&q, &kv, 2, &[], spec));
    answers.add(backend.attention(&k, &kv, 1, &[], spec));
    answers.add(backend.attention(&q, &kv, 1, &[], AttentionSpec { heads: 10, ..spec }));
    answers.add(backend.kv_append(&mut kv, 2, &k, Some(&v), &[]));
    answers.add(backend.kv_append(&mut kv, 1, &k, None, &[]));
    answers.add(backend.kv_append(&mut kv, 1, &v, Some(&k), &[]));
    heads(backend, answers);
    answers.add(backend.kv_read(&kv, 0, &[BlockId(9)], 0, 1));
    answers.add(backend.kv_read(&kv, 2, &[BlockId(0)], 0, 1));
    answers.add(backend.kv_read(&kv, 0, &[BlockId(0)], 4, 5));
    answers.add(backend.kv_rows(&kv, 0, &[BlockId(9)], 0, 1));
    answers.add(backend.kv_rows(&kv, 2, &[BlockId(0)], 0, 1));
    answers.add(backend.kv_rows(&kv, 0, &[BlockId(0)], 4, 5));
    answers.add(backend.kv_write(&mut kv, 0, &[BlockId(0)], 0, &[0; 191]));
    answers.add(backend.kv_write(&mut kv, 0, &[BlockId(0)], 8, &[0; 192]));
}

/// Heads that are not those of the cache.
fn heads<B: Backend>(backend: &B, answers: &mut Answers) {
    let rope = RopeTable {
        inv_freq: vec![1.0; 2],
        magnitude: 1.0,
        layout: RopeLayout::Half,
    };
    for (v_dim, cols, head_dim) in [(12, 36, 12), (8, 24, 12), (12, 30, 12), (12, 24, 0)] {
        let layout = KvLayout {
            k_dim: 12,
            v_dim,
            kv_heads: if cols == 36 { 2 } else { 1 },
            ..LAYOUT
        };
        let mut kv = backend.kv_alloc(layout, 1).unwrap();
        let tensor = |cols| backend.zeros(1, cols).unwrap();
        let of = Heads {
            q: tensor(cols),
            k: tensor(12),
            v: tensor(v_dim),
            norms: None,
            eps: 1e-6,
            head_dim,
            positions: &[0],
            rope: &rope,
        };
        answers.add(backend.cache_heads(&mut kv, 0, &[], of));
    }
}

fn answers<B: Backend>(backend: &B) -> Vec<String> {
    let mut answers = Answers::default();
    elementwise(backend, &mut answers);
    products(backend, &mut answers);
    routing(backend, &mut answers);
    cache(backend, &mut answers);
    answers.0
}

#[test]
fn shapes_that_do_not_fit_are_refused_in_the_words_of_the_cpu() {
    let want = answers(&scalar());
    assert!(want.len() > 45, "{}", want.len());
    assert_eq!(answers(&*plain()), want);
}

#[test]
fn what_only_the_gpu_cannot_take_is_refused_by_name() {
    let gpu = plain();
    let text = |result: Result<_, KernelError>| result.err().unwrap().to_string();
    let logits = gpu.zeros(1, 1024).unwrap();
    let error = text(gpu.route(&logits, None, ROUTER).map(drop));
    assert!(
        error.starts_with("route: 2 of 1024 experts in 1 groups: "),
        "{error}"
    );

    let layout = KvLayout {
        kv_heads: 1,
        k_dim: 1030,
        ..LAYOUT
    };
    let kv = gpu.kv_alloc(layout, 1).unwrap();
    let q = gpu.zeros(1, 1030).unwrap();
    let span = Span {
        first_row: 0,
        rows: 1,
        start: 0,
        blocks: vec![BlockId(0)],
    };
    let spec = AttentionSpec {
        heads: 1,
        scale: 1.0,
    };
    let error = text(gpu.attention(&q, &kv, 0, &[span], spec).map(drop));
    assert!(
        error.starts_with("attention: heads of up to 1024 elements"),
        "{error}"
    );

    let mut x = gpu.zeros(1, 1028).unwrap();
    let table = RopeTable {
        inv_freq: vec![1.0; 514],
        magnitude: 1.0,
        layout: RopeLayout::Half,
    };
    let error = text(gpu.rope(&mut x, (1, 0), &[0], &table));
    assert!(error.starts_with("rope: 514 frequencies"), "{error}");

    let load = |dtype| gpu.weight(&matrix(&[1.0; 4], 2, 2, dtype)).unwrap();
    let (gate, up) = (load(DType::F32), load(DType::Bf16));
    let call = ExpertCall {
        expert: 0,
        gate: &gate,
        up: &up,
        down: &up,
        rows: &[0],
        weights: &[1.0],
    };
    let x = gpu.zeros(1, 2).unwrap();
    let mut sum = gpu.expert_sum(1, 2, 1).unwrap();
    let error = text(gpu.experts(&mut sum, &x, &[call], true));
    assert!(
        error.starts_with("experts: gate is F32 and up BF16"),
        "{error}"
    );
}

#[test]
fn a_backend_computes_for_the_thread_that_bound_it_last() {
    let gpu = own(16 << 20);
    let x = gpu.upload(1, 2, &[1.0, 2.0]).unwrap();
    let other = || {
        let text = gpu.rows(&x, &[0]).err().unwrap().to_string();
        assert!(text.contains("computes for one thread"), "{text}");
        gpu.bind_thread().unwrap();
        let row = gpu.rows(&x, &[0]).unwrap();
        gpu.download(&row).unwrap()
    };
    let downloaded = std::thread::scope(|scope| scope.spawn(other).join().unwrap());
    assert_eq!(downloaded, [1.0, 2.0]);
    assert!(gpu.rows(&x, &[0]).is_err());
    gpu.bind_thread().unwrap();
}
