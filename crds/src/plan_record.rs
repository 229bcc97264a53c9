//! Inputs of an `InferencePlan`, fixed with it, and its outcome, in its status.
//!
//! Plans of earlier versions keep both in annotations, which a `kubectl replace` loses.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Inputs of a plan.
///
/// The deployment's spec and the model's facts are kept as they were written, including fields of other versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanInputs {
    /// Digest of the spec, as far as it affects the plan, and of the model's facts.
    pub digest: String,
    /// The deployment's spec, its URLs without secrets. The plan's Pods are built from it.
    #[cfg_attr(
        feature = "kube",
        schemars(schema_with = "crate::plan_record::any_object")
    )]
    pub deployment_spec: Value,
    /// Facts of the model.
    #[cfg_attr(
        feature = "kube",
        schemars(schema_with = "crate::plan_record::any_object")
    )]
    pub model_facts: Value,
    /// Nodes that have the model; empty: every node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub model_nodes: Vec<String>,
    /// Digest of the model's source.
    pub source_digest: String,
    /// Name of a fetched model in the nodes' stores; unset for other sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_key: Option<String>,
    /// The commit that its nodes have of a model of a hub; unset for other sources, and while none had told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_commit: Option<String>,
    /// Nodes that are left out because they refused workers of earlier plans.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 64)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["node".into()])))]
    pub refusals: Vec<NodeRefusal>,
    /// GPUs that are left out because workers of earlier plans lost them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 256)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["node".into(), "uuid".into()])))]
    pub lost_gpus: Vec<LostGpu>,
    /// The plan that was given up, if this one is the plan before it with the number of workers requested now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<GivenUpPlan>,
}

/// A plan that was given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct GivenUpPlan {
    /// Its generation.
    pub generation: u64,
    /// Digest of what it was made for, apart from numbers of workers.
    pub digest: String,
    /// Its worker image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_image: Option<String>,
    /// Reason it was given up.
    pub message: String,
}

/// A node that refused workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeRefusal {
    /// The node's name.
    pub node: String,
    /// The refusing component, the refused worker, and the reason given.
    pub message: String,
}

/// A GPU that no longer answered while its node was Ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct LostGpu {
    /// The node's name.
    pub node: String,
    /// UUID of the GPU.
    pub uuid: String,
    /// The worker that lost it, and its last words.
    pub message: String,
    /// Time at which it was noted, in seconds since 1970.
    pub at_seconds: i64,
}

/// Outcome of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct InferencePlanStatus {
    /// Serving once all its ranks were ready, Failed when it was given up; unset before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Reason it was given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Reason it does not hold other deployments back from another worker image although it does not serve: one that
    /// is not an image's fault. Empty or unset: it holds them back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes_turn: Option<String>,
    /// Pods that ended as a whole and were recreated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 256)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["name".into()])))]
    pub ended_pods: Option<Vec<EndedPod>>,
    /// Newest spec that the unchanged plan serves; unset: the one that it was made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serves: Option<ServedSpec>,
}

/// Pods of one name that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct EndedPod {
    /// The Pod's name.
    pub name: String,
    /// Uid of the last of them.
    pub uid: String,
    /// Number of them, one after the other.
    pub times: u32,
    /// Time at which the first was noted, in seconds since 1970.
    pub first_seconds: i64,
    /// Whether a container of one of them ever ran.
    pub has_run: bool,
}

/// A spec that leads to a plan equal to the existing one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct ServedSpec {
    /// Digest like that of the plan's inputs.
    pub digest: String,
    /// The deployment's spec, its URLs without secrets. The plan's Pods are built from it.
    #[cfg_attr(
        feature = "kube",
        schemars(schema_with = "crate::plan_record::any_object")
    )]
    pub deployment_spec: Value,
}

impl InferencePlanStatus {
    /// Takes over the fields that `other` sets.
    pub fn merge(&mut self, other: Self) {
        let Self {
            outcome,
            message,
            passes_turn,
            ended_pods,
            serves,
        } = other;
        self.outcome = outcome.or(self.outcome.take());
        self.message = message.or(self.message.take());
        self.passes_turn = passes_turn.or(self.passes_turn.take());
        self.ended_pods = ended_pods.or(self.ended_pods.take());
        self.serves = serves.or(self.serves.take());
    }
}

/// Returns the schema of an object with any fields, which the API server preserves.
#[cfg(feature = "kube")]
pub(crate) fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_later_counts_and_the_rest_stays() {
        let told = |text: &str| Some(text.to_owned());
        let mut status = InferencePlanStatus {
            outcome: told("Serving"),
            passes_turn: told("MountFailed"),
            ..InferencePlanStatus::default()
        };
        status.merge(InferencePlanStatus {
            passes_turn: told(""),
            message: told("why"),
            ..InferencePlanStatus::default()
        });
        assert_eq!(status.outcome, told("Serving"));
        assert_eq!(status.passes_turn, told(""));
        assert_eq!(status.message, told("why"));
    }
}
