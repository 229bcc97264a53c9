//! Ranks of one node by role, and the devices that they compute on. Stages are ranks of rings, which are placed otherwise.

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
            PlanRole::Stage => 0,
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

    /// Whether any rank takes dense modules from the node's memory too.
    pub(crate) fn has_host_dense(self) -> bool {
        self.prefill > 0 && self.devices.prefill.streams_dense()
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

    /// Decode ranks whose CPUs compute experts of which not all need to be in memory: no copies to a GPU need them there.
    pub(crate) fn with_expert_budget(self) -> u32 {
        match self.with(PlanRole::Prefill, Device::has_host_experts) {
            0 => self.with(PlanRole::Decode, |device| device == Device::GpuAndCpus),
            _ => 0,
        }
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
    /// A GPU through which routed experts pass in a ring of slots.
    StreamingGpu(DenseModules),
    /// A GPU that has all but the routed experts, and CPUs that compute these.
    GpuAndCpus,
}

/// Where attention, dense and shared feed-forward blocks are beside experts that stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DenseModules {
    /// On the GPU.
    Stay,
    /// In the node's memory too; they pass through slots of their own.
    Stream,
}

impl Device {
    /// Whether routed experts pass through a ring of slots.
    pub(crate) fn is_streaming(self) -> bool {
        matches!(self, Self::StreamingGpu(_))
    }

    /// Whether dense modules pass through slots too.
    pub(crate) fn streams_dense(self) -> bool {
        self == Self::StreamingGpu(DenseModules::Stream)
    }

    pub(crate) fn is_gpu(self) -> bool {
        match self {
            Self::Cpus => false,
            Self::Gpu | Self::StreamingGpu(_) | Self::GpuAndCpus => true,
        }
    }

    pub(crate) fn uses_cpus(self) -> bool {
        match self {
            Self::Cpus | Self::GpuAndCpus => true,
            Self::Gpu | Self::StreamingGpu(_) => false,
        }
    }

    /// Whether routed experts stay in the node's memory although the rest is on a GPU.
    pub(crate) fn has_host_experts(self) -> bool {
        match self {
            Self::Cpus | Self::Gpu => false,
            Self::StreamingGpu(_) | Self::GpuAndCpus => true,
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
            PlanRole::Gateway | PlanRole::Stage => Device::Cpus,
            PlanRole::Prefill => self.prefill,
            PlanRole::Decode => self.decode,
        }
    }

    /// Whether routed experts of any rank stay in the node's memory although the rest is on a GPU.
    pub(crate) fn has_host_experts(self) -> bool {
        self.prefill.has_host_experts() || self.decode.has_host_experts()
    }
}
