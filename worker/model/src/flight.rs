//! A pass between two of its modules.

use hearth_kernels::{Backend, Span};

use crate::ModelError;
use crate::blocks::Pass;
use crate::experts::PendingExperts;

/// A pass that has begun: the rows of some sequences on their way through the layers.
///
/// It owns all that it needs between two modules, so that a thread may leave it there and go on with another one.
pub struct Flight<B: Backend> {
    pub(crate) place: Place,
    pub(crate) stream: Stream<B>,
    pub(crate) moe: Option<MoeInFlight<B>>,
}

impl<B: Backend> Flight<B> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.place.positions.len()
    }
}

/// Sequences of a flight, and how far it has come.
pub(crate) struct Place {
    pub(crate) spans: Vec<Span>,
    /// `[rows]` absolute positions.
    pub(crate) positions: Vec<u32>,
    /// Blocks that were computed: a layer's attention and feed-forward count as one each.
    pub(crate) blocks_done: usize,
}

/// The residual stream between two blocks: a block's output is added when the next norm reads the sum.
pub(crate) struct Stream<B: Backend> {
    /// `[rows, hidden]`.
    pub(crate) residual: B::Tensor,
    /// `[rows, hidden]`, still to be added.
    pub(crate) delta: Option<B::Tensor>,
}

impl<B: Backend> Stream<B> {
    /// Adds the pending output and returns the norm of the sum, `[rows, hidden]`.
    pub(crate) fn norm(
        &mut self,
        pass: &Pass<'_, B>,
        weight: &B::Vector,
        eps: f32,
    ) -> Result<B::Tensor, ModelError> {
        Ok(match self.delta.take() {
            None => pass.backend.rms_norm(&self.residual, weight, eps)?,
            Some(delta) => pass
                .backend
                .add_rms_norm(&mut self.residual, &delta, weight, eps)?,
        })
    }
}

/// A layer's routed experts between their begin and their end.
pub(crate) struct MoeInFlight<B: Backend> {
    /// `[rows, hidden]`, normalised.
    pub(crate) x: B::Tensor,
    /// `[rows, hidden]` output of the shared experts.
    pub(crate) shared: Option<B::Tensor>,
    pub(crate) routed: Box<dyn PendingExperts<B>>,
}
