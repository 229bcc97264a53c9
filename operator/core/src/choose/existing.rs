//! The plans that exist: which one is in force, and what two of them have in common.

use std::sync::Arc;

use hearth_crds::{
    InferenceDeployment, InferencePlan, InferencePlanSpec, PlanPrediction, PlanRole,
};
use kube_core::ResourceExt;

use crate::build::{model_key, source_digest};
use crate::candidates::is_lost;
use crate::observed::Observed;
use crate::plan_record::{has_failed, has_served, source_digest_of, spec_of_plan};

/// The newest plan that served before `plan` and that has no lost nodes.
pub(crate) fn way_back<'a>(
    observed: &'a Observed,
    plan: &InferencePlan,
) -> Option<&'a Arc<InferencePlan>> {
    let older = observed
        .plans
        .iter()
        .rev()
        .filter(|older| older.spec.generation < plan.spec.generation);
    let is_whole = |older: &&Arc<InferencePlan>| {
        let mut ranks = older.spec.ranks.iter();
        has_served(older) && ranks.all(|rank| !is_lost(observed, &rank.node))
    };
    older.into_iter().find(is_whole)
}

/// Plans that nothing needs once `target` serves: all but the target, the one that served before it, and the newest,
/// which records what was tried last.
pub(crate) fn unneeded(observed: &Observed, target: &InferencePlan) -> Vec<String> {
    let generation = target.spec.generation;
    let newest = observed.plans.last().map_or(0, |plan| plan.spec.generation);
    let served_before = observed
        .plans
        .iter()
        .filter(|plan| plan.spec.generation < generation && has_served(plan))
        .map(|plan| plan.spec.generation)
        .max();
    let is_needed = |plan: &&Arc<InferencePlan>| {
        let it = plan.spec.generation;
        it == generation || it == newest || Some(it) == served_before
    };
    observed
        .plans
        .iter()
        .filter(|plan| !is_needed(plan))
        .map(|plan| plan.name_any())
        .collect()
}

/// The newest plan; if it was given up, the newest that served, preferably one without lost nodes.
pub(crate) fn in_force(observed: &Observed) -> Option<Arc<InferencePlan>> {
    let newest = observed.plans.last()?;
    if !has_failed(newest) {
        return Some(newest.clone());
    }
    let served = || observed.plans.iter().rev().find(|plan| has_served(plan));
    let older = way_back(observed, newest).or_else(served);
    Some(older.unwrap_or(newest).clone())
}

pub(super) fn is_same_work(old: &InferencePlan, new: &InferencePlan) -> bool {
    let (mut old_work, new_work) = (work(&old.spec), work(&new.spec));
    // Plans of operators that did not record it.
    let image = old_work.worker_image.take();
    old_work.worker_image = image.or_else(|| new_work.worker_image.clone());
    source_digest_of(old) == source_digest_of(new)
        && old_work == new_work
        && is_same_template(old, new)
}

/// Whether the Pods of both plans have the same template: a template with which they do not become ready is rolled
/// back, too.
fn is_same_template(old: &InferencePlan, new: &InferencePlan) -> bool {
    match (spec_of_plan(old), spec_of_plan(new)) {
        (Some(old), Some(new)) => old.pod_template == new.pod_template,
        // Plans of operators that did not record it.
        _ => true,
    }
}

/// The plan without the fields that have no effect on what runs.
fn work(plan: &InferencePlanSpec) -> InferencePlanSpec {
    let mut plan = plan.clone();
    plan.generation = 0;
    plan.inputs = None;
    plan.why.clear();
    plan.not_chosen.clear();
    plan.predicted = PlanPrediction {
        ttft_ms: 0.0,
        ttft_prompt_tokens: 0,
        tpot_ms: 0.0,
        tokens_per_second: 0.0,
    };
    for rank in &mut plan.ranks {
        rank.predicted = None;
        // It says what `gpu_memory_bytes` is for.
        rank.device_memory = None;
    }
    plan
}

pub(super) fn is_of_source(plan: &InferencePlan, deployment: &InferenceDeployment) -> bool {
    let source = &deployment.spec.model.source;
    let key = model_key(deployment, source);
    source_digest_of(plan) == source_digest(source, key.as_deref())
}

pub(crate) fn nodes_of(plan: &InferencePlan) -> impl Iterator<Item = &str> {
    plan.spec.ranks.iter().map(|rank| rank.node.as_str())
}

/// Nodes of its workers, without those of its gateways alone.
pub(crate) fn worker_nodes_of(plan: &InferencePlan) -> impl Iterator<Item = &str> {
    let ranks = plan.spec.ranks.iter();
    let workers = ranks.filter(|rank| rank.role != PlanRole::Gateway);
    workers.map(|rank| rank.node.as_str())
}

/// Words for a node that is down.
pub(crate) fn lost_words(observed: &Observed, node: &str) -> String {
    match observed.nodes.get(node) {
        Some(_) => format!("node {node} is not Ready"),
        None => format!("node {node} is gone"),
    }
}

#[cfg(test)]
mod tests {
    use hearth_crds::PlanDeviceMemory;

    use super::work;
    use crate::testing::samples;

    #[test]
    fn what_a_share_of_a_gpu_is_for_is_no_other_work() {
        let old = samples::plan();
        let mut new = old.clone();
        new.ranks[1].device_memory = Some(PlanDeviceMemory::default());
        assert_eq!(work(&old), work(&new));
        new.ranks[1].gpu_memory_bytes += 1;
        assert_ne!(work(&old), work(&new));
    }
}
