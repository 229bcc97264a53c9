//! KV export to another worker: each layer is read as soon as it is computed, while later layers are still computing.

use hearth_kernels::{BlockId, KvLayout};
use hearth_schedule::SequenceId;

use crate::{EngineError, forward::KvBytes};

/// Maximum size of one event's data.
const PIECE_BYTES: usize = 4 << 20;

/// Tokens that a forward pass makes ready for an export: those it computes and, before them, those that were found
/// in the cache and not sent yet.
#[derive(Clone, Debug)]
pub(crate) struct ExportRange {
    pub(crate) sequence: SequenceId,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl ExportRange {
    /// Reads one layer in pieces of bounded size and passes each to `send` (first token, tokens, bytes), which returns
    /// false when the receiver is gone.
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
