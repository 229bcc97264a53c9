//! Plans for nodes whose memory cannot hold the experts that their CPUs compute beside a GPU.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{
    InferencePlanSpec, NodeProfileStatus, PlanRank, READER_VERSION, ResidencyPolicy,
};
use hearth_planner::{PlanError, plan};
use support::{GIB, laptop, plan_input_here, qwen3_30b};

fn planned(yaml: &str, profile: NodeProfileStatus) -> Result<InferencePlanSpec, PlanError> {
    let spec = serde_norway::from_str(yaml).unwrap();
    plan(&plan_input_here(&spec, &qwen3_30b(), &[profile]))
}

fn rank<'a>(plan: &'a InferencePlanSpec, name: &str) -> &'a PlanRank {
    plan.rank(name).unwrap()
}

#[track_caller]
fn assert_line(lines: &[String], begin: &str, part: &str) {
    let found = lines
        .iter()
        .any(|line| line.starts_with(begin) && line.contains(part));
    assert!(found, "{begin} … {part} in {lines:#?}");
}

/// Context that leaves room for both workers on the GPU.
const SHORT: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\n";
/// Without prefill ranks, which would have memory of their own, and beside a GPU whatever is predicted.
const HALVES: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\nprefill: {mode: Chunked}\ndecode: {dualBatch: \"On\"}\n";
/// The same where it is predicted to be faster.
const CHUNKED: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\nprefill: {mode: Chunked}\n";

#[test]
fn experts_that_exceed_memory_are_read_from_the_disk_within_what_the_node_has() {
    let of = |gib: u64, yaml: &str| {
        let mut machine = laptop(gib * GIB);
        machine.disks[0].read_gbps = 7.0;
        planned(yaml, machine).unwrap()
    };
    let facts = qwen3_30b();
    let mut before_ms = f64::INFINITY;
    for gib in [16, 20, 24] {
        let plan = of(gib, HALVES);
        let decode = rank(&plan, "decode-0");
        let residency = decode.residency.as_ref().unwrap();
        assert_eq!(
            residency.policy,
            ResidencyPolicy::HostExperts,
            "{:#?}",
            plan.not_chosen
        );
        assert_eq!(residency.host_bytes, facts.bytes.routed_experts);
        let budget = residency.host_budget_bytes.unwrap();
        assert!((gib - 2) * GIB < budget && budget < gib * GIB, "{budget}");
        // It answers for its memory alone, and for no more than that.
        assert_eq!(decode.host_weight_bytes(), budget);
        assert_eq!(decode.own_weight_bytes(), budget);
        assert_eq!(residency.cache_slots, None);
        assert_eq!(plan.min_version, 3);
        let tpot_ms = plan.predicted.tpot_ms;
        assert!(tpot_ms < before_ms, "{gib} GiB: {tpot_ms} ms");
        before_ms = tpot_ms;
        let held = "of 27 GiB are in the memory of office at a time";
        assert_line(&plan.why, "experts of decode-0", held);
        assert_line(&plan.why, "experts of decode-0", "at 7.0 GB/s");
        assert_line(&plan.why, "no cache of experts", "need all experts");
    }
    let all = of(40, HALVES);
    let residency = rank(&all, "decode-0").residency.clone().unwrap();
    assert_eq!(residency.host_budget_bytes, None);
    assert!(all.predicted.tpot_ms < before_ms);
    assert_eq!(all.min_version, 2);
}

/// Agents have the workers' image: a plan that it cannot read is not made.
#[test]
fn workers_of_an_earlier_version_get_no_budget_for_experts() {
    let of = |reader_version| {
        let mut machine = laptop(24 * GIB);
        machine.disks[0].read_gbps = 7.0;
        machine.reader_version = reader_version;
        planned(CHUNKED, machine).unwrap()
    };
    let has_budget = |plan: &InferencePlanSpec| plan.ranks.iter().any(PlanRank::has_expert_budget);
    assert!(has_budget(&of(Some(READER_VERSION))));
    let old = of(None);
    assert!(!has_budget(&old) && old.min_version < READER_VERSION);
}

#[test]
fn a_faster_disk_gives_a_faster_plan_of_experts_that_exceed_memory_and_a_slow_one_counts() {
    let tpot_ms = |gbps: f64| {
        let mut machine = laptop(16 * GIB);
        machine.disks[0].read_gbps = gbps;
        planned(HALVES, machine).unwrap().predicted.tpot_ms
    };
    let [slow, fast] = [1.0, 4.0].map(tpot_ms);
    // 8 of 128 experts in each of 48 layers, of which between a third and two thirds are absent.
    let token_bytes = qwen3_30b().bytes.routed_experts as f64 / 16.0;
    let disk_ms = slow - fast;
    let of_token = disk_ms / (token_bytes / 1e6 * (1.0 - 0.25));
    assert!((0.33..0.67).contains(&of_token), "{slow} {fast} {of_token}");
}

/// Which of the two is faster is a matter of how much the disk has to do: both are predicted, and both are found.
#[test]
fn a_gpu_beside_experts_that_exceed_memory_is_used_where_it_is_predicted_to_be_faster() {
    let mut chosen = Vec::new();
    for gib in 8..30 {
        let of = |yaml: &str| planned(yaml, laptop(gib * GIB)).unwrap();
        let mut cpus = laptop(gib * GIB);
        cpus.gpus.clear();
        let on_cpus = planned(CHUNKED, cpus).unwrap().predicted.tpot_ms;
        let (auto, with_gpu) = (of(CHUNKED), of(HALVES).predicted.tpot_ms);
        assert_eq!(
            auto.predicted.tpot_ms,
            on_cpus.min(with_gpu),
            "{gib} GiB: {:#?}",
            auto.not_chosen
        );
        chosen.push(rank(&auto, "decode-0").has_expert_budget());
    }
    assert!(
        chosen.contains(&true) && chosen.contains(&false),
        "{chosen:?}"
    );
}

#[test]
fn prompts_are_not_streamed_beside_experts_that_exceed_memory() {
    let yaml = format!("{SHORT}decode: {{dualBatch: \"On\"}}\n");
    let plan = planned(&yaml, laptop(20 * GIB)).unwrap();
    let (prefill, decode) = (rank(&plan, "prefill-0"), rank(&plan, "decode-0"));
    let residency = prefill.residency.as_ref().unwrap();
    assert_eq!(residency.policy, ResidencyPolicy::MmapPrefetch);
    assert!(decode.has_expert_budget(), "{decode:?}");
    // Its window and that of the prefill rank fit the node beside each other.
    let used: u64 = plan
        .ranks
        .iter()
        .map(|rank| rank.host_weight_bytes() + rank.host_kv_bytes() + rank.scratch_bytes)
        .sum();
    assert!(used <= 19 * GIB, "{used}");
    assert_line(
        &plan.not_chosen,
        "experts of prefill streamed to a GPU",
        "of the memory of office beside it",
    );
}

#[test]
fn memory_for_less_than_the_experts_of_one_token_is_refused_with_what_is_needed() {
    let short = |bytes: u64| planned(HALVES, laptop(bytes)).map(drop).unwrap_err();
    let PlanError::InsufficientMemory {
        needs_bytes,
        free_bytes,
        advice,
        ..
    } = short(GIB / 4)
    else {
        panic!("{}", short(GIB / 4));
    };
    assert!(
        free_bytes < needs_bytes && needs_bytes < 2 * GIB,
        "{needs_bytes}"
    );
    assert!(!advice.is_empty());
    // What it says is needed is enough.
    let enough = needs_bytes + needs_bytes / 19 + 128 * 1024 * 1024;
    let plan = planned(HALVES, laptop(enough)).unwrap();
    assert!(rank(&plan, "decode-0").has_expert_budget());
}
