//! The residual stream of some rows as bytes: the sequences that the rows belong to, then the rows in f32.

use hearth_kernels::Span;
use prost::Message;

use crate::rows::{SpanOf, spans, told};

/// The rows' sequences.
#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(message, repeated, tag = "1")]
    spans: Vec<SpanOf>,
}

/// Bytes of rows `[rows, hidden]` of these sequences.
pub(crate) fn encode(spans: &[Span], rows: &[f32]) -> Vec<u8> {
    let header = Header { spans: told(spans) };
    let mut bytes = Vec::with_capacity(header.encoded_len() + 8 + 4 * rows.len());
    bytes.extend(header.encode_length_delimited_to_vec());
    bytes.extend(rows.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// Sequences, and rows `[rows, hidden]` of them.
///
/// # Errors
/// What is wrong with the bytes: no header, or not as many rows as the sequences have.
pub(crate) fn decode(mut bytes: &[u8], hidden: usize) -> Result<(Vec<Span>, Vec<f32>), String> {
    let header = Header::decode_length_delimited(&mut bytes)
        .map_err(|error| format!("the rows' sequences cannot be read: {error}"))?;
    let (spans, rows) = spans(header.spans);
    let want_bytes = rows.saturating_mul(4 * hidden);
    if bytes.len() != want_bytes || rows == 0 {
        return Err(format!(
            "{rows} rows of {hidden} numbers come in {} bytes instead of {want_bytes}",
            bytes.len()
        ));
    }
    let (values, _) = bytes.as_chunks::<4>();
    Ok((
        spans,
        values
            .iter()
            .map(|value| f32::from_le_bytes(*value))
            .collect(),
    ))
}

#[cfg(test)]
mod tests {
    use hearth_kernels::BlockId;
    use proptest::prelude::*;

    use super::*;

    fn given() -> Vec<Span> {
        let span = |first_row, rows, start, blocks: &[u32]| Span {
            first_row,
            rows,
            start,
            blocks: blocks.iter().copied().map(BlockId).collect(),
        };
        vec![span(0, 2, 30, &[5, 1, 9]), span(2, 1, 0, &[7])]
    }

    #[test]
    fn what_is_encoded_is_read_back_to_the_bit() {
        let rows = [
            1.5,
            -0.0,
            f32::MIN_POSITIVE / 2.0,
            3e38,
            f32::EPSILON,
            -7.25,
        ];
        let (read, values) = decode(&encode(&given(), &rows), 2).unwrap();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&rows));
        let all = |spans: &[Span]| format!("{spans:?}");
        assert_eq!(all(&read), all(&given()));
    }

    #[test]
    fn bytes_that_are_short_or_too_many_are_refused() {
        let bytes = encode(&given(), &[0.0; 6]);
        for wrong in [
            &bytes[..bytes.len() - 1],
            &[&bytes[..], &[0]].concat(),
            &[],
            &[0],
        ] {
            assert!(decode(wrong, 2).is_err());
        }
        assert!(
            decode(&bytes, 3)
                .unwrap_err()
                .contains("3 rows of 3 numbers")
        );
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), hidden in 0_usize..9) {
            let _ = decode(&bytes, hidden);
        }
    }
}
