//! Suspended deployments: nothing is planned while they are suspended, and their plan may have lost its place when
//! they resume.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_crds::InferencePlan;

use super::choice::PlanChoice;
use super::existing::{in_force, is_of_source};
use super::new_plan::is_made_for;
use crate::build::rank_holding;
use crate::candidates::rooms;
use crate::conditions;
use crate::model::model_of_plan;
use crate::observed::{Holding, Observed, PodRole, PodView};

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
        held: None,
    }
}

/// Whether `plan` was made for the current spec, as far as the plan itself records the model.
pub(crate) fn is_up_to_date(observed: &Observed, plan: &InferencePlan) -> bool {
    let deployment = &observed.deployment;
    is_of_source(plan, deployment)
        && model_of_plan(plan).is_some_and(|model| is_made_for(plan, deployment, &model.facts))
}

/// Whether the nodes of a plan that is being resumed no longer have room for it: while it was suspended, others could
/// be planned there. Once one of its Pods exists, the plan has its place.
pub(super) fn has_lost_its_place(observed: &Observed, plan: &InferencePlan) -> bool {
    let is_made = |pod: &Arc<PodView>| pod.role != PodRole::Inspect;
    if !conditions::is_resuming(observed) || observed.pods.iter().any(is_made) {
        return false;
    }
    let mut held: BTreeMap<&str, Holding> = BTreeMap::new();
    for rank in &plan.spec.ranks {
        let node = held.entry(&rank.node).or_default();
        node.add(&rank_holding(&plan.spec, rank));
    }
    let rooms = rooms(observed);
    let nothing = Holding::default();
    let has_room = |node: &str, held: &Holding| {
        let others = observed.held_by_others.get(node).unwrap_or(&nothing);
        let mut cpus = held.exclusive_cpus.iter();
        let requests = held.requests();
        rooms
            .get(node)
            .is_some_and(|room| requests.max(*room) == *room)
            && cpus.all(|cpu| !others.exclusive_cpus.contains(cpu))
            && held.claimed_gpus.is_disjoint(&others.claimed_gpus)
    };
    !held.iter().all(|(node, held)| has_room(node, held))
}
