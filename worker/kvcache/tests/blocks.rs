//! The life cycle of blocks through the public API.

#![allow(clippy::unwrap_used)] // A test may panic.

use hearth_kvcache::{BlockPool, KvCache, KvCacheError, KvToken, OutOfBlocks, Provenance};

fn cache(blocks: usize) -> KvCache {
    KvCache::new(blocks, 4).unwrap()
}

/// Tokens that the worker itself computes.
fn own(ids: &[u32]) -> Vec<KvToken> {
    ids.iter().copied().map(KvToken::own).collect()
}

/// Begins, reserves and commits a whole prompt.
fn run(cache: &mut KvCache, prompt: &[u32]) -> hearth_kvcache::SequenceBlocks {
    let mut s = cache.begin(&own(prompt));
    cache.reserve(&mut s, prompt.len()).unwrap();
    let done = s.tokens();
    cache.commit(&mut s, &own(&prompt[done..])).unwrap();
    s
}

#[test]
fn a_second_prompt_reuses_whole_blocks_and_leaves_one_token_to_compute() {
    let mut c = cache(8);
    let prompt: Vec<u32> = (0..8).collect();
    let first = run(&mut c, &prompt);
    let ids: Vec<_> = first.ids().collect();
    // 8 tokens are two blocks, but the last token must be computed: one block is reused.
    assert_eq!(c.cached_tokens(&own(&prompt)), 4);
    let second = c.begin(&own(&prompt));
    assert_eq!((second.tokens(), second.ids().next()), (4, Some(ids[0])));
    assert_eq!(c.pool().references(ids[0]), 2);
    // With one more token, both blocks are reused.
    let longer: Vec<u32> = (0..9).collect();
    assert_eq!(c.cached_tokens(&own(&longer)), 8);
    c.release(first);
    c.release(second);
    let stats = c.stats();
    assert_eq!(
        (stats.used_blocks, stats.cached_blocks, stats.free_blocks),
        (0, 2, 6)
    );
    assert_eq!((stats.lookup_tokens, stats.hit_tokens), (16, 4));
}

#[test]
fn equal_tokens_after_another_prefix_are_no_hit() {
    let mut c = cache(8);
    let s = run(&mut c, &[1, 1, 1, 1, 7, 7, 7, 7]);
    assert_eq!(c.cached_tokens(&own(&[2, 2, 2, 2, 7, 7, 7, 7, 0])), 0);
    assert_eq!(c.cached_tokens(&own(&[7, 7, 7, 7, 0])), 0);
    assert_eq!(c.cached_tokens(&own(&[1, 1, 1, 1, 7, 7, 7, 7, 0])), 8);
    c.release(s);
}

#[test]
fn a_hash_that_always_collides_gives_no_wrong_block() {
    let mut c = KvCache::with_hash(8, 4, |_, _| 7).unwrap();
    let a = run(&mut c, &[1, 1, 1, 1, 7, 7, 7, 7]);
    let b = run(&mut c, &[2, 2, 2, 2, 7, 7, 7, 7]);
    // Four blocks with different prefixes, the last two with equal tokens.
    assert_eq!(c.stats().used_blocks, 4);
    assert_eq!(c.cached_tokens(&own(&[2, 2, 2, 2, 7, 7, 7, 7, 0])), 8);
    assert_eq!(c.cached_tokens(&own(&[3, 3, 3, 3, 7, 7, 7, 7, 0])), 0);
    let hit = c.begin(&own(&[1, 1, 1, 1, 7, 7, 7, 7, 0]));
    assert_eq!(hit.ids().collect::<Vec<_>>(), a.ids().collect::<Vec<_>>());
    c.release(a);
    c.release(b);
    c.release(hit);
}

#[test]
fn eviction_takes_the_oldest_and_the_end_of_a_prompt_first() {
    let mut c = cache(4);
    let old = run(&mut c, &[1, 1, 1, 1, 2, 2, 2, 2]);
    c.release(old);
    let new = run(&mut c, &[3, 3, 3, 3]);
    c.release(new);
    // One block is free; the second one taken is the end of the oldest prompt.
    let s = run(&mut c, &[9; 8]);
    assert_eq!(c.stats().evictions, 1);
    assert_eq!(c.cached_tokens(&own(&[1, 1, 1, 1, 2, 2, 2, 2, 0])), 4);
    assert_eq!(c.cached_tokens(&own(&[3, 3, 3, 3, 0])), 4);
    c.release(s);
}

#[test]
fn an_evicted_parent_does_not_lend_its_children_to_the_next_owner_of_its_block() {
    // Every hash collides, so only the parent's identity tells the children apart.
    let mut pool = BlockPool::with_hash(2, 2, |_, _| 0).unwrap();
    let fill = |pool: &mut BlockPool, tokens: &[u32]| {
        let mut block = pool.allocate(1).unwrap().remove(0).begin();
        block.append(&own(tokens));
        block.complete().unwrap()
    };
    let (parent, child) = (fill(&mut pool, &[1, 1]), fill(&mut pool, &[5, 5]));
    let parent = pool.register(parent, None).unwrap();
    let child = pool.register(child, Some(&parent)).unwrap();
    let parent_id = parent.id();
    // The parent first: the wrong order, so it is evicted before its child.
    pool.release(parent);
    pool.release(child);
    let other = fill(&mut pool, &[2, 2]);
    assert_eq!(other.id(), parent_id);
    let other = pool.register(other, None).unwrap();
    assert_eq!(pool.peek_prefix(&own(&[2, 2, 5, 5])), 1);
    assert_eq!(pool.peek_prefix(&own(&[1, 1, 5, 5])), 0);
    pool.release(other);
}

#[test]
fn a_shortage_takes_nothing() {
    let mut c = cache(2);
    let mut s = c.begin(&own(&[1, 2, 3]));
    assert_eq!(
        c.reserve(&mut s, 9),
        Err(OutOfBlocks {
            needed: 3,
            available: 2
        })
    );
    assert_eq!((s.blocks(), c.stats().free_blocks), (0, 2));
    c.release(s);
}

#[test]
fn committing_more_than_was_reserved_is_refused_whole() {
    let mut c = cache(2);
    let mut s = c.begin(&own(&[1, 2, 3, 4, 5]));
    c.reserve(&mut s, 4).unwrap();
    let error = c.commit(&mut s, &own(&[1, 2, 3, 4, 5])).unwrap_err();
    assert!(matches!(error, KvCacheError::NoRoom { tokens: 5, room: 4 }));
    assert!(error.to_string().contains("reserve before commit"));
    assert_eq!(s.tokens(), 0);
    c.release(s);
}

#[test]
fn two_sequences_that_compute_the_same_block_end_with_one() {
    let mut c = cache(4);
    let prompt = [1, 2, 3, 4, 5];
    let (mut a, mut b) = (c.begin(&own(&prompt)), c.begin(&own(&prompt)));
    c.reserve(&mut a, 5).unwrap();
    c.reserve(&mut b, 5).unwrap();
    assert_eq!(c.stats().free_blocks, 0);
    c.commit(&mut a, &own(&prompt)).unwrap();
    c.commit(&mut b, &own(&prompt)).unwrap();
    assert_eq!(a.ids().next(), b.ids().next());
    assert_eq!(c.stats().free_blocks, 1);
    c.release(a);
    c.release(b);
}

#[test]
fn blocks_registered_meanwhile_replace_reserved_ones() {
    let mut c = cache(8);
    let prompt: Vec<u32> = (0..10).collect();
    let mut late = c.begin(&own(&prompt));
    c.reserve(&mut late, 10).unwrap();
    let early = run(&mut c, &prompt);
    assert_eq!(c.extend_from_cache(&mut late, &own(&prompt)), 8);
    assert_eq!((late.tokens(), late.blocks()), (8, 3));
    assert_eq!(c.stats().free_blocks, 8 - 4);
    // Within a block, nothing is replaced.
    c.commit(&mut late, &own(&[8])).unwrap();
    assert_eq!(c.extend_from_cache(&mut late, &own(&prompt)), 0);
    c.release(early);
    c.release(late);
}

#[test]
fn what_is_freed_while_steps_are_in_flight_waits_for_the_last_of_them() {
    let mut c = cache(4);
    let a = run(&mut c, &[1, 2, 3, 4, 5]);
    let b = run(&mut c, &[6, 7]);
    let free = |c: &KvCache| (c.stats().used_blocks, c.stats().free_blocks);
    c.launched(1);
    c.release(a);
    // The full block is cached: no step writes to it any more. The partial one may be written to.
    assert_eq!((free(&c), c.stats().cached_blocks), ((2, 1), 1));
    c.launched(2);
    c.release(b);
    assert_eq!(free(&c), (2, 1));
    c.landed(1);
    assert_eq!(free(&c), (1, 2));
    let s = run(&mut c, &[8; 12]);
    assert_eq!(c.stats().evictions, 1, "rather than a block in flight");
    c.landed(2);
    c.release(s);
    assert_eq!(free(&c), (0, 1));
}

#[test]
fn a_block_that_an_equal_one_replaces_waits_for_the_steps_that_read_it() {
    let mut c = cache(4);
    let prompt = own(&[1, 2, 3, 4, 5]);
    let (mut first, mut second) = (c.begin(&prompt), c.begin(&prompt));
    c.reserve(&mut first, 5).unwrap();
    c.reserve(&mut second, 5).unwrap();
    c.commit(&mut first, &prompt).unwrap();
    c.launched(1);
    c.commit(&mut second, &prompt[..4]).unwrap();
    assert_eq!(second.ids().next(), first.ids().next());
    assert_eq!(c.stats().free_blocks, 0);
    c.landed(1);
    assert_eq!(c.stats().free_blocks, 1);
    c.release(first);
    c.release(second);
}

#[test]
fn clearing_forgets_what_nobody_holds() {
    let mut c = cache(4);
    let (a, b) = (run(&mut c, &[1; 4]), run(&mut c, &[2; 4]));
    c.release(a);
    c.clear_cached();
    assert_eq!(c.cached_tokens(&own(&[1; 5])), 0);
    assert_eq!(c.cached_tokens(&own(&[2; 5])), 4);
    c.release(b);
}

#[test]
fn impossible_sizes_say_what_to_change() {
    let message = |b, t| KvCache::new(b, t).unwrap_err().to_string();
    assert!(message(4, 12).contains("power of two"));
    assert!(message(4, 0).contains("power of two"));
    assert!(message(0, 16).contains("one block at least"));
}

#[test]
fn errors_hand_the_block_back() {
    let mut pool = BlockPool::new(2, 4).unwrap();
    let mut other = BlockPool::new(2, 2).unwrap();
    let mut block = pool.allocate(1).unwrap().remove(0).begin();
    assert_eq!(block.append(&own(&[1, 2])), 2);
    let mut block = block.complete().unwrap_err();
    assert_eq!(block.append(&own(&[3, 4, 5])), 2);
    let refused = other.register(block.complete().unwrap(), None).unwrap_err();
    assert_eq!(refused.block.tokens(), own(&[1, 2, 3, 4]));
    assert!(refused.to_string().contains("not of this pool"));
    let kept = pool.register(refused.block, None).unwrap();
    pool.release(kept);
    assert_eq!(pool.stats().cached_blocks, 1);
}

#[test]
fn a_prefix_is_found_only_with_what_computed_it() {
    let by = |provenance, ids: &[u32]| -> Vec<KvToken> {
        let token = |id: &u32| KvToken {
            id: *id,
            provenance: Provenance(provenance),
        };
        ids.iter().map(token).collect()
    };
    let mut c = cache(8);
    // A six-token prompt computed by another device and an answer of our own: the boundary lies within a block.
    let mixed = [by(1, &[1, 2, 3, 4, 5, 6]), own(&[7, 8, 9, 9, 9, 9])].concat();
    let mut s = c.begin(&mixed);
    c.reserve(&mut s, 12).unwrap();
    c.commit(&mut s, &mixed).unwrap();
    let ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 0];
    let found = |tokens: Vec<KvToken>| c.cached_tokens(&tokens);
    assert_eq!(found([&mixed[..], &own(&[0])].concat()), 12);
    assert_eq!(found(own(&ids)), 0, "computed here, it has other bits");
    assert_eq!(found(by(2, &ids)), 0);
    // The whole conversation as a prompt for the other device: the answer computed here must be recomputed.
    assert_eq!(found(by(1, &ids)), 4);
    // The same boundary one token later.
    let later = [by(1, &ids[..7]), own(&ids[7..])].concat();
    assert_eq!(found(later), 4);
    c.release(s);
}
