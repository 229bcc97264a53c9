//! More or fewer decode workers, with all others left where they are.
//!
//! The planner places everything anew each time. For a change of the number alone, which an autoscaler makes under load,
//! that would replace workers that do well where they are.

use std::collections::BTreeSet;

use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole};

use crate::candidates::Candidates;

/// `old` with as many decode workers as `new` has: the last ones go, or more come on the nodes where `new` has more.
///
/// `None` when the plans differ in something else, or when the old places do not suffice; then `new` is the plan.
/// `free` is what each node can give to this deployment.
pub(crate) fn in_place(
    old: &InferencePlanSpec,
    new: &InferencePlanSpec,
    free: &Candidates,
) -> Option<InferencePlanSpec> {
    let count = |plan: &InferencePlanSpec, role| plan.ranks_of(role).count();
    // Which GPU another worker would get, the planner alone knows.
    let is_on_gpu =
        |plan: &InferencePlanSpec| plan.ranks_of(PlanRole::Decode).any(PlanRank::is_on_gpu);
    let is_alike = old.model == new.model
        && old.strategy == new.strategy
        && count(old, PlanRole::Gateway) == count(new, PlanRole::Gateway)
        && count(old, PlanRole::Prefill) == count(new, PlanRole::Prefill);
    let (had, wanted) = (count(old, PlanRole::Decode), count(new, PlanRole::Decode));
    if !is_alike || had == wanted || is_on_gpu(old) || is_on_gpu(new) {
        return None;
    }
    let mut ranks: Vec<PlanRank> = old
        .ranks
        .iter()
        .filter(|rank| rank.role != PlanRole::Decode || (rank.index as usize) < wanted)
        .cloned()
        .collect();
    for index in had..wanted {
        ranks.push(one_more(&ranks, new, index)?);
    }
    let nodes: BTreeSet<&str> = ranks.iter().map(|rank| rank.node.as_str()).collect();
    if !nodes.into_iter().all(|node| holds(node, &ranks, free)) {
        return None;
    }
    let mut plan = InferencePlanSpec {
        generation: new.generation,
        routing: new.routing.clone(),
        objectives: new.objectives.clone(),
        ranks,
        ..old.clone()
    };
    plan.predicted.tokens_per_second = plan
        .ranks_of(PlanRole::Decode)
        .filter_map(|rank| Some(rank.predicted.as_ref()?.tokens_per_second))
        .sum();
    plan.why.push(format!(
        "{wanted} instead of {had} decode workers: the others stay where they are"
    ));
    Some(plan)
}

/// A copy of a worker of `new`, on the node where `new` has the most that `ranks` has not.
fn one_more(ranks: &[PlanRank], new: &InferencePlanSpec, index: usize) -> Option<PlanRank> {
    let here = |ranks: &mut dyn Iterator<Item = &PlanRank>, node: &str| {
        ranks
            .filter(|rank| rank.role == PlanRole::Decode && rank.node == node)
            .count()
    };
    let mut best: Option<(usize, &PlanRank)> = None;
    for rank in new.ranks_of(PlanRole::Decode) {
        let wanted = here(&mut new.ranks.iter(), &rank.node);
        let lacking = wanted.saturating_sub(here(&mut ranks.iter(), &rank.node));
        if lacking > best.map_or(0, |(most, _)| most) {
            best = Some((lacking, rank));
        }
    }
    let (_, rank) = best?;
    Some(PlanRank {
        name: format!("{}-{index}", PlanRole::Decode.as_str()),
        index: u32::try_from(index).ok()?,
        ..rank.clone()
    })
}

/// Whether a node holds its ranks: one copy of the weights, everybody's own memory and requests of CPU, and no CPU given
/// away twice.
fn holds(node: &str, ranks: &[PlanRank], free: &Candidates) -> bool {
    let (Some(profile), Some(room)) = (free.free.get(node), free.cpu_rooms.get(node)) else {
        return false;
    };
    let mut here = ranks.iter().filter(|rank| rank.node == node);
    let own = |rank: &PlanRank| {
        let sum = rank.host_kv_bytes().saturating_add(rank.scratch_bytes);
        sum.saturating_add(rank.own_weight_bytes())
    };
    let shared = |rank: &PlanRank| rank.host_weight_bytes() - rank.own_weight_bytes();
    let weights = here.clone().map(shared).max();
    let needs = here
        .clone()
        .map(own)
        .fold(weights.unwrap_or(0), u64::saturating_add);
    let mut cpus = BTreeSet::new();
    let is_free = |cpu: &u32| profile.cpus.iter().any(|free| free.id == *cpu);
    let is_apart = here.all(|rank| {
        rank.cpus.iter().all(is_free)
            && (rank.pinning != hearth_crds::Pinning::Exclusive
                || rank.cpus.iter().all(|cpu| cpus.insert(*cpu)))
    });
    let here = ranks.iter().filter(|rank| rank.node == node);
    let cpu_millis: u64 = here.map(PlanRank::cpu_millis).sum();
    is_apart
        && cpu_millis <= room.free_millis()
        && needs <= crate::candidates::usable(profile.memory.available_bytes)
}
