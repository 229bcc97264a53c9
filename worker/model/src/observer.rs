//! A look into a forward pass while it runs.

use hearth_kernels::Backend;

/// Sees what a forward pass computes, as soon as it is computed. It runs on the pass's own thread: what takes long belongs elsewhere.
pub trait Observer<B: Backend> {
    /// The keys and values of this layer are final for every row of the batch; later layers have yet to run.
    fn layer_done(&mut self, _layer: usize, _kv: &B::Kv) {}

    /// Asked between operations that take long: whether the pass goes on, `done` of its `blocks` blocks being computed, of which
    /// attention and feed-forward of a layer are one each. False ends it with [`crate::ModelError::GivenUp`].
    fn goes_on(&mut self, _done: usize, _blocks: usize) -> bool {
        true
    }

    /// A named intermediate, `[rows, …]`; the names are listed in the blocks' documentation.
    fn tensor(&mut self, _name: &'static str, _layer: Option<usize>, _backend: &B, _x: &B::Tensor) {
    }
}

impl<B: Backend> Observer<B> for () {}
