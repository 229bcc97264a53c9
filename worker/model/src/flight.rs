//! A pass between two of its modules.

use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::{Backend, Span};

use crate::ModelError;
use crate::batch;
use crate::blocks::Pass;
use crate::experts::PendingExperts;
use crate::peers::GroupPass;

/// A pass that has begun: the rows of some sequences on their way through the layers.
///
/// It owns all that it needs between two modules, so that a thread may leave it there and go on with another one, unless
/// the policy streams weights in the order of one pass.
pub struct Flight<B: Backend> {
    pub(crate) sequences: Sequences,
    pub(crate) stream: Stream<B>,
    pub(crate) moe: Option<MoeInFlight<B>>,
    /// Whether a block is running, or failed and left the stream undefined.
    pub(crate) is_in_block: bool,
}

impl<B: Backend> Flight<B> {
    /// Rows of `spans` of which `blocks_done` blocks were computed; `residual` `[rows, hidden]`.
    pub(crate) fn new(residual: B::Tensor, spans: Vec<Span>, blocks_done: usize) -> Self {
        Self {
            sequences: Sequences {
                positions: batch::positions(&spans),
                spans,
                blocks_done,
                group: None,
            },
            stream: Stream {
                residual,
                delta: None,
            },
            moe: None,
            is_in_block: false,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.sequences.positions.len()
    }

    /// Checks that a block is the next one, and enters it.
    pub(crate) fn enter(&mut self, block: usize) -> Result<(), ModelError> {
        if self.is_in_block || self.sequences.blocks_done != block {
            return Err(ModelError::Order {
                block,
                done: self.sequences.blocks_done,
            });
        }
        self.is_in_block = true;
        Ok(())
    }

    /// Checks that a block is the one that was entered.
    pub(crate) fn check_within(&self, block: usize) -> Result<(), ModelError> {
        match self.is_in_block && self.sequences.blocks_done == block {
            true => Ok(()),
            false => Err(ModelError::Order {
                block,
                done: self.sequences.blocks_done,
            }),
        }
    }

    pub(crate) fn leave(&mut self) {
        self.sequences.blocks_done += 1;
        self.is_in_block = false;
    }
}

/// Sequences of a flight, and how far it has come.
pub(crate) struct Sequences {
    pub(crate) spans: Vec<Span>,
    /// `[rows]` absolute positions.
    pub(crate) positions: Vec<u32>,
    /// Blocks that were computed: a layer's attention and feed-forward count as one each.
    pub(crate) blocks_done: usize,
    /// The pass that these rows are one rank's share of.
    pub(crate) group: Option<Arc<GroupPass>>,
}

impl Sequences {
    /// The part of these sequences in some rows, which are counted from the first of them.
    pub(crate) fn tile(&self, rows: &Range<usize>) -> Self {
        Self {
            spans: tile(&self.spans, rows),
            positions: self.positions[rows.clone()].to_vec(),
            blocks_done: self.blocks_done,
            group: self.group.clone(),
        }
    }

    /// The pass that these rows are one rank's share of.
    pub(crate) fn group(&self) -> Option<&Arc<GroupPass>> {
        self.group.as_ref()
    }
}

/// The part of sequences in some rows, which are counted from the first of them.
pub(crate) fn tile(spans: &[Span], rows: &Range<usize>) -> Vec<Span> {
    let part = |span: &Span| {
        let first = span.first_row.max(rows.start);
        let end = (span.first_row + span.rows).min(rows.end);
        (first < end).then(|| Span {
            first_row: first - rows.start,
            rows: end - first,
            start: span.start + (first - span.first_row),
            blocks: span.blocks.clone(),
        })
    };
    spans.iter().filter_map(part).collect()
}

/// Tiles of a long pass, at most: smaller ones would leave a large GPU idle, and what a tile takes is little beside what the
/// pass's routed experts take.
pub const PASS_TILES: usize = 8;

/// Rows of a tile of a pass of `rows`: `least_rows`, or more where there would be more than [`PASS_TILES`].
pub(crate) fn tile_rows(least_rows: usize, rows: usize) -> usize {
    least_rows.max(rows.div_ceil(PASS_TILES))
}

/// Cuts rows into tiles of at most `tile_rows`, in order.
pub(crate) fn row_tiles(rows: usize, tile_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows)
        .step_by(tile_rows)
        .map(move |first| first..rows.min(first.saturating_add(tile_rows)))
}

/// Indices of a tile's rows.
pub(crate) fn indices(tile: &Range<usize>) -> Vec<u32> {
    tile.clone().map(|row| row as u32).collect()
}

/// The residual stream between two blocks: a block's output is added when the next norm reads the sum.
pub(crate) struct Stream<B: Backend> {
    /// `[rows, hidden]`.
    pub(crate) residual: B::Tensor,
    /// `[rows, hidden]`, still to be added.
    pub(crate) delta: Option<B::Tensor>,
}

impl<B: Backend> Stream<B> {
    /// Adds the pending output and returns the norm of the sum, `[rows, hidden]`.
    pub(crate) fn norm(
        &mut self,
        pass: &Pass<'_, B>,
        weight: &B::Vector,
        eps: f32,
    ) -> Result<B::Tensor, ModelError> {
        Ok(match self.delta.take() {
            None => pass.backend.rms_norm(&self.residual, weight, eps)?,
            Some(delta) => pass
                .backend
                .add_rms_norm(&mut self.residual, &delta, weight, eps)?,
        })
    }

    /// Runs a block over a tile of rows after the other, of `least_rows` or more ([`tile_rows`]): `block` gets the stream of a tile, and returns its output
    /// `[tile rows, cols]`. Returns all of them, `[rows, cols]`, in the memory of the pending ones if these are as wide.
    pub(crate) fn in_tiles(
        &mut self,
        backend: &B,
        least_rows: usize,
        cols: usize,
        block: impl FnMut(&mut Self, Range<usize>) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        self.in_two_parts(backend, (least_rows, 0), cols, block)
    }

    /// The same where no tile reaches over the first `first_rows` rows.
    pub(crate) fn in_two_parts(
        &mut self,
        backend: &B,
        (least_rows, first_rows): (usize, usize),
        cols: usize,
        mut block: impl FnMut(&mut Self, Range<usize>) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let rows = backend.shape(&self.residual).0;
        let tile_rows = tile_rows(least_rows, rows);
        let is_cut = 0 < first_rows && first_rows < rows;
        if rows <= tile_rows && !is_cut {
            return block(self, 0..rows);
        }
        let mut pending = self.delta.take();
        let is_pending = pending.is_some();
        let is_as_wide = |delta: &mut B::Tensor| backend.shape(delta).1 == cols;
        let (mut outputs, pending) = match pending.take_if(is_as_wide) {
            Some(delta) => (delta, None),
            None => (backend.zeros(rows, cols)?, pending),
        };
        let first_rows = if is_cut { first_rows } else { 0 };
        let behind = row_tiles(rows - first_rows, tile_rows)
            .map(|tile| tile.start + first_rows..tile.end + first_rows);
        for tile in row_tiles(first_rows, tile_rows).chain(behind) {
            let picked = indices(&tile);
            let delta = pending.as_ref().unwrap_or(&outputs);
            let delta = is_pending.then(|| backend.rows(delta, &picked));
            let mut stream = Self {
                residual: backend.rows(&self.residual, &picked)?,
                delta: delta.transpose()?,
            };
            let output = block(&mut stream, tile.clone())?;
            if is_pending {
                backend.put_tile(&mut self.residual, (tile.start, 0), &stream.residual)?;
            }
            backend.put_tile(&mut outputs, (tile.start, 0), &output)?;
        }
        Ok(outputs)
    }
}

/// A layer's routed experts between their begin and their end.
pub(crate) struct MoeInFlight<B: Backend> {
    /// `[rows, hidden]`, normalised.
    pub(crate) x: B::Tensor,
    /// `[rows, hidden]` output of the shared experts.
    pub(crate) shared: Option<B::Tensor>,
    pub(crate) routed: PendingExperts<B>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_has_its_part_of_each_sequence() {
        let span = |first_row, rows, start| Span {
            first_row,
            rows,
            start,
            blocks: Vec::new(),
        };
        let sequences = Sequences {
            spans: vec![span(0, 3, 10), span(3, 1, 7), span(4, 6, 0)],
            positions: vec![10, 11, 12, 7, 0, 1, 2, 3, 4, 5],
            blocks_done: 4,
            group: None,
        };
        let parts = |rows: Range<usize>| {
            let tile = sequences.tile(&rows);
            assert_eq!(tile.positions, sequences.positions[rows]);
            let spans = tile.spans.iter();
            spans
                .map(|span| (span.first_row, span.rows, span.start))
                .collect::<Vec<_>>()
        };
        assert_eq!(parts(0..10), [(0, 3, 10), (3, 1, 7), (4, 6, 0)]);
        assert_eq!(parts(2..6), [(0, 1, 12), (1, 1, 7), (2, 2, 0)]);
        assert_eq!(parts(6..10), [(0, 4, 2)]);
        let tiles: Vec<_> = row_tiles(10, 4).collect();
        assert_eq!(tiles, [0..4, 4..8, 8..10]);
    }
}
