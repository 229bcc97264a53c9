//! Whole models on the CUDA backend: every architecture against transformers, every way to an answer, experts that are
//! streamed or on the host, and KV that moves between a GPU and a CPU. They run on the host model of CUDA,
//! or with `HEARTH_TEST_GPU=1` on this machine's GPU.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

#[path = "../../../engine/tests/support/mod.rs"]
mod support;

mod device;
mod expanded;
mod export;
mod goldens;
mod host_experts;
mod nodes;
mod peers;
mod sampling;
mod streaming;
mod traces;
mod transfer;
mod upload;
mod ways;
