//! What the step loop asks of a model: one forward pass, and the bytes of its KV.

use std::sync::Arc;

use hearth_kernels::{Backend, BlockId, KvLayout};
use hearth_model::{Batch, Model, Observer};

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

/// Called when the KV of a layer is final for all rows of the batch.
pub(crate) type LayerDone<'a> = dyn FnMut(usize, &dyn KvBytes) + 'a;

/// Counters of weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightStats {
    pub(crate) read_bytes: u64,
    pub(crate) resident_bytes: u64,
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
    /// Logits `[batch.logit_rows.len(), vocab]`, row-major.
    fn forward(
        &mut self,
        batch: &Batch,
        layer_done: &mut LayerDone<'_>,
    ) -> Result<Vec<f32>, String>;
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
}

/// A real model.
pub(crate) struct ModelForward<B: Backend> {
    model: Model<B>,
    backend: Arc<B>,
    kv: B::Kv,
}

impl<B: Backend> ModelForward<B> {
    pub(crate) fn new(model: Model<B>, kv: B::Kv) -> Self {
        Self {
            backend: model.backend().clone(),
            model,
            kv,
        }
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

    fn forward(
        &mut self,
        batch: &Batch,
        layer_done: &mut LayerDone<'_>,
    ) -> Result<Vec<f32>, String> {
        let mut watch = Watch {
            backend: &*self.backend,
            layer_done,
        };
        self.model
            .forward(batch, &mut self.kv, &mut watch)
            .map_err(|e| e.to_string())
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

    fn weights(&self) -> WeightStats {
        let stats = self.model.residency().stats();
        WeightStats {
            read_bytes: stats.read_bytes,
            resident_bytes: stats.resident_bytes,
        }
    }
}

/// Passes a model's own observation on, with the cache made readable.
struct Watch<'a, 'b, B: Backend> {
    backend: &'a B,
    layer_done: &'a mut LayerDone<'b>,
}

impl<B: Backend> Observer<B> for Watch<'_, '_, B> {
    fn layer_done(&mut self, layer: usize, kv: &B::Kv) {
        let view = View {
            backend: self.backend,
            kv,
        };
        (self.layer_done)(layer, &view);
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
