//! Everything that one reconcile wants, decided from [`crate::observed::Observed`] alone.

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_crds::{
    InferenceDeploymentStatus, InferencePlan, InferencePoolScaler, InferencePoolScalerStatus,
};
use k8s_openapi::api::core::v1::Pod;
use kube_core::DynamicObject;

use crate::key::Key;
use crate::plan_record::PlanStatusChange;

/// Seconds that a Pod without streams gets for an orderly exit before the kubelet kills it.
pub const EXIT_S: u32 = 10;

/// Actions of one reconcile. Fetches come first, then a status that is no longer Ready; then objects, plans and their
/// statuses, claim templates, Pods created, patched and deleted, plans deleted, and the scaler; then status and events.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// Service, PodDisruptionBudgets, NetworkPolicies: applied where they differ from the existing ones.
    pub objects: Vec<DynamicObject>,
    /// Our own objects that are no longer wanted, as kind and name.
    pub remove_objects: Vec<(String, String)>,
    /// A new plan; never changed afterwards.
    pub create_plan: Option<InferencePlan>,
    /// Status changes of existing plans.
    pub plan_statuses: Vec<PlanStatusChange>,
    /// ResourceClaimTemplates of the Pods; they never change.
    pub create_templates: Vec<DynamicObject>,
    /// Pods to create. One that already exists is not an error.
    pub create_pods: Vec<Pod>,
    /// Annotations for existing Pods.
    pub mark_pods: Vec<Marks>,
    /// Pods to delete.
    pub delete_pods: Vec<PodEnd>,
    /// Plans that nothing refers to any more, by name.
    pub delete_plans: Vec<String>,
    /// Action on the scaler of the prefill workers.
    pub scaler: Option<ScalerStep>,
    /// Nodes whose agents should hold the model behind the URL.
    pub fetch_on: Vec<String>,
    /// The commit of it that its plans record: other nodes get no other one.
    pub fetch_commit: Option<String>,
    /// The whole status.
    pub status: InferenceDeploymentStatus,
    /// Transitions to report to people; none on a reconcile that changes nothing.
    pub events: Vec<Transition>,
    /// Whether it is waiting for its turn with a worker image.
    pub waits_for_turn: bool,
    /// Other deployments whose workers are to end, so that this one's have room.
    pub asks: Vec<Key>,
    /// Nodes that its workers will have once others have ended theirs: nobody starts there without a request meanwhile.
    pub awaits: BTreeSet<String>,
    /// Time after which to look again even if nothing is reported; `None`: at the next resync.
    pub requeue_after: Option<Duration>,
}

/// Action on an InferencePoolScaler.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalerStep {
    /// It is wanted and does not exist: its number is written now, and never again.
    Create(Box<InferencePoolScaler>),
    /// Its status is updated with the effect of its number.
    Status {
        /// Its name.
        name: String,
        /// Its UID, as a precondition.
        uid: String,
        /// The whole status.
        status: InferencePoolScalerStatus,
    },
    /// It is deleted: nothing scales the pool from outside any more.
    Remove {
        /// Its name.
        name: String,
        /// Its UID, as a precondition.
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

/// Deletion of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEnd {
    /// Name of the Pod.
    pub name: String,
    /// Its UID, as a precondition.
    pub uid: String,
    /// Grace period that it gets.
    pub grace: Grace,
}

/// Grace period of a Pod: the time from being told to end until its kubelet kills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grace {
    /// The Pod's own grace period: its streams end.
    Whole,
    /// Time to exit, as it has never served: the kubelet may signal a process before it handles signals.
    Exit,
    /// None: its node is lost, or it has already ended.
    None,
}

impl Grace {
    /// Grace period for the API server; `None`: the Pod's own.
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
    /// Reason: Planned, PlanReplaced, WorkerReady, WorkerLost, ScaledDecode, ModelDownloaded, RolledBack …
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// Normal or Warning.
    pub is_warning: bool,
}

#[cfg(test)]
impl Decision {
    /// Whether it writes anything besides the status.
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
