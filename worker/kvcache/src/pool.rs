//! The pool of blocks with its prefix index.
//!
//! The index maps a chained hash, `h(i) = hash(h(i-1), tokens of block i)`, to the registered blocks that
//! have it. A candidate counts only if its own tokens are equal and its parent is the very registration
//! that the walk came from; by induction, the whole prefix is equal. Parents are named by the serial
//! number of their registration, which is never used again, so that a block evicted and filled anew is
//! never taken for what it was.
//!
//! Eviction takes the unreferenced block that was released first. Holders release a sequence from its end,
//! so that a prefix outlives its continuations.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher};

use hearth_kernels::BlockId;

use crate::{
    Block, BlockState, Complete, KvCacheError, KvToken, OutOfBlocks, RegisterError, Registered,
    Reset,
};

/// Chained hash of a block: `(hash of the parent, tokens of the block)` to 64 bits.
pub type PrefixHash = fn(u64, &[KvToken]) -> u64;

/// Parent hash of a sequence's first block.
const ROOT_HASH: u64 = 0;

/// SipHash with fixed keys: the same prefix has the same hash in every run.
fn sip_hash(parent: u64, tokens: &[KvToken]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(parent);
    for token in tokens {
        hasher.write_u32(token.id);
        hasher.write_u32(token.provenance.0);
    }
    hasher.finish()
}

/// How the blocks of a cache are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// All blocks.
    pub total_blocks: usize,
    /// Blocks that sequences hold.
    pub used_blocks: usize,
    /// Blocks that no sequence holds but the prefix index knows; they are evicted when needed.
    pub cached_blocks: usize,
    /// Blocks that hold nothing.
    pub free_blocks: usize,
    /// Tokens of all prompts that were looked up in the prefix index.
    pub lookup_tokens: u64,
    /// Tokens of them that were found.
    pub hit_tokens: u64,
    /// Cached blocks that were given up for new tokens.
    pub evictions: u64,
}

#[derive(Debug)]
struct Registration {
    serial: u64,
    hash: u64,
    parent: Option<u64>,
    tokens: Box<[KvToken]>,
    references: u32,
    released_at: u64,
}

#[derive(Debug)]
enum Slot {
    Free,
    Owned,
    Registered(Registration),
}

/// Blocks `0..blocks` with their reference counts and the prefix index.
#[derive(Debug)]
pub struct BlockPool {
    block_tokens: usize,
    slots: Vec<Slot>,
    free: Vec<BlockId>,
    index: HashMap<u64, Vec<BlockId>>,
    /// Unreferenced registered blocks by the tick of their release.
    evictable: BTreeMap<u64, BlockId>,
    tick: u64,
    hash: PrefixHash,
    evictions: u64,
}

impl BlockPool {
    /// A pool of `blocks` blocks of `block_tokens` tokens.
    ///
    /// # Errors
    /// [`KvCacheError::Size`] for no blocks, more than `u32::MAX`, or `block_tokens` that is no power of two.
    pub fn new(blocks: usize, block_tokens: usize) -> Result<Self, KvCacheError> {
        Self::with_hash(blocks, block_tokens, sip_hash)
    }

    /// A pool with a hash of the caller's; any function is right, a poor one is slow.
    ///
    /// # Errors
    /// As [`BlockPool::new`].
    pub fn with_hash(
        blocks: usize,
        block_tokens: usize,
        hash: PrefixHash,
    ) -> Result<Self, KvCacheError> {
        let refuse = |remedy| KvCacheError::Size {
            blocks,
            block_tokens,
            remedy,
        };
        if !block_tokens.is_power_of_two() {
            return Err(refuse(
                "tokens of a block must be a power of two, such as 16",
            ));
        }
        let count = u32::try_from(blocks).map_err(|_| refuse("make the blocks larger"))?;
        if count == 0 {
            return Err(refuse("give it memory for one block at least"));
        }
        Ok(Self {
            block_tokens,
            slots: (0..count).map(|_| Slot::Free).collect(),
            // Popped from the end: block 0 goes first.
            free: (0..count).rev().map(BlockId).collect(),
            index: HashMap::new(),
            evictable: BTreeMap::new(),
            tick: 0,
            hash,
            evictions: 0,
        })
    }

    /// Tokens of one block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// All blocks.
    pub fn total_blocks(&self) -> usize {
        self.slots.len()
    }

    /// Blocks that [`BlockPool::allocate`] can give: free ones and evictable ones.
    pub fn available_blocks(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// Blocks in use, cached and free; the counters of lookups are left at zero.
    pub fn stats(&self) -> CacheStats {
        let (total_blocks, cached_blocks) = (self.slots.len(), self.evictable.len());
        CacheStats {
            total_blocks,
            used_blocks: total_blocks - cached_blocks - self.free.len(),
            cached_blocks,
            free_blocks: self.free.len(),
            evictions: self.evictions,
            ..CacheStats::default()
        }
    }

    /// Holders of a block: 1 for one that is exclusively owned, 0 for free and cached ones.
    pub fn references(&self, id: BlockId) -> u32 {
        match self.slots.get(id.0 as usize) {
            Some(Slot::Registered(r)) => r.references,
            Some(Slot::Owned) => 1,
            Some(Slot::Free) | None => 0,
        }
    }

    /// Takes `count` empty blocks, evicting cached ones when none is free.
    ///
    /// # Errors
    /// [`OutOfBlocks`], and nothing is taken or evicted.
    pub fn allocate(&mut self, count: usize) -> Result<Vec<Block<Reset>>, OutOfBlocks> {
        let available = self.available_blocks();
        if count > available {
            return Err(OutOfBlocks {
                needed: count,
                available,
            });
        }
        let mut blocks = Vec::with_capacity(count);
        while blocks.len() < count {
            let Some(id) = self.free.pop() else {
                self.evict_oldest();
                continue;
            };
            self.slots[id.0 as usize] = Slot::Owned;
            blocks.push(Block::new(id, self.block_tokens));
        }
        Ok(blocks)
    }

    /// Enters a complete block into the prefix index, after `parent` (`None`: it starts the sequence).
    ///
    /// When the index already has an equal block, that one is returned with a reference more and the given
    /// one becomes free: numerics are batch-invariant, so that equal prefixes of one provenance have equal KV.
    ///
    /// # Errors
    /// [`RegisterError`] with the block when it, or its parent, is not of this pool.
    pub fn register(
        &mut self,
        block: Block<Complete>,
        parent: Option<&Block<Registered>>,
    ) -> Result<Block<Registered>, RegisterError> {
        let refuse = |block, reason| Err(RegisterError { block, reason });
        if block.tokens().len() != self.block_tokens
            || !matches!(self.slots.get(block.id().0 as usize), Some(Slot::Owned))
        {
            return refuse(block, "it is not of this pool");
        }
        let parent = match parent {
            None => None,
            Some(parent) => match self.registration(parent) {
                Some(r) => Some((r.serial, r.hash)),
                None => return refuse(block, "its parent is not of this pool"),
            },
        };
        let (parent, parent_hash) = parent.map_or((None, ROOT_HASH), |(s, h)| (Some(s), h));
        let hash = (self.hash)(parent_hash, block.tokens());
        if let Some(existing) = self.find(hash, parent, block.tokens()) {
            self.release(block);
            return Ok(self.hold(existing));
        }
        let id = block.id();
        let serial = self.next_tick();
        self.slots[id.0 as usize] = Slot::Registered(Registration {
            serial,
            hash,
            parent,
            tokens: block.into_tokens().into_boxed_slice(),
            references: 1,
            released_at: 0,
        });
        self.index.entry(hash).or_default().push(id);
        Ok(Block::registered(id, self.block_tokens, serial))
    }

    /// Holds the longest registered run of whole blocks of `tokens` that continues `after`
    /// (`None`: from the start of the sequence).
    pub fn match_prefix(
        &mut self,
        after: Option<&Block<Registered>>,
        tokens: &[KvToken],
    ) -> Vec<Block<Registered>> {
        self.walk(after, tokens)
            .into_iter()
            .map(|id| self.hold(id))
            .collect()
    }

    /// Number of blocks that [`BlockPool::match_prefix`] would hold from the start.
    pub fn peek_prefix(&self, tokens: &[KvToken]) -> usize {
        self.walk(None, tokens).len()
    }

    /// The same number, and how many of those blocks nobody holds.
    pub(crate) fn peek_prefix_blocks(&self, tokens: &[KvToken]) -> (usize, usize) {
        let found = self.walk(None, tokens);
        let unheld = found.iter().filter(|id| self.references(**id) == 0);
        (found.len(), unheld.count())
    }

    /// Gives a block back. An exclusively owned one becomes free; a registered one stays in the index and
    /// can be evicted once its last holder has released it.
    pub fn release<S: BlockState>(&mut self, block: Block<S>) {
        let id = block.id();
        let Some(slot) = self.slots.get_mut(id.0 as usize) else {
            return;
        };
        match slot {
            Slot::Owned if !S::SHARED => {
                *slot = Slot::Free;
                self.free.push(id);
            }
            Slot::Registered(r) if S::SHARED && r.references > 0 => {
                r.references -= 1;
                if r.references == 0 {
                    self.tick += 1;
                    r.released_at = self.tick;
                    self.evictable.insert(self.tick, id);
                }
            }
            // A block of another pool: this one has nothing to take back.
            Slot::Free | Slot::Owned | Slot::Registered(_) => {}
        }
    }

    /// Forgets all cached blocks that nobody holds.
    pub fn clear_cached(&mut self) {
        while !self.evictable.is_empty() {
            self.evict_oldest();
        }
    }

    fn walk(&self, after: Option<&Block<Registered>>, tokens: &[KvToken]) -> Vec<BlockId> {
        let (mut parent, mut hash) = match after.map(|b| self.registration(b)) {
            None => (None, ROOT_HASH),
            Some(Some(r)) => (Some(r.serial), r.hash),
            Some(None) => return Vec::new(),
        };
        let mut found = Vec::new();
        for chunk in tokens.chunks_exact(self.block_tokens) {
            hash = (self.hash)(hash, chunk);
            let Some(id) = self.find(hash, parent, chunk) else {
                break;
            };
            let Some(Slot::Registered(r)) = self.slots.get(id.0 as usize) else {
                break;
            };
            parent = Some(r.serial);
            found.push(id);
        }
        found
    }

    /// The registered block with exactly these tokens after exactly this parent.
    fn find(&self, hash: u64, parent: Option<u64>, tokens: &[KvToken]) -> Option<BlockId> {
        let candidates = self.index.get(&hash)?;
        candidates.iter().copied().find(|id| {
            matches!(&self.slots[id.0 as usize],
                Slot::Registered(r) if r.parent == parent && *r.tokens == *tokens)
        })
    }

    fn registration(&self, block: &Block<Registered>) -> Option<&Registration> {
        match self.slots.get(block.id().0 as usize) {
            Some(Slot::Registered(r)) if r.serial == block.state.serial => Some(r),
            _ => None,
        }
    }

    /// A reference more to a block that is registered.
    fn hold(&mut self, id: BlockId) -> Block<Registered> {
        let mut serial = 0;
        if let Slot::Registered(r) = &mut self.slots[id.0 as usize] {
            if r.references == 0 {
                self.evictable.remove(&r.released_at);
            }
            r.references += 1;
            serial = r.serial;
        }
        Block::registered(id, self.block_tokens, serial)
    }

    fn evict_oldest(&mut self) {
        let Some((_, id)) = self.evictable.pop_first() else {
            return;
        };
        let slot = std::mem::replace(&mut self.slots[id.0 as usize], Slot::Free);
        if let Slot::Registered(r) = slot
            && let Some(bucket) = self.index.get_mut(&r.hash)
        {
            bucket.retain(|&other| other != id);
            if bucket.is_empty() {
                self.index.remove(&r.hash);
            }
        }
        self.free.push(id);
        self.evictions += 1;
    }

    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }
}
