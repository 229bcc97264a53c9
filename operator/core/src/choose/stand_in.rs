//! Numbers of workers after a plan was given up.
//!
//! What was given up is tried again when the spec asks for something else, and another number of workers is nothing else: an
//! autoscaler asks for one whenever it likes. So the plan that serves gets the number, and says instead of which plan it runs.

use std::sync::Arc;

use hearth_crds::{GivenUpPlan, InferenceDeployment, InferenceDeploymentSpec, InferencePlan};
use kube_core::ResourceExt;

use super::refusals;
use super::scale::{but_for_numbers, in_place};
use super::{Choice, in_force, is_same_work, made, refuse, renew};
use crate::build::{deployment_of_plan, model_key};
use crate::candidates::Candidates;
use crate::model::told_by;
use crate::observed::Observed;
use crate::plan_record::{failure, has_failed, spec_of_plan};

/// The plan that was given up for the spec as it is, where no more than numbers of workers have changed since.
pub(super) fn given_up(observed: &Observed) -> Option<GivenUpPlan> {
    let (newest, deployment) = (observed.plans.last()?, &observed.deployment);
    let before = spec_of_plan(newest)?;
    if let Some(given_up) = instead_of(newest) {
        return is_of(given_up, &deployment.spec).then(|| given_up.clone());
    }
    let is_same = has_failed(newest)
        && numbers(&before) != numbers(&deployment.spec)
        && is_same_but_for_numbers(newest, &before, deployment);
    (is_same && in_force(observed)?.name_any() != newest.name_any()).then(|| GivenUpPlan {
        generation: newest.spec.generation,
        digest: wish(&deployment.spec),
        worker_image: newest.spec.worker_image.clone(),
        message: failure(newest).to_owned(),
    })
}

/// Chooses the plan in force with the numbers of the spec.
pub(super) fn choose(observed: &Observed, choice: &mut Choice, given_up: GivenUpPlan) {
    let now = &observed.deployment.spec;
    let has_numbers = |plan: &Arc<InferencePlan>| {
        spec_of_plan(plan).is_some_and(|spec| numbers(&spec) == numbers(now))
    };
    // One that was given up for its numbers is not tried again with the same ones.
    if observed.plans.last().is_some_and(has_numbers) {
        return;
    }
    let Some(base) = choice.target.clone().filter(|base| !has_numbers(base)) else {
        return;
    };
    let mut deployment = deployment_of_plan(&observed.deployment, &base);
    let Some(model) = told_by(&base) else {
        return;
    };
    let (prefill, decode) = (&mut deployment.spec.prefill, &mut deployment.spec.decode);
    (prefill.replicas, decode.replicas) = (now.prefill.replicas, now.decode.replicas);
    prefill.scaling.clone_from(&now.prefill.scaling);
    decode.scaling.clone_from(&now.decode.scaling);
    let image = renew::image_of(observed, &base);
    let told = refusals::told_by(&base);
    match made(observed, &deployment, &model, image, &told) {
        Ok(mut plan) => {
            let free = Candidates::of(observed, &deployment.spec.placement);
            if let Some(in_place) = in_place(&base.spec, &plan.spec, &free) {
                plan.spec = in_place;
            }
            if !is_same_work(&base, &plan) {
                choice.target = Some(Arc::new(of(plan, Some(&given_up))));
                choice.is_new = true;
            }
        }
        Err(refusal) => refuse(choice, observed, &refusal),
    }
}

/// `plan`, which says instead of which plan it runs.
pub(super) fn of(mut plan: InferencePlan, instead_of: Option<&GivenUpPlan>) -> InferencePlan {
    if let Some(inputs) = &mut plan.spec.inputs {
        inputs.instead_of = instead_of.cloned();
    }
    plan
}

/// The plan that was given up and instead of which `plan` runs.
pub(crate) fn instead_of(plan: &InferencePlan) -> Option<&GivenUpPlan> {
    plan.spec.inputs.as_ref()?.instead_of.as_ref()
}

/// Whether the spec asks for what was given up then, apart from numbers of workers.
pub(crate) fn is_of(given_up: &GivenUpPlan, spec: &InferenceDeploymentSpec) -> bool {
    given_up.digest == wish(spec)
}

/// Digest of what plans follow from, apart from the nodes, the model's facts and numbers of workers.
fn wish(spec: &InferenceDeploymentSpec) -> String {
    but_for_numbers(spec, None)
}

fn numbers(spec: &InferenceDeploymentSpec) -> (u32, u32) {
    let (prefill, decode) = (&spec.prefill, &spec.decode);
    (prefill.planned_replicas(), decode.planned_replicas())
}

/// Whether `plan`, made for the spec `before`, was made for the deployment as it is, apart from numbers of workers. A plan
/// shows no secrets of URLs; the key of the model tells them apart.
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
    told_by(plan).is_some_and(|told| told.key == key) && shown(before) == shown(&deployment.spec)
}
