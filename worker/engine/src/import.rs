//! KV from another worker: received so far, and still outstanding.

use std::collections::VecDeque;

use bytes::Bytes;
use hearth_kernels::KvLayout;

use crate::{EngineError, RequestId};

/// Maximum bytes of KV copied between two forward passes while sequences decode.
pub(crate) const IMPORT_BYTES_PER_STEP: usize = 32 << 20;

/// Progress of one sequence's import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Import {
    first_token: usize,
    tokens: usize,
    /// First missing token of each layer.
    there: Vec<usize>,
}

/// A message with KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KvChunk {
    pub(crate) layer: usize,
    pub(crate) first_token: usize,
    pub(crate) data: Bytes,
}

impl Import {
    /// Starts an import of tokens `first_token..tokens`, in `layers` layers.
    pub(crate) fn new(layers: usize, first_token: usize, tokens: usize) -> Self {
        Self {
            first_token,
            tokens,
            there: vec![first_token; layers],
        }
    }

    /// Checks a message. Messages for a layer must arrive in order; one may arrive again, as when
    /// a second prefill worker takes over.
    pub(crate) fn check(&self, chunk: &KvChunk, layout: &KvLayout) -> Result<(), EngineError> {
        let KvChunk {
            layer,
            first_token,
            data,
        } = chunk;
        let wrong = |detail: String| {
            Err(EngineError::Import {
                layer: *layer,
                first_token: *first_token,
                detail,
            })
        };
        let Some(there) = self.there.get(*layer) else {
            return wrong(format!("the model has {} layers", self.there.len()));
        };
        let token_bytes = layout.token_layer_bytes();
        if data.is_empty() || !data.len().is_multiple_of(token_bytes) {
            return wrong(format!(
                "{} bytes are no whole number of tokens of {token_bytes} bytes: the workers' KV layouts differ",
                data.len()
            ));
        }
        let end = first_token.saturating_add(data.len() / token_bytes);
        if *first_token < self.first_token || end > self.tokens {
            return wrong(format!(
                "it covers tokens {first_token}..{end}, and {}..{} are owed",
                self.first_token, self.tokens
            ));
        }
        if first_token > there {
            return wrong(format!(
                "tokens {there}..{first_token} are missing before it"
            ));
        }
        Ok(())
    }

    /// Records a message that was checked and stored.
    pub(crate) fn stored(&mut self, chunk: &KvChunk, layout: &KvLayout) {
        let end = chunk.first_token + chunk.data.len() / layout.token_layer_bytes();
        if let Some(there) = self.there.get_mut(chunk.layer) {
            *there = end.max(*there);
        }
    }

    /// Returns an error unless all KV has arrived.
    pub(crate) fn check_complete(&self) -> Result<(), EngineError> {
        match self.there.iter().position(|there| *there < self.tokens) {
            None => Ok(()),
            Some(layer) => Err(EngineError::Prefill {
                detail: format!(
                    "KV of layer {layer} ends at token {} of {}",
                    self.there[layer], self.tokens
                ),
            }),
        }
    }
}

/// Callers' import commands, queued in order.
pub(crate) enum ImportCommand {
    Chunk(KvChunk),
    Done(Vec<f32>),
    Failed(EngineError),
}

/// Import commands that wait their turn, since copies must not hold up decoding.
#[derive(Default)]
pub(crate) struct ImportQueue {
    commands: VecDeque<(RequestId, ImportCommand)>,
}

impl ImportQueue {
    pub(crate) fn push(&mut self, id: RequestId, command: ImportCommand) {
        self.commands.push_back((id, command));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Returns the next command, unless its copy would exceed the remaining budget; the first one is always returned.
    pub(crate) fn pop(&mut self, budget: &mut ImportBudget) -> Option<(RequestId, ImportCommand)> {
        let size = match self.commands.front()?.1 {
            ImportCommand::Chunk(ref chunk) => chunk.data.len(),
            ImportCommand::Done(_) | ImportCommand::Failed(_) => 0,
        };
        if !budget.take(size) {
            return None;
        }
        self.commands.pop_front()
    }

    /// Drops the commands for a request that has ended.
    pub(crate) fn forget(&mut self, id: RequestId) {
        self.commands.retain(|(other, _)| *other != id);
    }
}

/// Bytes that may be copied before the next forward pass.
pub(crate) struct ImportBudget {
    left: Option<usize>,
    taken: bool,
}

impl ImportBudget {
    /// The budget is bounded while sequences decode.
    pub(crate) fn new(decoding: bool) -> Self {
        Self {
            left: decoding.then_some(IMPORT_BYTES_PER_STEP),
            taken: false,
        }
    }

    fn take(&mut self, bytes: usize) -> bool {
        match &mut self.left {
            None => true,
            Some(left) if bytes > *left && self.taken => false,
            Some(left) => {
                *left = left.saturating_sub(bytes);
                self.taken = true;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_kernels::KvDType;

    use super::*;

    /// 8 bytes per token and layer.
    const LAYOUT: KvLayout = KvLayout {
        layers: 2,
        kv_heads: 1,
        k_dim: 1,
        v_dim: 1,
        value_in_key: false,
        block_tokens: 4,
        dtype: KvDType::F32,
    };

    fn chunk(layer: usize, first_token: usize, bytes: usize) -> KvChunk {
        KvChunk {
            layer,
            first_token,
            data: vec![0; bytes].into(),
        }
    }

    #[test]
    fn messages_that_do_not_fit_are_told_why() {
        let import = Import::new(2, 4, 10);
        let error = |p: KvChunk| import.check(&p, &LAYOUT).unwrap_err().to_string();
        assert!(error(chunk(2, 4, 8)).contains("the model has 2 layers"));
        assert!(error(chunk(0, 4, 0)).contains("no whole number"));
        assert!(error(chunk(0, 4, 9)).contains("no whole number"));
        assert!(error(chunk(0, 3, 16)).contains("4..10 are owed"));
        assert!(error(chunk(0, 9, 16)).contains("tokens 9..11"));
        assert!(error(chunk(0, usize::MAX, 16)).contains("4..10 are owed"));
        assert!(error(chunk(1, 5, 8)).contains("tokens 4..5 are missing"));
    }

    #[test]
    fn an_import_is_complete_when_every_layer_is() {
        let mut import = Import::new(2, 4, 10);
        let store = |import: &mut Import, p: KvChunk| {
            import.check(&p, &LAYOUT).unwrap();
            import.stored(&p, &LAYOUT);
        };
        store(&mut import, chunk(0, 4, 48));
        store(&mut import, chunk(1, 4, 24));
        let text = import.check_complete().unwrap_err().to_string();
        assert!(text.contains("layer 1 ends at token 7 of 10"), "{text}");
        // A second worker starts over.
        store(&mut import, chunk(0, 4, 8));
        store(&mut import, chunk(1, 4, 48));
        assert_eq!(import.check_complete(), Ok(()));
    }

    #[test]
    fn copies_are_spread_over_steps_only_while_sequences_decode() {
        let mut queue = ImportQueue::default();
        let id = RequestId(1);
        for _ in 0..3 {
            queue.push(id, ImportCommand::Chunk(chunk(0, 0, IMPORT_BYTES_PER_STEP)));
        }
        queue.push(id, ImportCommand::Done(vec![]));
        let mut count = |decoding: bool| {
            let mut budget = ImportBudget::new(decoding);
            std::iter::from_fn(|| queue.pop(&mut budget)).count()
        };
        assert_eq!(count(true), 1);
        assert_eq!(count(true), 1);
        assert_eq!(count(false), 2);
        queue.push(RequestId(2), ImportCommand::Done(vec![]));
        queue.push(id, ImportCommand::Done(vec![]));
        queue.forget(id);
        assert_eq!(queue.commands.len(), 1);
    }
}
