//! Input of one forward pass.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::ModelError;

/// Tokens of one step, from any mixture of sequences: prompt chunks and single decode tokens.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// One token per row.
    pub tokens: Vec<u32>,
    /// The sequences: consecutive runs of rows, starting at row 0 and covering all rows.
    pub spans: Vec<Span>,
    /// Rows whose logits are wanted, in the order in which the logits are returned.
    pub logit_rows: Vec<u32>,
}

/// What a pass computes, beside its tokens.
#[derive(Clone, Copy)]
pub struct PassSpec<'a> {
    /// The sequences of its rows, see [`Batch::spans`].
    pub spans: &'a [Span],
    /// Rows whose logits are wanted, see [`Batch::logit_rows`].
    pub logit_rows: &'a [u32],
    /// Whether this rank computes it without its peers, if it can.
    pub alone: bool,
}

/// What the rows of a pass begin with.
pub enum Rows<'a, B: Backend> {
    /// Tokens, one a row.
    Tokens(&'a [u32]),
    /// Tokens that the device has chosen, or is about to, and that need not be on the host yet.
    Sampled {
        /// The chosen tokens.
        tokens: &'a B::Tokens,
        /// For each row, the index of its token among them.
        picked: &'a [u32],
    },
}

impl<B: Backend> Clone for Rows<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Rows<'_, B> {}

impl<'a, B: Backend> Rows<'a, B> {
    /// Number of rows.
    pub fn count(self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Sampled { picked, .. } => picked.len(),
        }
    }

    /// Some of the rows.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::Tokens(tokens) => Self::Tokens(&tokens[range]),
            Self::Sampled { tokens, picked } => Self::Sampled {
                tokens,
                picked: &picked[range],
            },
        }
    }

    /// Tokens that the host knows.
    pub(crate) fn known(self) -> &'a [u32] {
        match self {
            Self::Tokens(tokens) => tokens,
            Self::Sampled { .. } => &[],
        }
    }
}

/// Checks that the rows whose logits are wanted exist.
pub(crate) fn check_logit_rows(logit_rows: &[u32], rows: usize) -> Result<(), ModelError> {
    match logit_rows.iter().find(|&&row| row as usize >= rows) {
        None => Ok(()),
        Some(row) => Err(ModelError::Batch(format!(
            "logits are wanted of row {row} of {rows}"
        ))),
    }
}

/// Absolute position of each row.
pub(crate) fn positions(spans: &[Span]) -> Vec<u32> {
    spans
        .iter()
        .flat_map(|span| (span.start..span.start + span.rows).map(|p| p as u32))
        .collect()
}

/// Checks that spans cover the rows.
pub(crate) fn check_spans(spans: &[Span], rows: usize) -> Result<(), ModelError> {
    let mut next_row = 0;
    for span in spans {
        if span.first_row != next_row || span.rows == 0 {
            return Err(ModelError::Batch(format!(
                "a span has rows {}+{} where row {next_row} comes next",
                span.first_row, span.rows
            )));
        }
        if u32::try_from(span.start.saturating_add(span.rows)).is_err() {
            return Err(ModelError::Batch(format!(
                "position {} is too large",
                span.start
            )));
        }
        next_row += span.rows;
    }
    if next_row != rows || rows == 0 {
        return Err(ModelError::Batch(format!(
            "spans cover {next_row} rows, tokens are {rows}"
        )));
    }
    Ok(())
}

/// Checks that tokens are in the vocabulary.
pub(crate) fn check_tokens(tokens: &[u32], vocab_size: usize) -> Result<(), ModelError> {
    match tokens.iter().find(|&&t| t as usize >= vocab_size) {
        None => Ok(()),
        Some(token) => Err(ModelError::Batch(format!(
            "token {token} is outside the vocabulary of {vocab_size}"
        ))),
    }
}
