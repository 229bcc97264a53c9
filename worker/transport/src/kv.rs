//! KV messages of bounded size, so that no single message blocks the others on a connection.

use bytes::Bytes;

use crate::v1::KvLayer;

/// Largest size of the KV in one message, in bytes.
pub const MAX_PIECE_BYTES: usize = 4 << 20;

/// Splits the KV of `tokens` tokens of one layer into messages of whole tokens, at most [`MAX_PIECE_BYTES`] each
/// unless a single token is larger. The pieces share the memory of `data`.
///
/// Yields nothing if `data` is not a whole number of bytes per token, since it could not be split correctly.
pub fn pieces(
    layer: u32,
    first_token: u32,
    tokens: u32,
    data: Bytes,
) -> impl Iterator<Item = KvLayer> {
    pieces_of(layer, first_token, tokens, data, MAX_PIECE_BYTES)
}

fn pieces_of(
    layer: u32,
    first_token: u32,
    tokens: u32,
    data: Bytes,
    limit_bytes: usize,
) -> impl Iterator<Item = KvLayer> {
    let whole = tokens > 0 && data.len().is_multiple_of(tokens as usize);
    let token_bytes = if whole {
        data.len() / tokens as usize
    } else {
        0
    };
    let step = (limit_bytes / token_bytes.max(1)).clamp(1, u32::MAX as usize) as u32;
    let end = if whole { tokens } else { 0 };
    (0..end).step_by(step as usize).map(move |from| {
        let count = step.min(end - from);
        let start = from as usize * token_bytes;
        KvLayer {
            layer,
            first_token: first_token + from,
            tokens: count,
            data: data.slice(start..start + count as usize * token_bytes),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_token_once() {
        let data: Bytes = (0..70u8).collect::<Vec<_>>().into();
        for limit in [1, 10, 25, 69, 70, 1000] {
            let pieces: Vec<_> = pieces_of(3, 5, 7, data.clone(), limit).collect();
            let joined: Vec<u8> = pieces.iter().flat_map(|p| p.data.to_vec()).collect();
            assert_eq!(joined, data, "limit {limit}");
            let mut next = 5;
            for piece in &pieces {
                assert_eq!((piece.layer, piece.first_token), (3, next));
                assert_eq!(piece.data.len(), piece.tokens as usize * 10);
                assert!(piece.data.len() <= limit.max(10));
                next += piece.tokens;
            }
            assert_eq!(next, 12);
        }
        assert_eq!(pieces_of(0, 0, 7, data.clone(), 30).count(), 3);
    }

    #[test]
    fn nothing_comes_of_nothing_or_of_broken_tokens() {
        assert_eq!(pieces(0, 0, 0, Bytes::new()).count(), 0);
        assert_eq!(pieces(0, 0, 3, Bytes::from_static(b"1234")).count(), 0);
    }
}
