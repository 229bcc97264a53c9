//! Builds objects of the cluster from a plan: pure, no client.
//!
//! - [`rank_pod`]: the Pod of one rank, or of two that share a container, named after a digest of everything that defines it, so that an unchanged rank
//!   keeps its Pod across plans.
//! - [`inspect_pod`]: a Pod that reads a model's facts where only a Pod can.
//! - [`objects`]: Service, PodDisruptionBudgets and NetworkPolicies.
//! - [`plan_object`]: the plan as it is stored.
//!
//! **Invariants**
//! - Everything is derived from the spec that the plan was made for: [`deployment_of_plan`] returns the deployment as
//!   it was then, so that an older plan comes back with its own model.
//! - Pods satisfy Pod Security `restricted`, except for models in directories of nodes, which need hostPath volumes.

mod canonical;
mod claims;
mod collector;
#[cfg(test)]
mod digest_fields_tests;
#[cfg(test)]
mod digest_tests;
#[cfg(test)]
mod gpu_tests;
mod holding;
mod lines;
mod objects;
mod pod;
#[cfg(test)]
mod policy_tests;
mod probes;
#[cfg(test)]
mod secrets_tests;
mod template;
#[cfg(test)]
mod template_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferencePlan, InferencePlanSpec, ModelSource,
    PlanRank, PlanRole,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_core::DynamicObject;
use kube_core::{Resource, ResourceExt};
use serde_json::Value;

use self::canonical::source_identity;
use crate::names::{
    APP, BUILTIN_DIRECTORY, LABEL_APP, LABEL_COMPONENT, LABEL_DEPLOYMENT, LABEL_MANAGED_BY,
    LABEL_ROLE, MANAGER, SOURCE_DIRECTORY, plan_name,
};
use crate::observed::{SecondRank, Settings};
use crate::plan_record::{model_key_of, spec_of_plan};
pub use canonical::short_digest;
pub use holding::rank_holding;
pub(crate) use holding::{held_memory_bytes, planned_rank};
pub use objects::{Beside, objects, prefill_scaler, role_selector, unwanted};
pub use pod::{inspect_pod, rank_pod};

/// Inputs to the objects besides the plan.
#[derive(Clone, Copy, Debug)]
pub struct BuildContext<'a> {
    /// The operator's settings.
    pub settings: &'a Settings,
    /// The deployment, with the spec that the plan was made for: see [`deployment_of_plan`].
    pub deployment: &'a InferenceDeployment,
    /// Name of a fetched model in the nodes' stores: see [`model_key_of`]. `None` for other sources.
    pub model_key: Option<&'a str>,
}

/// The Pod that a rank of a plan should have, and the node's resources that it holds.
#[derive(Clone, Debug)]
pub struct DesiredPod {
    /// The rank's name, such as `decode-0`.
    pub rank: String,
    /// Its role.
    pub role: PlanRole,
    /// The rank that shares its container: see [`PlanRank::in_pod_of`].
    pub second: Option<SecondRank>,
    /// Names of the members of the group that it is the head of, by place; empty if it is none.
    pub group: Vec<String>,
    /// Digest of the Pod as this operator writes it.
    pub form: String,
    /// Name of the Pod, which ends in the digest of everything that defines it.
    pub name: String,
    /// Name that it has while another worker of its node requests the memory for the weights, if it may stay as it is without that
    /// one: it is charged for what it touches, and no limit keeps it from that. The claim of GPUs is for one Pod as it is.
    pub without_weights: Option<String>,
    /// The node that it is to run on.
    pub node: String,
    /// CPU that it requests, in thousandths of a CPU.
    pub cpu_millis: u64,
    /// Memory that it requests; only the first worker of a node includes the weights.
    pub memory_bytes: u64,
    /// GPUs that it requests.
    pub gpus: u32,
    /// CPUs that it has exclusively, by the kernel's number.
    pub exclusive_cpus: Vec<u32>,
    /// UUIDs of the GPUs that it claims.
    pub claimed_gpus: Vec<String>,
    /// Template of its claim, if it claims GPUs.
    pub claim_template: Option<DynamicObject>,
    /// The Pod itself.
    pub pod: Pod,
}

/// The Pods of all ranks, in the plan's order.
pub fn rank_pods(context: &BuildContext<'_>, plan: &InferencePlanSpec) -> Vec<DesiredPod> {
    let pod = |rank: &PlanRank| rank_pod(context, plan, rank);
    let with_pods = plan.ranks.iter().filter(|rank| rank.in_pod_of.is_none());
    with_pods.map(pod).collect()
}

impl DesiredPod {
    /// The same as it runs, if it does under another name. The request of a Pod cannot be changed, and a worker that runs is not to
    /// start anew because the one that requested the memory for the weights is not needed any more: until it does for another reason,
    /// only the ledger counts that memory.
    pub(crate) fn renamed_as_running(mut self, is_there: impl Fn(&str) -> bool) -> Self {
        let name = self.without_weights.take().filter(|name| is_there(name));
        if let Some(name) = name.filter(|_| !is_there(&self.name)) {
            self.pod.metadata.name = Some(name.clone());
            self.name = name;
        }
        self
    }
}

/// The plan as it is stored.
pub fn plan_object(context: &BuildContext<'_>, spec: InferencePlanSpec) -> InferencePlan {
    let name = plan_name(&context.name(), spec.generation);
    let mut plan = InferencePlan::new(&name, spec);
    plan.metadata = context.metadata(&name, "plan");
    plan
}

/// The deployment's spec as its plans store it: with secrets removed from its URLs.
pub fn kept_spec(spec: &InferenceDeploymentSpec) -> Value {
    let mut kept = spec.clone();
    kept.model = kept.model.shown();
    serde_json::to_value(kept).unwrap_or_default()
}

/// The deployment with the spec that `plan` was made for, to build the plan's Pods from. A plan that does not record
/// its spec is assumed to be for the current one.
pub fn deployment_of_plan(
    deployment: &InferenceDeployment,
    plan: &InferencePlan,
) -> InferenceDeployment {
    let mut deployment = deployment.clone();
    if let Some(mut spec) = spec_of_plan(plan) {
        // A plan stores no secrets of URLs. If its source is the current one, they are taken from there.
        let now = &deployment.spec.model;
        let key = model_key(&deployment, &now.source);
        if model_key_of(plan) == key && spec.model.source == now.shown().source {
            spec.model.source = now.source.clone();
        }
        deployment.spec = spec;
    }
    deployment
}

/// The model's directory inside worker Pods.
pub fn model_path(_context: &BuildContext<'_>, source: &ModelSource) -> String {
    if let Some(builtin) = &source.builtin {
        return format!("{BUILTIN_DIRECTORY}/{}", builtin.name);
    }
    let inside = source
        .persistent_volume_claim
        .as_ref()
        .and_then(|claim| claim.path.as_deref())
        .map(|path| path.trim_matches('/'))
        .filter(|path| !path.is_empty());
    match inside {
        Some(path) => format!("{SOURCE_DIRECTORY}/{path}"),
        None => SOURCE_DIRECTORY.to_owned(),
    }
}

/// Name of a deployment's fetched model in the nodes' stores; `None` for a source that is not fetched.
pub fn model_key(deployment: &InferenceDeployment, source: &ModelSource) -> Option<String> {
    let namespace = deployment.metadata.namespace.as_deref().unwrap_or_default();
    source.store_key(namespace)
}

/// Digest of a model source, for [`crate::names::ANNOTATION_SOURCE`]. `key` distinguishes fetched models.
pub fn source_digest(source: &ModelSource, key: Option<&str>) -> String {
    match key {
        Some(key) => short_digest(key),
        None => short_digest(source_identity(source)),
    }
}

impl BuildContext<'_> {
    fn name(&self) -> String {
        self.deployment.name_any()
    }

    fn namespace(&self) -> String {
        self.deployment.namespace().unwrap_or_default()
    }

    /// Metadata of an object of the deployment.
    fn metadata(&self, name: &str, component: &str) -> ObjectMeta {
        ObjectMeta {
            name: Some(name.to_owned()),
            namespace: self.deployment.namespace(),
            labels: Some(self.labels(component)),
            owner_references: self
                .deployment
                .controller_owner_ref(&())
                .map(|owner| vec![owner]),
            ..ObjectMeta::default()
        }
    }

    fn labels(&self, component: &str) -> BTreeMap<String, String> {
        texts([
            (LABEL_APP, APP),
            (LABEL_MANAGED_BY, MANAGER),
            (LABEL_COMPONENT, component),
            (LABEL_DEPLOYMENT, &self.name()),
        ])
    }

    /// Labels that select the Pods of one role.
    fn role_labels(&self, role: &str) -> BTreeMap<String, String> {
        texts([(LABEL_DEPLOYMENT, &*self.name()), (LABEL_ROLE, role)])
    }
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

fn texts<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> BTreeMap<String, String> {
    pairs
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}
