//! What can go wrong with logical blocks.

use crate::{Block, Complete};

/// Fewer blocks are free or evictable than were asked for; nothing was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache has {available} of the {needed} blocks needed")]
pub struct OutOfBlocks {
    /// Blocks that were asked for.
    pub needed: usize,
    /// Blocks that are free or can be evicted.
    pub available: usize,
}

/// A complete block that could not enter the prefix index; it is handed back.
#[derive(Debug, thiserror::Error)]
#[error("block {} cannot be registered: {reason}", .block.id().0)]
pub struct RegisterError {
    /// The block, still owned by the caller.
    pub block: Block<Complete>,
    /// Why.
    pub reason: &'static str,
}

/// A call that the cache refuses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvCacheError {
    /// The cache cannot be made with these sizes.
    #[error("a KV cache of {blocks} blocks of {block_tokens} tokens cannot be made\n  {remedy}")]
    Size {
        /// Blocks asked for.
        blocks: usize,
        /// Tokens of one block asked for.
        block_tokens: usize,
        /// What to change.
        remedy: &'static str,
    },
    /// More tokens were committed than blocks were reserved for.
    #[error(
        "{tokens} tokens were committed to a sequence with room for {room}: reserve before commit"
    )]
    NoRoom {
        /// Tokens given.
        tokens: usize,
        /// Tokens that the reserved blocks still take.
        room: usize,
    },
    /// The sequence's blocks belong to another cache.
    #[error("the sequence belongs to another cache: {0}")]
    Foreign(&'static str),
    /// No block is left.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
}
