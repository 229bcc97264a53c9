//! Everything that one reconcile wants, decided from [`super::observed::Observed`] alone.

use std::time::Duration;

use hearth_crds::{InferenceDeploymentStatus, InferencePlan};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;

/// Time that a Pod without streams gets to end in order, before the kubelet kills.
pub(crate) const EXIT_S: u32 = 10;

/// What is to be done, in this order: objects, plans, marks, Pods made, Pods patched, Pods deleted, plans deleted,
/// fetches, status, events.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decision {
    /// Service, PodDisruptionBudgets, NetworkPolicies: applied where they differ from what is there.
    pub(crate) objects: Vec<DynamicObject>,
    /// Objects of ours that are there no longer wanted, as kind and name.
    pub(crate) remove_objects: Vec<(String, String)>,
    /// A new plan; never changed afterwards.
    pub(crate) create_plan: Option<InferencePlan>,
    /// Annotations of plans that are there.
    pub(crate) mark_plans: Vec<Marks>,
    /// What claims of Pods are made from; they never change.
    pub(crate) create_templates: Vec<DynamicObject>,
    /// Pods to make. One that is there already is no error.
    pub(crate) create_pods: Vec<Pod>,
    /// Annotations of Pods that are there.
    pub(crate) mark_pods: Vec<Marks>,
    /// Pods to end.
    pub(crate) delete_pods: Vec<PodEnd>,
    /// Plans that nothing refers to any more, by name.
    pub(crate) delete_plans: Vec<String>,
    /// Whether the agents of these nodes are to hold the model behind the URL.
    pub(crate) fetch_on: Vec<String>,
    /// The whole status.
    pub(crate) status: InferenceDeploymentStatus,
    /// Transitions that a person is told of; none on a reconcile that changes nothing.
    pub(crate) events: Vec<Transition>,
    /// It waits for its turn with a worker image.
    pub(crate) waits_for_turn: bool,
    /// When to look again though nothing is reported; `None`: at the next resync.
    pub(crate) requeue_after: Option<Duration>,
}

/// Annotations for one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) name: String,
    pub(crate) annotations: Vec<(String, String)>,
}

/// The end of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodEnd {
    pub(crate) name: String,
    /// Precondition: only this very Pod.
    pub(crate) uid: String,
    pub(crate) grace: Grace,
}

/// What a Pod gets from being told to end until its kubelet kills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grace {
    /// What the Pod itself says: its streams end.
    Whole,
    /// Time to exit, as it has never served. The kubelet may tell a process to end that is too young to listen.
    Exit,
    /// None: its node is lost, or it has ended already.
    None,
}

impl Grace {
    /// As the API server is asked for it; `None`: as the Pod has it.
    pub(crate) fn seconds(self) -> Option<u32> {
        match self {
            Self::Whole => None,
            Self::Exit => Some(EXIT_S),
            Self::None => Some(0),
        }
    }
}

/// One line of `kubectl describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transition {
    /// Planned, PlanReplaced, WorkerReady, WorkerLost, ScaledDecode, ModelDownloaded, RolledBack …
    pub(crate) reason: String,
    /// A sentence.
    pub(crate) message: String,
    /// Normal or Warning.
    pub(crate) is_warning: bool,
}

#[cfg(test)]
impl Decision {
    /// Whether anything is written by it beside the status.
    pub(crate) fn writes_objects(&self) -> bool {
        self.create_plan.is_some()
            || !(self.mark_plans.is_empty()
                && self.create_pods.is_empty()
                && self.mark_pods.is_empty()
                && self.delete_pods.is_empty()
                && self.delete_plans.is_empty())
    }
}
