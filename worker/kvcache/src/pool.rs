//! The block pool and its prefix index.
//!
//! The index maps a chained hash, `h(i) = hash(h(i-1), tokens of block i)`, to the registered blocks that
//! have it. A candidate counts only if its own tokens are equal and its parent is the very registration
//! that the walk came from; by induction, the whole prefix is equal. Parents are identified by the serial
//! number of their registration, which is never reused, so a block that is evicted and refilled is
//! never mistaken for its former contents.
//!
//! Eviction takes the unreferenced block that was released first. Holders release a sequence from its end,
//! so a prefix outlives its continuations.
//!
//! A step that was launched may write to the blocks of a sequence that ends meanwhile, and reads those that its block
//! tables name: what is freed while steps are in flight is given to nobody before the last of them has landed.

use std::collections::{BTreeMap, HashMap, VecDeque};
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

/// Usage of a cache's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Number of blocks.
    pub total_blocks: usize,
    /// Blocks held by sequences, or by steps in flight whose sequences have ended.
    pub used_blocks: usize,
    /// Blocks that no sequence holds but that are in the prefix index; they are evicted when needed.
    pub cached_blocks: usize,
    /// Blocks that hold nothing.
    pub free_blocks: usize,
    /// Tokens of all prompts that were looked up in the prefix index.
    pub lookup_tokens: u64,
    /// Number of those tokens that were found.
    pub hit_tokens: u64,
    /// Cached blocks that were evicted to make room for new tokens.
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
    /// Blocks that were freed while steps were in flight, each with the last of those; in order.
    deferred: VecDeque<(u64, BlockId)>,
    /// The last step that was launched, and the last one that has landed.
    launched: u64,
    landed: u64,
    index: HashMap<u64, Vec<BlockId>>,
    /// Unreferenced registered blocks, keyed by the tick of their release.
    evictable: BTreeMap<u64, BlockId>,
    tick: u64,
    hash: PrefixHash,
    evictions: u64,
}

impl BlockPool {
    /// Creates a pool of `blocks` blocks of `block_tokens` tokens each.
    ///
    /// # Errors
    /// [`KvCacheError::Size`] for 0 or more than `u32::MAX` blocks, or if `block_tokens` is not a power of two.
    pub fn new(blocks: usize, block_tokens: usize) -> Result<Self, KvCacheError> {
        Self::with_hash(blocks, block_tokens, sip_hash)
    }

    /// Creates a pool with the caller's hash function; any function is correct, a poor one is slow.
    ///
    /// # Errors
    /// Same as [`BlockPool::new`].
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
            // Popped from the end, so that block 0 is used first.
            free: (0..count).rev().map(BlockId).collect(),
            deferred: VecDeque::new(),
            launched: 0,
            landed: 0,
            index: HashMap::new(),
            evictable: BTreeMap::new(),
            tick: 0,
            hash,
            evictions: 0,
        })
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Number of blocks.
    pub fn total_blocks(&self) -> usize {
        self.slots.len()
    }

    /// Number of blocks that [`BlockPool::allocate`] can provide, free or evictable.
    pub fn available_blocks(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// Numbers of used, cached and free blocks; the lookup counters are left at zero.
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

    /// Number of holders of a block: 1 if it is exclusively owned, 0 if it is free or cached.
    pub fn references(&self, id: BlockId) -> u32 {
        match self.slots.get(id.0 as usize) {
            Some(Slot::Registered(r)) => r.references,
            Some(Slot::Owned) => 1,
            Some(Slot::Free) | None => 0,
        }
    }

    /// Takes `count` empty blocks, evicting cached ones if none are free.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken or evicted.
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
    /// If the index already has an equal block, that block is returned with one more reference and the given
    /// one becomes free: numerics are batch-invariant, so equal prefixes of one provenance have equal KV.
    ///
    /// # Errors
    /// [`RegisterError`] with the block if the block or its parent does not belong to this pool.
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

    /// Takes references to the longest run of registered whole blocks of `tokens` that continues `after`
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

    /// Number of blocks that [`BlockPool::match_prefix`] would find from the start.
    pub fn peek_prefix(&self, tokens: &[KvToken]) -> usize {
        self.walk(None, tokens).len()
    }

    /// The same number, and how many of those blocks have no holder.
    pub(crate) fn peek_prefix_blocks(&self, tokens: &[KvToken]) -> (usize, usize) {
        let found = self.walk(None, tokens);
        let unheld = found.iter().filter(|id| self.references(**id) == 0);
        (found.len(), unheld.count())
    }

    /// Releases a block. An exclusively owned one becomes free; a registered one stays in the index and
    /// can be evicted once its last holder has released it.
    pub fn release<S: BlockState>(&mut self, block: Block<S>) {
        let id = block.id();
        let Some(slot) = self.slots.get_mut(id.0 as usize) else {
            return;
        };
        match slot {
            Slot::Owned if !S::SHARED => {
                *slot = Slot::Free;
                match self.landed < self.launched {
                    true => self.deferred.push_back((self.launched, id)),
                    false => self.free.push(id),
                }
            }
            Slot::Registered(r) if S::SHARED && r.references > 0 => {
                r.references -= 1;
                if r.references == 0 {
                    self.tick += 1;
                    r.released_at = self.tick;
                    self.evictable.insert(self.tick, id);
                }
            }
            // The block belongs to another pool, so there is nothing to release here.
            Slot::Free | Slot::Owned | Slot::Registered(_) => {}
        }
    }

    /// Records that a step was launched: blocks that are freed from now on wait for it. Numbers ascend.
    pub fn launched(&mut self, step: u64) {
        self.launched = self.launched.max(step);
    }

    /// Records that all steps up to this one have landed: what was freed before the next one was launched is free.
    pub fn landed(&mut self, step: u64) {
        self.landed = self.landed.max(step);
        while let Some((_, id)) = self.deferred.pop_front_if(|(last, _)| *last <= step) {
            self.free.push(id);
        }
    }

    /// Drops all cached blocks without a holder.
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

    /// Finds the registered block with exactly these tokens after exactly this parent.
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

    /// Adds a reference to a registered block.
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
