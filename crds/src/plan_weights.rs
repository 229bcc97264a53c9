//! Where a rank's weights are, and what its share of a GPU's memory is for.

use serde::{Deserialize, Serialize};

use crate::plan::is_none_of_bytes;

/// Residency of a rank's weights in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanResidency {
    /// The policy.
    pub policy: ResidencyPolicy,
    /// Bytes of the weights that the rank maps. Ranks of one node map one copy; a rank on a GPU has its own there.
    pub weight_bytes: u64,
    /// Bytes of them that may be in memory at a time (in the GPU's for a rank on one): all with Resident.
    pub budget_bytes: u64,
    /// Bytes of `budgetBytes` that weights pass through as they are read ahead, in the order of their use; what else the
    /// budget has room for stays. Of use with MmapPrefetch of a model without experts; unset, as much as two modules need.
    /// With 0 nothing is read ahead, to measure what that costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_ahead_bytes: Option<u64>,
    /// Bytes of them that a rank on a GPU reads from the node's memory in every pass: the routed experts with
    /// StreamLoading and HostExperts, and with `streamsDense` the modules that it names; of a follower of peers, its share
    /// of the experts alone, unless it stands in for others. Ranks of one node share one copy, unless `hostBudgetBytes` is set.
    #[serde(default, skip_serializing_if = "is_none_of_bytes")]
    pub host_bytes: u64,
    /// Bytes of `hostBytes` that are in memory at a time, where it cannot hold all of them: the others are read from the disk
    /// once a router has chosen them, past the page cache where that is of use. At least what a token chooses of one layer.
    /// Set with HostExperts alone; unset, all stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_budget_bytes: Option<u64>,
    /// Slots of the longest ring that experts pass through, each for one expert; set with StreamLoading alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring_slots: Option<u32>,
    /// Lengths of the ring by the length of a prompt, in ascending order: the longer the prompt, the more of the memory of
    /// ring and activations it needs. Unset where one length is for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ring_lengths: Vec<PlanRingLength>,
    /// Whether attention, dense and shared feed-forward blocks are read from the node's memory in every pass too, through
    /// two slots of their own on the GPU; with StreamLoading where they do not fit beside what else is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub streams_dense: bool,
    /// Experts that are kept on the GPU too, those used most; set with HostExperts where that pays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_slots: Option<u32>,
}

impl PlanResidency {
    /// Bytes of the weights that have no room in the node's memory.
    pub(crate) fn disk_bytes(&self) -> u64 {
        match self.policy {
            ResidencyPolicy::MmapPrefetch => self.weight_bytes.saturating_sub(self.budget_bytes),
            ResidencyPolicy::HostExperts => {
                let at_a_time = self.host_budget_bytes.unwrap_or(self.host_bytes);
                self.host_bytes.saturating_sub(at_a_time)
            }
            ResidencyPolicy::Resident | ResidencyPolicy::StreamLoading => 0,
        }
    }
}

/// What a rank's share of a GPU's memory is for, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanDeviceMemory {
    /// Weights that stay there.
    pub weights_bytes: u64,
    /// Slots that dense modules pass through; 0 where these stay.
    #[serde(default, skip_serializing_if = "is_none_of_bytes")]
    pub dense_slots_bytes: u64,
    /// The shortest ring of experts; 0 where none are streamed.
    #[serde(default, skip_serializing_if = "is_none_of_bytes")]
    pub ring_bytes: u64,
    /// Cached experts.
    #[serde(default, skip_serializing_if = "is_none_of_bytes")]
    pub cache_bytes: u64,
    /// The KV cache.
    pub kv_bytes: u64,
    /// Activations, logits and the driver; with a ring also what makes it longer for prompts that leave room.
    pub working_bytes: u64,
}

impl PlanDeviceMemory {
    /// All of it.
    pub fn sum_bytes(&self) -> u64 {
        let Self {
            weights_bytes,
            dense_slots_bytes,
            ring_bytes,
            cache_bytes,
            kv_bytes,
            working_bytes,
        } = *self;
        weights_bytes + dense_slots_bytes + ring_bytes + cache_bytes + kv_bytes + working_bytes
    }
}

/// Length of a ring for prompts of a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanRingLength {
    /// The longest prompts that it is for, in tokens that are computed together.
    pub prompt_tokens: u32,
    /// Slots.
    pub slots: u32,
}

/// Policy that brings weights to where they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ResidencyPolicy {
    /// All weights are mapped and stay in memory, or are copied to the rank's GPU and stay there.
    Resident,
    /// Mapped; the kernel is asked to read the next layers and to drop the last ones.
    MmapPrefetch,
    /// Routed experts are copied into a ring of slots on the rank's GPU, in the order of the layers, while others compute;
    /// all else stays there, but for what `streamsDense` says.
    StreamLoading,
    /// All but the routed experts stay on the rank's GPU; these are mapped, and its CPUs compute them.
    HostExperts,
}
