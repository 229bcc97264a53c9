//! Changes to a new worker image: the time for a deployment to change, and the plan for it.
//!
//! An image is part of a plan, so that a change of image is a rollout like any other: beside what runs or after it,
//! and back to the plan with the previous image if its workers do not become ready. The operator's new image reaches
//! one deployment after another; the first one that is given up holds back the rest.

use std::sync::Arc;

use hearth_crds::{InferenceDeploymentSpec, InferencePlan, PlanInputs};

use super::choice::{PlanChoice, refuse};
use super::existing::nodes_of;
use super::new_plan::{Refusal, made, next_generation};
use super::refusals::{self, Refusals};
use crate::build::{BuildContext, deployment_of_plan, kept_spec, plan_object};
use crate::candidates::is_down;
use crate::cause::Cause;
use crate::model::builtin;
use crate::model::{Model, model_of_plan};
use crate::observed::Observed;
use crate::observed::Turn;
use crate::plan_record::{
    has_failed, has_served, inputs_digest, instead_of, model_key_of, source_digest_of,
};

/// The image of a plan for another spec. A serving deployment changes to the operator's image in its turn, not along
/// with another change.
pub(crate) fn image_of_next(observed: &Observed) -> &str {
    let serves = observed.plans.iter().rev().find(|plan| has_served(plan));
    let image = serves.and_then(|plan| plan.spec.worker_image.as_deref());
    image.unwrap_or(&observed.settings.worker_image)
}

/// The image of a plan; for plans of operators that did not record one, this operator's.
pub(crate) fn image_of<'a>(observed: &'a Observed, plan: &'a InferencePlan) -> &'a str {
    let image = plan.spec.worker_image.as_deref();
    image.unwrap_or(&observed.settings.worker_image)
}

/// Replaces the target with the same plan for the operator's worker image, if it has a different one. Serving
/// deployments do so in turn, and not at all if the image has failed before.
pub(crate) fn renew(observed: &Observed, choice: &mut PlanChoice) {
    let image = &observed.settings.worker_image;
    let Some(target) = choice.target.clone() else {
        return;
    };
    let Some(before) = target.spec.worker_image.as_ref().filter(|it| *it != image) else {
        return;
    };
    let is_tried = |newest: &Arc<InferencePlan>| {
        let instead_of = instead_of(newest).filter(|it| it.worker_image.as_ref() == Some(image));
        has_failed(newest) && newest.spec.worker_image.as_ref() == Some(image)
            || instead_of.is_some()
    };
    let is_down = |node: &str| is_down(observed, node);
    if observed.plans.last().is_some_and(is_tried) || nodes_of(&target).any(is_down) {
        return;
    }
    let served = observed.plans.iter().rev().find(|plan| has_served(plan));
    match served {
        // Another change is under way, with the image that is known to serve.
        Some(served)
            if !has_served(&target) && served.spec.worker_image.as_ref() == Some(before) =>
        {
            return;
        }
        Some(_) if has_served(&target) && observed.turn != Turn::Free => {
            choice.held = Some(held_words(observed, before, image));
            return;
        }
        _ => {}
    }
    match renewed(observed, &target) {
        Ok(plan) => {
            choice.target = Some(Arc::new(plan));
            choice.is_new = true;
        }
        Err(refusal) => refuse(choice, observed, &refusal),
    }
}

/// A plan with the same ranks in the same places. A built-in model may be another one in another image: then
/// everything is planned anew.
fn renewed(observed: &Observed, target: &InferencePlan) -> Result<InferencePlan, Box<Refusal>> {
    let image = &observed.settings.worker_image;
    let deployment = deployment_of_plan(&observed.deployment, target);
    if let (Some(builtin), Some(told)) =
        (&deployment.spec.model.source.builtin, model_of_plan(target))
        && let Some(facts) = builtin::facts(&builtin.name)
        && facts != told.facts
    {
        let model = Model { facts, ..told };
        return made(observed, &deployment, &model, image, &Refusals::new());
    }
    let key = model_key_of(target);
    let context = BuildContext {
        settings: &observed.settings,
        deployment: &deployment,
        model_key: key.as_deref(),
    };
    let mut spec = target.spec.clone();
    spec.generation = next_generation(observed);
    spec.worker_image = Some(image.clone());
    spec.why.push(format!(
        "the workers' image is {image} now; all else is as in plan {}",
        target.spec.generation
    ));
    spec.inputs = inputs_of(target, &deployment.spec);
    Ok(plan_object(&context, spec))
}

/// Inputs of the target, with the spec that it serves now.
fn inputs_of(target: &InferencePlan, spec: &InferenceDeploymentSpec) -> Option<PlanInputs> {
    let told = model_of_plan(target)?;
    Some(PlanInputs {
        digest: inputs_digest(target).to_owned(),
        deployment_spec: kept_spec(spec),
        model_facts: serde_json::to_value(&told.facts).ok()?,
        model_nodes: told.nodes.into_iter().flatten().collect(),
        source_digest: source_digest_of(target).to_owned(),
        model_key: told.key,
        model_commit: told.commit,
        refusals: refusals::as_inputs(&refusals::left_out(target)),
        lost_gpus: {
            let inputs = target.spec.inputs.as_ref();
            inputs.map_or_else(Vec::new, |inputs| inputs.lost_gpus.clone())
        },
        instead_of: None,
    })
}

fn held_words(observed: &Observed, before: &str, image: &str) -> Cause {
    match &observed.turn {
        Turn::HeldBack(other) => {
            // The names of another namespace are not for those who read this one.
            let own = observed.deployment.metadata.namespace.as_deref();
            let other = match own == Some(&*other.namespace) {
                true => other.to_string(),
                false => "another deployment".to_owned(),
            };
            Cause::trouble(
                "ImageHeldBack",
                format!(
                    "it stays with the worker image {before}: {other} did not get ready with {image}. Set another \
                     image.workerTag, or change or delete that deployment"
                ),
            )
        }
        Turn::After(_) | Turn::Free => {
            // Not by name: the message would change with each deployment that is done.
            Cause::waiting(
                "WaitingForTurn",
                format!(
                    "it changes from the worker image {before} to {image} when the deployments before it have"
                ),
            )
        }
    }
}
