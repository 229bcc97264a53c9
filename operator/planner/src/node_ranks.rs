//! Ranks of one node by role, and the devices that they compute on.

use hearth_crds::PlanRole;

/// Number of ranks of each role on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeRanks {
    pub gateways: u32,
    pub prefill: u32,
    pub decode: u32,
    /// Devices of each role.
    pub devices: Devices,
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
        self.with(PlanRole::Prefill, |device| device == Device::Cpus)
    }

    pub(crate) fn decode_on_cpus(self) -> u32 {
        self.with(PlanRole::Decode, |device| device == Device::Cpus)
    }

    pub(crate) fn on_gpus(self) -> u32 {
        self.gpu_ranks(PlanRole::Prefill) + self.gpu_ranks(PlanRole::Decode)
    }

    /// Ranks of a role that hold a GPU.
    pub(crate) fn gpu_ranks(self, role: PlanRole) -> u32 {
        self.with(role, Device::is_gpu)
    }

    /// Ranks of a role whose arithmetic is on CPUs, all of it or that of experts.
    pub(crate) fn using_cpus(self, role: PlanRole) -> u32 {
        self.with(role, Device::uses_cpus)
    }

    /// Whether any rank on a GPU takes routed experts from the node's memory.
    pub(crate) fn has_host_experts(self) -> bool {
        [PlanRole::Prefill, PlanRole::Decode]
            .into_iter()
            .any(|role| self.with(role, Device::has_host_experts) > 0)
    }

    fn with(self, role: PlanRole, is_meant: impl Fn(Device) -> bool) -> u32 {
        match is_meant(self.devices.of(role)) {
            true => self.of(role),
            false => 0,
        }
    }
}

/// What a rank computes on, and what of the model is kept there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Device {
    /// The CPUs of its node.
    #[default]
    Cpus,
    /// A GPU that has the whole model.
    Gpu,
    /// A GPU that has all but the routed experts, which pass through a ring of slots there.
    StreamingGpu,
    /// A GPU that has all but the routed experts, and CPUs that compute these.
    GpuAndCpus,
}

impl Device {
    pub(crate) fn is_gpu(self) -> bool {
        match self {
            Self::Cpus => false,
            Self::Gpu | Self::StreamingGpu | Self::GpuAndCpus => true,
        }
    }

    pub(crate) fn uses_cpus(self) -> bool {
        match self {
            Self::Cpus | Self::GpuAndCpus => true,
            Self::Gpu | Self::StreamingGpu => false,
        }
    }

    /// Whether routed experts stay in the node's memory although the rest is on a GPU.
    pub(crate) fn has_host_experts(self) -> bool {
        match self {
            Self::Cpus | Self::Gpu => false,
            Self::StreamingGpu | Self::GpuAndCpus => true,
        }
    }
}

/// Devices of all ranks of a role: a stream that moves between decode workers continues with the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Devices {
    pub prefill: Device,
    pub decode: Device,
}

impl Devices {
    pub(crate) const CPUS: Self = Self {
        prefill: Device::Cpus,
        decode: Device::Cpus,
    };

    pub(crate) fn of(self, role: PlanRole) -> Device {
        match role {
            PlanRole::Gateway => Device::Cpus,
            PlanRole::Prefill => self.prefill,
            PlanRole::Decode => self.decode,
        }
    }

    /// Whether routed experts of any rank stay in the node's memory although the rest is on a GPU.
    pub(crate) fn has_host_experts(self) -> bool {
        self.prefill.has_host_experts() || self.decode.has_host_experts()
    }
}
