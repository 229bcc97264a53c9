//! The step loop's view of a model: one forward pass, and the bytes of its KV.

use std::sync::Arc;

use hearth_kernels::{Backend, BlockId, KernelError, KvLayout, SampleFault, SampleSpec};
use hearth_model::{Batch, Model, ModelError, Observer};

use crate::progress::{Pass, Progress};

/// Access to the bytes of stored KV.
pub(crate) trait KvBytes {
    /// Returns `tokens * token_layer_bytes` bytes of one layer, starting at a sequence's `first_token`.
    fn read(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, String>;
}

/// Observes a forward pass while it runs.
pub(crate) trait Watch {
    /// Called when a layer's KV is final for all rows of the batch.
    fn layer_done(&mut self, layer: usize, kv: &dyn KvBytes);
    /// Whether the pass continues, after `done` of its `blocks` blocks.
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool;
}

/// Weight counters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightStats {
    pub(crate) read_bytes: u64,
    pub(crate) resident_bytes: u64,
}

/// Result of a forward pass for the rows whose logits are wanted.
#[derive(Default)]
pub(crate) struct Output {
    /// Tokens chosen on the device; their rows come first.
    pub(crate) chosen: Vec<Result<u32, SampleFault>>,
    /// Logits of the other rows, `[rows, vocab]`.
    pub(crate) logits: Vec<f32>,
}

/// A model with its KV cache.
pub(crate) trait Forward: Send {
    /// Called once on the thread that makes all later calls.
    fn bind_thread(&self) -> Result<(), String> {
        Ok(())
    }
    /// Number of logits per token.
    fn vocab(&self) -> usize;
    /// Layout of the KV cache.
    fn layout(&self) -> KvLayout;
    /// Whether [`Forward::forward`] accepts `choices`.
    fn can_sample(&self) -> bool;
    /// Chooses tokens from the logits of the first `choices.len()` of `batch.logit_rows`, and returns the
    /// logits of the others; `None` if `watch` has ended the pass.
    fn forward(
        &mut self,
        batch: &Batch,
        choices: &[SampleSpec],
        watch: &mut dyn Watch,
    ) -> Result<Option<Output>, String>;
    /// Stores KV from another worker's cache.
    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String>;
    /// Why the device is lost; `None` while it answers.
    fn device_lost(&self) -> Option<String> {
        None
    }
    /// Returns counters since the start.
    fn weights(&self) -> WeightStats;
    /// Progress of the running pass.
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
    device_lost: Option<String>,
}

impl<B: Backend> ModelForward<B> {
    pub(crate) fn new(model: Model<B>, kv: B::Kv) -> Self {
        Self {
            backend: model.backend().clone(),
            model,
            kv,
            progress: Progress::default(),
            device_lost: None,
        }
    }

    /// The text of an error, remembered if it means that the device is lost.
    fn noted(&mut self, error: &ModelError) -> String {
        let text = error.to_string();
        if error.is_device_lost() {
            self.device_lost = Some(text.clone());
        }
        text
    }

    /// Chooses tokens where the logits are, and copies only the other rows to the host.
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
        let backend = Arc::clone(&self.backend);
        let mut observing = Observing {
            backend: &*backend,
            watch,
            pass: self.progress.begin(),
        };
        let logits = self
            .model
            .forward_logits(batch, &mut self.kv, &mut observing);
        let output = match logits {
            Err(ModelError::GivenUp) => return Ok(None),
            Err(error) => return Err(self.noted(&error)),
            Ok(None) => Output::default(),
            Ok(Some(logits)) => match self.output(&logits, choices) {
                Ok(output) => output,
                Err(error) => return Err(self.noted(&error.into())),
            },
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
        let backend = Arc::clone(&self.backend);
        backend
            .kv_write(&mut self.kv, layer, blocks, first_token, bytes)
            .map_err(|error| self.noted(&error.into()))
    }

    fn device_lost(&self) -> Option<String> {
        self.device_lost.clone()
    }

    fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn weights(&self) -> WeightStats {
        let stats = self.model.stats();
        WeightStats {
            read_bytes: stats.read_bytes,
            resident_bytes: stats.resident_bytes,
        }
    }
}

/// Forwards a model's own observation, with the cache made readable.
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
