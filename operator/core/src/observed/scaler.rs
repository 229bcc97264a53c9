//! The scaler of a deployment's prefill workers.

use hearth_crds::InferencePoolScalerStatus;

/// The InferencePoolScaler that the deployment owns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalerView {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The generation of its spec.
    pub generation: Option<i64>,
    /// Number of workers that it asks for.
    pub replicas: u32,
    /// Its status as last written.
    pub status: Option<InferencePoolScalerStatus>,
}
