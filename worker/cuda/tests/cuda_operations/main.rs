//! Every operation of the CUDA backend against the scalar reference.
//!
//! The operations run on the host model, whose checks detect kernels' accesses out of bounds or out of order; with
//! `HEARTH_TEST_GPU=1` they run on this machine's GPU, with patterns around every
//! buffer, and fail on a machine without a GPU.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

#[path = "../../../kernels/tests/common/mod.rs"]
mod common;

mod attention;
mod attention_bits;
mod attention_wgmma;
mod budget;
mod columns;
mod elementwise;
mod expert_sum;
mod experts;
mod graphs;
mod inputs;
mod kv;
mod kv_export;
mod linear;
mod linear_bits;
mod mla;
mod refusals;
mod route;
mod rows;
mod sanitizer;
mod sequence;
mod slots;
mod support;
