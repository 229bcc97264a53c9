//! Everything that one reconcile wants, decided from [`crate::observed::Observed`] alone.

use std::time::Duration;

use hearth_crds::{
    InferenceDeploymentStatus, InferencePlan, InferencePoolScaler, InferencePoolScalerStatus,
};
use k8s_openapi::api::core::v1::Pod;
use kube_core::DynamicObject;

use crate::plan_record::PlanStatusChange;

/// Time that a Pod without streams gets to end in order, before the kubelet kills.
pub const EXIT_S: u32 = 10;

/// What is to be done, in this order: objects, plans and their status, Pods made, Pods patched, Pods deleted, plans deleted,
/// the scaler, fetches, status, events.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// Service, PodDisruptionBudgets, NetworkPolicies: applied where they differ from what is there.
    pub objects: Vec<DynamicObject>,
    /// Objects of ours that are there no longer wanted, as kind and name.
    pub remove_objects: Vec<(String, String)>,
    /// A new plan; never changed afterwards.
    pub create_plan: Option<InferencePlan>,
    /// What is known now of plans that are there.
    pub plan_statuses: Vec<PlanStatusChange>,
    /// What claims of Pods are made from; they never change.
    pub create_templates: Vec<DynamicObject>,
    /// Pods to make. One that is there already is no error.
    pub create_pods: Vec<Pod>,
    /// Annotations of Pods that are there.
    pub mark_pods: Vec<Marks>,
    /// Pods to end.
    pub delete_pods: Vec<PodEnd>,
    /// Plans that nothing refers to any more, by name.
    pub delete_plans: Vec<String>,
    /// What becomes of the scaler of the prefill workers.
    pub scaler: Option<ScalerStep>,
    /// Whether the agents of these nodes are to hold the model behind the URL.
    pub fetch_on: Vec<String>,
    /// The whole status.
    pub status: InferenceDeploymentStatus,
    /// Transitions that a person is told of; none on a reconcile that changes nothing.
    pub events: Vec<Transition>,
    /// It waits for its turn with a worker image.
    pub waits_for_turn: bool,
    /// When to look again though nothing is reported; `None`: at the next resync.
    pub requeue_after: Option<Duration>,
}

/// What is to be done about an InferencePoolScaler.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalerStep {
    /// It is not there and wanted: its number is written now, and never again.
    Create(Box<InferencePoolScaler>),
    /// It is told what came of its number.
    Status {
        /// Its name.
        name: String,
        /// Precondition: only this very scaler.
        uid: String,
        /// The whole status.
        status: InferencePoolScalerStatus,
    },
    /// Nobody scales the pool from outside any more.
    Remove {
        /// Its name.
        name: String,
        /// Precondition: only this very scaler.
        uid: String,
    },
}

/// Annotations for one Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Name of the Pod.
    pub name: String,
    /// Keys with their values.
    pub annotations: Vec<(String, String)>,
}

/// The end of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEnd {
    /// Name of the Pod.
    pub name: String,
    /// Precondition: only this very Pod.
    pub uid: String,
    /// How long it gets.
    pub grace: Grace,
}

/// What a Pod gets from being told to end until its kubelet kills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grace {
    /// What the Pod itself says: its streams end.
    Whole,
    /// Time to exit, as it has never served. The kubelet may tell a process to end that is too young to listen.
    Exit,
    /// None: its node is lost, or it has ended already.
    None,
}

impl Grace {
    /// As the API server is asked for it; `None`: as the Pod has it.
    pub fn seconds(self) -> Option<u32> {
        match self {
            Self::Whole => None,
            Self::Exit => Some(EXIT_S),
            Self::None => Some(0),
        }
    }
}

/// One line of `kubectl describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Planned, PlanReplaced, WorkerReady, WorkerLost, ScaledDecode, ModelDownloaded, RolledBack …
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// Normal or Warning.
    pub is_warning: bool,
}

#[cfg(test)]
impl Decision {
    /// Whether anything is written by it beside the status.
    pub fn writes_objects(&self) -> bool {
        self.create_plan.is_some()
            || !(self.plan_statuses.is_empty()
                && self.create_pods.is_empty()
                && self.mark_pods.is_empty()
                && self.delete_pods.is_empty()
                && self.delete_plans.is_empty()
                && self.scaler.is_none())
    }
}
