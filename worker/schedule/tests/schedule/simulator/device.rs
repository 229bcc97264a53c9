//! A device whose arithmetic is a hash: each token's KV is a digest of all tokens up to it, and the answer's
//! next token is drawn from what is read back through the blocks. Another device computes other digests.
//! Anything that the scheduler mixes up changes the output.

use std::collections::BTreeMap;

use hearth_kernels::BlockId;

use hearth_schedule::{ImportTarget, Provenance, Request, SequenceId, SpanKind, StepSpan};

/// Tokens that the device samples from.
pub(crate) const VOCAB: u32 = 32_000;

/// A scheduler bug that the device detected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeviceError {
    /// A span without rows, or with too few blocks.
    #[error("sequence {}: {rows} rows at position {start} do not fit {blocks} blocks", .sequence.0)]
    Span {
        /// The sequence.
        sequence: SequenceId,
        /// Rows of the span.
        rows: usize,
        /// Position of the first.
        start: usize,
        /// Blocks given.
        blocks: usize,
    },
    /// A block outside the cache.
    #[error("block {} is outside the cache", .0.0)]
    Block(BlockId),
}

/// KV of `blocks` blocks, one digest per token.
#[derive(Debug)]
pub(crate) struct Device {
    block_tokens: usize,
    slots: Vec<u64>,
    /// The last token that was sampled for each sequence.
    sampled: BTreeMap<SequenceId, u32>,
}

impl Device {
    /// Creates a device with empty KV.
    pub(crate) fn new(blocks: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            slots: vec![0; blocks * block_tokens],
            sampled: BTreeMap::new(),
        }
    }

    /// Computes a span: stores its KV, and returns the token sampled from its last row's logits.
    ///
    /// # Errors
    /// [`DeviceError`] for a span that a real device would reject.
    pub(crate) fn compute(&mut self, span: &StepSpan) -> Result<u32, DeviceError> {
        let tokens = match span.kind {
            SpanKind::Ahead => self
                .sampled
                .get(&span.sequence)
                .copied()
                .into_iter()
                .collect(),
            SpanKind::Decode | SpanKind::Prefill => span.tokens.clone(),
        };
        let end = span.start + tokens.len();
        if tokens.is_empty() || span.blocks.len() * self.block_tokens < end {
            return Err(DeviceError::Span {
                sequence: span.sequence,
                rows: tokens.len(),
                start: span.start,
                blocks: span.blocks.len(),
            });
        }
        let mut past = match span.start.checked_sub(1) {
            Some(position) => self.slots[self.slot(&span.blocks, position)?],
            None => ROOT,
        };
        for (position, &token) in (span.start..).zip(&tokens) {
            past = mix(past, u64::from(token));
            let slot = self.slot(&span.blocks, position)?;
            self.slots[slot] = past;
        }
        let token = self.sample(&span.blocks, end)?;
        self.sampled.insert(span.sequence, token);
        Ok(token)
    }

    /// Stores the KV that another device computed for a prompt, and returns the token that follows it.
    ///
    /// # Errors
    /// [`DeviceError::Block`].
    pub(crate) fn import(
        &mut self,
        target: &ImportTarget,
        prompt: &[u32],
        provenance: Provenance,
    ) -> Result<u32, DeviceError> {
        let mut past = ROOT;
        for (position, &token) in prompt.iter().enumerate() {
            past = mix(past, value(token, provenance));
            if position >= target.first_token {
                let slot = self.slot(&target.blocks, position)?;
                self.slots[slot] = past;
            }
        }
        self.sample(&target.blocks, prompt.len())
    }

    /// Attention of the last of `tokens` tokens: reads the end of each block, which encodes its whole past.
    fn sample(&self, blocks: &[BlockId], tokens: usize) -> Result<u32, DeviceError> {
        let mut read = ROOT;
        for end in block_ends(tokens, self.block_tokens) {
            read = mix(read, self.slots[self.slot(blocks, end - 1)?]);
        }
        Ok(token_of(read))
    }

    fn slot(&self, blocks: &[BlockId], position: usize) -> Result<usize, DeviceError> {
        let id = blocks
            .get(position / self.block_tokens)
            .copied()
            .unwrap_or(BlockId(u32::MAX));
        let slot = id.0 as usize * self.block_tokens + position % self.block_tokens;
        if slot < self.slots.len() {
            Ok(slot)
        } else {
            Err(DeviceError::Block(id))
        }
    }
}

/// Expected answer of a device with blocks of `block_tokens` to a request, after the tokens generated already,
/// computed without any blocks.
pub(crate) fn expected_answer(request: &Request, tokens: usize, block_tokens: usize) -> Vec<u32> {
    let mut past = ROOT;
    let mut digests = Vec::new();
    let mut push = |digests: &mut Vec<u64>, token: u32, provenance| {
        past = mix(past, value(token, provenance));
        digests.push(past);
    };
    for &token in &request.prompt {
        push(&mut digests, token, request.work.prompt());
    }
    for &token in &request.generated {
        push(&mut digests, token, Provenance::OWN);
    }
    let mut answer = Vec::with_capacity(tokens);
    while answer.len() < tokens {
        let read = block_ends(digests.len(), block_tokens)
            .fold(ROOT, |read, end| mix(read, digests[end - 1]));
        let token = token_of(read);
        answer.push(token);
        push(&mut digests, token, Provenance::OWN);
    }
    answer
}

/// Contribution of a token to the digest: other bits for another device.
fn value(token: u32, provenance: Provenance) -> u64 {
    u64::from(token) | u64::from(provenance.0) << 32
}

const ROOT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Ends of the blocks that hold `tokens` tokens; the last one is truncated.
fn block_ends(tokens: usize, block_tokens: usize) -> impl Iterator<Item = usize> {
    (0..tokens.div_ceil(block_tokens)).map(move |b| ((b + 1) * block_tokens).min(tokens))
}

/// The finaliser of splitmix64 over both.
fn mix(past: u64, value: u64) -> u64 {
    let mut z = past.rotate_left(17) ^ value.wrapping_add(ROOT);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn token_of(digest: u64) -> u32 {
    (digest % u64::from(VOCAB)) as u32
}
