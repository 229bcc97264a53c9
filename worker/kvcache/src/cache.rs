//! The cache as seen by the scheduler: sequences that begin, grow and end.

use crate::{
    Block, BlockPool, CacheStats, KvCacheError, KvToken, OutOfBlocks, Partial, PrefixHash,
    SequenceBlocks,
};

/// Paged KV of many sequences over one [`BlockPool`].
///
/// A sequence's life: [`begin`](Self::begin) finds what is already cached, [`reserve`](Self::reserve) makes
/// room before the device writes, [`commit`](Self::commit) records what was written, and
/// [`release`](Self::release) ends it. Tokens that were reserved but not committed count as never written.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    lookup_tokens: u64,
    hit_tokens: u64,
}

impl KvCache {
    /// Creates a cache of `blocks` blocks of `block_tokens` tokens each.
    ///
    /// # Errors
    /// [`KvCacheError::Size`], see [`BlockPool::new`].
    pub fn new(blocks: usize, block_tokens: usize) -> Result<Self, KvCacheError> {
        BlockPool::new(blocks, block_tokens).map(Self::over)
    }

    /// Creates a cache with the caller's hash function, see [`BlockPool::with_hash`].
    ///
    /// # Errors
    /// [`KvCacheError::Size`].
    pub fn with_hash(
        blocks: usize,
        block_tokens: usize,
        hash: PrefixHash,
    ) -> Result<Self, KvCacheError> {
        BlockPool::with_hash(blocks, block_tokens, hash).map(Self::over)
    }

    fn over(pool: BlockPool) -> Self {
        Self {
            pool,
            lookup_tokens: 0,
            hit_tokens: 0,
        }
    }

    /// The pool, for reading its statistics.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.pool.block_tokens()
    }

    /// Number of blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.pool.block_tokens())
    }

    /// Usage of the blocks, and the hit rate of the prefix index.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            lookup_tokens: self.lookup_tokens,
            hit_tokens: self.hit_tokens,
            ..self.pool.stats()
        }
    }

    /// Number of tokens of a prompt that [`KvCache::begin`] would find cached now.
    pub fn cached_tokens(&self, prompt: &[KvToken]) -> usize {
        self.pool.peek_prefix(reusable(prompt)) * self.pool.block_tokens()
    }

    /// Blocks that would remain if a sequence with this prompt began now and reserved `tokens` tokens;
    /// `None` if it does not fit. Unlike [`KvCache::begin`], it holds no blocks and updates no counters.
    pub fn room_after(&self, prompt: &[KvToken], tokens: usize) -> Option<usize> {
        let (found, evictable) = self.pool.peek_prefix_blocks(reusable(prompt));
        let needed = self.blocks_for(tokens).saturating_sub(found);
        (self.pool.available_blocks() - evictable).checked_sub(needed)
    }

    /// Begins a sequence with the longest cached prefix of `prompt`, in whole blocks and shorter than the
    /// prompt: at least one token is left to compute, for its logits.
    pub fn begin(&mut self, prompt: &[KvToken]) -> SequenceBlocks {
        let mut sequence = SequenceBlocks::empty(self.pool.block_tokens());
        self.lookup_tokens += prompt.len() as u64;
        self.extend_from_cache(&mut sequence, prompt);
        sequence
    }

    /// Replaces reserved blocks with further blocks of `prompt` that other sequences have registered since, and
    /// returns how many tokens that saves. Takes nothing if the sequence ends within a block.
    pub fn extend_from_cache(
        &mut self,
        sequence: &mut SequenceBlocks,
        prompt: &[KvToken],
    ) -> usize {
        if sequence.tail.is_some() {
            return 0;
        }
        let rest = reusable(prompt).get(sequence.tokens()..).unwrap_or(&[]);
        let found = self.pool.match_prefix(sequence.registered.last(), rest);
        let saved_tokens = found.len() * self.pool.block_tokens();
        for block in found {
            sequence.registered.push(block);
            if let Some(spare) = sequence.reserved.pop_back() {
                self.pool.release(spare);
            }
        }
        self.hit_tokens += saved_tokens as u64;
        saved_tokens
    }

    /// Makes room for `tokens` tokens in total, counted from position 0.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the sequence is left unchanged.
    pub fn reserve(
        &mut self,
        sequence: &mut SequenceBlocks,
        tokens: usize,
    ) -> Result<(), OutOfBlocks> {
        let missing = self.blocks_for(tokens).saturating_sub(sequence.blocks());
        sequence.reserved.extend(self.pool.allocate(missing)?);
        Ok(())
    }

    /// Records that the KV of the next `tokens` has been written. Blocks that become full enter the prefix
    /// index; a block whose equal is already there is replaced by it (see [`BlockPool::register`]), so call
    /// [`SequenceBlocks::ids`] again.
    ///
    /// # Errors
    /// [`KvCacheError::NoRoom`] if too little was reserved; nothing is recorded.
    pub fn commit(
        &mut self,
        sequence: &mut SequenceBlocks,
        tokens: &[KvToken],
    ) -> Result<(), KvCacheError> {
        let room = sequence.capacity_tokens() - sequence.tokens();
        let no_room = || KvCacheError::NoRoom {
            tokens: tokens.len(),
            room,
        };
        if tokens.len() > room {
            return Err(no_room());
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            let open = sequence.tail.take();
            let open = open.or_else(|| sequence.reserved.pop_front().map(Block::begin));
            let mut block = open.ok_or_else(no_room)?;
            let taken = block.append(rest);
            rest = &rest[taken..];
            self.close(sequence, block)?;
        }
        Ok(())
    }

    /// Registers a full block, and keeps a partial one as the tail.
    fn close(
        &mut self,
        sequence: &mut SequenceBlocks,
        block: Block<Partial>,
    ) -> Result<(), KvCacheError> {
        match block.complete() {
            Err(partial) => sequence.tail = Some(partial),
            Ok(complete) => match self.pool.register(complete, sequence.registered.last()) {
                Ok(registered) => sequence.registered.push(registered),
                Err(refused) => {
                    sequence.tail = Some(refused.block.reopen());
                    return Err(KvCacheError::Foreign(refused.reason));
                }
            },
        }
        Ok(())
    }

    /// Ends a sequence. Its registered blocks stay cached until they are evicted, last blocks first.
    pub fn release(&mut self, sequence: SequenceBlocks) {
        let SequenceBlocks {
            block_tokens: _,
            registered,
            tail,
            reserved,
        } = sequence;
        for block in reserved {
            self.pool.release(block);
        }
        if let Some(block) = tail {
            self.pool.release(block);
        }
        for block in registered.into_iter().rev() {
            self.pool.release(block);
        }
    }

    /// Records that a step was launched, see [`BlockPool::launched`].
    pub fn launched(&mut self, step: u64) {
        self.pool.launched(step);
    }

    /// Records that all steps up to this one have landed, see [`BlockPool::landed`].
    pub fn landed(&mut self, step: u64) {
        self.pool.landed(step);
    }

    /// Drops every cached prefix that no sequence holds.
    pub fn clear_cached(&mut self) {
        self.pool.clear_cached();
    }
}

/// Returns the part of a prompt that may come from the cache: all but its last token.
fn reusable(prompt: &[KvToken]) -> &[KvToken] {
    &prompt[..prompt.len().saturating_sub(1)]
}
