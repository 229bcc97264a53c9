//! `InferencePoolScaler`: the number of prefill workers, as an autoscaler reads and writes it.
//!
//! An object has one scale subresource, and an `InferenceDeployment`'s is for its decode workers. A deployment whose
//! `prefill.scaling.mode` is External gets one of these as well.

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::rules;

/// Number of workers of a pool that an autoscaler requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "hearth.dev",
        version = "v1alpha1",
        kind = "InferencePoolScaler",
        namespaced,
        shortname = "infps",
        category = "hearth",
        status = "InferencePoolScalerStatus",
        derive = "PartialEq",
        doc = "The number of workers of a pool of an InferenceDeployment, for an autoscaler. The operator makes one named NAME-prefill for a deployment whose prefill.scaling.mode is External, and removes it when the mode changes; one that somebody else made is not obeyed.",
        scale(
            spec_replicas_path = ".spec.replicas",
            status_replicas_path = ".status.replicas",
            label_selector_path = ".status.selector"
        ),
        printcolumn(name = "Deployment", type_ = "string", json_path = ".spec.deployment"),
        printcolumn(name = "Pool", type_ = "string", json_path = ".spec.pool"),
        printcolumn(name = "Asked", type_ = "integer", json_path = ".spec.replicas"),
        printcolumn(
            name = "Desired",
            type_ = "integer",
            json_path = ".status.desiredReplicas"
        ),
        printcolumn(name = "Replicas", type_ = "integer", json_path = ".status.replicas"),
        printcolumn(
            name = "Age",
            type_ = "date",
            json_path = ".metadata.creationTimestamp"
        ),
    )
)]
#[serde(rename_all = "camelCase")]
pub struct InferencePoolScalerSpec {
    /// The InferenceDeployment, in the same namespace. Immutable.
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS),
            validation = Rule::new("self == oldSelf").message("it cannot be changed: the operator makes a scaler for each deployment that wants one"),
        )
    )]
    pub deployment: String,
    /// The pool of that deployment. Immutable.
    #[cfg_attr(feature = "kube", schemars(extend("maxLength" = 16)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self == oldSelf").message("it cannot be changed: the operator makes a scaler for each pool that wants one"))
    )]
    pub pool: ScaledPool,
    /// Requested number of workers. The operator writes it once, when it creates the scaler; from then on it is the
    /// autoscaler's. The number kept is the nearest one within the bounds of the deployment's scaling.
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::REPLICAS).message("write 1 to 64 workers: prefill workers end together with the decode workers, whose number the InferenceDeployment has"))
    )]
    pub replicas: u32,
}

/// A pool with its own scaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ScaledPool {
    /// Workers that read prompts.
    Prefill,
}

/// Effect of the requested number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct InferencePoolScalerStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods of the pool, of all plans, counted as a Deployment counts its own: without those that have ended or are ending.
    #[serde(default)]
    pub replicas: u32,
    /// Number kept of the requested one: the nearest within the bounds of the deployment's scaling.
    #[serde(default)]
    pub desired_replicas: u32,
    /// Label selector of the pool's Pods.
    #[serde(default)]
    pub selector: String,
}
