//! Changes the number of workers of a pool, and leaves all others where they are.
//!
//! The planner places everything anew each time. For a change in number alone, which an autoscaler makes under load,
//! that would replace workers that are fine where they are, or have all of them compute on other devices.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferencePlan, InferencePlanSpec, ModelFacts,
    NodeProfileStatus, PlanRank, PlanRole, PlanRouting, ResidencyPolicy,
};
use hearth_planner::mixed_pools;

use super::gpu_room;
use super::new_plan::inputs;
use super::rest::has_lost_its_place;
use crate::build::deployment_of_plan;
use crate::candidates::Candidates;
use crate::cause::Cause;
use crate::model::model_of_plan;
use crate::observed::Observed;
use crate::plan_record::{has_failed, has_served, spec_of_plan};

/// Pools whose number of workers is in the spec.
const POOLS: [PlanRole; 2] = [PlanRole::Prefill, PlanRole::Decode];

/// Returns `plan`, or the newest plan with other numbers of workers if that suffices and its places are still its own. `made` makes
/// a plan for another spec.
///
/// # Errors
/// Why other numbers alone are not planned: workers would leave their GPUs.
pub(super) fn scaled(
    observed: &Observed,
    newest: Option<&Arc<InferencePlan>>,
    mut plan: InferencePlan,
    facts: &ModelFacts,
    made: &dyn Fn(&InferenceDeployment) -> Option<InferencePlan>,
) -> Result<InferencePlan, Cause> {
    let stays =
        |newest: &&Arc<InferencePlan>| !has_failed(newest) && !has_lost_its_place(observed, newest);
    let Some(newest) = newest.filter(stays) else {
        return Ok(plan);
    };
    let spec = &observed.deployment.spec;
    let before = deployment_of_plan(&observed.deployment, newest);
    if but_for_numbers(spec, facts) != but_for_numbers(&before.spec, facts) {
        return Ok(plan);
    }
    if asks_for_same(&before.spec, spec) || has_same_numbers(&newest.spec, &plan.spec) {
        // The number is written out, or the bounds keep the current one. Whatever the planner would do now, all stays.
        plan.spec = InferencePlanSpec {
            generation: plan.spec.generation,
            inputs: plan.spec.inputs,
            routing: kept_routing(&newest.spec.routing, &plan.spec.routing),
            ..newest.spec.clone()
        };
        return Ok(plan);
    }
    let free = Candidates::of(observed, &spec.placement);
    let in_place = other_numbers(&newest.spec, &plan.spec, &observed.deployment, &free, made)?;
    if let Some(in_place) = in_place {
        plan.spec = in_place;
    } else if kinds(&newest.spec) == kinds(&plan.spec) {
        let routing = kept_routing(&newest.spec.routing, &plan.spec.routing);
        if routing.chunked_below_tokens != plan.spec.routing.chunked_below_tokens {
            let why = "which prompts decode workers read themselves stays as it was, so that the gateways stay";
            plan.spec.why.push(why.to_owned());
        }
        plan.spec.routing = routing;
    }
    Ok(plan)
}

/// `old` with the numbers of workers that `new` has for `deployment`, where its workers stay where they are and compute on what they
/// do; `None` where only a plan anew has a place for them. `made` makes a plan for another spec.
///
/// # Errors
/// Why not even that is planned: workers would leave their GPUs.
pub(super) fn other_numbers(
    old: &InferencePlanSpec,
    new: &InferencePlanSpec,
    deployment: &InferenceDeployment,
    free: &Candidates,
    made: &dyn Fn(&InferenceDeployment) -> Option<InferencePlan>,
) -> Result<Option<InferencePlanSpec>, Cause> {
    let on_cpus = || in_place_on_cpus(old, new, deployment, free, made);
    if let Some(found) = in_place(old, new, free).or_else(on_cpus) {
        return Ok(Some(found));
    }
    leaves_gpus(old, new).map_or(Ok(None), Err)
}

/// [`in_place`] for `old` without workers on GPUs, where `new` has some that were not there or not free before: with what is planned
/// for CPUs alone.
fn in_place_on_cpus(
    old: &InferencePlanSpec,
    new: &InferencePlanSpec,
    deployment: &InferenceDeployment,
    free: &Candidates,
    made: &dyn Fn(&InferenceDeployment) -> Option<InferencePlan>,
) -> Option<InferencePlanSpec> {
    let has_gpus = |plan: &InferencePlanSpec| plan.ranks.iter().any(PlanRank::is_on_gpu);
    if has_gpus(old) || !has_gpus(new) {
        return None;
    }
    let mut on_cpus = deployment.clone();
    on_cpus.spec.prefill.gpus_per_worker = Some(0);
    let found = in_place(old, &made(&on_cpus)?.spec, free)?;
    Some(InferencePlanSpec {
        inputs: new.inputs.clone(),
        ..found
    })
}

/// Why `new` is no plan for other numbers of workers alone: those of a pool of `old` compute on GPUs, and would all compute
/// elsewhere, or stream what is on a GPU now. `None` if there are none.
fn leaves_gpus(old: &InferencePlanSpec, new: &InferencePlanSpec) -> Option<Cause> {
    let is_like = |rank: &PlanRank| {
        let mut now = new.ranks_of(rank.role);
        now.any(|it| gpu_room::device(it) == gpu_room::device(rank))
    };
    let mut ranks = POOLS.into_iter().flat_map(|role| old.ranks_of(role));
    let rank = ranks.find(|rank| rank.is_on_gpu() && !is_like(rank))?;
    let [prefill, decode] = POOLS.map(|role| new.ranks_of(role).count());
    let message = format!(
        "with {prefill} prefill and {decode} decode workers there is no place like that of {}, on a GPU, for all of its pool, and another \
         number alone moves no worker: free a GPU, add a node with one, or write spec.prefill.gpusPerWorker: 0 to have all workers \
         planned on CPUs",
        rank.name
    );
    Some(Cause::trouble("TooFewGpus", message))
}

/// The routing of the plan before. What the planner would choose today may differ a little, and replaces the gateways, with the answers
/// that run through them and all that they have learnt.
fn kept_routing(old: &PlanRouting, new: &PlanRouting) -> PlanRouting {
    PlanRouting {
        // Whether workers end for want of requests stands beside their number.
        hold_timeout_ms: new.hold_timeout_ms,
        ..old.clone()
    }
}

/// The kinds of workers that a plan has, by which prompts are routed: role, whether on a GPU, and whether experts stream.
fn kinds(plan: &InferencePlanSpec) -> BTreeSet<(&'static str, bool, bool)> {
    let workers = plan.ranks.iter().filter(|rank| rank.role.is_worker());
    let kind = |rank: &PlanRank| {
        let policy = rank.residency.as_ref().map(|residency| residency.policy);
        let streams = policy == Some(ResidencyPolicy::StreamLoading);
        (rank.role.as_str(), rank.is_on_gpu(), streams)
    };
    workers.map(kind).collect()
}

/// Whether both specs mean the same numbers of workers, however they are written. Prefill workers are asked for by any number
/// that is written.
fn asks_for_same(old: &InferenceDeploymentSpec, new: &InferenceDeploymentSpec) -> bool {
    let numbers = |spec: &InferenceDeploymentSpec| {
        let prefill = spec.prefill.replicas.is_some();
        let planned = spec.prefill.planned_replicas();
        (prefill, planned, spec.decode.planned_replicas())
    };
    numbers(old) == numbers(new)
}

fn has_same_numbers(old: &InferencePlanSpec, new: &InferencePlanSpec) -> bool {
    let count = |plan: &InferencePlanSpec, role| plan.ranks_of(role).count();
    let mut roles = PlanRole::ALL.into_iter();
    roles.all(|role| count(old, role) == count(new, role))
}

/// Digest of a plan's inputs, apart from the nodes, the numbers of workers and who changes them; with a model's facts,
/// or without.
pub(super) fn but_for_numbers<'a>(
    spec: &InferenceDeploymentSpec,
    facts: impl Into<Option<&'a ModelFacts>>,
) -> String {
    let mut spec = spec.clone();
    (spec.prefill.replicas, spec.decode.replicas) = (None, None);
    (spec.prefill.scaling, spec.decode.scaling) = (None, None);
    inputs(&spec, facts.into())
}

/// The plans of the rollout that `plan` ends, oldest first: earlier plans that did not serve and differ from it only
/// in numbers of workers. An autoscaler may change a number at any time, and each number is another plan.
pub(crate) fn rollout_of<'a>(
    observed: &'a Observed,
    plan: &'a InferencePlan,
) -> Vec<&'a InferencePlan> {
    let (generation, wanted) = (plan.spec.generation, wish(plan));
    let older = observed.plans.iter().rev().map(|older| &**older);
    let mut plans: Vec<&InferencePlan> = older
        .filter(|older| older.spec.generation < generation)
        .take_while(|older| {
            !has_served(older) && !has_failed(older) && wanted.is_some() && wish(older) == wanted
        })
        .collect();
    plans.reverse();
    plans.push(plan);
    plans
}

/// Whether two plans were made for the same, apart from the numbers of workers, and in the same way: whoever is in both stays where
/// it is, and rings and peers are those of before.
pub(crate) fn differ_in_numbers_alone(old: &InferencePlan, new: &InferencePlan) -> bool {
    let stays = |rank: &PlanRank| {
        let mut others = new.spec.ranks.iter();
        match others.find(|other| other.name == rank.name) {
            Some(other) => other.node == rank.node && other.ring == rank.ring,
            None => rank.role != PlanRole::Stage,
        }
    };
    let wanted = wish(new);
    wanted.is_some()
        && wish(old) == wanted
        && old.spec.strategy == new.spec.strategy
        && old.spec.ranks_of(PlanRole::Stage).count() == new.spec.ranks_of(PlanRole::Stage).count()
        && old.spec.ranks.iter().all(stays)
}

/// What a plan was made for, apart from the numbers of workers: the digest of its inputs, and the image of its workers. `None` if it is
/// not recorded.
fn wish(plan: &InferencePlan) -> Option<(String, Option<String>)> {
    let spec = spec_of_plan(plan)?;
    let image = plan.spec.worker_image.clone();
    Some((but_for_numbers(&spec, &model_of_plan(plan)?.facts), image))
}

/// `old` with as many workers in each pool as `new`: the last ones are removed, or more are added on the nodes where
/// `new` has more.
///
/// Returns `None` if the plans differ in anything else, or if the old places do not suffice; then `new` is the plan.
/// `free` is what each node can provide to this deployment.
pub(crate) fn in_place(
    old: &InferencePlanSpec,
    new: &InferencePlanSpec,
    free: &Candidates,
) -> Option<InferencePlanSpec> {
    let count = |plan: &InferencePlanSpec, role| plan.ranks_of(role).count();
    let is_alike = old.model == new.model
        && old.strategy == new.strategy
        && count(old, PlanRole::Gateway) == count(new, PlanRole::Gateway)
        // Followers of peers are the planner's, too.
        && count(old, PlanRole::Stage) == count(new, PlanRole::Stage);
    let changed = POOLS.map(|role| (role, count(old, role), count(new, role)));
    let changed: Vec<_> = changed.into_iter().filter(|it| it.1 != it.2).collect();
    // Only the planner knows whether a pool should exist at all.
    let is_planners = |(_, had, wanted): &(PlanRole, usize, usize)| *had == 0 || *wanted == 0;
    if !is_alike || changed.is_empty() || changed.iter().any(is_planners) {
        return None;
    }
    let mut ranks = old.ranks.clone();
    let mut why = Vec::new();
    for (role, had, wanted) in changed {
        ranks.retain(|rank| rank.role != role || (rank.index as usize) < wanted);
        for index in had..wanted {
            ranks.push(one_more(&ranks, new, role, index, free)?);
        }
        why.push(format!(
            "{wanted} instead of {had} {} workers: the others stay where they are",
            role.as_str()
        ));
    }
    // The others keep their order: the first worker of a node holds its weights.
    ranks.sort_by_key(|rank| rank.role == PlanRole::Stage);
    if !is_held(&ranks, free) {
        return None;
    }
    let profiles: Vec<&NodeProfileStatus> = free.free.values().collect();
    let mut plan = InferencePlanSpec {
        generation: new.generation,
        min_version: old.min_version.max(new.min_version),
        inputs: new.inputs.clone(),
        routing: kept_routing(&old.routing, &new.routing),
        objectives: new.objectives.clone(),
        mixed_numerics: mixed_pools(&profiles, &ranks),
        ranks,
        ..old.clone()
    };
    plan.predicted.tokens_per_second = plan
        .ranks_of(PlanRole::Decode)
        .filter_map(|rank| Some(rank.predicted.as_ref()?.tokens_per_second))
        .sum();
    plan.why.extend(why);
    Some(plan)
}

/// A copy of a worker of `new`, on the node where `ranks` lacks the most workers compared to `new`; of those on GPUs, on one where a
/// GPU is left.
fn one_more(
    ranks: &[PlanRank],
    new: &InferencePlanSpec,
    role: PlanRole,
    index: usize,
    free: &Candidates,
) -> Option<PlanRank> {
    let here = |ranks: &[PlanRank], node: &str| {
        let ranks = ranks.iter();
        ranks
            .filter(|rank| rank.role == role && rank.node == node)
            .count()
    };
    let lacking =
        |rank: &PlanRank| here(&new.ranks, &rank.node).saturating_sub(here(ranks, &rank.node));
    let mut places: Vec<&PlanRank> = new.ranks_of(role).filter(|it| lacking(it) > 0).collect();
    places.sort_by_key(|rank| Reverse(lacking(rank)));
    let mut places = places.into_iter();
    let rank = places.find_map(|rank| gpu_room::beside(rank, ranks, new, free))?;
    Some(PlanRank {
        name: format!("{}-{index}", role.as_str()),
        index: u32::try_from(index).ok()?,
        ..rank
    })
}

/// Whether all nodes hold their ranks, and each rank that is in the Pod of another still has it.
fn is_held(ranks: &[PlanRank], free: &Candidates) -> bool {
    let nodes: BTreeSet<&str> = ranks.iter().map(|rank| rank.node.as_str()).collect();
    let has_host = |rank: &PlanRank| {
        let host = rank.in_pod_of.as_ref();
        host.is_none_or(|host| ranks.iter().any(|it| it.name == *host))
    };
    ranks.iter().all(has_host)
        && nodes
            .into_iter()
            .all(|node| holds(node, ranks, free) && gpu_room::holds(node, ranks, free))
}

/// Whether a node holds its ranks: one copy of the weights, each rank's own memory and CPU requests, and no CPU
/// assigned twice.
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
