//! Where routed experts run: the router's choice in, the weighted sum of the chosen experts' outputs out.

mod chosen;
mod host;
mod hot;
mod local;

use hearth_kernels::Backend;

use crate::{ModelError, ResidencyStats};

pub(crate) use host::HostExperts;
pub(crate) use local::LocalExperts;

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
    /// [`PendingExperts::finish`] (the shared experts, or another flight) runs beside them where the place can.
    ///
    /// # Errors
    /// Errors of the experts' modules.
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
    ) -> Result<Box<dyn PendingExperts<B>>, ModelError>;

    /// Whether a pass waits here for what the device computes, apart from what the model's own policy waits for.
    fn keep_host_waiting(&self) -> bool {
        false
    }

    /// Numerics of the backend that runs them if they differ from the device's.
    fn numerics(&self, _of_device: &str) -> Option<String> {
        None
    }

    /// Counters of the experts' weights where the model's own policy does not have them.
    fn stats(&self) -> ResidencyStats {
        ResidencyStats::default()
    }
}

/// Experts that were begun.
pub(crate) trait PendingExperts<B: Backend>: Send {
    /// Returns the sum of their weighted outputs `[rows, hidden]`. `check` is called between long operations, and
    /// its error ends the pass.
    ///
    /// # Errors
    /// Errors of the experts' modules, and `check`'s.
    fn finish(
        self: Box<Self>,
        x: &B::Tensor,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError>;
}
