//! Errors between a checkpoint and its logits.

use hearth_formats::FormatError;
use hearth_kernels::KernelError;

use crate::ModuleId;

/// A residency policy could not provide a module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The checkpoint lacks something that the module needs.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The backend could not load a module's weights.
    #[error("{module}: {source}")]
    Kernel {
        /// Module whose weights failed to load.
        module: ModuleId,
        /// The backend's error.
        source: KernelError,
    },
    /// The policy's device failed between modules.
    #[error(transparent)]
    Device {
        /// The backend's error.
        source: KernelError,
    },
    /// The policy was opened without this module: the plan assigned it to another rank.
    #[error(
        "{module} is not among the modules of this worker\n  its layers are those that the plan gave it"
    )]
    Unknown {
        /// Module that was requested.
        module: ModuleId,
    },
    /// The system rejected an operation that the policy needs.
    #[error("cannot {what}: {source}\n  {remedy}")]
    System {
        /// Operation that was attempted.
        what: String,
        /// The system's error.
        source: std::io::Error,
        /// The remedy, as shown to the user.
        remedy: &'static str,
    },
    /// The policy streams routed experts, and the model has none.
    #[error(
        "the model has no routed experts to stream\n  use --residency resident: on a device, all of a dense model's weights stay there"
    )]
    Experts,
    /// The device cannot hold the ring of experts.
    #[error(
        "a ring of {slots} slots of {slot_bytes} bytes does not fit: {}\n  use fewer --ring-slots (2 are enough), or give the device more memory",
        source.as_ref().map_or_else(|| format!("the model has {experts} routed experts"), first_line)
    )]
    Ring {
        /// Number of slots.
        slots: usize,
        /// Bytes of one.
        slot_bytes: u64,
        /// Routed experts of the model.
        experts: usize,
        /// The backend's error; `None` if there are more slots than experts.
        source: Option<KernelError>,
    },
    /// The device cannot hold the slots of dense modules.
    #[error(
        "{slots} slots of {slot_bytes} bytes for dense modules do not fit: {}\n  use fewer --ring-slots (in a plan: plan again), or give the device more memory",
        first_line(source)
    )]
    DenseSlots {
        /// Number of slots.
        slots: usize,
        /// Bytes of one.
        slot_bytes: u64,
        /// The backend's error.
        source: KernelError,
    },
    /// The device cannot hold the cache of experts.
    #[error(
        "a cache of {slots} experts of {slot_bytes} bytes does not fit: {}\n  use fewer --cache-slots (in a plan: plan again), or give the device more memory",
        first_line(source)
    )]
    Cache {
        /// Number of slots.
        slots: usize,
        /// Bytes of one.
        slot_bytes: u64,
        /// The backend's error.
        source: KernelError,
    },
    /// The thread that loads weights has ended.
    #[error(
        "{module}: the thread that loads weights has ended\n  its panic is in the log above; restart the worker"
    )]
    Ended {
        /// Module that was requested.
        module: ModuleId,
    },
    /// The memory budget is smaller than what a single step must hold.
    #[error(
        "the weights' budget of {budget_bytes} bytes cannot hold {module} ({module_bytes} bytes)\n  raise the budget to at least {module_bytes} bytes"
    )]
    Budget {
        /// The largest module.
        module: ModuleId,
        /// Its size in bytes.
        module_bytes: u64,
        /// The budget in bytes.
        budget_bytes: u64,
    },
}

/// What other ranks are told of a panic, whose text is in this rank's log.
pub const PANICKED: &str = "its computation has panicked; its log says where";

/// A forward pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration describes something that its architecture does not have; a bug in the caller, since reading
    /// config.json checks it.
    #[error("{architecture} cannot have {what}")]
    Config {
        /// Name of the architecture.
        architecture: String,
        /// The part that does not fit.
        what: &'static str,
    },
    /// The parts of a batch are inconsistent; a bug in the caller.
    #[error("batch: {0}")]
    Batch(String),
    /// A module lacks one of its weights; a bug in the residency policy.
    #[error("{module} has no weight {field}")]
    Field {
        /// Module that lacks the weight.
        module: ModuleId,
        /// Weight that the block requested.
        field: &'static str,
    },
    /// A step of a pass came out of order, or after one that failed; a bug in the program of steps.
    #[error("block {block} of a pass of which {done} blocks are done")]
    Order {
        /// The block that was asked for; a layer's attention and feed-forward are one each.
        block: usize,
        /// Blocks that were computed.
        done: usize,
    },
    /// Windows of layers that no rank can have; a bug in the planner.
    #[error("a part of the model: {why}")]
    Part {
        /// What is wrong with them.
        why: String,
    },
    /// A member of the group could not do its part of this pass.
    #[error("{why}")]
    Member {
        /// Which member, and its error.
        why: String,
    },
    /// A member of the group is lost, or does not do as it should: no pass succeeds before the group has formed anew.
    #[error("{why}")]
    Group {
        /// Which member, and what is known of it.
        why: String,
    },
    /// A member has come that computes otherwise than the one before: the group waits on for one that gives the same bits.
    #[error("{why}")]
    Unlike {
        /// Which member, its numerics, and those that are needed.
        why: String,
    },
    /// A pass of one rank meets a model that several compute, or the other way round; a bug in the program of steps.
    #[error("a pass and its model are not of the same ranks")]
    Alone,
    /// The thread that computes routed experts has ended.
    #[error(
        "the thread that computes routed experts has ended\n  its panic is in the log above; restart the worker"
    )]
    ExpertsEnded,
    /// The observer cancelled the pass.
    #[error("the forward pass was given up")]
    GivenUp,
    /// A module could not be acquired.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The device could not execute an operation.
    #[error("{}{source}", module.map(|m| format!("{m}: ")).unwrap_or_default())]
    Kernel {
        /// Module in which it failed, if known.
        module: Option<ModuleId>,
        /// The device's error.
        source: KernelError,
    },
}

impl From<KernelError> for ModelError {
    fn from(source: KernelError) -> Self {
        Self::Kernel {
            module: None,
            source,
        }
    }
}

impl ModelError {
    /// Whether the device is lost: no pass on it will succeed again.
    pub fn is_device_lost(&self) -> bool {
        let source = match self {
            Self::Kernel { source, .. }
            | Self::Residency(
                ResidencyError::Kernel { source, .. }
                | ResidencyError::Device { source }
                | ResidencyError::DenseSlots { source, .. }
                | ResidencyError::Cache { source, .. },
            ) => Some(source),
            Self::Residency(ResidencyError::Ring { source, .. }) => source.as_ref(),
            _ => None,
        };
        matches!(source, Some(KernelError::DeviceLost { .. }))
    }

    /// Adds the module in which the device failed, unless it is already known.
    pub(crate) fn within(self, id: ModuleId) -> Self {
        match self {
            Self::Kernel {
                module: None,
                source,
            } => Self::Kernel {
                module: Some(id),
                source,
            },
            other => other,
        }
    }
}

/// First line of an error's text: what is wrong, without its remedy.
fn first_line(error: &KernelError) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}
