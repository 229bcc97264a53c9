//! Block states as types.

use hearth_kernels::BlockId;

use crate::KvToken;

/// Allocated, but holds no tokens yet.
#[derive(Debug)]
pub struct Reset;

/// Holds some tokens and has room for more.
#[derive(Debug)]
pub struct Partial {
    tokens: Vec<KvToken>,
}

/// Full; takes no more tokens.
#[derive(Debug)]
pub struct Complete {
    tokens: Vec<KvToken>,
}

/// Full, immutable and found by its tokens; may have several holders.
#[derive(Debug)]
pub struct Registered {
    /// Unique to this registration and never reused, unlike the block's id.
    pub(crate) serial: u64,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Reset {}
    impl Sealed for super::Partial {}
    impl Sealed for super::Complete {}
    impl Sealed for super::Registered {}
}

/// One of [`Reset`], [`Partial`], [`Complete`], [`Registered`].
pub trait BlockState: sealed::Sealed {
    /// Whether the block may have other holders.
    const SHARED: bool;
}

impl BlockState for Reset {
    const SHARED: bool = false;
}
impl BlockState for Partial {
    const SHARED: bool = false;
}
impl BlockState for Complete {
    const SHARED: bool = false;
}
impl BlockState for Registered {
    const SHARED: bool = true;
}

/// A block of the cache in state `S`. Holding the value means holding the block; [`crate::BlockPool::release`]
/// returns it.
#[derive(Debug)]
#[must_use = "a block that is dropped and not released is lost to its pool"]
pub struct Block<S> {
    id: BlockId,
    block_tokens: usize,
    pub(crate) state: S,
}

impl<S: BlockState> Block<S> {
    /// Index of the physical block.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// Tokens that the block has room for.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }
}

impl Block<Reset> {
    pub(crate) fn new(id: BlockId, block_tokens: usize) -> Self {
        Self {
            id,
            block_tokens,
            state: Reset,
        }
    }

    /// Opens the block for tokens.
    pub fn begin(self) -> Block<Partial> {
        Block {
            id: self.id,
            block_tokens: self.block_tokens,
            state: Partial {
                tokens: Vec::with_capacity(self.block_tokens),
            },
        }
    }
}

impl Block<Partial> {
    /// Takes as many of `tokens` as fit and returns how many it took.
    pub fn append(&mut self, tokens: &[KvToken]) -> usize {
        let taken = tokens.len().min(self.room_tokens());
        self.state.tokens.extend_from_slice(&tokens[..taken]);
        taken
    }

    /// Number of tokens that still fit.
    pub fn room_tokens(&self) -> usize {
        self.block_tokens - self.state.tokens.len()
    }

    /// The tokens in the block.
    pub fn tokens(&self) -> &[KvToken] {
        &self.state.tokens
    }

    /// Closes a full block.
    ///
    /// # Errors
    /// Returns the block unchanged if it still has room.
    pub fn complete(self) -> Result<Block<Complete>, Self> {
        if self.room_tokens() > 0 {
            return Err(self);
        }
        Ok(Block {
            id: self.id,
            block_tokens: self.block_tokens,
            state: Complete {
                tokens: self.state.tokens,
            },
        })
    }
}

impl Block<Complete> {
    /// The tokens in the block.
    pub fn tokens(&self) -> &[KvToken] {
        &self.state.tokens
    }

    /// Turns the block back into a partial one that has no room.
    pub fn reopen(self) -> Block<Partial> {
        Block {
            id: self.id,
            block_tokens: self.block_tokens,
            state: Partial {
                tokens: self.state.tokens,
            },
        }
    }

    pub(crate) fn into_tokens(self) -> Vec<KvToken> {
        self.state.tokens
    }
}

impl Block<Registered> {
    pub(crate) fn registered(id: BlockId, block_tokens: usize, serial: u64) -> Self {
        Self {
            id,
            block_tokens,
            state: Registered { serial },
        }
    }
}
