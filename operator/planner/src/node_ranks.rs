//! Ranks of one node by role, and which of them compute on GPUs.

use hearth_crds::PlanRole;

/// Number of ranks of each role on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeRanks {
    pub gateways: u32,
    pub prefill: u32,
    pub decode: u32,
    /// Roles that compute on GPUs.
    pub on_gpu: OnGpu,
}

impl NodeRanks {
    pub(crate) fn count(self) -> usize {
        (self.gateways + self.prefill + self.decode) as usize
    }

    pub(crate) fn of(self, role: PlanRole) -> u32 {
        match role {
            PlanRole::Gateway => self.gateways,
            PlanRole::Prefill => self.prefill,
            PlanRole::Decode => self.decode,
        }
    }

    pub(crate) fn prefill_on_cpus(self) -> u32 {
        if self.on_gpu.prefill { 0 } else { self.prefill }
    }

    pub(crate) fn decode_on_cpus(self) -> u32 {
        if self.on_gpu.decode { 0 } else { self.decode }
    }

    pub(crate) fn on_gpus(self) -> u32 {
        self.prefill + self.decode - self.prefill_on_cpus() - self.decode_on_cpus()
    }
}

/// Roles whose ranks run on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OnGpu {
    pub prefill: bool,
    pub decode: bool,
}

impl OnGpu {
    pub(crate) const NONE: Self = Self {
        prefill: false,
        decode: false,
    };

    pub(crate) fn of(self, role: PlanRole) -> bool {
        match role {
            PlanRole::Gateway => false,
            PlanRole::Prefill => self.prefill,
            PlanRole::Decode => self.decode,
        }
    }
}
