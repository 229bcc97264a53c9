//! Changes in the number of workers after a plan was given up.
//!
//! A plan that was given up is tried again when the spec asks for something else, and another number of workers does
//! not count as that: an autoscaler may ask for one at any time. The serving plan gets the number instead, and records
//! the plan that it replaces.

use std::sync::Arc;

use hearth_crds::{GivenUpPlan, InferenceDeployment, InferenceDeploymentSpec, InferencePlan};
use kube_core::ResourceExt;

use super::choice::{PlanChoice, refuse, refuse_number};
use super::existing::{in_force, is_same_work};
use super::new_plan::made;
use super::scale::{but_for_numbers, other_numbers, rollout_of};
use super::{refusals, renew};
use crate::build::{deployment_of_plan, model_key};
use crate::candidates::Candidates;
use crate::model::model_of_plan;
use crate::observed::Observed;
use crate::plan_record::{failure, has_failed, instead_of, spec_of_plan};

/// The plan that was given up for the current spec, if another number of workers has been asked for since its rollout began,
/// or if the plan in force already runs instead of it.
pub(super) fn given_up(observed: &Observed) -> Option<GivenUpPlan> {
    let (newest, deployment) = (observed.plans.last()?, &observed.deployment);
    let before = spec_of_plan(newest)?;
    if let Some(given_up) = instead_of(newest) {
        return is_of(given_up, &deployment.spec).then(|| given_up.clone());
    }
    if !has_failed(newest) || !is_same_but_for_numbers(newest, &before, deployment) {
        return None;
    }
    let in_force = in_force(observed).filter(|it| it.name_any() != newest.name_any())?;
    let serving = spec_of_plan(&in_force)?;
    let now = numbers(&deployment.spec);
    let rolled_out = rollout_of(observed, newest);
    let mut begun = rolled_out.iter().filter_map(|plan| spec_of_plan(plan));
    // Of a number that came with what was given up nobody knows whether it is to blame.
    let came_later = numbers(&before) != now || begun.any(|spec| numbers(&spec) != now);
    // Nothing else was new: it was given up for its number.
    let is_of_number = numbers(&before) == now && wish(&serving) == wish(&before);
    let is_due = numbers(&serving) != now && came_later && !is_of_number;
    is_due.then(|| GivenUpPlan {
        generation: newest.spec.generation,
        digest: wish(&deployment.spec),
        worker_image: newest.spec.worker_image.clone(),
        message: failure(newest).to_owned(),
    })
}

/// Chooses the plan in force with the spec's numbers of workers.
pub(super) fn choose(observed: &Observed, choice: &mut PlanChoice, given_up: GivenUpPlan) {
    let now = &observed.deployment.spec;
    let has_numbers = |plan: &Arc<InferencePlan>| {
        spec_of_plan(plan).is_some_and(|spec| numbers(&spec) == numbers(now))
    };
    // One that was given up for its numbers is not tried again with the same ones.
    let is_tried =
        |newest: &Arc<InferencePlan>| instead_of(newest).is_some() && has_numbers(newest);
    if observed.plans.last().is_some_and(is_tried) {
        return;
    }
    let Some(base) = choice.target.clone().filter(|base| !has_numbers(base)) else {
        return;
    };
    let mut deployment = deployment_of_plan(&observed.deployment, &base);
    let Some(model) = model_of_plan(&base) else {
        return;
    };
    let (prefill, decode) = (&mut deployment.spec.prefill, &mut deployment.spec.decode);
    (prefill.replicas, decode.replicas) = (now.prefill.replicas, now.decode.replicas);
    prefill.scaling.clone_from(&now.prefill.scaling);
    decode.scaling.clone_from(&now.decode.scaling);
    let image = renew::image_of(observed, &base);
    let told = refusals::refusals_for_next(&base);
    let made = |deployment: &InferenceDeployment| made(observed, deployment, &model, image, &told);
    match made(&deployment) {
        Ok(mut plan) => {
            let free = Candidates::of(observed, &deployment.spec.placement);
            let made = |deployment: &InferenceDeployment| made(deployment).ok();
            match other_numbers(&base.spec, &plan.spec, &deployment, &free, &made) {
                Ok(in_place) => plan.spec = in_place.unwrap_or(plan.spec),
                Err(cause) => return refuse_number(choice, cause),
            }
            if !is_same_work(&base, &plan) {
                choice.target = Some(Arc::new(of(plan, Some(&given_up))));
                choice.is_new = true;
            }
        }
        Err(refusal) => refuse(choice, observed, &refusal),
    }
}

/// Returns `plan` with a record of the plan that it runs instead of, if any.
pub(super) fn of(mut plan: InferencePlan, instead_of: Option<&GivenUpPlan>) -> InferencePlan {
    if let Some(inputs) = &mut plan.spec.inputs {
        inputs.instead_of = instead_of.cloned();
    }
    plan
}

/// Whether the spec asks for what was given up, apart from numbers of workers.
pub(crate) fn is_of(given_up: &GivenUpPlan, spec: &InferenceDeploymentSpec) -> bool {
    given_up.digest == wish(spec)
}

/// Digest of a plan's inputs, apart from the nodes, the model's facts and numbers of workers.
fn wish(spec: &InferenceDeploymentSpec) -> String {
    but_for_numbers(spec, None)
}

fn numbers(spec: &InferenceDeploymentSpec) -> (u32, u32) {
    let (prefill, decode) = (&spec.prefill, &spec.decode);
    (prefill.planned_replicas(), decode.planned_replicas())
}

/// Whether `plan`, made for the spec `before`, was made for the current deployment, apart from numbers of workers. A
/// plan stores no secrets of URLs; the model's key distinguishes them.
fn is_same_but_for_numbers(
    plan: &InferencePlan,
    before: &InferenceDeploymentSpec,
    deployment: &InferenceDeployment,
) -> bool {
    let shown = |spec: &InferenceDeploymentSpec| {
        let mut spec = spec.clone();
        spec.model = spec.model.shown();
        wish(&spec)
    };
    let key = model_key(deployment, &deployment.spec.model.source);
    model_of_plan(plan).is_some_and(|told| told.key == key)
        && shown(before) == shown(&deployment.spec)
}
