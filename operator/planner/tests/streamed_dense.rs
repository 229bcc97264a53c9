//! Dense modules in plans: on the GPU beside the ring of experts, or passing through slots there.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{GpuProfile, InferencePlanSpec, NodeProfileStatus, PlanRank, ResidencyPolicy};
use hearth_planner::{PlanError, plan};
use support::{GIB, deepseek_v3, gpu, plan_input_here, server};

/// A machine with much memory and one GPU with `gib` GiB free, of the rates of an RTX 5090.
fn machine(gib: u64) -> NodeProfileStatus {
    let mut machine = NodeProfileStatus {
        gpus: vec![GpuProfile {
            read_gbps: 1792.0,
            bf16_gflops: 209_000.0,
            pcie_gbps: 63.0,
            ..gpu("RTX 5090", 1, gib + 1)
        }],
        ..server()
    };
    machine.memory.available_bytes = 800 * GIB;
    for numa in &mut machine.numa_nodes {
        numa.free_bytes = 400 * GIB;
    }
    machine
}

/// A plan for DeepSeek-V3.
fn planned_on(mode: &str, machine: NodeProfileStatus) -> Result<InferencePlanSpec, PlanError> {
    let yaml = format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 8192}}\nprefill: {{mode: {mode}}}\ndecode: {{maxBatch: 1}}\n"
    );
    let spec = serde_norway::from_str(&yaml).unwrap();
    plan(&plan_input_here(&spec, &deepseek_v3(), &[machine]))
}

fn planned(mode: &str, gib: u64) -> Result<InferencePlanSpec, PlanError> {
    planned_on(mode, machine(gib))
}

fn prefill(plan: &InferencePlanSpec) -> &PlanRank {
    let rank = plan.rank("prefill-0").unwrap();
    let residency = rank.residency.as_ref().unwrap();
    assert_eq!(residency.policy, ResidencyPolicy::StreamLoading);
    rank
}

fn streams_dense(plan: &InferencePlanSpec) -> bool {
    prefill(plan).residency.as_ref().unwrap().streams_dense
}

/// Two copies of 19 GB of dense modules do not fit on 32 GiB.
#[test]
fn dense_modules_stream_where_both_ranks_have_no_room_for_them() {
    let (small, large) = (
        planned("StreamLoading", 32).unwrap(),
        planned("StreamLoading", 64).unwrap(),
    );
    assert!(streams_dense(&small) && !streams_dense(&large));
    assert_eq!((small.min_version, large.min_version), (3, 2));
    for plan in [&small, &large] {
        let decode = plan.rank("decode-0").unwrap();
        let residency = decode.residency.as_ref().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::HostExperts);
        assert!(!residency.streams_dense);
    }
    let [lean, full] = [&small, &large].map(|plan| prefill(plan).device_memory.unwrap());
    // Embedding, head and routers are 4 GB; two slots of the largest module, 0.8 GB.
    assert!(
        (3_900_000_000..4_200_000_000).contains(&lean.weights_bytes),
        "{lean:?}"
    );
    assert!(
        (790_000_000..810_000_000).contains(&lean.dense_slots_bytes),
        "{lean:?}"
    );
    assert!(
        full.weights_bytes > 18_000_000_000 && full.dense_slots_bytes == 0,
        "{full:?}"
    );
    // What crosses the link grows by 15 GB of 654.
    let [lean_ms, full_ms] = [&small, &large].map(|plan| plan.predicted.ttft_ms);
    assert!(
        lean_ms > full_ms && lean_ms < full_ms * 1.05,
        "{lean_ms} {full_ms}"
    );
    let host_bytes = |plan| prefill(plan).residency.as_ref().unwrap().host_bytes;
    let facts = deepseek_v3();
    let more = host_bytes(&small) - host_bytes(&large);
    assert_eq!(more, facts.streamed_dense_bytes());
    let why = small.why.join("\n");
    for part in [
        "embedding, head and routers 3.7 GiB, 2 slots for dense modules 767.1 MiB",
        "of dense modules with them, which have no room beside the rest",
        "experts of prefill streamed to a GPU, those of decode on CPUs beside it: with both, a ",
    ] {
        let said = why.contains(part) || small.not_chosen.join("\n").contains(part);
        assert!(said, "{part} in {why}\n{:#?}", small.not_chosen);
    }
}

/// Both workers fit into 30 GiB of a GPU, and from 44 on the dense modules of both stay.
#[test]
fn dense_modules_that_stream_save_fourteen_gib() {
    // Smaller GPUs have the prefill worker alone.
    let has_both = |plan: &InferencePlanSpec| {
        let decode = plan.rank("decode-0").unwrap().residency.as_ref().unwrap();
        decode.policy == ResidencyPolicy::HostExperts
    };
    let fitting: Vec<(u64, bool)> = (26..50)
        .filter_map(|gib| {
            let plan = planned("StreamLoading", gib).ok().filter(has_both)?;
            Some((gib, streams_dense(&plan)))
        })
        .collect();
    assert_eq!(fitting.first(), Some(&(30, true)));
    let stays = fitting.iter().find(|(_, streams)| !streams);
    assert_eq!(stays, Some(&(44, false)));
}

/// Without room for the smallest of all, the error has the numbers of that.
#[test]
fn a_gpu_that_is_too_small_for_dense_modules_that_stream_is_refused_with_numbers() {
    let error = planned("StreamLoading", 8).unwrap_err().to_string();
    for part in [
        "weights",
        "of embedding, head and routers, 2 slots for dense modules",
        "a ring of 2 experts",
    ] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

/// Agents have the workers' image: a plan that it cannot read is not made, with the reason.
#[test]
fn workers_of_an_earlier_version_get_no_dense_modules_that_stream() {
    let machine = NodeProfileStatus {
        reader_version: None,
        ..machine(32)
    };
    let plan = planned_on("StreamLoading", machine).unwrap();
    assert!(!streams_dense(&plan) && plan.min_version == 2);
    let why = plan.why.join("\n");
    assert!(why.contains("is of an earlier version"), "{why}");
}
