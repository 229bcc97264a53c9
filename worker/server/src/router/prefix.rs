//! Prefixes of prompts that each worker has seen, and the numerics that read them. A guess, never a promise: the
//! worker's own cache decides.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens per entry.
const CHUNK_TOKENS: usize = 64;
/// Maximum number of chunks of a prompt that are remembered.
const MAX_CHUNKS: usize = 256;
/// Maximum number of entries per worker; beyond it, the older half is dropped.
const MAX_ENTRIES: usize = 1 << 14;

/// Chained hashes of a prompt's chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixKey(Vec<u64>);

impl PrefixKey {
    pub(super) fn of(tokens: &[u32]) -> Self {
        let mut hasher = DefaultHasher::new();
        let keys = tokens
            .chunks_exact(CHUNK_TOKENS)
            .take(MAX_CHUNKS)
            .map(|chunk| {
                chunk.hash(&mut hasher);
                hasher.finish()
            })
            .collect();
        Self(keys)
    }

    fn entries(&self, numerics: &str) -> impl Iterator<Item = u64> {
        let mut hasher = DefaultHasher::new();
        numerics.hash(&mut hasher);
        let reader = hasher.finish();
        self.0.iter().map(move |hash| hash ^ reader)
    }
}

/// Prefixes that one worker has seen.
#[derive(Debug, Default)]
pub(super) struct PrefixMemory {
    seen: HashMap<u64, u64>,
    clock: u64,
}

impl PrefixMemory {
    /// Number of tokens at the front of the prompt that were seen, read with these numerics.
    pub(super) fn matched_tokens(&self, key: &PrefixKey, numerics: &str) -> u32 {
        let entries = key.entries(numerics);
        let chunks = entries.take_while(|entry| self.seen.contains_key(entry));
        (chunks.count() * CHUNK_TOKENS) as u32
    }

    pub(super) fn remember(&mut self, key: &PrefixKey, numerics: &str) {
        self.clock += 1;
        self.seen
            .extend(key.entries(numerics).map(|entry| (entry, self.clock)));
        if self.seen.len() > MAX_ENTRIES {
            let mut times: Vec<u64> = self.seen.values().copied().collect();
            let (_, median, _) = times.select_nth_unstable(MAX_ENTRIES / 2);
            let median = *median;
            self.seen.retain(|_, time| *time > median);
        }
    }

    /// Forgets everything: the worker was lost, and its cache with it.
    pub(super) fn forget(&mut self) {
        self.seen.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_seen_beginning_counts_in_whole_chunks() {
        let mut memory = PrefixMemory::default();
        let prompt: Vec<u32> = (0..200).collect();
        memory.remember(&PrefixKey::of(&prompt), "avx512");
        let mut longer = prompt.clone();
        longer.extend(0..100);
        assert_eq!(
            memory.matched_tokens(&PrefixKey::of(&longer), "avx512"),
            192
        );
        longer[70] = 9999;
        assert_eq!(memory.matched_tokens(&PrefixKey::of(&longer), "avx512"), 64);
        longer[0] = 9999;
        assert_eq!(memory.matched_tokens(&PrefixKey::of(&longer), "avx512"), 0);
        assert_eq!(memory.matched_tokens(&PrefixKey::of(&prompt), "cuda"), 0);
        memory.forget();
        assert_eq!(memory.matched_tokens(&PrefixKey::of(&prompt), "avx512"), 0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory = PrefixMemory::default();
        for request in 0..2000u32 {
            let prompt: Vec<u32> = (0..64 * 20).map(|i| i + request * 5000).collect();
            memory.remember(&PrefixKey::of(&prompt), "avx512");
        }
        assert!(memory.seen.len() <= MAX_ENTRIES + MAX_CHUNKS);
        let last: Vec<u32> = (0..64 * 20).map(|i| i + 1999 * 5000).collect();
        assert_eq!(memory.matched_tokens(&PrefixKey::of(&last), "avx512"), 1280);
    }
}
