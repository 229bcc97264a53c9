//! All that a plan follows from.

use hearth_crds::{InferenceDeploymentSpec, ModelFacts, NodeProfileSpec};

use crate::cpus::CpuOffer;
use crate::gpus::GpuOffer;

/// All that a plan follows from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// The deployment's name.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// The plan's generation: one more than that of the plan in force, 1 for the first.
    pub generation: u64,
    /// What is asked for.
    pub spec: &'a InferenceDeploymentSpec,
    /// The model.
    pub facts: &'a ModelFacts,
    /// The directory of the model on each node.
    pub model_path: &'a str,
    /// Measured nodes, in any order.
    pub profiles: &'a [NodeProfileSpec],
    /// Where GPUs come from.
    pub gpus: GpuOffer<'a>,
    /// What of the nodes' CPUs may be asked for.
    pub cpus: CpuOffer<'a>,
}
