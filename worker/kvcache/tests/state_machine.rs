//! Arbitrary operations checked against a naive model: a device memory that is really written, and sequences as
//! plain vectors. Run with the real hash and with colliding hashes.

#![allow(clippy::unwrap_used)] // A test may panic.

use std::collections::{BTreeMap, BTreeSet};

use hearth_kvcache::{BlockId, KvCache, KvToken, PrefixHash, Provenance, SequenceBlocks};
use proptest::prelude::*;

const BLOCK_TOKENS: usize = 4;
const BLOCKS: usize = 10;

#[derive(Clone, Debug)]
enum Op {
    /// Begin with a prompt and reserve all of it.
    Begin(Vec<KvToken>),
    /// Write and commit some of the prompt's remaining tokens, or new ones.
    Grow(usize, Vec<KvToken>),
    Rematch(usize),
    Release(usize),
    ClearCached,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Few token ids, and lengths around the block size, so that prefixes often coincide.
    let token = || {
        (0u32..2, prop::bool::weighted(0.1)).prop_map(|(id, elsewhere)| KvToken {
            id,
            provenance: Provenance(u32::from(elsewhere)),
        })
    };
    let tokens = |range| prop::collection::vec(token(), range);
    let op = prop_oneof![
        4 => tokens(1..14).prop_map(Op::Begin),
        6 => (any::<usize>(), tokens(1..6)).prop_map(|(i, t)| Op::Grow(i, t)),
        2 => any::<usize>().prop_map(Op::Rematch),
        3 => any::<usize>().prop_map(Op::Release),
        1 => Just(Op::ClearCached),
    ];
    prop::collection::vec(op, 1..120)
}

struct Live {
    blocks: SequenceBlocks,
    prompt: Vec<KvToken>,
    written: Vec<KvToken>,
}

struct Harness {
    cache: KvCache,
    live: Vec<Live>,
    /// Contents of the device memory: the whole prefix up to each slot, as KV depends on all of it.
    memory: BTreeMap<(BlockId, usize), Vec<KvToken>>,
    /// Every prefix of whole blocks that was ever committed.
    committed: BTreeSet<Vec<KvToken>>,
    cleared: bool,
}

impl Harness {
    fn new(hash: Option<PrefixHash>) -> Self {
        let cache = match hash {
            Some(hash) => KvCache::with_hash(BLOCKS, BLOCK_TOKENS, hash),
            None => KvCache::new(BLOCKS, BLOCK_TOKENS),
        };
        Self {
            cache: cache.unwrap(),
            live: Vec::new(),
            memory: BTreeMap::new(),
            committed: BTreeSet::new(),
            cleared: false,
        }
    }

    fn apply(&mut self, op: Op) {
        let pick = |i: usize, n: usize| (n > 0).then(|| i % n.max(1));
        match op {
            Op::Begin(prompt) => self.begin(prompt),
            Op::Grow(i, fresh) => {
                if let Some(i) = pick(i, self.live.len()) {
                    self.grow(i, &fresh);
                }
            }
            Op::Rematch(i) => {
                if let Some(i) = pick(i, self.live.len()) {
                    let s = &mut self.live[i];
                    let saved = self.cache.extend_from_cache(&mut s.blocks, &s.prompt);
                    if saved > 0 {
                        let end = s.written.len() + saved;
                        assert!(end < s.prompt.len());
                        s.written.extend_from_slice(&s.prompt[s.written.len()..end]);
                    }
                }
            }
            Op::Release(i) => {
                if let Some(i) = pick(i, self.live.len()) {
                    self.cache.release(self.live.swap_remove(i).blocks);
                }
            }
            Op::ClearCached => {
                self.cache.clear_cached();
                self.cleared = true;
            }
        }
    }

    fn begin(&mut self, prompt: Vec<KvToken>) {
        let expected = self.cache.cached_tokens(&prompt);
        let naive = (0..prompt.len())
            .step_by(BLOCK_TOKENS)
            .take_while(|&n| n == 0 || self.committed.contains(&prompt[..n]))
            .last()
            .unwrap_or(0);
        let room = self.cache.room_after(&prompt, prompt.len());
        let mut blocks = self.cache.begin(&prompt);
        let matched = blocks.tokens();
        assert_eq!(matched, expected);
        assert!(matched <= naive && matched < prompt.len());
        if !self.cleared && self.cache.stats().evictions == 0 {
            assert_eq!(matched, naive, "a cached prefix was missed");
        }
        if self.cache.reserve(&mut blocks, prompt.len()).is_err() {
            assert_eq!(room, None);
            self.cache.release(blocks);
            return;
        }
        assert_eq!(room, Some(self.cache.pool().available_blocks()));
        let written = prompt[..matched].to_vec();
        self.live.push(Live {
            blocks,
            prompt,
            written,
        });
    }

    fn grow(&mut self, i: usize, fresh: &[KvToken]) {
        let s = &mut self.live[i];
        let rest = s.prompt.get(s.written.len()..).unwrap_or(&[]);
        let tokens: Vec<KvToken> = if rest.is_empty() {
            fresh.to_vec()
        } else {
            rest[..fresh.len().min(rest.len())].to_vec()
        };
        let end = s.written.len() + tokens.len();
        if self.cache.reserve(&mut s.blocks, end).is_err() {
            return;
        }
        let ids = s.blocks.ids_for(end);
        for token in &tokens {
            let position = s.written.len();
            s.written.push(*token);
            let id = ids[position / BLOCK_TOKENS];
            assert_eq!(
                self.cache.pool().references(id),
                1,
                "a shared block is written"
            );
            self.memory
                .insert((id, position % BLOCK_TOKENS), s.written.clone());
        }
        self.cache.commit(&mut s.blocks, &tokens).unwrap();
        for n in (BLOCK_TOKENS..=s.written.len()).step_by(BLOCK_TOKENS) {
            self.committed.insert(s.written[..n].to_vec());
        }
    }

    fn check(&self) {
        let mut holders: BTreeMap<BlockId, u32> = BTreeMap::new();
        for s in &self.live {
            assert_eq!(s.blocks.tokens(), s.written.len());
            assert!(s.blocks.capacity_tokens() >= s.written.len());
            let ids: Vec<_> = s.blocks.ids().collect();
            for id in &ids {
                *holders.entry(*id).or_default() += 1;
            }
            // Reading the sequence back through its blocks yields its own KV, each slot with its whole past.
            for position in 0..s.written.len() {
                let slot = (ids[position / BLOCK_TOKENS], position % BLOCK_TOKENS);
                assert_eq!(self.memory[&slot], s.written[..=position]);
            }
        }
        for id in (0..BLOCKS as u32).map(BlockId) {
            let expected = holders.get(&id).copied().unwrap_or(0);
            assert_eq!(
                self.cache.pool().references(id),
                expected,
                "holders of {id:?}"
            );
        }
        let stats = self.cache.stats();
        assert_eq!(stats.used_blocks, holders.len());
        assert_eq!(
            stats.used_blocks + stats.cached_blocks + stats.free_blocks,
            BLOCKS
        );
        assert_eq!(
            self.cache.pool().available_blocks(),
            stats.cached_blocks + stats.free_blocks
        );
    }

    fn end(mut self) {
        for s in std::mem::take(&mut self.live) {
            self.cache.release(s.blocks);
        }
        assert_eq!(self.cache.stats().used_blocks, 0, "a block leaked");
        // The whole capacity is available again.
        let mut all = self.cache.begin(&[]);
        self.cache.reserve(&mut all, BLOCKS * BLOCK_TOKENS).unwrap();
        assert_eq!(all.ids().collect::<BTreeSet<_>>().len(), BLOCKS);
        self.cache.release(all);
    }
}

fn play(hash: Option<PrefixHash>, ops: Vec<Op>) {
    let mut harness = Harness::new(hash);
    for op in ops {
        harness.apply(op);
        harness.check();
    }
    harness.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn blocks_are_never_lost_shared_for_writing_or_mistaken(ops in ops()) {
        play(None, ops);
    }

    #[test]
    fn the_same_with_one_hash_for_everything(ops in ops()) {
        play(Some(|_, _| 1), ops);
    }

    #[test]
    fn the_same_with_a_hash_that_forgets_the_parent(ops in ops()) {
        play(Some(|_, tokens| tokens.iter().map(|t| u64::from(t.id)).sum()), ops);
    }
}
