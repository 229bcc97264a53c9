//! Blocks that architectures are composed of. Each lists its tensors and computes its output from a normalised input.

pub(crate) mod ffn;
pub(crate) mod gqa;
pub(crate) mod mla;
pub(crate) mod moe;
pub(crate) mod rope;

use hearth_kernels::{Backend, Span};

use crate::{ModelError, Observer, Residency};

/// What a block needs of the running forward pass.
pub(crate) struct Pass<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) residency: &'a dyn Residency<B>,
    pub(crate) kv: &'a mut B::Kv,
    pub(crate) spans: &'a [Span],
    /// `[rows]` absolute positions.
    pub(crate) positions: &'a [u32],
    pub(crate) observer: &'a mut dyn Observer<B>,
    /// The layer that runs.
    pub(crate) layer: usize,
    /// Blocks before the one that runs: attention and feed-forward of a layer are one each.
    pub(crate) blocks_done: usize,
    /// All blocks.
    pub(crate) blocks: usize,
}

impl<B: Backend> Pass<'_, B> {
    /// Ends the pass where nobody wants it any more; asked between operations that take long.
    pub(crate) fn ask(&mut self) -> Result<(), ModelError> {
        match self.observer.goes_on(self.blocks_done, self.blocks) {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        }
    }

    /// Shows a named intermediate of this layer.
    pub(crate) fn show(&mut self, name: &'static str, x: &B::Tensor) {
        self.observer
            .tensor(name, Some(self.layer), self.backend, x);
    }
}

/// `model.layers.{layer}.{rest}`: how all published checkpoints name what belongs to a layer.
pub(crate) fn layer_name(layer: u32, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}
