//! KV export to another worker: each layer is copied as soon as it is computed, and sent once the copy has arrived, while later
//! layers are still computing.
//!
//! A copy is queued behind the layer, and the thread that launches the pass goes on: it sends what has arrived between two
//! blocks, and the rest when all is launched, each piece as soon as it is there. A device that is slower than the thread is
//! waited for only where [`MOST_MOVING_BYTES`] are on their way. A receiver must not block; what it has not taken yet is in ordinary
//! memory, so that a slow one does not hold up the device, and bounded by which exports begin (`unread.rs`).

use std::collections::{BTreeMap, VecDeque};

use hearth_kernels::{BlockId, KvLayout};
use hearth_schedule::SequenceId;

use crate::{
    EngineError,
    forward::{KvBytes, PendingKv},
    request::{EngineRequest, Export},
};

/// Maximum size of one event's data.
const PIECE_BYTES: usize = 4 << 20;
/// Maximum size of the pieces on their way at a time. A device copies them to pinned memory, which is scarce; several layers of
/// a prompt have room, so that the device always has work while a piece is waited for.
pub(crate) const MOST_MOVING_BYTES: usize = 64 << 20;

/// The requests of an engine.
type Requests = BTreeMap<SequenceId, EngineRequest>;

/// Tokens that a forward pass makes ready for an export: those it computes and, before them, those that were found
/// in the cache and not sent yet.
#[derive(Clone, Debug)]
pub(crate) struct ExportRange {
    pub(crate) sequence: SequenceId,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// KV of a pass on its way to the host, in the order in which it is sent. Dropping it waits for nothing.
#[derive(Default)]
pub(crate) struct ExportQueue {
    pieces: VecDeque<Piece>,
    /// Sum of the pieces' bytes.
    bytes: usize,
    /// Bytes that were sent.
    pub(crate) sent_bytes: u64,
    /// Exports whose KV could not be read, each once; nothing more of them is sent.
    pub(crate) lost: Vec<(SequenceId, EngineError)>,
}

/// A part of a layer's KV.
struct Piece {
    sequence: SequenceId,
    layer: usize,
    first_token: usize,
    tokens: usize,
    bytes: usize,
    copy: Box<dyn PendingKv>,
}

impl ExportQueue {
    /// Begins to copy one layer in pieces of bounded size; waits for earlier ones, and sends them, while there is no room.
    pub(crate) fn begin(
        &mut self,
        range: &ExportRange,
        layer: usize,
        layout: &KvLayout,
        kv: &dyn KvBytes,
        requests: &mut Requests,
    ) {
        let token_bytes = layout.token_layer_bytes();
        let step = (PIECE_BYTES / token_bytes.max(1)).max(1);
        for first_token in (range.from..range.to).step_by(step) {
            let tokens = step.min(range.to - first_token);
            let bytes = tokens * token_bytes;
            while self.bytes + bytes > MOST_MOVING_BYTES && self.send_next(requests) {}
            if self.wanted(range.sequence, requests).is_none() {
                return;
            }
            match kv.begin(layer, &range.blocks, first_token, tokens) {
                Ok(copy) => {
                    self.bytes += bytes;
                    self.pieces.push_back(Piece {
                        sequence: range.sequence,
                        layer,
                        first_token,
                        tokens,
                        bytes,
                        copy,
                    });
                }
                Err(reason) => self.lose(range.sequence, reason),
            }
        }
    }

    /// Sends the pieces that have arrived, up to the first that has not.
    pub(crate) fn send_arrived(&mut self, requests: &mut Requests) {
        // Where asking fails, waiting tells why.
        let has_arrived = |piece: &Piece| piece.copy.has_arrived().unwrap_or(true);
        while self.pieces.front().is_some_and(has_arrived) {
            self.send_next(requests);
        }
    }

    /// Waits for the first piece, and sends it, unless nobody wants it any more. Returns false if there is none.
    pub(crate) fn send_next(&mut self, requests: &mut Requests) -> bool {
        let Some(piece) = self.pieces.pop_front() else {
            return false;
        };
        self.bytes -= piece.bytes;
        if let Some(export) = self.wanted(piece.sequence, requests) {
            match piece.copy.wait() {
                Ok(data) => {
                    self.sent_bytes += data.len() as u64;
                    // That a receiver is gone is seen at the next piece.
                    export.kv(piece.layer, piece.first_token, piece.tokens, data);
                }
                Err(reason) => self.lose(piece.sequence, reason),
            }
        }
        true
    }

    /// Whether nothing is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The export, if somebody still wants it and it lacks nothing.
    fn wanted<'a>(
        &self,
        sequence: SequenceId,
        requests: &'a mut Requests,
    ) -> Option<&'a mut Export> {
        let is_lost = self.lost.iter().any(|(lost, _)| *lost == sequence);
        let request = requests.get_mut(&sequence);
        match request.filter(|request| !is_lost && !request.is_cancelled()) {
            Some(EngineRequest::Export(export)) => Some(export),
            _ => None,
        }
    }

    fn lose(&mut self, sequence: SequenceId, reason: String) {
        self.lost.push((sequence, EngineError::Forward { reason }));
    }
}
