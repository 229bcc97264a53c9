//! However an answer is computed on a GPU, its tokens and the bits of their log-probabilities are the same: alone or
//! in a batch, in chunks of any size, after prefix reuse, in replay, with KV from another worker.

use std::path::PathBuf;

use crate::device::{engine, gpu};
use crate::support::{checkpoints, every_way_gives_the_same_bits};

/// One of each kind of attention, feed-forward block and weight; goldens.rs runs all checkpoints.
const CASES: [&str; 3] = ["deepseek_v3_fp8", "qwen3_moe_fp8", "llama3"];

#[test]
fn every_way_to_an_answer_gives_the_same_bits() {
    for case in CASES {
        let dir = find(case);
        every_way_gives_the_same_bits(case, |change| engine(&dir, gpu(), change));
    }
}

fn find(case: &str) -> PathBuf {
    let mut all = checkpoints().into_iter();
    all.find(|dir| dir.ends_with(case)).unwrap()
}
