//! The rows of a pass that ranks compute together, as bytes.

use hearth_kernels::{BlockId, Span};
use hearth_model::{GroupRows, Sites};
use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct Pass {
    #[prost(uint32, repeated, tag = "1")]
    tokens: Vec<u32>,
    #[prost(message, repeated, tag = "2")]
    spans: Vec<SpanOf>,
    #[prost(uint32, repeated, tag = "3")]
    logit_rows: Vec<u32>,
    #[prost(message, repeated, tag = "4")]
    before: Vec<SpanOf>,
    /// The site of each rank where keys and values are passed on.
    #[prost(uint32, repeated, tag = "5")]
    sites: Vec<u32>,
}

/// The rows of one sequence; those of sequences follow each other.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SpanOf {
    #[prost(uint32, tag = "1")]
    rows: u32,
    #[prost(uint32, tag = "2")]
    start: u32,
    #[prost(uint32, repeated, tag = "3")]
    blocks: Vec<u32>,
}

/// Sequences as messages.
pub(crate) fn told(spans: &[Span]) -> Vec<SpanOf> {
    let told = |span: &Span| SpanOf {
        rows: span.rows as u32,
        start: span.start as u32,
        blocks: span.blocks.iter().map(|block| block.0).collect(),
    };
    spans.iter().map(told).collect()
}

/// Sequences that a message tells, and the number of their rows.
pub(crate) fn spans(told: Vec<SpanOf>) -> (Vec<Span>, usize) {
    let mut first_row: usize = 0;
    let mut spans = Vec::with_capacity(told.len());
    for span in told {
        let rows = span.rows as usize;
        spans.push(Span {
            first_row,
            rows,
            start: span.start as usize,
            blocks: span.blocks.into_iter().map(BlockId).collect(),
        });
        first_row = first_row.saturating_add(rows);
    }
    (spans, first_row)
}

/// Bytes of a pass's rows.
pub(crate) fn encode(rows: &GroupRows) -> Vec<u8> {
    let pass = Pass {
        tokens: rows.tokens.clone(),
        spans: told(&rows.spans),
        logit_rows: rows.logit_rows.clone(),
        before: told(&rows.before),
        sites: rows.sites.by_rank().to_vec(),
    };
    pass.encode_to_vec()
}

/// The rows of a pass.
///
/// # Errors
/// What is wrong with the bytes. Whether they are rows of a model, the model says.
pub(crate) fn decode(bytes: &[u8]) -> Result<GroupRows, String> {
    let pass = Pass::decode(bytes)
        .map_err(|error| format!("the rows of a pass cannot be read: {error}"))?;
    let ((spans, _), (before, _)) = (spans(pass.spans), spans(pass.before));
    Ok(GroupRows {
        tokens: pass.tokens,
        spans,
        logit_rows: pass.logit_rows,
        before,
        sites: Sites::new(pass.sites),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_encoded_is_read_back() {
        let span = |first_row, rows, start, blocks: &[u32]| Span {
            first_row,
            rows,
            start,
            blocks: blocks.iter().copied().map(BlockId).collect(),
        };
        let rows = GroupRows {
            tokens: vec![7, 0, 9],
            spans: vec![span(0, 2, 30, &[5, 1, 9]), span(2, 1, 0, &[7])],
            logit_rows: vec![2, 1],
            before: vec![span(0, 30, 0, &[5, 1])],
            sites: Sites::new(vec![0, 0, 1]),
        };
        assert_eq!(decode(&encode(&rows)).unwrap(), rows);
        assert!(decode(&[9]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
