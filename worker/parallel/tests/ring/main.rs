//! Rings of threads: the bits of one process, whatever the stages, rounds and flights; and what happens when one is lost.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

mod faults;
mod harness;
#[path = "../support/mod.rs"]
mod support;

use std::sync::atomic::Ordering;

use harness::run_ring;
use hearth_parallel::Route;
use support::{Files, run_whole};

/// Layers of every model here: with no divisor, so that the last round is a partial one.
const LAYERS: usize = 13;

/// Windows of a round, for rings of 2, 3 and 4 stages with 1, 2, 4 and more rounds each, some of unequal stages, and one stage without
/// layers.
const RINGS: [&[usize]; 11] = [
    // 2 stages: 1, 2 and 4 rounds.
    &[7, 6],
    &[4, 3],
    &[2, 2],
    // 3 stages: 1, 2, 3 and 4 rounds.
    &[5, 4, 4],
    &[3, 2, 2],
    &[1, 3, 2],
    &[2, 1, 1],
    // 4 stages: 1, 2 and 4 rounds.
    &[4, 3, 3, 3],
    &[2, 2, 2, 1],
    &[1, 1, 1, 1],
    &[2, 0, 1],
];

/// Defines one `#[test]` per architecture.
macro_rules! architectures {
    ($($case:ident),+ $(,)?) => {
        $(#[test] fn $case() { rings_give_the_bits_of_one_process(stringify!($case)); })+
    };
}

architectures! {
    deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2,
    qwen3_moe, qwen3_moe_sparse_step, qwen3_moe_fp8, qwen3, qwen3_yarn, qwen2, llama2, llama3, llama_linear,
}

fn rings_give_the_bits_of_one_process(case: &str) {
    let files = Files::of(case, LAYERS);
    let want = run_whole(&files);
    for windows in RINGS {
        let route = Route::around(windows, LAYERS).unwrap();
        for flight_rows in [usize::MAX, 16] {
            let got = run_ring(&files, &route, flight_rows);
            assert!(got == want, "{case}: {windows:?}, flights of {flight_rows}");
        }
    }
}

/// Dense layers, of which the same ones stay, and experts, which stay by chance.
#[test]
fn rings_whose_nodes_have_half_the_memory_give_the_same_bits() {
    for case in ["qwen3", "llama3", "qwen3_moe", "deepseek_v3_fp8"] {
        let mut files = Files::of(case, LAYERS);
        let want = run_whole(&files);
        files.is_short = true;
        for windows in [&[7, 6][..], &[2, 2], &[3, 2, 2], &[2, 1, 1], &[2, 2, 2, 1]] {
            let route = Route::around(windows, LAYERS).unwrap();
            for flight_rows in [usize::MAX, 16] {
                let got = run_ring(&files, &route, flight_rows);
                assert!(got == want, "{case}: {windows:?}, flights of {flight_rows}");
                // Each of the five passes needs all layers, of which half stay at most.
                let released = files.releases.swap(0, Ordering::Relaxed);
                assert!(released > LAYERS, "{case}: {windows:?}: {released} were");
            }
        }
    }
}
