//! Attention: pieces are tiles of rows and heads of one sequence and kv head.

use crate::arch::{AttentionTask, KvLayer};
use crate::ops::AttentionOps;
use crate::{AttentionSpec, KernelError, Span, checks};

use super::memory::{CpuTensor, SharedMatrix};
use super::{CpuBackend, CpuKv};

/// Queries (row and head) that one piece runs through the keys together.
const TILE_QUERIES: usize = 32;

/// A tile of one span: rows are counted within the span, query heads within the tensor.
struct Tile {
    span: usize,
    kv_head: usize,
    first_row: usize,
    rows: usize,
    first_head: usize,
    heads: usize,
}

impl AttentionOps for CpuBackend {
    fn attention(
        &self,
        q: &CpuTensor,
        kv: &CpuKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<CpuTensor, KernelError> {
        let mut out = self.tensor(q.rows(), spec.heads * kv.layout().v_dim);
        if spans.iter().map(|s| s.rows).sum::<usize>() < q.rows() {
            // Rows that belong to no sequence attend to nothing.
            out.as_mut_slice().fill(0.0);
        }
        self.attention_rows(&mut out, q, kv, layer, spans, spec)?;
        Ok(out)
    }

    fn attention_rows(
        &self,
        out: &mut CpuTensor,
        q: &CpuTensor,
        kv: &CpuKv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<(), KernelError> {
        let layout = kv.layout();
        let AttentionSpec { heads, scale } = spec;
        let shape = (q.rows(), q.cols());
        checks::attention(&layout, kv.blocks(), shape, layer, spans, spec)?;
        let out_shape = (out.rows(), out.cols());
        checks::attention_out(&layout, shape, out_shape, spec)?;
        let tiles = tiles(spans, layout.kv_heads, heads / layout.kv_heads);
        let shared = SharedMatrix::new(out.as_mut_slice(), heads * layout.v_dim);
        self.pool.run(tiles.len(), |piece| {
            // The last rows of a span see the most keys, so the long tiles go first.
            let tile = &tiles[tiles.len() - 1 - piece.index];
            let span = &spans[tile.span];
            let task = AttentionTask {
                kv: KvLayer {
                    layout,
                    bytes: kv.layer(layer),
                    blocks: &span.blocks,
                },
                kv_head: tile.kv_head,
                q: q.as_slice(),
                q_cols: q.cols(),
                first_row: span.first_row + tile.first_row,
                rows: tile.rows,
                first_position: span.start + tile.first_row,
                first_head: tile.first_head,
                heads: tile.heads,
                scale,
            };
            let mut scratch = self.scratch(piece.worker);
            let scratch = &mut *scratch;
            let width = tile.heads * layout.v_dim;
            let result = scratch.tile.f32s_mut(tile.rows * width);
            self.kernels.attention(&task, &mut scratch.kernel, result);
            let first_col = tile.first_head * layout.v_dim;
            for (row, result) in result.chunks(width).enumerate() {
                // SAFETY: tiles are disjoint in row or in head, and spans in rows (`checks::attention`).
                let out =
                    unsafe { shared.part(task.first_row + row, first_col..first_col + width) };
                out.copy_from_slice(result);
            }
        });
        Ok(())
    }
}

/// Returns all tiles; those of one sequence and kv head in ascending order of rows.
fn tiles(spans: &[Span], kv_heads: usize, group: usize) -> Vec<Tile> {
    let heads = group.min(TILE_QUERIES);
    let rows = (TILE_QUERIES / heads).max(1);
    let mut tiles = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        for first_row in (0..span.rows).step_by(rows) {
            for kv_head in 0..kv_heads {
                for first_head in (0..group).step_by(heads) {
                    tiles.push(Tile {
                        span: index,
                        kv_head,
                        first_row,
                        rows: rows.min(span.rows - first_row),
                        first_head: kv_head * group + first_head,
                        heads: heads.min(group - first_head),
                    });
                }
            }
        }
    }
    tiles
}
