//! Input of one forward pass.

use hearth_kernels::Span;

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

impl Batch {
    /// Checks that the rows whose logits are wanted exist.
    pub(crate) fn check_logit_rows(&self) -> Result<(), ModelError> {
        let rows = self.tokens.len();
        match self.logit_rows.iter().find(|&&row| row as usize >= rows) {
            None => Ok(()),
            Some(row) => Err(ModelError::Batch(format!(
                "logits are wanted of row {row} of {rows}"
            ))),
        }
    }
}

/// Absolute position of each row.
pub(crate) fn positions(spans: &[Span]) -> Vec<u32> {
    spans
        .iter()
        .flat_map(|span| (span.start..span.start + span.rows).map(|p| p as u32))
        .collect()
}

/// Checks that tokens and spans are consistent with each other and with the vocabulary.
pub(crate) fn check(tokens: &[u32], spans: &[Span], vocab_size: usize) -> Result<(), ModelError> {
    let rows = tokens.len();
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
    if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab_size) {
        return Err(ModelError::Batch(format!(
            "token {token} is outside the vocabulary of {vocab_size}"
        )));
    }
    Ok(())
}
