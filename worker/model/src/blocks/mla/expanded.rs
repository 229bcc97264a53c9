//! Latent attention with expanded keys and values: `2 (nope + rope + v)` operations for a pair of a query and a position,
//! where the absorbed form has `2 (2 rank + rope)`, but each position is expanded once for all rows of a pass.
//!
//! Keys and values of some heads at a time are expanded from the cached latents, for all positions of the pass's
//! sequences, into a cache of their own, over which attention runs as over any other. How many heads that are changes no
//! bit: a head's keys are a function of its weights and of the latents as they are stored.

use hearth_kernels::{
    AttentionSpec, Backend, BlockId, KernelError, KvLayout, Latents, MlaHeads, Span, compose,
};

use super::super::{Pass, attend, project};
use super::{LATENT_NORM_EPS, Mla};
use crate::flight::{Sequences, indices, row_tiles};
use crate::{ExpansionRoom, ModelError, ModuleWeights};

/// Most positions, or rows, of a tile: enough for large products.
pub const EXPANSION_TILE_ROWS: usize = 2048;

impl Mla {
    /// Columns of what queries are projected from.
    pub(crate) fn query_inputs(&self) -> usize {
        self.q_rank.unwrap_or(self.hidden)
    }

    /// Stores the latents of the rows `x` `[rows, hidden]`, and returns what their queries are projected from: the queries'
    /// latent `[rows, q_rank]`, or `x`.
    pub(crate) fn cache<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &mut B::Kv,
        weights: &ModuleWeights<B>,
        x: B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        // kv_a [rows, rank + rope]; q_a [rows, q_rank]
        let (kv_a, q_a) = match self.q_rank {
            Some(_) => {
                let [kv_a, q_a] = project(pass, weights, &x, [("kv_a", ""), ("q_a", "")])?;
                (kv_a, Some((q_a, weights.vector("q_a_norm")?)))
            }
            None => {
                let [kv_a] = project(pass, weights, &x, [("kv_a", "")])?;
                (kv_a, None)
            }
        };
        pass.show("kv_a", &kv_a);
        let latents = Latents {
            kv_a,
            kv_norm: weights.vector("kv_a_norm")?,
            q_a,
            rank: self.heads.rank,
            eps: LATENT_NORM_EPS,
            positions: &pass.sequences.positions,
            rope: &self.rope,
        };
        let spans = &pass.sequences.spans;
        let q_a = pass
            .backend
            .cache_latents(kv, pass.cache_layer, spans, latents)?;
        if let Some(q_a) = &q_a {
            pass.show("q_a_norm", q_a);
        }
        pass.check_cancelled()?;
        Ok(q_a.unwrap_or(x))
    }

    /// Attention of the rows whose queries are projected from `inputs` → `[rows, heads * v]`. Expanded heads, and the
    /// activations that lead to them, take about as much as there is `room` for.
    pub(crate) fn expanded<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        kv: &B::Kv,
        weights: &ModuleWeights<B>,
        inputs: &B::Tensor,
        room: ExpansionRoom,
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let layout = backend.kv_layout(kv);
        let (spans, expanded) = apart(&pass.sequences.spans, &layout);
        let sequences = Sequences {
            spans,
            positions: pass.sequences.positions.clone(),
            blocks_done: pass.sequences.blocks_done,
            group: None,
        };
        let blocks: usize = expanded.iter().map(|to| to.blocks.len()).sum();
        let rows = sequences.positions.len();
        let cut = self.cut(&layout, (blocks, rows), room);
        let MlaHeads { heads, nope, v, .. } = self.heads;
        let part = MlaHeads {
            heads: cut.heads,
            ..self.heads
        };
        let mut cache = backend.kv_alloc(self.expanded_layout(&layout, cut.heads), blocks)?;
        // out [rows, heads * v]
        let mut out = backend.zeros(rows, heads * v)?;
        let (of_kv_b, of_q) = (nope + v, nope + self.rope_dim);
        let q_weight = weights.matrix(if self.q_rank.is_some() { "q_b" } else { "q" })?;
        for first in (0..heads).step_by(cut.heads) {
            let rows_of =
                |weight, width| backend.weight_rows(weight, first * width, cut.heads * width);
            let kv_b = rows_of(weights.matrix("kv_b")?, of_kv_b)?;
            let q_weight = rows_of(q_weight, of_q)?;
            for to in &expanded {
                for tile in row_tiles(to.positions, cut.positions) {
                    pass.check_cancelled()?;
                    let latents = (kv, pass.cache_layer, to.from);
                    let to = Span {
                        first_row: 0,
                        rows: tile.len(),
                        start: tile.start,
                        blocks: to.blocks.clone(),
                    };
                    compose::expand_latents(backend, latents, &kv_b, part, &mut cache, &to)?;
                }
            }
            for tile in row_tiles(rows, cut.rows) {
                pass.check_cancelled()?;
                let part = sequences.tile(&tile);
                let picked = (tile.len() < rows).then(|| backend.rows(inputs, &indices(&tile)));
                let picked = picked.transpose()?;
                let x = picked.as_ref().unwrap_or(inputs);
                let query = self.queries(backend, x, &q_weight, cut.heads, &part.positions)?;
                drop(picked);
                let spec = AttentionSpec {
                    heads: cut.heads,
                    scale: self.scale,
                };
                // attended [tile rows, cut.heads * v]
                let attended = attend(pass, (&cache, 0, &part.spans), &query, spec)?;
                backend.put_tile(&mut out, (tile.start, first * v), &attended)?;
            }
        }
        pass.show("attn_heads", &out);
        Ok(out)
    }

    /// `heads` `[rows, heads * v]` → `[rows, hidden]`.
    pub(crate) fn output<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        heads: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        pass.check_cancelled()?;
        let out = pass.backend.linear(heads, weights.matrix("o")?, None)?;
        pass.show("attn_out", &out);
        Ok(out)
    }

    /// Queries `[q_C, rope(q_R)]` of some heads, `[rows, heads * (nope + rope)]` (DeepSeek-V3, equations 7 to 9), from what
    /// they are projected from and the heads' rows of the weight.
    fn queries<B: Backend>(
        &self,
        backend: &B,
        x: &B::Tensor,
        weight: &B::Weight,
        heads: usize,
        positions: &[u32],
    ) -> Result<B::Tensor, KernelError> {
        // q [rows, heads * (nope + rope)]
        let mut q = backend.linear(x, weight, None)?;
        backend.rope(&mut q, (heads, self.heads.nope), positions, &self.rope)?;
        Ok(q)
    }

    /// Layout of a cache for some expanded heads of a layer.
    pub(crate) fn expanded_layout(&self, latents: &KvLayout, heads: usize) -> KvLayout {
        KvLayout {
            layers: 1,
            kv_heads: heads,
            k_dim: self.heads.nope + self.rope_dim,
            v_dim: self.heads.v,
            value_in_key: false,
            ..*latents
        }
    }

    /// [`Model::idle_row_bytes`](crate::Model::idle_row_bytes).
    pub(crate) fn idle_row_bytes(&self) -> usize {
        let kept = self.heads.heads * self.heads.v + self.query_inputs();
        4 * (7 * self.hidden).saturating_sub(kept)
    }

    /// As many heads as there is room for, for so many blocks of positions in a pass of so many rows, all groups of the same
    /// size, and as many positions and rows as have room for their activations.
    fn cut(&self, latents: &KvLayout, (blocks, rows): (usize, usize), room: ExpansionRoom) -> Cut {
        let MlaHeads {
            heads,
            nope,
            v,
            rank,
        } = self.heads;
        let head_bytes = self.expanded_layout(latents, 1).block_bytes() * blocks;
        let idle_bytes = room.row_bytes.saturating_mul(rows);
        let heads_bytes = room.least_bytes.max(idle_bytes);
        let most = (heads_bytes / head_bytes.max(1)).clamp(1, heads);
        let divisor = (1..=most).rev().find(|n| heads.is_multiple_of(*n));
        let at_once = divisor.unwrap_or(1);
        // What the heads leave of the rows' bytes makes tiles larger: each reads all keys before it.
        let taken_bytes = room.least_bytes.max(at_once * head_bytes);
        let left_bytes = idle_bytes.saturating_sub(taken_bytes);
        let tile_bytes = room.least_bytes.saturating_add(left_bytes);
        // What an operation reads, and what it writes.
        let of_heads = 2 * at_once * (nope + self.rope_dim + v);
        let tile = |elements: usize| (tile_bytes / (4 * elements)).clamp(1, EXPANSION_TILE_ROWS);
        Cut {
            heads: at_once,
            positions: tile(of_heads + 2 * (rank + self.rope_dim)),
            rows: tile(of_heads + self.query_inputs()),
        }
    }
}

/// What is expanded, and attends, at once.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    /// Heads of a group.
    heads: usize,
    /// Positions of a tile that is expanded.
    positions: usize,
    /// Rows of a tile that attends.
    rows: usize,
}

/// A sequence whose latents are expanded.
struct Expanded<'a> {
    /// Blocks of its latents.
    from: &'a [BlockId],
    /// Its positions, from the first one.
    positions: usize,
    /// Blocks of its keys and values.
    blocks: Vec<BlockId>,
}

/// The same spans, in a cache that holds one sequence behind the other, and these sequences. Spans that follow each other in the
/// same blocks are pieces of one sequence.
fn apart<'a>(spans: &'a [Span], layout: &KvLayout) -> (Vec<Span>, Vec<Expanded<'a>>) {
    let mut moved = Vec::with_capacity(spans.len());
    let mut sequences = Vec::new();
    let mut next = 0;
    for pieces in spans.chunk_by(|a, b| a.blocks == b.blocks && !a.blocks.is_empty()) {
        let ends = pieces.iter().map(|piece| piece.start + piece.rows);
        let positions = ends.max().unwrap_or(0);
        let first = next;
        next += layout.blocks_for(positions) as u32;
        let blocks: Vec<BlockId> = (first..next).map(BlockId).collect();
        moved.extend(pieces.iter().map(|piece| Span {
            blocks: blocks.clone(),
            ..*piece
        }));
        sequences.push(Expanded {
            from: &pieces[0].blocks,
            positions,
            blocks,
        });
    }
    (moved, sequences)
}

#[cfg(test)]
mod tests {
    use hearth_kernels::{KvDType, RopeLayout, RopeTable};

    use super::*;

    /// DeepSeek-V3's attention.
    fn mla() -> Mla {
        Mla {
            hidden: 7168,
            q_rank: Some(1536),
            rope_dim: 64,
            heads: MlaHeads {
                heads: 128,
                nope: 128,
                v: 128,
                rank: 512,
            },
            scale: 1.0,
            rope: RopeTable {
                inv_freq: Vec::new(),
                magnitude: 1.0,
                layout: RopeLayout::Interleaved,
            },
        }
    }

    #[test]
    fn all_groups_of_heads_are_as_large_as_the_room_allows() {
        let (mla, room) = (mla(), 64 << 20);
        let layout = mla.kv_layout(61, 16, KvDType::Bf16);
        let of = |least_bytes, row_bytes| ExpansionRoom {
            least_bytes,
            row_bytes,
        };
        let blocks = |tokens| (layout.blocks_for(tokens), tokens);
        let cut = |tokens: usize| mla.cut(&layout, blocks(tokens), of(room, 0));
        // 640 bytes of a position and head.
        for (tokens, heads) in [(1, 128), (512, 128), (800, 128), (1024, 64), (32_768, 2)] {
            let Cut {
                heads: at_once,
                positions,
                rows,
            } = cut(tokens);
            assert_eq!(at_once, heads, "{tokens}");
            assert!(positions * 4 * (640 * heads + 1152) <= room, "{tokens}");
            assert!(rows * 4 * (640 * heads + 1536) <= room && rows > 0);
        }
        // One head, one position and one row have no smaller part.
        let least = Cut {
            heads: 1,
            positions: 1,
            rows: 1,
        };
        assert_eq!(mla.cut(&layout, (1000, 1), of(0, 0)), least);
        // What a long prompt's experts take is room for many heads, and for none more where few rows follow a cached part.
        let idle = of(room, mla.idle_row_bytes());
        let long = mla.cut(&layout, blocks(32_768), idle);
        assert_eq!((long.heads, long.rows), (128, EXPANSION_TILE_ROWS));
        assert_eq!(
            mla.cut(&layout, (layout.blocks_for(32_768), 10), idle)
                .heads,
            2
        );
    }

    #[test]
    fn sequences_lie_one_behind_the_other() {
        let span = |first_row, rows, start, blocks: &[u32]| Span {
            first_row,
            rows,
            start,
            blocks: blocks.iter().copied().map(BlockId).collect(),
        };
        let layout = mla().kv_layout(1, 16, KvDType::Bf16);
        // The last block of the first sequence is for tokens to come.
        let spans = [span(0, 3, 30, &[9, 4, 7, 1]), span(3, 16, 0, &[2])];
        let (moved, sequences) = apart(&spans, &layout);
        assert_eq!(sequences.len(), 2);
        assert_eq!(moved[0].blocks, [0, 1, 2].map(BlockId));
        assert_eq!(moved[1].blocks, [BlockId(3)]);
        assert_eq!(
            (moved[1].first_row, moved[1].rows, moved[1].start),
            (3, 16, 0)
        );
        // Two pieces of one sequence, of whose positions all up to the last are expanded once.
        let pieces = [span(0, 2, 4, &[3, 8, 5]), span(2, 6, 30, &[3, 8, 5])];
        let (moved, sequences) = apart(&pieces, &layout);
        assert_eq!((sequences.len(), sequences[0].positions), (1, 36));
        assert_eq!(moved[0].blocks, moved[1].blocks);
        assert_eq!(moved[1].blocks, [0, 1, 2].map(BlockId));
    }
}
