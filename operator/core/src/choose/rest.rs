//! Deployments that are suspended, or without workers for want of requests: nothing is planned meanwhile, and their plan may have
//! lost its place when they resume.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_crds::{InferencePlan, PlanRank};

use super::choice::PlanChoice;
use super::existing::{in_force, is_of_source};
use super::new_plan::is_made_for;
use super::trouble_of_nodes;
use crate::build::{deployment_of_plan, rank_holding};
use crate::candidates::{is_lost, room_on};
use crate::cause::{Cause, node_of};
use crate::conditions::{self, NODES_TAKEN};
use crate::model::model_of_plan;
use crate::observed::{Holding, Observed, PodView};
use crate::plan_record::has_failed;

/// The plan in force, and nothing new.
pub(crate) fn keep(observed: &Observed) -> PlanChoice {
    PlanChoice {
        target: in_force(observed),
        is_new: false,
        plan_statuses: Vec::new(),
        refusal: None,
        wants_nodes: false,
        trouble: None,
        look_again: None,
        asks: Vec::new(),
        awaits: BTreeSet::new(),
        others_have_room: false,
        waits_for_place: false,
        held: None,
    }
}

/// Whether `plan` was made for the current spec, as far as the plan itself records the model.
pub(crate) fn is_up_to_date(observed: &Observed, plan: &InferencePlan) -> bool {
    let deployment = &observed.deployment;
    is_of_source(plan, deployment)
        && model_of_plan(plan).is_some_and(|model| is_made_for(plan, deployment, &model.facts))
}

/// The plan in force, and what keeps it from its place, if `choice` replaces it only because others have that, and by a plan with fewer
/// workers on GPUs: as plans stay, these would not come back to them.
pub(crate) fn taken_gpus(
    observed: &Observed,
    choice: &PlanChoice,
) -> Option<(Arc<InferencePlan>, Cause)> {
    let next = choice.target.as_ref().filter(|_| choice.is_new)?;
    let plan = in_force(observed)?;
    let on_gpus = |plan: &InferencePlan| {
        let ranks = plan.spec.ranks.iter();
        ranks.filter(|rank| rank.is_on_gpu()).count()
    };
    if on_gpus(next) >= on_gpus(&plan) || !is_up_to_date(observed, &plan) {
        return None;
    }
    let deployment = deployment_of_plan(&observed.deployment, &plan);
    let trouble = trouble_of_nodes(observed, &plan, &deployment)?;
    (trouble.reason == NODES_TAKEN).then_some((plan, trouble))
}

/// Whether the nodes of a plan that is being resumed, or that comes back after another was given up, no longer have room for it: while
/// it had no workers, others could be planned there.
pub(crate) fn has_lost_its_place(observed: &Observed, plan: &InferencePlan) -> bool {
    let newest = observed.plans.last();
    let comes_back = newest
        .is_some_and(|newest| newest.spec.generation > plan.spec.generation && has_failed(newest));
    match comes_back {
        true => has_no_way_back(observed, plan),
        false => conditions::is_resuming(observed) && lacks_room(observed, plan, |_| true),
    }
}

/// The same of a plan that is to come back now.
pub(crate) fn has_no_way_back(observed: &Observed, plan: &InferencePlan) -> bool {
    lacks_room(observed, plan, |pod| {
        pod.plan_generation == plan.spec.generation
    })
}

/// Whether a node on which one of a plan's ranks has no Pod lacks room for all of its ranks there. Where each has one of the Pods that
/// count, the plan has its place.
fn lacks_room(
    observed: &Observed,
    plan: &InferencePlan,
    counts: impl Fn(&PodView) -> bool,
) -> bool {
    let is_made = |rank: &PlanRank| {
        let mut pods = observed.pods.iter().filter(|pod| !pod.has_ended());
        pods.any(|pod| counts(pod) && pod.has_rank(&rank.name) && node_of(pod) == rank.node)
    };
    let lacks_pods = plan.spec.ranks.iter().filter(|rank| !is_made(rank));
    let in_question: BTreeSet<&str> = lacks_pods.map(|rank| &*rank.node).collect();
    let mut held: BTreeMap<&str, Holding> = BTreeMap::new();
    for rank in &plan.spec.ranks {
        if in_question.contains(&*rank.node) {
            let node = held.entry(&rank.node).or_default();
            node.add(&rank_holding(&plan.spec, rank));
        }
    }
    let nothing = Holding::default();
    let has_room = |node: &str, held: &Holding| {
        let others = observed.held_by_others.get(node).unwrap_or(&nothing);
        let mut cpus = held.exclusive_cpus.iter();
        let requests = held.requests();
        // A node that is not Ready for a moment keeps what it has.
        let room = room_on(observed, node).filter(|_| !is_lost(observed, node));
        room.is_some_and(|room| requests.max(room) == room)
            && cpus.all(|cpu| !others.exclusive_cpus.contains(cpu))
            && held.claimed_gpus.is_disjoint(&others.claimed_gpus)
    };
    !held.iter().all(|(node, held)| has_room(node, held))
}
