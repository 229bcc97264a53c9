//! What members of rings keep in memory where that is short.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use hearth_crds::{InferencePlanSpec, NodeProfileStatus, PlanResidency, ResidencyPolicy};
use hearth_planner::plan;
use support::rings::{check, machine, members};
use support::{GIB, plan_input, plan_input_here, qwen3_30b, spec};

const RING: &str = "strategy: PipedRing\n";

#[test]
fn a_member_short_of_experts_finds_some_in_memory_that_nobody_uses() {
    let nodes = [machine("attic", 8, 14), machine("cellar", 4, 14)];
    let (facts, spec) = (qwen3_30b(), spec(RING));
    let in_pods = plan(&plan_input(&spec, &facts, &nodes)).unwrap();
    let here = plan(&plan_input_here(&spec, &facts, &nodes)).unwrap();
    let short = members(&in_pods);
    let mut short = short
        .iter()
        .filter_map(|rank| rank.residency.as_ref())
        .filter(|residency| residency.budget_bytes < residency.weight_bytes);
    assert!(short.next().is_some(), "{:#?}", in_pods.why);
    // Pods are limited to what the plan grants; what is to stay free of a machine is its page cache's until somebody needs it.
    let (in_pods, here) = (in_pods.predicted, here.predicted);
    assert!(here.tpot_ms < in_pods.tpot_ms, "{here:?} {in_pods:?}");
}

/// A ring's plan for a model with an embedding of so many bytes.
fn with_embedding(embedding_bytes: u64, nodes: &[NodeProfileStatus]) -> InferencePlanSpec {
    let mut facts = qwen3_30b();
    facts.parameter_count += embedding_bytes - facts.bytes.embedding;
    facts.bytes.embedding = embedding_bytes;
    let plan = plan(&plan_input(&spec(RING), &facts, nodes)).unwrap();
    check(&plan, &facts, nodes);
    plan
}

fn of_head(plan: &InferencePlanSpec) -> &PlanResidency {
    members(plan)[0].residency.as_ref().unwrap()
}

#[test]
fn an_embedding_takes_memory_only_where_all_weights_are_in_it() {
    let (small, large) = (GIB, 7 * GIB);
    // Where weights are read for each token, and where all of them have room but the embedding.
    for (gib, fits) in [(14, false), (19, true)] {
        let nodes = [machine("attic", 8, gib), machine("cellar", 8, gib)];
        let plans = [small, large].map(|bytes| with_embedding(bytes, &nodes));
        let [less, more] = plans.each_ref().map(|plan| plan.predicted.tpot_ms);
        assert!((more / less - 1.0).abs() < 0.01, "{gib} GiB: {less} {more}");
        let head = of_head(&plans[1]);
        assert_eq!(head.policy, ResidencyPolicy::MmapPrefetch, "{gib} GiB");
        let mapped_bytes = head.weight_bytes - large;
        assert_eq!(head.budget_bytes == mapped_bytes, fits, "{head:?}");
        assert!(head.budget_bytes <= mapped_bytes, "{head:?}");
    }
    // A disk that was not measured is not read for each token, so that the embedding must be in memory, too.
    let mut nodes = [machine("attic", 8, 20), machine("cellar", 8, 20)];
    for node in &mut nodes {
        node.disks.clear();
    }
    let plan = with_embedding(small, &nodes);
    let head = of_head(&plan);
    assert_eq!(head.policy, ResidencyPolicy::Resident);
    assert_eq!(head.budget_bytes, head.weight_bytes);
}
