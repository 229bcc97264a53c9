//! Building blocks of architectures. Each lists its tensors and computes its output from a normalised input.

pub(crate) mod ffn;
pub(crate) mod gqa;
pub(crate) mod mla;
pub(crate) mod moe;
pub(crate) mod rope;

use hearth_kernels::{Backend, Span};

use crate::{ModelError, Observer, Residency};

/// State of the running forward pass, as seen by a block.
pub(crate) struct Pass<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) residency: &'a dyn Residency<B>,
    pub(crate) kv: &'a mut B::Kv,
    pub(crate) spans: &'a [Span],
    /// `[rows]` absolute positions.
    pub(crate) positions: &'a [u32],
    pub(crate) observer: &'a mut dyn Observer<B>,
    /// Index of the running layer.
    pub(crate) layer: usize,
    /// Number of blocks before the running one: a layer's attention and feed-forward count as one each.
    pub(crate) blocks_done: usize,
    /// Total number of blocks.
    pub(crate) blocks: usize,
}

impl<B: Backend> Pass<'_, B> {
    /// Ends the pass if its result is no longer wanted; called between long operations.
    pub(crate) fn check_cancelled(&mut self) -> Result<(), ModelError> {
        match self.observer.goes_on(self.blocks_done, self.blocks) {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        }
    }

    /// Shows a named intermediate of this layer to the observer.
    pub(crate) fn show(&mut self, name: &'static str, x: &B::Tensor) {
        self.observer
            .tensor(name, Some(self.layer), self.backend, x);
    }
}

/// Returns `model.layers.{layer}.{rest}`, the name that all published checkpoints use for a layer's tensors.
pub(crate) fn layer_name(layer: u32, rest: &str) -> String {
    format!("model.layers.{layer}.{rest}")
}
