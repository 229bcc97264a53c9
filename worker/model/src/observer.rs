//! Observation of a forward pass while it runs.

use hearth_kernels::Backend;

/// Observes the results of a forward pass as soon as they are computed. Runs on the pass's own thread, so long work
/// belongs elsewhere.
pub trait Observer<B: Backend> {
    /// Called when this layer's keys and values are final for every row of the batch; later layers have yet to run.
    fn layer_done(&mut self, _layer: usize, _kv: &B::Kv) {}

    /// Returns whether the pass continues; called between long operations, when `done` of its `blocks` blocks have
    /// been computed (a layer's attention and feed-forward are one each). False ends it with
    /// [`crate::ModelError::GivenUp`].
    fn goes_on(&mut self, _done: usize, _blocks: usize) -> bool {
        true
    }

    /// Whether [`Observer::tensor`] is to see every intermediate. If not, operations that leave some out may take the place
    /// of several; bits are the same.
    fn sees_tensors(&self) -> bool {
        true
    }

    /// Receives a named intermediate, `[rows, …]`; the blocks' documentation lists the names. A model in row tiles shows
    /// those of attention and of dense feed-forward blocks tile by tile.
    fn tensor(&mut self, _name: &'static str, _layer: Option<usize>, _backend: &B, _x: &B::Tensor) {
    }
}

impl<B: Backend> Observer<B> for () {
    fn sees_tensors(&self) -> bool {
        false
    }
}
