//! A model with its own cache, driven step by step without a scheduler.

use anyhow::bail;
use hearth_kernels::{Backend, BlockId, KvDType, KvLayout, SampleSpec, Span};
use hearth_model::{Batch, Model, PassSpec, Rows};

/// Tokens per cache block.
const BLOCK_TOKENS: usize = 64;

/// Several sequences of equal capacity, each with contiguous blocks.
pub(crate) struct Session<'a, B: Backend> {
    model: &'a Model<B>,
    kv: B::Kv,
    layout: KvLayout,
    blocks_per_sequence: usize,
    lengths: Vec<usize>,
}

impl<'a, B: Backend> Session<'a, B> {
    /// Creates a session with room for `sequences` sequences of `capacity_tokens` tokens each.
    pub(crate) fn new(
        model: &'a Model<B>,
        sequences: usize,
        capacity_tokens: usize,
        dtype: KvDType,
    ) -> anyhow::Result<Self> {
        let (kv, layout) = cache(model, sequences, capacity_tokens, dtype)?;
        Ok(Self {
            model,
            kv,
            layout,
            blocks_per_sequence: layout.blocks_for(capacity_tokens.max(1)),
            lengths: vec![0; sequences],
        })
    }

    /// Appends tokens to sequences (`(sequence, tokens)`, each sequence at most once) and returns the logits
    /// `[rows, vocab]` of the last appended token of each, or of every token.
    pub(crate) fn step(
        &mut self,
        appended: &[(usize, &[u32])],
        every_row: bool,
    ) -> anyhow::Result<Vec<f32>> {
        let vocab = self.model.config().vocab_size;
        let mut batch = Batch {
            tokens: Vec::new(),
            spans: Vec::new(),
            logit_rows: Vec::new(),
        };
        for &(sequence, tokens) in appended {
            if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                bail!(
                    "token {token} is outside the vocabulary\n  this model has tokens 0 to {}",
                    vocab - 1
                );
            }
            let first_row = batch.tokens.len();
            batch.tokens.extend_from_slice(tokens);
            batch
                .spans
                .push(self.span(sequence, first_row, tokens.len()));
            let end_row = batch.tokens.len() as u32;
            let logits_from = if every_row {
                first_row as u32
            } else {
                end_row - 1
            };
            batch.logit_rows.extend(logits_from..end_row);
            self.lengths[sequence] += tokens.len();
        }
        Ok(self.model.forward(&batch, &mut self.kv, &mut ())?)
    }

    /// Appends a row to each sequence, and begins to choose the likeliest token after it on the device.
    pub(crate) fn decode(&mut self, rows: Rows<'_, B>) -> anyhow::Result<B::Tokens> {
        let count = rows.count();
        let spans: Vec<Span> = (0..count).map(|row| self.span(row, row, 1)).collect();
        let all: Vec<u32> = (0..count as u32).collect();
        let pass = PassSpec {
            spans: &spans,
            logit_rows: &all,
            alone: false,
        };
        let Some(logits) = self.model.forward_rows(rows, pass, &mut self.kv, &mut ())? else {
            bail!("a step has no rows");
        };
        self.lengths[..count]
            .iter_mut()
            .for_each(|length| *length += 1);
        let greedy = vec![SampleSpec::default(); count];
        Ok(self.model.backend().sample(&logits, &greedy)?)
    }

    /// Forgets the tokens of each sequence from a position on.
    pub(crate) fn rewind(&mut self, tokens: usize) {
        self.lengths
            .iter_mut()
            .for_each(|length| *length = tokens.min(*length));
    }

    fn span(&self, sequence: usize, first_row: usize, rows: usize) -> Span {
        let start = self.lengths[sequence];
        let first_block = sequence * self.blocks_per_sequence;
        let blocks = self.layout.blocks_for(start + rows);
        Span {
            first_row,
            rows,
            start,
            blocks: (first_block..first_block + blocks)
                .map(|block| BlockId(block as u32))
                .collect(),
        }
    }
}

/// A cache with room for `sequences` sequences of `capacity_tokens` tokens each, and its layout.
pub(super) fn cache<B: Backend>(
    model: &Model<B>,
    sequences: usize,
    capacity_tokens: usize,
    dtype: KvDType,
) -> anyhow::Result<(B::Kv, KvLayout)> {
    let limit = model.config().max_position_embeddings;
    if capacity_tokens > limit {
        bail!(
            "{capacity_tokens} tokens exceed the model's context of {limit} (max_position_embeddings)\n  \
             ask for fewer tokens"
        );
    }
    let layout = model.kv_layout(BLOCK_TOKENS, dtype);
    let blocks = sequences * layout.blocks_for(capacity_tokens.max(1));
    Ok((model.kv_alloc(layout, blocks)?, layout))
}

/// Index of the largest logit; the lowest index in case of a tie.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = index;
        }
    }
    best as u32
}
