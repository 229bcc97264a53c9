//! What latent attention takes in its expanded form, besides its arithmetic: room for the heads of the positions that a pass
//! sees, and operations. Heads and positions are cut as workers do (`worker/model/src/blocks/mla/expanded.rs`).

use hearth_crds::{EXPANSION_BYTES, EXPANSION_TILE_ROWS, KvShape, ModelFacts};

/// Most positions, or rows, of a tile.
const MOST_TILE: u64 = EXPANSION_TILE_ROWS as u64;
/// Operations that expand a tile of positions: latents from the cache, the part that is multiplied, the product, and all of
/// it into a cache.
const TILE_OPERATIONS: u64 = 4;
/// Operations of a tile of rows: queries with their rotation, scores, and the result in its place.
const ROWS_OPERATIONS: u64 = 4;

/// Dimensions of latent attention, in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latents {
    hidden: u64,
    heads: u64,
    latent: u64,
    nope: u64,
    rope: u64,
    value: u64,
    /// Bytes of a stored element.
    element_bytes: u64,
}

impl Latents {
    /// `None` without latent attention, and for facts of earlier versions, which do not tell the size of expanded heads.
    pub(crate) fn of(facts: &ModelFacts, kv_bytes_per_token: u64) -> Option<Self> {
        let KvShape::Latent {
            rank,
            rope_dim,
            nope_dim,
            value_dim,
        } = facts.kv
        else {
            return None;
        };
        let latent = u64::from(rank) + u64::from(rope_dim);
        let stored = u64::from(facts.layers) * latent;
        (nope_dim > 0 && value_dim > 0).then(|| Self {
            hidden: u64::from(facts.hidden),
            heads: u64::from(facts.heads).max(1),
            latent,
            nope: u64::from(nope_dim),
            rope: u64::from(rope_dim),
            value: u64::from(value_dim),
            element_bytes: kv_bytes_per_token / stored.max(1),
        })
    }

    /// Elements that a row keeps while it attends: the residual stream twice, and the outputs of all heads.
    pub(crate) fn kept_by_row(self) -> u64 {
        2 * self.hidden + self.heads * self.value
    }

    /// Bytes of some heads at least, for `positions`, and of a tile of activations. Longer prompts leave more of what their
    /// experts will take.
    pub(crate) fn scratch_bytes(self, positions: u64) -> [u64; 2] {
        let one_head = self.head_bytes(positions);
        let heads = one_head.saturating_mul(self.heads);
        let tile = 4 * self.in_tile(self.heads) * MOST_TILE.min(positions);
        [
            heads.min(EXPANSION_BYTES.max(one_head)),
            tile.min(EXPANSION_BYTES),
        ]
    }

    /// Operations of a layer that expand `tokens` positions and let as many rows attend to them.
    pub(crate) fn operations(self, tokens: u32) -> f64 {
        let tokens = u64::from(tokens.max(1));
        // A row's idle bytes are the worker's (`Model::idle_row_bytes`), with the queries' latent as one width of the stream.
        let idle = 4 * (6 * self.hidden).saturating_sub(self.heads * self.value);
        let room = EXPANSION_BYTES.max(idle * tokens);
        let most = (room / self.head_bytes(tokens).max(1)).clamp(1, self.heads);
        let at_once = (1..=most).rev().find(|n| self.heads.is_multiple_of(*n));
        let at_once = at_once.unwrap_or(1);
        let taken = EXPANSION_BYTES.max(at_once * self.head_bytes(tokens));
        let in_tile = EXPANSION_BYTES + (idle * tokens).saturating_sub(taken);
        let tile = (in_tile / (4 * self.in_tile(at_once))).clamp(1, MOST_TILE);
        let of_tile = TILE_OPERATIONS + ROWS_OPERATIONS;
        (self.heads / at_once * tokens.div_ceil(tile) * of_tile) as f64
    }

    /// Elements of activations that a token's expansion and attention read and write in a layer.
    pub(crate) fn activations(self) -> f64 {
        let key = (self.nope + self.rope) as f64;
        let (rope, value) = (self.rope as f64, self.value as f64);
        self.heads as f64 * (4.5 * key + 2.0 * rope + 6.5 * value)
    }

    /// Bytes of a head's keys and values.
    fn head_bytes(self, positions: u64) -> u64 {
        positions.saturating_mul((self.nope + self.rope + self.value) * self.element_bytes)
    }

    /// Elements of a position or a row in a tile: what an operation reads and what it writes.
    fn in_tile(self, heads: u64) -> u64 {
        let of_heads = 2 * heads * (self.nope + self.rope + self.value);
        of_heads + self.hidden.max(2 * self.latent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deepseek_v3() -> Latents {
        Latents {
            hidden: 7168,
            heads: 128,
            latent: 576,
            nope: 128,
            rope: 64,
            value: 128,
            element_bytes: 2,
        }
    }

    #[test]
    fn scratch_is_bounded_unless_one_head_takes_more() {
        let mib = 1 << 20;
        let heads = |positions| deepseek_v3().scratch_bytes(positions)[0];
        assert_eq!(heads(100), 100 * 640 * 128);
        assert_eq!(heads(32_768), 64 * mib);
        assert_eq!(heads(200_000), 200_000 * 640);
        let tile = |positions| deepseek_v3().scratch_bytes(positions)[1];
        assert!(tile(100) < 64 * mib && tile(4096) == 64 * mib);
    }

    #[test]
    fn operations_grow_with_groups_and_tiles() {
        // All heads at once, in 2 tiles of 188 positions.
        assert_eq!(deepseek_v3().operations(300), 2.0 * 8.0);
        // What its experts will take has room for all heads of a long prompt, too, and for large tiles.
        assert_eq!(deepseek_v3().operations(32_768), 16.0 * 8.0);
    }
}
