//! Makes a plan for a spec, and says why there is none.

use hearth_crds::{
    AutoscalingSpec, InferenceDeployment, InferenceDeploymentSpec, InferencePlan, ModelFacts,
    PlanInputs, PodTemplateSpec,
};
use hearth_planner::{CpuOffer, GpuOffer, PlanError, PlanInput};
use kube_core::ResourceExt;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::lost_gpus;
use super::refusals::{self, Refusals};
use crate::build::{BuildContext, kept_spec, model_key, model_path, plan_object, source_digest};
use crate::candidates::Candidates;
use crate::cause::Cause;
use crate::model::{Model, model_of_plan};
use crate::observed::Observed;
use crate::plan_record::{inputs_digest, spec_of_plan};

/// The generation of the next plan: above those of the plans that somebody has deleted, whose Pods would be taken for its
/// own.
pub(crate) fn next_generation(observed: &Observed) -> u64 {
    let plans = observed.plans.iter().map(|plan| plan.spec.generation);
    let pods = observed.pods.iter().map(|pod| pod.plan_generation);
    let status = observed.deployment.status.as_ref();
    let told = status.and_then(|status| Some(status.plan.as_ref()?.generation));
    // Annotations of Pods are anybody's in the namespace.
    let seen = plans.chain(pods).chain(told).filter(|it| *it < 1 << 52);
    seen.max().unwrap_or(0) + 1
}

/// Whether a plan was made for this spec and this model. If another version of the operator encoded its inputs
/// differently, their meaning counts, not the encoding.
pub(super) fn is_made_for(
    plan: &InferencePlan,
    deployment: &InferenceDeployment,
    facts: &ModelFacts,
) -> bool {
    if inputs_digest(plan) == inputs(&deployment.spec, facts) {
        return true;
    }
    let (Some(mut then), Some(told)) = (spec_of_plan(plan), model_of_plan(plan)) else {
        return false;
    };
    // A plan stores no secrets of URLs; the model's key distinguishes them.
    let mut now = deployment.spec.clone();
    (now.model, then.model) = (now.model.shown(), then.model.shown());
    let key = model_key(deployment, &deployment.spec.model.source);
    told.key == key && Inputs::of(&then, &told.facts) == Inputs::of(&now, facts)
}

/// Inputs of a plan, apart from the nodes.
#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inputs<'a> {
    model: &'a hearth_crds::ModelSpec,
    strategy: hearth_crds::Strategy,
    prefill: &'a hearth_crds::PrefillSpec,
    decode: &'a hearth_crds::DecodeSpec,
    placement: &'a hearth_crds::PlacementSpec,
    objectives: &'a hearth_crds::ObjectivesSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    hold_timeout: Option<&'a hearth_crds::DurationText>,
    #[serde(skip_serializing_if = "hearth_crds::GatewaySpec::is_default")]
    gateway: &'a hearth_crds::GatewaySpec,
    #[serde(skip_serializing_if = "PodTemplateSpec::is_empty")]
    pod_template: &'a PodTemplateSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    facts: Option<&'a ModelFacts>,
}

impl<'a> Inputs<'a> {
    fn of(spec: &'a InferenceDeploymentSpec, facts: impl Into<Option<&'a ModelFacts>>) -> Self {
        // A field that is added to the spec must be considered here.
        let InferenceDeploymentSpec {
            model,
            strategy,
            prefill,
            decode,
            placement,
            objectives,
            autoscaling:
                AutoscalingSpec {
                    scale_to_zero_after: _,
                    hold_timeout,
                    keep: _,
                    preload: _,
                    scale_down_stabilization: _,
                },
            endpoint: _,
            rollout: _,
            gateway,
            pod_template,
            priority: _,
            suspend: _,
        } = spec;
        Self {
            model,
            strategy: *strategy,
            prefill,
            decode,
            placement,
            objectives,
            hold_timeout: hold_timeout.as_ref(),
            gateway,
            pod_template,
            facts: facts.into(),
        }
    }
}

pub(super) fn inputs<'a>(
    spec: &'a InferenceDeploymentSpec,
    facts: impl Into<Option<&'a ModelFacts>>,
) -> String {
    let text = serde_json::to_string(&Inputs::of(spec, facts)).unwrap_or_default();
    let digest = Sha256::digest(text.as_bytes());
    digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The next plan for the spec of `deployment`.
pub(crate) fn made(
    observed: &Observed,
    deployment: &InferenceDeployment,
    model: &Model,
    image: &str,
    refusals: &Refusals,
) -> Result<InferencePlan, Box<Refusal>> {
    let spec = &deployment.spec;
    let candidates = Candidates::of(observed, &spec.placement);
    let candidates = match &model.nodes {
        Some(nodes) => candidates.only(|name| nodes.contains(name), "does not have the model"),
        None => candidates,
    };
    let candidates = candidates.only(
        |name| !refusals.contains_key(name),
        "refused a worker of the plan before",
    );
    let context = BuildContext {
        settings: &observed.settings,
        deployment,
        model_key: model.key.as_deref(),
    };
    let generation = next_generation(observed);
    let mut profiles: Vec<_> = candidates.free.values().cloned().collect();
    let lost = lost_gpus::known(observed);
    lost_gpus::leave_out(&lost, &mut profiles);
    let planned = hearth_planner::plan(&PlanInput {
        name: &deployment.name_any(),
        namespace: &deployment.namespace().unwrap_or_default(),
        generation,
        spec,
        facts: &model.facts,
        model_path: &model_path(&context, &spec.model.source),
        profiles: &profiles,
        gpus: GpuOffer::Cluster {
            plugin: &candidates.gpus_free,
            claimable: &candidates.claimable,
        },
        cpus: CpuOffer::Requests(&candidates.cpu_rooms),
    });
    let mut planned = planned.map_err(|error| Box::new(Refusal { error, candidates }))?;
    planned.worker_image = Some(image.to_owned());
    planned.why.extend(refusals::sentences(refusals));
    planned.why.extend(lost_gpus::sentences(&lost));
    planned.inputs = Some(PlanInputs {
        digest: inputs(spec, &model.facts),
        deployment_spec: kept_spec(spec),
        model_facts: serde_json::to_value(&model.facts).unwrap_or_default(),
        model_nodes: model.nodes.iter().flatten().cloned().collect(),
        source_digest: source_digest(&spec.model.source, model.key.as_deref()),
        model_key: model.key.clone(),
        model_commit: model.commit.clone(),
        refusals: refusals::as_inputs(refusals),
        lost_gpus: lost,
        instead_of: None,
    });
    Ok(plan_object(&context, planned))
}

/// The planner's error, with the candidates that it was offered.
pub(crate) struct Refusal {
    pub(super) error: PlanError,
    candidates: Candidates,
}

impl Refusal {
    pub(super) fn cause(&self) -> Cause {
        let reason = match &self.error {
            PlanError::Unsupported(_) => "Unsupported",
            PlanError::NoNodes(_) => "NoNodes",
            PlanError::BadProfile { .. } => "BadProfile",
            PlanError::InsufficientMemory { .. } | PlanError::NoRoomInRing { .. } => {
                "InsufficientMemory"
            }
            PlanError::NoRing(_) => "BadProfile",
            PlanError::KvBudgetTooSmall { .. } | PlanError::KvBudgetTiny { .. } => {
                "KvBudgetTooSmall"
            }
            PlanError::ContextTooLong { .. } => "ContextTooLong",
            PlanError::TooFewCores { .. } => "TooFewCores",
            PlanError::InsufficientCpu { .. } => "InsufficientCpu",
            PlanError::TooFewGpus { .. } | PlanError::TooFewPeers { .. } => "TooFewGpus",
            PlanError::NoUsableGpu { .. } => "NoUsableGpu",
            PlanError::InsufficientGpuMemory { .. } => "InsufficientGpuMemory",
        };
        let words = match &self.error {
            PlanError::NoNodes(_) => "no node can take the workers".to_owned(),
            error => one_line(&error.to_string()),
        };
        let left_out = match &self.error {
            error if lacks_nodes(error) => self.candidates.left_out_sentence(),
            _ => None,
        };
        let message = match left_out {
            Some(left_out) => format!("{words}; {left_out}"),
            None if self.candidates.free.is_empty() => {
                format!("{words}: no node of the cluster has been measured")
            }
            None => words,
        };
        Cause::trouble(reason, message)
    }
}

/// Whether another node could help.
pub(super) fn lacks_nodes(error: &PlanError) -> bool {
    matches!(
        error,
        PlanError::NoNodes(_)
            | PlanError::InsufficientMemory { .. }
            | PlanError::NoRoomInRing { .. }
            | PlanError::TooFewCores { .. }
            | PlanError::InsufficientCpu { .. }
            | PlanError::TooFewGpus { .. }
            | PlanError::TooFewPeers { .. }
            | PlanError::NoUsableGpu { .. }
            | PlanError::InsufficientGpuMemory { .. }
    )
}

/// Joins two lines, the problem and the remedy, into one sentence.
fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join("; ")
}
