//! The blocks of one sequence.

use std::collections::VecDeque;

use hearth_kernels::BlockId;

use crate::{Block, Partial, Registered, Reset};

/// Blocks of one sequence, ordered by position: registered ones, then at most one partial, then
/// reserved empty ones. Only the last two kinds can take tokens.
#[derive(Debug)]
#[must_use = "a sequence's blocks go back by KvCache::release"]
pub struct SequenceBlocks {
    pub(crate) block_tokens: usize,
    pub(crate) registered: Vec<Block<Registered>>,
    pub(crate) tail: Option<Block<Partial>>,
    pub(crate) reserved: VecDeque<Block<Reset>>,
}

impl SequenceBlocks {
    pub(crate) fn empty(block_tokens: usize) -> Self {
        Self {
            block_tokens,
            registered: Vec::new(),
            tail: None,
            reserved: VecDeque::new(),
        }
    }

    /// Number of tokens whose KV is in the blocks.
    pub fn tokens(&self) -> usize {
        let tail = self.tail.as_ref().map_or(0, |b| b.tokens().len());
        self.registered.len() * self.block_tokens + tail
    }

    /// Number of tokens that the blocks can hold, including those already in them.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks() * self.block_tokens
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.registered.len() + usize::from(self.tail.is_some()) + self.reserved.len()
    }

    /// All block ids, ordered by position.
    pub fn ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        let registered = self.registered.iter().map(Block::id);
        let tail = self.tail.iter().map(Block::id);
        registered
            .chain(tail)
            .chain(self.reserved.iter().map(Block::id))
    }

    /// Ids of the blocks that hold the first `tokens` tokens.
    pub fn ids_for(&self, tokens: usize) -> Vec<BlockId> {
        self.ids()
            .take(tokens.div_ceil(self.block_tokens))
            .collect()
    }
}
