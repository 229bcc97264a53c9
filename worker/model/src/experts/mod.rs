//! Where routed experts run: the router's choice in, the weighted sum of the chosen experts' outputs out.

mod choices;
mod chosen;
mod ep;
mod host;
mod hot;
mod local;
mod small_ep;

use std::sync::Arc;

use hearth_kernels::Backend;
use hearth_kernels::ops::MemoryOps;

use crate::peers::GroupPass;
use crate::{ModelError, ResidencyStats};

pub(crate) use ep::Ep;
pub(crate) use host::HostExperts;
pub use hot::CACHED_STEP_ROWS;
pub(crate) use local::LocalExperts;
pub(crate) use small_ep::SmallEp;

/// A layer with routed experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutedLayer {
    /// Index of the layer.
    pub(crate) layer: u32,
    /// Number of experts.
    pub(crate) experts: usize,
    /// Experts that each token chooses.
    pub(crate) top_k: usize,
}

/// A place where routed experts run.
pub(crate) trait Experts<B: Backend>: Send + Sync {
    /// Begins the experts that the tokens `x` `[rows, hidden]` chose. What follows until
    /// [`PendingExperts::finish`] (the shared experts, or another flight) runs beside them where the place can. `group`: the
    /// rows are one rank's of a pass that several compute.
    ///
    /// # Errors
    /// Errors of the experts' modules; [`ModelError::Alone`] if the experts are on several ranks, and the rows on one.
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
        group: Option<&Arc<GroupPass>>,
    ) -> Result<PendingExperts<B>, ModelError>;

    /// Runs what the other ranks' rows chose of this rank's experts, in a layer of `hidden` columns, where this rank has no
    /// rows. `check` is called now and then, and its error ends the run.
    ///
    /// # Errors
    /// Those of [`PendingExperts::finish`].
    fn assist(
        &self,
        _layer: RoutedLayer,
        _hidden: usize,
        _group: &Arc<GroupPass>,
        _check: Check<'_>,
    ) -> Result<(), ModelError> {
        Err(ModelError::Alone)
    }

    /// Whether a pass waits here for what the device computes, apart from what the model's own policy waits for.
    fn keep_host_waiting(&self) -> bool {
        false
    }

    /// Lets them run beside another flight from now on, even where that takes longer for one alone.
    fn run_beside(&mut self) {}

    /// Numerics of the backend that runs them if they differ from the device's.
    fn numerics(&self, _of_device: &str) -> Option<String> {
        None
    }

    /// Counters of the experts' weights where the model's own policy does not have them.
    fn stats(&self) -> ResidencyStats {
        ResidencyStats::default()
    }
}

/// Asks whether a pass is still wanted; an error ends it.
pub(crate) type Check<'a> = &'a mut dyn FnMut() -> Result<(), ModelError>;

/// Experts that were begun; to drop them gives them up.
pub(crate) struct PendingExperts<B: Backend>(Box<Finish<B>>);

type Finish<B> = dyn FnOnce(&<B as MemoryOps>::Tensor, Check<'_>) -> Result<<B as MemoryOps>::Tensor, ModelError>
    + Send;

impl<B: Backend> PendingExperts<B> {
    /// Experts whose output `finish` returns.
    fn new(
        finish: impl FnOnce(&B::Tensor, Check<'_>) -> Result<B::Tensor, ModelError> + Send + 'static,
    ) -> Self {
        Self(Box::new(finish))
    }

    /// Returns the sum of their weighted outputs `[rows, hidden]` for the tokens `x` that they were begun with. `check` is
    /// called between long operations.
    ///
    /// # Errors
    /// Errors of the experts' modules, and `check`'s.
    pub(crate) fn finish(self, x: &B::Tensor, check: Check<'_>) -> Result<B::Tensor, ModelError> {
        (self.0)(x, check)
    }
}
