//! Rows and experts of the ranks that read a prompt together.

use std::collections::HashMap;
use std::ops::Range;

use hearth_kernels::Span;

use crate::{ModuleId, ModuleSpec};

/// The rows of one rank in a pass that several ranks compute together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Its pieces of the sequences: up to two of each, whose rows are counted through.
    pub(crate) spans: Vec<Span>,
    /// Which of two it is, of each piece.
    pub(crate) halves: Vec<Half>,
    /// Index in the whole pass of each of its rows.
    pub(crate) rows: Vec<u32>,
}

/// The half of its sequence that a piece lies in: a rank has one piece in each, the earlier the one, the later the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    First,
    Second,
}

/// Cuts the sequences of a pass into the shares of `ranks` ranks, by rank: of the `2 * ranks` pieces of a sequence, as equal as
/// they can be, rank `r` has the pieces `r` and `2 * ranks - 1 - r`, so that all see about as many keys (the zig-zag variant
/// of striped attention; OSDI '26, section 3.2). The last row of each sequence is rank 0's.
pub(crate) fn zig_zag(spans: &[Span], ranks: usize) -> Vec<Share> {
    let mut shares = vec![Share::default(); ranks];
    for span in spans {
        for (rank, share) in shares.iter_mut().enumerate() {
            for (piece, half) in [(rank, Half::First), (2 * ranks - 1 - rank, Half::Second)] {
                share.take(span, &piece_of(span.rows, piece, ranks), half);
            }
        }
    }
    shares
}

/// Rows of one of the `2 * ranks` pieces of a sequence.
fn piece_of(rows: usize, piece: usize, ranks: usize) -> Range<usize> {
    let border = |piece: usize| piece * rows / (2 * ranks);
    border(piece)..border(piece + 1)
}

impl Share {
    /// Its pieces in one half of the sequences.
    pub(crate) fn pieces(&self, half: Half) -> impl Iterator<Item = &Span> {
        let pieces = self.spans.iter().zip(&self.halves);
        pieces.filter_map(move |(span, of)| (*of == half).then_some(span))
    }

    /// Number of its rows in one half of the sequences.
    pub(crate) fn rows_in(&self, half: Half) -> usize {
        self.pieces(half).map(|span| span.rows).sum()
    }

    /// Number of its rows before the first one in the second half of a sequence.
    pub(crate) fn first_rows(&self) -> usize {
        self.pieces(Half::Second)
            .next()
            .map_or(self.rows.len(), |span| span.first_row)
    }

    /// Adds some rows of a sequence.
    fn take(&mut self, span: &Span, rows: &Range<usize>, half: Half) {
        if rows.is_empty() {
            return;
        }
        self.halves.push(half);
        self.spans.push(Span {
            first_row: self.rows.len(),
            rows: rows.len(),
            start: span.start + rows.start,
            blocks: span.blocks.clone(),
        });
        self.rows
            .extend(rows.clone().map(|row| (span.first_row + row) as u32));
    }
}

/// One rank's share of each layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShare {
    rank: usize,
    ranks: usize,
}

impl ExpertShare {
    /// All of them.
    pub const ALL: Self = Self { rank: 0, ranks: 1 };

    /// That of a rank, counted from 0, of `ranks` ranks.
    pub const fn of(rank: usize, ranks: usize) -> Self {
        Self { rank, ranks }
    }

    /// Number of ranks.
    pub const fn ranks(self) -> usize {
        self.ranks
    }

    /// Its experts, of `experts` that a layer has. Where the number of ranks is 1, 2, 4 or 8, these are whole leaves of the tree
    /// in which experts are summed ([`hearth_kernels::expert_sum`]).
    pub const fn experts(self, experts: usize) -> Range<usize> {
        let Self { rank, ranks } = self;
        rank * experts / ranks..(rank + 1) * experts / ranks
    }
}

/// Those of a model's modules that a rank needs: its share of each layer's experts, and all others.
pub fn modules_of(share: ExpertShare, mut modules: Vec<ModuleSpec>) -> Vec<ModuleSpec> {
    let mut experts = HashMap::new();
    for module in &modules {
        if let ModuleId::Expert(layer, _) = module.id {
            *experts.entry(layer).or_insert(0) += 1;
        }
    }
    modules.retain(|module| match module.id {
        ModuleId::Expert(layer, expert) => {
            let of_layer = experts.get(&layer).copied().unwrap_or(0);
            share.experts(of_layer).contains(&(expert as usize))
        }
        _ => true,
    });
    modules
}

/// The rank that has an expert.
pub(crate) fn rank_of(expert: usize, ranks: usize, experts: usize) -> usize {
    (ranks * (expert + 1) - 1) / experts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first_row: usize, rows: usize, start: usize) -> Span {
        Span {
            first_row,
            rows,
            start,
            blocks: Vec::new(),
        }
    }

    #[test]
    fn each_row_is_one_ranks_and_the_last_of_each_sequence_the_first_ranks() {
        for ranks in 1..9 {
            for lengths in [vec![1], vec![3, 1], vec![40], vec![17, 64, 2]] {
                let mut spans = Vec::new();
                let mut rows = 0;
                for (i, length) in lengths.into_iter().enumerate() {
                    spans.push(span(rows, length, 7 * i));
                    rows += length;
                }
                let shares = zig_zag(&spans, ranks);
                let mut all: Vec<u32> = shares.iter().flat_map(|s| s.rows.clone()).collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..rows as u32));
                for span in &spans {
                    let last = (span.first_row + span.rows - 1) as u32;
                    assert!(shares[0].rows.contains(&last));
                }
                for share in &shares {
                    let mut next = 0;
                    for span in &share.spans {
                        assert_eq!(span.first_row, next);
                        next += span.rows;
                    }
                    assert_eq!(next, share.rows.len());
                }
            }
        }
    }

    #[test]
    fn ranks_see_about_as_many_keys() {
        let shares = zig_zag(&[span(0, 4096, 0)], 4);
        let pairs = |share: &Share| {
            let of = |span: &Span| {
                (0..span.rows)
                    .map(|row| span.start + row + 1)
                    .sum::<usize>()
            };
            share.spans.iter().map(of).sum::<usize>()
        };
        let (least, most) = (
            shares.iter().map(pairs).min(),
            shares.iter().map(pairs).max(),
        );
        assert_eq!(least, most);
        assert_eq!(shares[1].spans, [span(0, 512, 512), span(512, 512, 3072)]);
        assert_eq!(shares[1].halves, [Half::First, Half::Second]);
        assert_eq!(
            (shares[1].first_rows(), shares[1].rows_in(Half::Second)),
            (512, 512)
        );
    }

    #[test]
    fn experts_are_shared_out_once() {
        for ranks in 1..9 {
            for experts in [1, 3, 8, 60, 256, 257] {
                for rank in 0..ranks {
                    for expert in ExpertShare::of(rank, ranks).experts(experts) {
                        assert_eq!(rank_of(expert, ranks, experts), rank);
                    }
                }
                let last = ExpertShare::of(ranks - 1, ranks);
                assert_eq!(last.experts(experts).end, experts);
            }
        }
    }
}
