//! Where routed experts run: the router's choice in, the weighted sum of the chosen experts' outputs out.

mod local;

use hearth_kernels::Backend;

use crate::ModelError;

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
