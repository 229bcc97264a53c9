//! Input of the planner.

use hearth_crds::{InferenceDeploymentSpec, ModelFacts, NodeProfileStatus};

use crate::cpus::CpuOffer;
use crate::gpus::GpuOffer;

/// Everything that a plan is computed from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The deployment's name.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// The plan's generation: one more than that of the plan in force, 1 for the first.
    pub generation: u64,
    /// The deployment's spec.
    pub spec: &'a InferenceDeploymentSpec,
    /// Facts about the model.
    pub facts: &'a ModelFacts,
    /// Directory of the model on each node.
    pub model_path: &'a str,
    /// Profiles of the nodes, in any order.
    pub profiles: &'a [NodeProfileStatus],
    /// GPUs that may be used.
    pub gpus: GpuOffer<'a>,
    /// CPUs that may be requested.
    pub cpus: CpuOffer<'a>,
}
