//! The effective spec, and the object through which an autoscaler changes the number of prefill workers.
//!
//! The number of decode workers is in the deployment, where its scale subresource writes it; 0, where it may be that, ends all workers.
//! The number of prefill workers whose mode is External is in an `InferencePoolScaler`, which is created with a number once. From then
//! on the scaler's number counts and the deployment's does not; only its autoscaler writes it.

use std::borrow::Cow;
use std::sync::Arc;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferenceDeploymentStatus,
    InferencePoolScalerStatus, PlanRole, ScalingSpec,
};
use kube_core::ResourceExt;

use crate::build::{BuildContext, prefill_scaler, role_selector};
use crate::choose::in_force;
use crate::decision::ScalerStep;
use crate::observed::Observed;
use crate::plan_record::spec_of_plan;

/// Whether the number of a pool's workers follows the load.
pub fn follows_load(spec: &InferenceDeploymentSpec) -> bool {
    let pools = [&spec.prefill.scaling, &spec.decode.scaling];
    pools.into_iter().flatten().any(ScalingSpec::is_auto)
}

/// The observation with the effective spec: in today's fields, with the number of prefill workers from their scaler, and where the
/// autoscaler of the decode workers asks for none, with the numbers that both had: they come back by the same plan. Validity is decided
/// before, for the spec as it was written.
pub(crate) fn resolved(observed: &Observed) -> Cow<'_, Observed> {
    let written = &*observed.deployment;
    let mut spec = written.spec.clone().translated();
    if is_external(&spec) {
        spec.prefill.replicas = asked(observed).or(spec.prefill.replicas);
    }
    if spec.is_emptied() {
        let newest = observed.plans.last().and_then(|plan| spec_of_plan(plan));
        // Whatever the scaler of the prefill workers says meanwhile is for when they are back.
        spec.prefill.replicas = newest
            .as_ref()
            .map_or(spec.prefill.replicas, |newest| newest.prefill.replicas);
        spec.decode.replicas = newest.and_then(|newest| newest.decode.replicas);
    }
    if spec == written.spec {
        return Cow::Borrowed(observed);
    }
    let deployment = InferenceDeployment {
        spec,
        ..written.clone()
    };
    Cow::Owned(Observed {
        deployment: Arc::new(deployment),
        ..observed.clone()
    })
}

/// Action on the scaler of a valid deployment; `None` if it is as it should be.
pub(crate) fn step(observed: &Observed, status: &InferenceDeploymentStatus) -> Option<ScalerStep> {
    let deployment = &observed.deployment;
    let scaler = match (is_external(&deployment.spec), observed.scaler.as_ref()) {
        (true, Some(scaler)) => scaler,
        (true, None) => return Some(creation(observed)),
        (false, scaler) => {
            return scaler.map(|scaler| ScalerStep::Remove {
                name: scaler.name.clone(),
                uid: scaler.uid.clone(),
            });
        }
    };
    let name = PlanRole::Prefill.as_str();
    let mut pools = status.pool_statuses.iter();
    let pool = pools.find(|pool| pool.name == name);
    let wanted = InferencePoolScalerStatus {
        observed_generation: scaler.generation,
        replicas: pool.map_or(0, |pool| pool.replicas),
        desired_replicas: deployment.spec.prefill.planned_replicas(),
        selector: role_selector(&deployment.name_any(), PlanRole::Prefill),
    };
    (scaler.status.as_ref() != Some(&wanted)).then(|| ScalerStep::Status {
        name: scaler.name.clone(),
        uid: scaler.uid.clone(),
        status: wanted,
    })
}

fn creation(observed: &Observed) -> ScalerStep {
    let deployment = &observed.deployment;
    let context = BuildContext {
        settings: &observed.settings,
        deployment,
        model_key: None,
    };
    let replicas = deployment.spec.prefill.planned_replicas();
    ScalerStep::Create(Box::new(prefill_scaler(&context, replicas)))
}

fn is_external(spec: &InferenceDeploymentSpec) -> bool {
    let scaling = spec.prefill.scaling.as_ref();
    scaling.is_some_and(ScalingSpec::is_external)
}

/// The number of prefill workers that their scaler asks for. If the scaler cannot be seen, because it was deleted or
/// the operator lacks permission, the number in force stays: a pool under load must not shrink for that.
fn asked(observed: &Observed) -> Option<u32> {
    if let Some(scaler) = &observed.scaler {
        return Some(scaler.replicas);
    }
    let spec = spec_of_plan(&*in_force(observed)?)?;
    spec.prefill.replicas.filter(|_| is_external(&spec))
}
