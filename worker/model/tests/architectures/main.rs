//! Every architecture compared with transformers, layer by layer and end to end, and with itself in other batches.
//!
//! The cases are the directories in `tests/goldens`, whose README says what each one adds. Each property runs for each
//! case.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

mod batch_invariance;
mod expanded;
mod flights;
mod goldens;
mod harness;
mod host_experts;
mod residency;

/// Defines one `#[test]` per case: `cases!(property: case, case)` makes `property::case` call `property("case")`.
macro_rules! cases {
    ($property:ident: $($case:ident),+ $(,)?) => {
        mod $property {
            $(#[test] fn $case() { super::$property(stringify!($case)); })+
        }
    };
}

/// Same as `cases!`, for every golden.
macro_rules! all_cases {
    ($($property:ident),+ $(,)?) => {
        $($crate::cases! {
            $property: deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2,
            qwen3_moe, qwen3_moe_sparse_step, qwen3_moe_fp8, qwen3, qwen3_yarn, qwen2, llama2, llama3, llama_linear,
        })+
    };
}

use {all_cases, cases};
