//! What can go wrong between a checkpoint and its logits.

use hearth_formats::FormatError;
use hearth_kernels::KernelError;

use crate::ModuleId;

/// A residency policy could not provide a module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResidencyError {
    /// The checkpoint does not hold what the module needs.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The backend could not take a module's weights.
    #[error("{module}: {source}")]
    Kernel {
        /// Which module.
        module: ModuleId,
        /// Why.
        source: KernelError,
    },
    /// The policy was opened without this module: the plan gave it to another rank.
    #[error(
        "{module} is not among the modules of this worker\n  its layers are those that the plan gave it"
    )]
    Unknown {
        /// Which module.
        module: ModuleId,
    },
    /// The system refused what the policy needs.
    #[error("cannot {what}: {source}\n  {remedy}")]
    System {
        /// What was to be done.
        what: String,
        /// The system's answer.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// The memory budget is smaller than what one step must hold.
    #[error(
        "the weights' budget of {budget_bytes} bytes cannot hold {module} ({module_bytes} bytes)\n  raise the budget to at least {module_bytes} bytes"
    )]
    Budget {
        /// The largest module.
        module: ModuleId,
        /// Its bytes.
        module_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
}

/// A forward pass could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration describes what its architecture does not have; a fault of the caller, since reading config.json checks it.
    #[error("{architecture} cannot have {what}")]
    Config {
        /// Name of the architecture.
        architecture: String,
        /// What does not fit.
        what: &'static str,
    },
    /// A batch whose parts do not fit each other; a fault of the caller.
    #[error("batch: {0}")]
    Batch(String),
    /// A module came without one of its weights; a fault of the residency policy.
    #[error("{module} has no weight {field}")]
    Field {
        /// Which module.
        module: ModuleId,
        /// What the block asked for.
        field: &'static str,
    },
    /// The observer did not want the pass to go on.
    #[error("the forward pass was given up")]
    GivenUp,
    /// A module could not be had.
    #[error(transparent)]
    Residency(#[from] ResidencyError),
    /// The device could not carry out an operation.
    #[error("{}{source}", module.map(|m| format!("{m}: ")).unwrap_or_default())]
    Kernel {
        /// Module in which it is.
        module: Option<ModuleId>,
        /// Why.
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
    /// Says in which module the device failed, unless that is known.
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
