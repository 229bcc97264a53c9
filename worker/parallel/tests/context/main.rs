//! Ranks that share passes, as threads: the bits of one process, whatever their number; the bytes that they exchange; and what
//! happens when one fails or is lost.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

mod alone;
mod bytes;
mod faults;
mod harness;
mod short;
mod sites;
#[path = "../support/mod.rs"]
mod support;

use harness::run_group;
use hearth_model::ExpertParallel::{Ep, SmallEp};
use support::{Files, run_whole};

/// Layers of every model here.
const LAYERS: usize = 3;

/// Defines one `#[test]` per architecture.
macro_rules! architectures {
    ($($case:ident),+ $(,)?) => {
        $(#[test] fn $case() { ranks_give_the_bits_of_one(stringify!($case)); })+
    };
}

architectures! {
    deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2,
    qwen3_moe, qwen3_moe_sparse_step, qwen3_moe_fp8, qwen3, qwen3_yarn, qwen2, llama2, llama3, llama_linear,
}

#[test]
fn deepseek_v3_expanded() {
    let mut files = Files::of("deepseek_v3", LAYERS);
    files.expands = true;
    all_give_the_bits_of_one("deepseek_v3, expanded", &files);
}

fn ranks_give_the_bits_of_one(case: &str) {
    all_give_the_bits_of_one(case, &Files::of(case, LAYERS));
}

fn all_give_the_bits_of_one(case: &str, files: &Files) {
    let want = run_whole(files);
    for ranks in 1..=8 {
        let got = run_group(files, ranks, Ep);
        assert!(got == want, "{case}: {ranks} ranks, EP");
        let got = run_group(files, ranks, SmallEp);
        if [1, 2, 4, 8].contains(&ranks) {
            assert!(got == want, "{case}: {ranks} ranks, SmallEP");
        } else {
            // Sums are taken in another order.
            same_within_rounding(files, &want, &got);
        }
    }
}

/// Same tokens, and logits that differ by rounding alone.
fn same_within_rounding(files: &Files, want: &[u32], got: &[u32]) {
    let vocab = files.config.vocab_size;
    assert_eq!(want.len(), got.len());
    for (want, got) in want.chunks(vocab).zip(got.chunks(vocab)) {
        let values = |bits: &[u32]| bits.iter().map(|b| f32::from_bits(*b)).collect::<Vec<_>>();
        let (want, got) = (values(want), values(got));
        let best = |row: &[f32]| {
            row.iter()
                .copied()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(&b.1))
        };
        assert_eq!(best(&want).map(|b| b.0), best(&got).map(|b| b.0));
        let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let difference = want
            .iter()
            .zip(&got)
            .fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
        // Keys are stored in bf16: the last bit of one may differ.
        assert!(difference <= 1e-3 * largest, "{difference} of {largest}");
    }
}
