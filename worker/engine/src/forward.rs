//! What the step loop asks of a model: one forward pass, and the bytes of its KV.

use std::sync::Arc;

use hearth_kernels::{Backend, BlockId, KernelError, KvLayout, SampleFault, SampleSpec};
use hearth_model::{Batch, Model, ModelError, Observer};

use crate::progress::{Pass, Progress};

/// Bytes of stored KV.
pub(crate) trait KvBytes {
    /// `tokens * token_layer_bytes` bytes of one layer from `first_token` of a sequence.
    fn read(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, String>;
}

/// Looks into a forward pass while it runs.
pub(crate) trait Watch {
    /// The KV of a layer is final for all rows of the batch.
    fn layer_done(&mut self, layer: usize, kv: &dyn KvBytes);
    /// Whether the pass goes on, `done` of its `blocks` blocks being computed.
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool;
}

/// Counters of weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightStats {
    pub(crate) read_bytes: u64,
    pub(crate) resident_bytes: u64,
}

/// What a forward pass says of the rows whose logits are wanted.
#[derive(Default)]
pub(crate) struct Output {
    /// Tokens of the rows that were chosen from, which come first.
    pub(crate) chosen: Vec<Result<u32, SampleFault>>,
    /// Logits of the others, `[rows, vocab]`.
    pub(crate) logits: Vec<f32>,
}

/// A model with its KV cache.
pub(crate) trait Forward: Send {
    /// Called once on the thread that will make all further calls.
    fn bind_thread(&self) -> Result<(), String> {
        Ok(())
    }
    /// Logits of a token.
    fn vocab(&self) -> usize;
    /// Layout of the cache.
    fn layout(&self) -> KvLayout;
    /// Whether [`Forward::forward`] takes choices.
    fn can_sample(&self) -> bool;
    /// Chooses tokens from the logits of the first `choices.len()` of `batch.logit_rows`, and returns the logits of the others;
    /// `None` when `watch` has ended the pass.
    fn forward(
        &mut self,
        batch: &Batch,
        choices: &[SampleSpec],
        watch: &mut dyn Watch,
    ) -> Result<Option<Output>, String>;
    /// Stores what another worker's cache held.
    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String>;
    /// Counters since the start.
    fn weights(&self) -> WeightStats;
    /// How far the running pass is.
    fn progress(&self) -> Progress {
        Progress::default()
    }
}

/// A real model.
pub(crate) struct ModelForward<B: Backend> {
    model: Model<B>,
    backend: Arc<B>,
    kv: B::Kv,
    progress: Progress,
}

impl<B: Backend> ModelForward<B> {
    pub(crate) fn new(model: Model<B>, kv: B::Kv) -> Self {
        Self {
            backend: model.backend().clone(),
            model,
            kv,
            progress: Progress::default(),
        }
    }

    /// Chooses where the logits are, and brings only the other rows to the host.
    fn output(&self, logits: &B::Tensor, choices: &[SampleSpec]) -> Result<Output, KernelError> {
        let backend = &*self.backend;
        if choices.is_empty() {
            return Ok(Output {
                chosen: Vec::new(),
                logits: backend.download(logits)?,
            });
        }
        let others: Vec<u32> = (choices.len()..backend.shape(logits).0)
            .map(|row| row as u32)
            .collect();
        if others.is_empty() {
            return Ok(Output {
                chosen: backend.sample(logits, choices)?,
                logits: Vec::new(),
            });
        }
        let rest = backend.rows(logits, &others)?;
        Ok(Output {
            chosen: backend.sample(logits, choices)?,
            logits: backend.download(&rest)?,
        })
    }
}

impl<B: Backend> Forward for ModelForward<B> {
    fn bind_thread(&self) -> Result<(), String> {
        self.backend.bind_thread().map_err(|e| e.to_string())
    }

    fn vocab(&self) -> usize {
        self.model.config().vocab_size
    }

    fn layout(&self) -> KvLayout {
        self.backend.kv_layout(&self.kv)
    }

    fn can_sample(&self) -> bool {
        self.backend.can_sample(self.vocab())
    }

    fn forward(
        &mut self,
        batch: &Batch,
        choices: &[SampleSpec],
        watch: &mut dyn Watch,
    ) -> Result<Option<Output>, String> {
        let mut observing = Observing {
            backend: &*self.backend,
            watch,
            pass: self.progress.begin(),
        };
        let logits = self
            .model
            .forward_logits(batch, &mut self.kv, &mut observing);
        let output = match logits {
            Err(ModelError::GivenUp) => return Ok(None),
            Err(error) => return Err(error.to_string()),
            Ok(None) => Output::default(),
            Ok(Some(logits)) => self.output(&logits, choices).map_err(|e| e.to_string())?,
        };
        Ok(Some(output))
    }

    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String> {
        self.backend
            .kv_write(&mut self.kv, layer, blocks, first_token, bytes)
            .map_err(|e| e.to_string())
    }

    fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn weights(&self) -> WeightStats {
        let stats = self.model.residency().stats();
        WeightStats {
            read_bytes: stats.read_bytes,
            resident_bytes: stats.resident_bytes,
        }
    }
}

/// Passes a model's own observation on, with the cache made readable.
struct Observing<'a, B: Backend> {
    backend: &'a B,
    watch: &'a mut dyn Watch,
    pass: Pass,
}

impl<B: Backend> Observer<B> for Observing<'_, B> {
    fn layer_done(&mut self, layer: usize, kv: &B::Kv) {
        self.pass.goes_on();
        let view = View {
            backend: self.backend,
            kv,
        };
        self.watch.layer_done(layer, &view);
    }

    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        self.watch.goes_on(done, blocks)
    }
}

struct View<'a, B: Backend> {
    backend: &'a B,
    kv: &'a B::Kv,
}

impl<B: Backend> KvBytes for View<'_, B> {
    fn read(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, String> {
        self.backend
            .kv_read(self.kv, layer, blocks, first_token, tokens)
            .map_err(|e| e.to_string())
    }
}
