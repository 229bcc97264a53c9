//! A decoder, the backend that runs it, and the policy that provides its weights.

use std::sync::Arc;

use hearth_formats::ModelConfig;
use hearth_kernels::{Backend, KvDType, KvLayout};

use crate::arch;
use crate::decoder::Decoder;
use crate::experts::{Experts, LocalExperts};
use crate::{Batch, ModelError, ModuleId, ModuleSpec, Observer, Residency};

/// Lists all modules of a model in execution order, with the names and shapes of their tensors.
///
/// # Errors
/// [`ModelError::Config`] if the configuration does not fit its architecture; one read from a file always does.
pub fn modules(config: &ModelConfig) -> Result<Vec<ModuleSpec>, ModelError> {
    arch::modules(config)
}

/// Layout of the KV that one token stores in each layer, without needing a model.
///
/// # Errors
/// Same as [`modules`].
pub fn kv_layout(
    config: &ModelConfig,
    block_tokens: usize,
    dtype: KvDType,
) -> Result<KvLayout, ModelError> {
    Ok(arch::describe(config)?.kv_layout(block_tokens, dtype))
}

/// A model that computes logits.
pub struct Model<B: Backend> {
    config: ModelConfig,
    decoder: Decoder,
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
    experts: Box<dyn Experts<B>>,
    /// Most rows that attention and dense feed-forward blocks take at once.
    tile_rows: usize,
}

impl<B: Backend> Model<B> {
    /// Calls [`modules`]; for callers that name the backend's type.
    ///
    /// # Errors
    /// Same as [`modules`].
    pub fn modules(config: &ModelConfig) -> Result<Vec<ModuleSpec>, ModelError> {
        modules(config)
    }

    /// Combines a configuration with the policy that was opened with its [`modules`].
    ///
    /// # Errors
    /// Same as [`modules`].
    pub fn new(
        config: ModelConfig,
        backend: Arc<B>,
        residency: Arc<dyn Residency<B>>,
    ) -> Result<Self, ModelError> {
        let decoder = arch::describe(&config)?;
        let experts = LocalExperts::new(Arc::clone(&backend), Arc::clone(&residency));
        Ok(Self {
            config,
            decoder,
            backend,
            residency,
            experts: Box::new(experts),
            tile_rows: usize::MAX,
        })
    }

    /// Runs attention and dense feed-forward blocks in tiles of at most `rows` rows: a long pass then needs, beside two
    /// matrices `[rows, hidden]` and those of routed experts, working memory for one tile. The bits are the same.
    #[must_use]
    pub fn in_row_tiles(mut self, rows: usize) -> Self {
        self.tile_rows = rows.max(1);
        self
    }

    /// Layout of the KV cache that [`Model::forward`] reads and writes.
    pub fn kv_layout(&self, block_tokens: usize, dtype: KvDType) -> KvLayout {
        self.decoder.kv_layout(block_tokens, dtype)
    }

    /// The device.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The policy that provides the weights.
    pub fn residency(&self) -> &Arc<dyn Residency<B>> {
        &self.residency
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs a batch: stores its keys and values, and returns logits `[batch.logit_rows.len(), vocab]`, row-major.
    ///
    /// Besides the blocks' intermediates, the observer sees `embedding` and, for each layer, `attn_norm`, `ffn_norm`,
    /// `ffn_out` and `layer_out`, all `[rows, hidden]`; then `final_norm` `[logit rows, hidden]` and `logits`.
    ///
    /// # Errors
    /// [`ModelError::Batch`], [`ModelError::Residency`], [`ModelError::Kernel`]; [`ModelError::GivenUp`] if the
    /// observer ended it. The cache is then undefined at the positions of the batch; earlier positions are untouched.
    pub fn forward(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<f32>, ModelError> {
        let logits = self.forward_logits(batch, kv, observer)?;
        let logits = logits.map_or_else(|| Ok(Vec::new()), |x| self.backend.download(&x));
        logits.map_err(|e| ModelError::from(e).within(ModuleId::Head))
    }

    /// Same as [`Model::forward`], but leaves the logits on the device, where a token may be chosen; `None` if no rows
    /// are wanted.
    ///
    /// # Errors
    /// Same as [`Model::forward`].
    pub fn forward_logits(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        batch.check_logit_rows()?;
        let mut flight = self.begin(&batch.tokens, batch.spans.clone(), observer)?;
        for layer in 0..self.decoder.feed_forward.len() {
            self.attention(&mut flight, layer, kv, observer)?;
            self.feed_forward(&mut flight, layer, observer)?;
        }
        self.end(flight, &batch.logit_rows, observer)
    }

    /// The blocks.
    pub(crate) fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Most rows that attention and dense feed-forward blocks take at once.
    pub(crate) fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// The place where routed experts run.
    pub(crate) fn experts(&self) -> &dyn Experts<B> {
        &*self.experts
    }
}
