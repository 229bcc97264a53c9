//! The budget is hard, and the error names the allocation that exceeds it.

use hearth_kernels::KvDType::Bf16;
use hearth_kernels::ops::*;
use hearth_kernels::{DType, KernelError};

use crate::common::*;
use crate::sequence::layout;
use crate::support::{BUDGET_BYTES, own, plain};

#[test]
fn too_much_is_refused_with_the_budget_and_what_is_in_use() {
    let gpu = plain();
    let _held = gpu.zeros(100, 100).unwrap();
    let used = gpu.memory_bytes().0;
    assert!(used >= 40_000 && gpu.memory_bytes().1 == BUDGET_BYTES);
    let layout = layout(8, 128, 128, false, Bf16);
    let blocks = (BUDGET_BYTES as usize).div_ceil(layout.block_bytes());
    let refused = [
        gpu.zeros(1 << 16, 1 << 16).map(drop),
        gpu.kv_alloc(layout, blocks).map(drop),
        gpu.kv_alloc(layout, usize::MAX / 2).map(drop),
    ];
    let [tensor, cache, absurd] = refused.map(Result::unwrap_err);
    for (error, what) in [(tensor, "activations"), (cache, "the KV cache")] {
        assert!(matches!(error, KernelError::OutOfMemory { .. }), "{error}");
        let budget = format!("(budget {BUDGET_BYTES} bytes, {used} in use)");
        let text = error.to_string();
        assert!(
            text.starts_with("cuda:GPU-") && text.contains(&budget),
            "{text}"
        );
        assert!(
            text.contains(&format!("too little memory for {what} (")),
            "{text}"
        );
    }
    assert!(
        matches!(absurd, KernelError::OutOfMemory { .. }),
        "{absurd}"
    );
    // Allocations that fit still work.
    let y = gpu.zeros(3, 5).unwrap();
    assert_eq!(gpu.download(&y).unwrap(), [0.0; 15]);
}

#[test]
fn memory_that_waits_is_given_back_when_the_budget_asks_but_not_before_it_was_used() {
    let budget_bytes = 16 << 20;
    let gpu = own(budget_bytes);
    let table = matrix(&[1.0, 2.0, 3.0, 4.0], 2, 2, DType::F32);
    let table = gpu.weight(&table).unwrap();
    // A step of few rows waits to be launched as a whole, while its buffers are dropped.
    gpu.begin_pass(2).unwrap();
    let mut sum = gpu.embed(&table, &[1, 0]).unwrap();
    let delta = gpu.embed(&table, &[0, 1]).unwrap();
    gpu.add_assign(&mut sum, &delta).unwrap();
    let picked = gpu.rows(&sum, &[1]).unwrap();
    drop((sum, delta));
    let room = (budget_bytes - gpu.memory_bytes().0) as usize;
    let large = (room - (1 << 20)) / 4;
    let first = gpu.zeros(1, large).unwrap();
    assert!(gpu.memory_bytes().0 <= budget_bytes);
    assert!(gpu.zeros(1, large).is_err());
    drop(first);
    // Another size: the first one's memory is in the free list, and must be given back.
    let second = gpu.zeros(1, large - 300_000).unwrap();
    assert_eq!(gpu.download(&picked).unwrap(), [4.0, 6.0]);
    let second = gpu.download(&second).unwrap();
    assert!(second.iter().all(|&v| v == 0.0));
}

#[test]
fn a_decode_step_asks_for_no_more_memory_than_the_one_before() {
    let gpu = own(BUDGET_BYTES);
    let mut rng = Rng(1);
    let table = gpu
        .weight(&random_matrix(&mut rng, 20, 64, DType::Bf16))
        .unwrap();
    let weight = gpu
        .weight(&random_matrix(&mut rng, 64, 64, DType::Bf16))
        .unwrap();
    let mut used = Vec::new();
    for token in 0..4 {
        gpu.begin_pass(1).unwrap();
        let x = gpu.embed(&table, &[token]).unwrap();
        let x = gpu.linear(&x, &weight, None).unwrap();
        gpu.download(&x).unwrap();
        drop(x);
        used.push(gpu.memory_bytes().0);
    }
    assert!(used.iter().all(|&bytes| bytes == used[0]), "{used:?}");
}
