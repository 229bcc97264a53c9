//! Order of slots when the host chose the experts, and where slots that the device sorted lie.

use std::ops::Range;

use hearth_kernels::ExpertCall;

use super::CudaWeight;
use super::linear::DECODE_ROWS;
use super::tensor::TileArg;
use crate::memory::Buffer;

/// An expert's index, and the tokens that chose it.
#[derive(Clone, Copy)]
pub(super) struct ListedCall<'a> {
    expert: u32,
    /// Ascending.
    rows: &'a [u32],
    weights: &'a [f32],
}

impl<'a> ListedCall<'a> {
    pub(super) fn of(call: &ExpertCall<'a, CudaWeight>) -> Self {
        Self {
            expert: call.expert,
            rows: call.rows,
            weights: call.weights,
        }
    }

    /// The part of the call that is in some rows.
    fn within(self, rows: &Range<usize>) -> Self {
        let [first, end] =
            [rows.start, rows.end].map(|row| self.rows.partition_point(|&r| (r as usize) < row));
        Self {
            expert: self.expert,
            rows: &self.rows[first..end],
            weights: &self.weights[first..end],
        }
    }
}

/// Cuts tokens into ranges, in order, each of at most `most_slots` slots unless it is one token.
pub(super) fn chunks(
    calls: &[ListedCall<'_>],
    tokens: usize,
    most_slots: usize,
) -> Vec<Range<usize>> {
    let mut counts = vec![0; tokens];
    for row in calls.iter().flat_map(|call| call.rows) {
        counts[*row as usize] += 1;
    }
    let mut chunks = Vec::new();
    let (mut first, mut slots) = (0, 0);
    for (token, count) in counts.iter().enumerate() {
        if token > first && slots + count > most_slots {
            chunks.push(first..token);
            (first, slots) = (token, 0);
        }
        slots += count;
    }
    if first < tokens {
        chunks.push(first..tokens);
    }
    chunks
}

/// Rows of a tile: those of the decode kernel, which is bound by the weights, for few tokens per expert; else those of
/// the tiled one. The bits are the same.
pub(super) fn tile_rows(slots: usize, experts: usize, tiled: impl FnOnce() -> usize) -> usize {
    if slots <= experts.min(slots) * DECODE_ROWS {
        DECODE_ROWS
    } else {
        tiled()
    }
}

/// Arrays as moe_sort.cu leaves them on the device, built from calls that are already in order. Rows are counted from
/// the first token.
pub(super) struct HostOrder {
    pub(super) rows: Vec<i32>,
    pub(super) positions: Vec<i32>,
    pub(super) weights: Vec<f32>,
    pub(super) chosen: Vec<i32>,
    pub(super) tiles: Vec<TileArg>,
    pub(super) per_token: usize,
    pub(super) tile_rows: usize,
}

impl HostOrder {
    /// `tiled`: rows of the tiled kernel's tiles.
    pub(super) fn new(
        calls: &[ListedCall<'_>],
        tokens: Range<usize>,
        tiled: impl FnOnce() -> usize,
    ) -> Self {
        let calls: Vec<ListedCall<'_>> = calls.iter().map(|call| call.within(&tokens)).collect();
        let slots = calls.iter().map(|call| call.rows.len()).sum();
        let used = calls.iter().filter(|call| !call.rows.is_empty()).count();
        Self::tiled(&calls, tokens, tile_rows(slots, used, tiled))
    }

    fn tiled(calls: &[ListedCall<'_>], tokens: Range<usize>, tile_rows: usize) -> Self {
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        let mut counts = vec![0_usize; tokens.len()];
        let place = |row: u32| row as usize - tokens.start;
        for (index, call) in calls.iter().enumerate() {
            for first in (0..call.rows.len()).step_by(tile_rows) {
                tiles.push(TileArg {
                    expert: index as i32,
                    first: (rows.len() + first) as i32,
                    count: tile_rows.min(call.rows.len() - first) as i32,
                    reserved: 0,
                });
            }
            for &row in call.rows {
                counts[place(row)] += 1;
                rows.push(place(row) as i32);
            }
        }
        let per_token = counts.iter().copied().max().unwrap_or(0);
        let slots = per_token * tokens.len();
        let (mut positions, mut weights) = (vec![-1; slots], vec![0.0; slots]);
        let mut chosen = vec![0; slots];
        counts.fill(0);
        let mut position = 0;
        for call in calls {
            for (&row, &weight) in call.rows.iter().zip(call.weights) {
                let (first, count) = (place(row) * per_token, &mut counts[place(row)]);
                positions[first + *count] = position;
                weights[first + *count] = weight;
                // Fillers follow the token's slots, and have its last expert so that experts ascend.
                chosen[first + *count..first + per_token].fill(call.expert as i32);
                *count += 1;
                position += 1;
            }
        }
        Self {
            rows,
            positions,
            weights,
            chosen,
            tiles,
            per_token,
            tile_rows,
        }
    }
}

/// Where sorted slots lie in a buffer.
pub(super) struct SlotAddresses {
    pub(super) tiles: u64,
    pub(super) rows: u64,
    pub(super) positions: u64,
    pub(super) tile_count: u64,
    /// Upper bound of the number of tiles.
    pub(super) most_tiles: usize,
    pub(super) tile_rows: usize,
}

impl SlotAddresses {
    /// The parts of a buffer for slots of `experts` experts: tiles of `tile_rows`, then rows, positions and the count.
    pub(super) fn new(buffer: &Buffer, slots: usize, experts: usize, tile_rows: usize) -> Self {
        let most_tiles = most_tiles(slots, experts, tile_rows);
        let rows = buffer.address() + (most_tiles * size_of::<TileArg>()) as u64;
        let positions = rows + slots as u64 * 4;
        Self {
            tiles: buffer.address(),
            rows,
            positions,
            tile_count: positions + slots as u64 * 4,
            most_tiles,
            tile_rows,
        }
    }

    /// Size of the buffer.
    pub(super) fn bytes(slots: usize, experts: usize, tile_rows: usize) -> usize {
        most_tiles(slots, experts, tile_rows) * size_of::<TileArg>() + (2 * slots + 1) * 4
    }
}

fn most_tiles(slots: usize, experts: usize, tile_rows: usize) -> usize {
    slots.min(experts + slots / tile_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLS: [ListedCall<'static>; 2] = [
        ListedCall {
            expert: 4,
            rows: &[1, 2, 3],
            weights: &[0.1, 0.2, 0.3],
        },
        ListedCall {
            expert: 7,
            rows: &[0, 2],
            weights: &[0.4, 0.5],
        },
    ];

    fn tile(expert: i32, first: i32, count: i32) -> TileArg {
        TileArg {
            expert,
            first,
            count,
            reserved: 0,
        }
    }

    #[test]
    fn calls_become_slots_tiles_and_places() {
        let order = HostOrder::tiled(&CALLS, 0..5, 2);
        assert_eq!(order.rows, [1, 2, 3, 0, 2]);
        assert_eq!(order.per_token, 2);
        assert_eq!(order.positions, [3, -1, 0, -1, 1, 4, 2, -1, -1, -1]);
        assert_eq!(
            order.weights,
            [0.4, 0.0, 0.1, 0.0, 0.2, 0.5, 0.3, 0.0, 0.0, 0.0]
        );
        assert_eq!(order.chosen, [7, 7, 4, 4, 4, 7, 4, 4, 0, 0]);
        assert_eq!(order.tiles, [tile(0, 0, 2), tile(0, 2, 1), tile(1, 3, 2)]);
    }

    #[test]
    fn some_tokens_have_their_part_of_the_slots_counted_from_the_first() {
        let order = HostOrder::new(&CALLS, 2..4, || 64);
        assert_eq!(order.rows, [0, 1, 0]);
        assert_eq!(order.positions, [0, 2, 1, -1]);
        assert_eq!(order.chosen, [4, 7, 4, 4]);
        assert_eq!(order.tiles, [tile(0, 0, 2), tile(1, 2, 1)]);
    }

    #[test]
    fn chunks_hold_all_tokens_and_no_more_slots_than_allowed_unless_one_token_has_them() {
        assert_eq!(chunks(&CALLS, 5, 2), [0..2, 2..3, 3..5]);
        assert_eq!(chunks(&CALLS, 5, 1), [0..1, 1..2, 2..3, 3..5]);
        assert!(matches!(&chunks(&CALLS, 5, 100)[..], [all] if *all == (0..5)));
        assert_eq!(chunks(&[], 0, 1), []);
    }

    #[test]
    fn few_tokens_an_expert_take_the_decode_kernel() {
        assert_eq!(tile_rows(64, 8, || 128), DECODE_ROWS);
        assert_eq!(tile_rows(65, 8, || 128), 128);
        assert_eq!(tile_rows(3, 8, || 128), DECODE_ROWS);
    }
}
