//! KV for another worker: read right after its layer is computed, while later layers still compute.

use hearth_kernels::{BlockId, KvLayout};
use hearth_schedule::SequenceId;

use crate::{EngineError, forward::KvBytes};

/// Most bytes of one event.
const PIECE_BYTES: usize = 4 << 20;

/// What a forward pass makes ready for an export: tokens computed by it, and before them those that were found
/// in the cache and never sent.
#[derive(Clone, Debug)]
pub(crate) struct ExportRange {
    pub(crate) sequence: SequenceId,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl ExportRange {
    /// Reads one layer in pieces of bounded size and hands each on: first token, tokens, bytes. `send` returns
    /// false when nobody wants more.
    pub(crate) fn read(
        &self,
        layer: usize,
        layout: &KvLayout,
        kv: &dyn KvBytes,
        send: &mut dyn FnMut(usize, usize, Vec<u8>) -> bool,
    ) -> Result<(), EngineError> {
        let step = (PIECE_BYTES / layout.token_layer_bytes().max(1)).max(1);
        for first_token in (self.from..self.to).step_by(step) {
            let tokens = step.min(self.to - first_token);
            let data = kv
                .read(layer, &self.blocks, first_token, tokens)
                .map_err(|reason| EngineError::Forward { reason })?;
            if !send(first_token, tokens, data) {
                return Ok(());
            }
        }
        Ok(())
    }
}
