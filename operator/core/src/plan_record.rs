//! Records of what a plan was made from and of its outcome.
//!
//! Plans of earlier versions have them in annotations; each field is read from there if the plan itself lacks it.

use std::collections::BTreeMap;
use std::sync::Arc;

use hearth_crds::{
    GivenUpPlan, InferenceDeploymentSpec, InferencePlan, InferencePlanStatus, ModelFacts,
    STORE_KEY_DIGITS, ServedSpec,
};
use kube_core::ResourceExt as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::names::{
    ANNOTATION_INPUTS, ANNOTATION_MODEL, ANNOTATION_MODEL_KEY, ANNOTATION_MODEL_NODES,
    ANNOTATION_OUTCOME, ANNOTATION_OUTCOME_MESSAGE, ANNOTATION_SOURCE, ANNOTATION_SPEC,
    ANNOTATION_TURN, OUTCOME_FAILED, OUTCOME_SERVING,
};

/// The status that a plan should have.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanStatusChange {
    /// Name of the plan.
    pub name: String,
    /// Its whole status.
    pub status: InferencePlanStatus,
}

impl PlanStatusChange {
    /// The status of `plan`, with the fields that `news` sets.
    pub(crate) fn of(plan: &InferencePlan, news: InferencePlanStatus) -> Self {
        let mut status = plan.status.clone().unwrap_or_default();
        status.merge(news);
        Self {
            name: plan.name_any(),
            status,
        }
    }
}

/// Whether all ranks of the plan have ever been ready at once.
pub fn has_served(plan: &InferencePlan) -> bool {
    outcome(plan) == OUTCOME_SERVING
}

/// Whether the plan was given up.
pub fn has_failed(plan: &InferencePlan) -> bool {
    outcome(plan) == OUTCOME_FAILED
}

/// The plan whose nodes a deployment holds, of its plans in the order of their generations: the newest; once that was given up, the
/// one that came back, whose generation is the `followed` one of the deployment's status, and until that says so the newest that has
/// served.
pub fn ahead(plans: &[Arc<InferencePlan>], followed: Option<u64>) -> Option<&Arc<InferencePlan>> {
    let newest = plans.last()?;
    if !has_failed(newest) {
        return Some(newest);
    }
    let served = || plans.iter().rev().filter(|plan| has_served(plan));
    let told = served().find(|plan| Some(plan.spec.generation) == followed);
    told.or_else(|| served().next()).or(Some(newest))
}

/// Reason why a plan was given up.
pub(crate) fn failure(plan: &InferencePlan) -> &str {
    let told = plan.status.as_ref();
    told.and_then(|status| status.message.as_deref())
        .unwrap_or_else(|| annotation(plan, ANNOTATION_OUTCOME_MESSAGE))
}

/// Reason why the plan does not hold back other deployments from its worker image although it does not serve; empty:
/// it does hold them back.
pub(crate) fn passes_turn(plan: &InferencePlan) -> &str {
    let told = plan.status.as_ref();
    told.and_then(|status| status.passes_turn.as_deref())
        .unwrap_or_else(|| annotation(plan, ANNOTATION_TURN))
}

fn outcome(plan: &InferencePlan) -> &str {
    let told = plan.status.as_ref();
    told.and_then(|status| status.outcome.as_deref())
        .unwrap_or_else(|| annotation(plan, ANNOTATION_OUTCOME))
}

/// Digest of the newest inputs that lead to the plan; empty if it is not recorded.
pub fn inputs_digest(plan: &InferencePlan) -> &str {
    let served = served(plan).map(|served| served.digest.as_str());
    let made = || Some(plan.spec.inputs.as_ref()?.digest.as_str());
    served
        .or_else(made)
        .unwrap_or_else(|| annotation(plan, ANNOTATION_INPUTS))
}

/// The newest spec that leads to the plan; `None` if it is not recorded or this version cannot read it.
pub fn spec_of_plan(plan: &InferencePlan) -> Option<InferenceDeploymentSpec> {
    let served = served(plan).map(|served| &served.deployment_spec);
    let made = || Some(&plan.spec.inputs.as_ref()?.deployment_spec);
    let spec: InferenceDeploymentSpec = match served.or_else(made) {
        Some(spec) => read(spec)?,
        None => serde_json::from_str(annotation(plan, ANNOTATION_SPEC)).ok()?,
    };
    Some(spec.translated())
}

/// Facts of the plan's model.
pub(crate) fn model_facts(plan: &InferencePlan) -> Option<ModelFacts> {
    match &plan.spec.inputs {
        Some(inputs) => read(&inputs.model_facts),
        None => serde_json::from_str(annotation(plan, ANNOTATION_MODEL)).ok(),
    }
}

/// Nodes that have the plan's model, as far as recorded; empty: every node.
pub(crate) fn model_nodes(plan: &InferencePlan) -> Vec<&str> {
    match &plan.spec.inputs {
        Some(inputs) => inputs.model_nodes.iter().map(String::as_str).collect(),
        None => annotation(plan, ANNOTATION_MODEL_NODES)
            .split(',')
            .filter(|name| !name.is_empty())
            .collect(),
    }
}

/// Digest of the source of the plan's model; empty if it is not recorded.
pub(crate) fn source_digest_of(plan: &InferencePlan) -> &str {
    match &plan.spec.inputs {
        Some(inputs) => &inputs.source_digest,
        None => annotation(plan, ANNOTATION_SOURCE),
    }
}

/// The given-up plan that `plan` runs instead of.
pub(crate) fn instead_of(plan: &InferencePlan) -> Option<&GivenUpPlan> {
    plan.spec.inputs.as_ref()?.instead_of.as_ref()
}

/// Name of a plan's fetched model in the nodes' stores; `None` for other sources.
pub fn model_key_of(plan: &InferencePlan) -> Option<String> {
    match &plan.spec.inputs {
        Some(inputs) => inputs.model_key.clone(),
        None => model_key_in_annotations(plan.metadata.annotations.as_ref()?),
    }
}

/// The commit of a plan's model, if it is of a hub and was known when the plan was made.
pub(crate) fn model_commit_of(plan: &InferencePlan) -> Option<&str> {
    plan.spec.inputs.as_ref()?.model_commit.as_deref()
}

/// See [`model_key_of`]: the key of a plan that cannot be parsed, from its spec and its annotations.
pub fn model_key_of_raw(
    spec: &Value,
    annotations: Option<&BTreeMap<String, String>>,
) -> Option<String> {
    match spec.pointer("/inputs") {
        Some(inputs) => Some(inputs.pointer("/modelKey")?.as_str()?.to_owned()),
        None => model_key_in_annotations(annotations?),
    }
}

fn model_key_in_annotations(annotations: &BTreeMap<String, String>) -> Option<String> {
    if let Some(key) = annotations.get(ANNOTATION_MODEL_KEY) {
        return Some(key.clone());
    }
    // The first plans record the spec alone; a model was then stored under the first half of its checksum.
    let text = annotations
        .get(ANNOTATION_SPEC)
        .filter(|text| text.contains("\"http\""))?;
    let spec: InferenceDeploymentSpec = serde_json::from_str(text).ok()?;
    let sha256 = spec.model.source.http?.sha256;
    Some(sha256.get(..STORE_KEY_DIGITS).unwrap_or(&sha256).to_owned())
}

/// Whether the plan records the spec that it was made for.
pub(crate) fn records_spec(plan: &InferencePlan) -> bool {
    plan.spec.inputs.is_some() || !annotation(plan, ANNOTATION_SPEC).is_empty()
}

fn served(plan: &InferencePlan) -> Option<&ServedSpec> {
    plan.status.as_ref()?.serves.as_ref()
}

fn read<T: DeserializeOwned>(value: &Value) -> Option<T> {
    T::deserialize(value).ok()
}

/// An annotation; empty if it is missing.
pub(crate) fn annotation<'a>(plan: &'a InferencePlan, key: &str) -> &'a str {
    let annotations = plan.metadata.annotations.as_ref();
    annotations
        .and_then(|annotations| annotations.get(key))
        .map_or("", String::as_str)
}
