//! Errors of logical blocks.

use crate::{Block, Complete};

/// Fewer blocks are free or evictable than were requested; nothing was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache has {available} of the {needed} blocks needed")]
pub struct OutOfBlocks {
    /// Blocks that were requested.
    pub needed: usize,
    /// Blocks that are free or can be evicted.
    pub available: usize,
}

/// A complete block that could not enter the prefix index; the caller gets it back.
#[derive(Debug, thiserror::Error)]
#[error("block {} cannot be registered: {reason}", .block.id().0)]
pub struct RegisterError {
    /// The block, still owned by the caller.
    pub block: Block<Complete>,
    /// Reason for the rejection.
    pub reason: &'static str,
}

/// A call rejected by the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvCacheError {
    /// The cache cannot be created with these sizes.
    #[error("a KV cache of {blocks} blocks of {block_tokens} tokens cannot be made\n  {remedy}")]
    Size {
        /// Requested number of blocks.
        blocks: usize,
        /// Requested tokens per block.
        block_tokens: usize,
        /// The remedy, as shown to the user.
        remedy: &'static str,
    },
    /// More tokens were committed than blocks were reserved for.
    #[error(
        "{tokens} tokens were committed to a sequence with room for {room}: reserve before commit"
    )]
    NoRoom {
        /// Tokens that were committed.
        tokens: usize,
        /// Tokens that still fit into the reserved blocks.
        room: usize,
    },
    /// The sequence's blocks belong to another cache.
    #[error("the sequence belongs to another cache: {0}")]
    Foreign(&'static str),
    /// No blocks are left.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
}
