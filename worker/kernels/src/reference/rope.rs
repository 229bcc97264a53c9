//! Rotary position embedding.

use crate::{RopeLayout, RopeTable};

/// Rotates the first `2 * inv_freq.len()` elements of one head at absolute position `position`.
///
/// The angle is `position * inv_freq`, rounded to f32 as the published models compute it.
pub fn rope_head(head: &mut [f32], position: u32, table: &RopeTable) {
    let half = table.inv_freq.len();
    for (i, &frequency) in table.inv_freq.iter().enumerate() {
        let (sin, cos) = (position as f32 * frequency).sin_cos();
        let (sin, cos) = (sin * table.magnitude, cos * table.magnitude);
        let (first, second) = match table.layout {
            RopeLayout::Half => (i, i + half),
            RopeLayout::Interleaved => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first], head[second]);
        head[first] = a * cos - b * sin;
        head[second] = b * cos + a * sin;
    }
}

/// Rotates every head of x `[positions, heads * head_dim]` from its column `first` on.
pub fn rope(x: &mut [f32], (heads, first): (usize, usize), positions: &[u32], table: &RopeTable) {
    let cols = x.len() / positions.len().max(1);
    let head_dim = cols / heads;
    for (row, &position) in x.chunks_mut(cols).zip(positions) {
        for head in row.chunks_mut(head_dim) {
            rope_head(&mut head[first..], position, table);
        }
    }
}
