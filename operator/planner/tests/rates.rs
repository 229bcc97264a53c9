//! Which of a profile's rates a prediction takes: of the disk, and of products.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{ModelFacts, NodeProfileStatus, PlanPrediction, ResidencyPolicy};
use hearth_planner::{PAGE_CACHE_EFFICIENCY, plan};
use support::{GIB, gpu, laptop, plan_input_here, qwen3_30b};

/// Workers on CPUs that read prompts and answers.
const CPUS: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\nprefill: {mode: Chunked, gpusPerWorker: 0}\ndecode: {maxBatch: 1}\n";
/// Attention on a GPU, and experts on the CPUs.
const HALVES: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\nprefill: {mode: Chunked}\ndecode: {dualBatch: \"On\"}\n";
/// A GPU that holds the model, if there is one.
const SHORT: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\n";

fn predicted(
    yaml: &str,
    facts: &ModelFacts,
    node: &NodeProfileStatus,
    policy: ResidencyPolicy,
) -> PlanPrediction {
    let spec = serde_norway::from_str(yaml).unwrap();
    let plan = plan(&plan_input_here(&spec, facts, std::slice::from_ref(node))).unwrap();
    let residency = plan.rank("decode-0").unwrap().residency.clone().unwrap();
    assert_eq!(residency.policy, policy);
    plan.predicted
}

fn stored_as(dtype: &str) -> ModelFacts {
    ModelFacts {
        dtype: dtype.to_owned(),
        ..qwen3_30b()
    }
}

#[test]
fn mapped_weights_arrive_at_the_rate_through_the_page_cache() {
    let tpot_ms = |read_gbps: f64, mapped_read_gbps: f64| {
        let mut node = laptop(16 * GIB);
        node.disks[0].read_gbps = read_gbps;
        node.disks[0].mapped_read_gbps = mapped_read_gbps;
        predicted(CPUS, &qwen3_30b(), &node, ResidencyPolicy::MmapPrefetch).tpot_ms
    };
    let measured = tpot_ms(1.0, 0.5);
    assert_eq!(measured, tpot_ms(3.0, 0.5), "whatever direct reads reach");
    // What is left of a token when its reads take half the time, once more.
    let overhead_ms = 2.0 * tpot_ms(1.0, 1.0) - measured;
    assert!(
        (0.0..measured / 10.0).contains(&overhead_ms),
        "{overhead_ms} of {measured}"
    );
    // Where it was not measured it is a share of the other.
    assert_eq!(tpot_ms(0.5, 0.0), tpot_ms(0.0, 0.5 * PAGE_CACHE_EFFICIENCY));
    // And where nothing was measured, a slow disk is assumed.
    assert_eq!(tpot_ms(0.0, 0.0), tpot_ms(0.0, 0.1));
}

#[test]
fn experts_that_exceed_memory_are_read_past_the_page_cache() {
    let tpot_ms = |read_gbps: f64, mapped_read_gbps: f64| {
        let mut node = laptop(16 * GIB);
        node.disks[0].read_gbps = read_gbps;
        node.disks[0].mapped_read_gbps = mapped_read_gbps;
        predicted(HALVES, &qwen3_30b(), &node, ResidencyPolicy::HostExperts).tpot_ms
    };
    assert_eq!(tpot_ms(1.0, 0.5), tpot_ms(1.0, 0.9));
    assert!(tpot_ms(2.0, 0.5) < tpot_ms(1.0, 0.5) * 0.7);
}

#[test]
fn prompts_take_the_rate_of_products_with_weights_as_the_model_has_them() {
    let mut node = laptop(64 * GIB);
    let compute = &mut node.compute;
    // So slow that reads of weights do not count.
    let one = compute.bf16_one_thread_gflops / 8.0;
    let all = compute.bf16_all_threads_gflops / 8.0;
    (
        compute.bf16_one_thread_gflops,
        compute.bf16_all_threads_gflops,
    ) = (one, all);
    let plain = node.clone();
    let compute = &mut node.compute;
    compute.fp8_one_thread_gflops = one / 2.0;
    compute.fp8_all_threads_gflops = all / 2.0;
    compute.f16_one_thread_gflops = one / 3.0;
    compute.f16_all_threads_gflops = all / 3.0;
    compute.f32_weights_one_thread_gflops = one / 4.0;
    compute.f32_weights_all_threads_gflops = all / 4.0;
    let ttft_ms = |node: &NodeProfileStatus, dtype: &str| {
        predicted(CPUS, &stored_as(dtype), node, ResidencyPolicy::Resident).ttft_ms
    };
    let bf16_ms = ttft_ms(&node, "BF16");
    for (dtype, times) in [("FP8", 2.0), ("F16", 3.0), ("F32", 4.0)] {
        let ratio = ttft_ms(&node, dtype) / bf16_ms;
        assert!(
            (times * 0.95..=times).contains(&ratio),
            "{dtype} takes {ratio} of the time"
        );
        // An earlier version's agent has measured bf16 alone.
        assert_eq!(ttft_ms(&plain, dtype), bf16_ms, "{dtype}");
    }
}

#[test]
fn a_measured_gpu_has_a_rate_of_each_stored_format() {
    let ttft_ms = |dtype: &str, gflops: [f64; 3]| {
        let mut node = laptop(64 * GIB);
        let mut card = gpu("RTX 6000", 1, 48);
        card.operation_us = 2.0;
        [card.fp8_gflops, card.f16_gflops, card.f32_weights_gflops] = gflops;
        node.gpus = vec![card];
        let facts = stored_as(dtype);
        predicted(SHORT, &facts, &node, ResidencyPolicy::Resident).ttft_ms
    };
    let bf16_ms = ttft_ms("BF16", [1_000.0; 3]);
    for (at, dtype) in ["FP8", "F16", "F32"].into_iter().enumerate() {
        assert_eq!(ttft_ms(dtype, [0.0; 3]), bf16_ms, "{dtype}");
        let mut slow = [1e9; 3];
        slow[at] = 1_000.0;
        let slow_ms = ttft_ms(dtype, slow);
        assert!(slow_ms > 2.0 * bf16_ms, "{dtype}: {slow_ms} and {bf16_ms}");
    }
}
