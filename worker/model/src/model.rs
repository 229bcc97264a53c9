//! A decoder, the backend that runs it, and the policy that provides its weights.

use std::sync::Arc;

use hearth_formats::ModelConfig;
use hearth_kernels::{Backend, KvDType, KvLayout};

use crate::arch;
use crate::blocks::Pass;
use crate::decoder::{Attention, Decoder, FeedForward};
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
        Ok(Self {
            config,
            decoder,
            backend,
            residency,
        })
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
        batch.check(self.decoder.vocab)?;
        let positions = batch.positions();
        let layers = self.decoder.feed_forward.len();
        let mut pass = Pass {
            backend: &*self.backend,
            residency: &*self.residency,
            kv,
            spans: &batch.spans,
            positions: &positions,
            observer,
            layer: 0,
            blocks_done: 0,
            blocks: 2 * layers,
        };
        let mut stream = self.embed(&mut pass, &batch.tokens)?;
        for layer in 0..layers {
            pass.layer = layer;
            pass.blocks_done = 2 * layer;
            pass.check_cancelled()?;
            self.attention(&mut pass, &mut stream)?;
            pass.observer.layer_done(layer, pass.kv);
            pass.blocks_done += 1;
            pass.check_cancelled()?;
            self.feed_forward(&mut pass, &mut stream)?;
        }
        if batch.logit_rows.is_empty() {
            self.backend.finish()?;
            return Ok(None);
        }
        self.head(&mut pass, stream, &batch.logit_rows)
            .map(Some)
            .map_err(|e| e.within(ModuleId::Head))
    }

    fn embed(&self, pass: &mut Pass<'_, B>, tokens: &[u32]) -> Result<Stream<B>, ModelError> {
        let embedding = pass.residency.acquire(ModuleId::Embedding)?;
        let table = embedding.matrix("embedding")?;
        // residual [rows, hidden]
        let residual = pass
            .backend
            .embed(table, tokens)
            .map_err(|e| ModelError::from(e).within(ModuleId::Embedding))?;
        let observer = &mut pass.observer;
        observer.tensor("embedding", None, pass.backend, &residual);
        Ok(Stream {
            residual,
            delta: None,
        })
    }

    fn attention(&self, pass: &mut Pass<'_, B>, stream: &mut Stream<B>) -> Result<(), ModelError> {
        let id = ModuleId::Attention(pass.layer as u32);
        let weights = pass.residency.acquire(id)?;
        let mut run = |pass: &mut Pass<'_, B>| {
            // x [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder.eps)?;
            if pass.layer > 0 {
                let before = Some(pass.layer - 1);
                let observer = &mut pass.observer;
                observer.tensor("layer_out", before, pass.backend, &stream.residual);
            }
            pass.show("attn_norm", &x);
            // delta [rows, hidden]
            let delta = match &self.decoder.attention {
                Attention::Gqa(gqa) => gqa.forward(pass, &weights, &x)?,
                Attention::Mla(mla) => mla.forward(pass, &weights, &x)?,
            };
            stream.delta = Some(delta);
            Ok(())
        };
        run(pass).map_err(|e: ModelError| e.within(id))
    }

    fn feed_forward(
        &self,
        pass: &mut Pass<'_, B>,
        stream: &mut Stream<B>,
    ) -> Result<(), ModelError> {
        let layer = pass.layer as u32;
        let block = &self.decoder.feed_forward[pass.layer];
        let id = match block {
            FeedForward::Dense(_) => ModuleId::DenseFfn(layer),
            FeedForward::Moe(_) => ModuleId::Router(layer),
        };
        let weights = pass.residency.acquire(id)?;
        let run = |pass: &mut Pass<'_, B>| {
            // x [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder.eps)?;
            pass.show("ffn_norm", &x);
            // delta [rows, hidden]
            let delta = match block {
                FeedForward::Dense(dense) => dense.forward(pass, &weights, &x)?,
                FeedForward::Moe(moe) => moe.forward(pass, weights, &x)?,
            };
            pass.show("ffn_out", &delta);
            stream.delta = Some(delta);
            Ok(())
        };
        run(pass).map_err(|e: ModelError| e.within(id))
    }

    fn head(
        &self,
        pass: &mut Pass<'_, B>,
        mut stream: Stream<B>,
        logit_rows: &[u32],
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let weights = pass.residency.acquire(ModuleId::Head)?;
        if let Some(delta) = stream.delta.take() {
            backend.add_assign(&mut stream.residual, &delta)?;
        }
        pass.show("layer_out", &stream.residual);
        // last, x [logit rows, hidden]
        let last = backend.rows(&stream.residual, logit_rows)?;
        let x = backend.rms_norm(&last, weights.vector("norm")?, self.decoder.eps)?;
        pass.observer.tensor("final_norm", None, backend, &x);
        // logits [logit rows, vocab]
        let logits = backend.linear(&x, weights.matrix("head")?, None)?;
        pass.observer.tensor("logits", None, backend, &logits);
        Ok(logits)
    }
}

/// The residual stream between two blocks: a block's output is added when the next norm reads the sum.
struct Stream<B: Backend> {
    /// `[rows, hidden]`.
    residual: B::Tensor,
    /// `[rows, hidden]`, still to be added.
    delta: Option<B::Tensor>,
}

impl<B: Backend> Stream<B> {
    /// Adds the pending output and returns the norm of the sum, `[rows, hidden]`.
    fn norm(
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
