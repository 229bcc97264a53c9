//! Ranks of one node by role, and the devices that they compute on. Stages of rings are placed otherwise.

use hearth_crds::PlanRole;

/// Number of ranks of each role on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeRanks {
    pub gateways: u32,
    pub prefill: u32,
    pub decode: u32,
    /// Ranks that read prompts together with a prefill rank: the other peers.
    pub followers: u32,
    /// Peers of the whole plan, which share out the experts of each layer; 0 where a prefill rank reads prompts alone.
    pub peers: u32,
    /// Devices of each role.
    pub devices: Devices,
}

impl NodeRanks {
    pub(crate) fn count(self) -> usize {
        (self.gateways + self.workers()) as usize
    }

    /// Ranks that run the model.
    pub(crate) fn workers(self) -> u32 {
        self.prefill + self.decode + self.followers
    }

    /// Ranks that read prompts together with others.
    pub(crate) fn in_group(self) -> u32 {
        match self.peers {
            0 => 0,
            _ => self.prefill + self.followers,
        }
    }

    pub(crate) fn of(self, role: PlanRole) -> u32 {
        match role {
            PlanRole::Gateway => self.gateways,
            PlanRole::Prefill => self.prefill,
            PlanRole::Decode => self.decode,
            PlanRole::Stage => self.followers,
        }
    }

    pub(crate) fn prefill_on_cpus(self) -> u32 {
        self.with(PlanRole::Prefill, |device| device == Device::Cpus)
    }

    pub(crate) fn decode_on_cpus(self) -> u32 {
        self.with(PlanRole::Decode, |device| device == Device::Cpus)
    }

    pub(crate) fn on_gpus(self) -> u32 {
        ON_GPUS.into_iter().map(|role| self.gpu_ranks(role)).sum()
    }

    /// Ranks of a role that hold a GPU.
    pub(crate) fn gpu_ranks(self, role: PlanRole) -> u32 {
        self.with(role, Device::is_gpu)
    }

    /// Whether any rank takes dense modules from the node's memory too.
    pub(crate) fn has_host_dense(self) -> bool {
        self.prefill + self.followers > 0 && self.devices.prefill.streams_dense()
    }

    /// Ranks of a role whose arithmetic is on CPUs, all of it or that of experts.
    pub(crate) fn using_cpus(self, role: PlanRole) -> u32 {
        self.with(role, Device::uses_cpus)
    }

    /// Whether any rank on a GPU takes routed experts from the node's memory.
    pub(crate) fn has_host_experts(self) -> bool {
        ON_GPUS
            .into_iter()
            .any(|role| self.with(role, Device::has_host_experts) > 0)
    }

    /// Whether the only routed experts in the node's memory are the shares of followers.
    pub(crate) fn has_shares_alone(self) -> bool {
        let mut others = [PlanRole::Prefill, PlanRole::Decode].into_iter();
        self.followers > 0 && others.all(|role| self.with(role, Device::has_host_experts) == 0)
    }

    /// Decode ranks whose CPUs compute experts of which not all need to be in memory: no copies to a GPU need them there.
    pub(crate) fn with_expert_budget(self) -> u32 {
        let streaming = [PlanRole::Prefill, PlanRole::Stage]
            .map(|role| self.with(role, Device::has_host_experts));
        match streaming {
            [0, 0] => self.with(PlanRole::Decode, |device| device == Device::GpuAndCpus),
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

/// Roles whose ranks may compute on GPUs.
const ON_GPUS: [PlanRole; 3] = [PlanRole::Prefill, PlanRole::Decode, PlanRole::Stage];

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
            PlanRole::Gateway => Device::Cpus,
            PlanRole::Prefill | PlanRole::Stage => self.prefill,
            PlanRole::Decode => self.decode,
        }
    }

    /// Whether routed experts of any rank stay in the node's memory although the rest is on a GPU.
    pub(crate) fn has_host_experts(self) -> bool {
        self.prefill.has_host_experts() || self.decode.has_host_experts()
    }
}
