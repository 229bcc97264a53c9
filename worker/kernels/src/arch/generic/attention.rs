//! Attention of a tile of queries over the pages of one kv head, with a running softmax.
//!
//! Keys are processed in steps of [`STEP`] absolute positions, from 0 to the query's own. Each step computes the
//! scores, the new maximum, the old sums times `exp(old - new)`, then each key's value in ascending order. A query
//! never reads a key beyond its own position, so the contents there (another row, an unwritten page) cannot matter.

use std::ops::Range;

use super::Simd;
use crate::KvDType;
use crate::arch::AttentionTask;
use crate::cpu::memory::KernelScratch;

/// Absolute positions per step.
const STEP: usize = 64;

/// Queries and keys in a register tile of scores; queries and vectors in one of outputs.
const TILE: usize = 4;

/// Rows of f32 in scratch, `stride` apart, padded with zeros.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn row(&self, i: usize) -> *const f32 {
        self.data[i * self.stride..(i + 1) * self.stride].as_ptr()
    }
}

/// The tile's working memory. Queries are ordered by row, then by head.
struct Tile<'a> {
    queries: usize,
    /// `[queries, k_stride]`.
    q: &'a mut [f32],
    /// `[STEP, k_stride]`.
    keys: &'a mut [f32],
    /// `[STEP, v_stride]`; empty when the key holds the value.
    values: &'a mut [f32],
    /// `[queries, STEP]`: scores, then weights.
    scores: &'a mut [f32],
    /// `[queries, v_stride]`: weighted sums of values so far.
    sums: &'a mut [f32],
    /// Greatest score so far of each query.
    max: &'a mut [f32],
    /// Sum of weights so far of each query.
    total: &'a mut [f32],
    /// Factor for the sums from before the current step.
    decay: &'a mut [f32],
    k_stride: usize,
    v_stride: usize,
}

impl<'a> Tile<'a> {
    fn new<S: Simd>(task: &AttentionTask<'_>, scratch: &'a mut KernelScratch) -> Self {
        let layout = task.kv.layout;
        let queries = task.rows * task.heads;
        let k_stride = layout.k_dim.next_multiple_of(S::LANES);
        let v_stride = layout.v_dim.next_multiple_of(S::LANES);
        let value_elements = if layout.value_in_key {
            0
        } else {
            STEP * v_stride
        };
        let (q, values) = scratch
            .values
            .f32s_mut(queries * k_stride + value_elements)
            .split_at_mut(queries * k_stride);
        let (scores, rest) = scratch
            .scores
            .f32s_mut(queries * (STEP + 3))
            .split_at_mut(queries * STEP);
        let (max, rest) = rest.split_at_mut(queries);
        let (total, decay) = rest.split_at_mut(queries);
        let tile = Self {
            queries,
            q,
            keys: scratch.weights.f32s_mut(STEP * k_stride),
            values,
            scores,
            sums: scratch.sums.f32s_mut(queries * v_stride),
            max,
            total,
            decay,
            k_stride,
            v_stride,
        };
        tile.sums.fill(0.0);
        tile.max.fill(f32::NEG_INFINITY);
        tile.total.fill(0.0);
        for (query, q) in tile.q.chunks_exact_mut(k_stride).enumerate() {
            let (filled, pad) = q.split_at_mut(layout.k_dim);
            filled.copy_from_slice(task.query(query / task.heads, query % task.heads));
            pad.fill(0.0);
        }
        tile
    }

    /// Unpacks the keys and values of `n` positions, starting at `start`.
    #[inline(always)]
    fn load<S: Simd>(&mut self, simd: S, task: &AttentionTask<'_>, start: usize, n: usize) {
        let layout = task.kv.layout;
        for j in 0..n {
            let key = task.kv.key(start + j, task.kv_head);
            let out = &mut self.keys[j * self.k_stride..][..self.k_stride];
            unpack(simd, layout.dtype, key, out);
            if !layout.value_in_key {
                let value = task.kv.value(start + j, task.kv_head);
                let out = &mut self.values[j * self.v_stride..][..self.v_stride];
                unpack(simd, layout.dtype, value, out);
            }
        }
        // Keys that pad a register tile of scores: any finite number works, since they are masked.
        self.keys[n * self.k_stride..n.next_multiple_of(TILE) * self.k_stride].fill(0.0);
    }

    /// Runs the queries of one row, which see `seen` keys of this step, through softmax and values.
    #[inline(always)]
    fn advance_row<S: Simd>(&mut self, simd: S, queries: Range<usize>, seen: usize) {
        for query in queries.clone() {
            let scores = &mut self.scores[query * STEP..][..STEP];
            scores[seen..].fill(f32::NEG_INFINITY);
            self.decay[query] = soften(simd, scores, &mut self.max[query], &mut self.total[query]);
        }
        let values = if self.values.is_empty() {
            Rows {
                data: self.keys,
                stride: self.k_stride,
            }
        } else {
            Rows {
                data: self.values,
                stride: self.v_stride,
            }
        };
        let mut query = queries.start;
        while query < queries.end {
            let wide = queries.end - query >= TILE;
            let operands = Operands {
                n: seen,
                weights: &self.scores[query * STEP..],
                decay: &self.decay[query..],
                values,
                v_stride: self.v_stride,
            };
            let sums = &mut self.sums[query * self.v_stride..];
            if wide {
                accumulate::<S, TILE>(simd, &operands, sums);
            } else {
                accumulate::<S, 1>(simd, &operands, sums);
            }
            query += if wide { TILE } else { 1 };
        }
    }
}

/// Computes out `[rows, heads, v_dim]`.
#[inline(always)]
pub(crate) fn attention<S: Simd>(
    simd: S,
    task: &AttentionTask<'_>,
    scratch: &mut KernelScratch,
    out: &mut [f32],
) {
    let mut tile = Tile::new::<S>(task, scratch);
    let end = task.first_position + task.rows;
    for start in (0..end).step_by(STEP) {
        let n = STEP.min(end - start);
        tile.load(simd, task, start, n);
        // Rows before this step's first position are done.
        let first_row = start.saturating_sub(task.first_position);
        let queries = first_row * task.heads..tile.queries;
        score(simd, &mut tile, queries, n, task.scale);
        for row in first_row..task.rows {
            let seen = (task.first_position + row + 1 - start).min(STEP);
            tile.advance_row(simd, row * task.heads..(row + 1) * task.heads, seen);
        }
    }
    let v_dim = task.kv.layout.v_dim;
    for (query, out) in out.chunks_exact_mut(v_dim).enumerate() {
        let inverse = 1.0 / tile.total[query];
        let sums = &tile.sums[query * tile.v_stride..][..v_dim];
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum * inverse;
        }
    }
}

/// Stored elements as f32, padded with zeros to `out`'s length, a multiple of the lanes.
#[inline(always)]
fn unpack<S: Simd>(simd: S, dtype: KvDType, bytes: &[u8], out: &mut [f32]) {
    let size_bytes = dtype.size_bytes();
    let len = bytes.len() / size_bytes;
    let whole = len / S::LANES * S::LANES;
    for at in (0..whole).step_by(S::LANES) {
        // SAFETY: a whole vector lies from `at` on in `bytes` and in `out`.
        unsafe {
            let p = bytes.as_ptr().add(at * size_bytes);
            let v = match dtype {
                KvDType::Bf16 => simd.load_bf16(p),
                KvDType::F32 => simd.load(p.cast()),
            };
            simd.store(out[at..at + S::LANES].as_mut_ptr(), v);
        }
    }
    if whole < len {
        let mut padded = [0u8; 64];
        let rest = &bytes[whole * size_bytes..];
        padded[..rest.len()].copy_from_slice(rest);
        // SAFETY: `padded` is as long as the longest vector, and a vector fits `out` from `whole` on.
        unsafe {
            let v = match dtype {
                KvDType::Bf16 => simd.load_bf16(padded.as_ptr()),
                KvDType::F32 => simd.load(padded.as_ptr().cast()),
            };
            simd.store(out[whole..whole + S::LANES].as_mut_ptr(), v);
        }
    }
}

/// `scores[query][j] = scale * q · k[j]` for `n` keys (rounded up to a tile) of each query of the range.
#[inline(always)]
fn score<S: Simd>(simd: S, tile: &mut Tile<'_>, queries: Range<usize>, n: usize, scale: f32) {
    let stride = tile.k_stride;
    let rows = |data| Rows { data, stride };
    let (q, keys) = (rows(&*tile.q), rows(&*tile.keys));
    let mut query = queries.start;
    while query < queries.end {
        let wide = queries.end - query >= TILE;
        for j in (0..n).step_by(TILE) {
            let k: [*const f32; TILE] = std::array::from_fn(|i| keys.row(j + i));
            let at = query * STEP + j;
            if wide {
                let q: [*const f32; TILE] = std::array::from_fn(|i| q.row(query + i));
                // SAFETY: all rows have `stride` elements.
                let dots = unsafe { dots::<S, TILE>(simd, q, k, stride) };
                for (i, dots) in dots.iter().enumerate() {
                    for (m, dot) in dots.iter().enumerate() {
                        tile.scores[at + i * STEP + m] = dot * scale;
                    }
                }
            } else {
                // SAFETY: all rows have `stride` elements.
                let [dots] = unsafe { dots::<S, 1>(simd, [q.row(query)], k, stride) };
                for (m, dot) in dots.iter().enumerate() {
                    tile.scores[at + m] = dot * scale;
                }
            }
        }
        query += if wide { TILE } else { 1 };
    }
}

/// `q[i] · k[j]`, one vector of partial sums each.
///
/// # Safety
/// `len` elements, a multiple of the lanes, lie at every pointer.
#[inline(always)]
unsafe fn dots<S: Simd, const Q: usize>(
    simd: S,
    q: [*const f32; Q],
    k: [*const f32; TILE],
    len: usize,
) -> [[f32; TILE]; Q] {
    let mut sums = [[simd.zero(); TILE]; Q];
    for at in (0..len).step_by(S::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut key = [simd.zero(); TILE];
            for j in 0..TILE {
                key[j] = simd.load(k[j].add(at));
            }
            for i in 0..Q {
                let query = simd.load(q[i].add(at));
                for j in 0..TILE {
                    sums[i][j] = simd.fma(query, key[j], sums[i][j]);
                }
            }
        }
    }
    let mut dots = [[0.0; TILE]; Q];
    for i in 0..Q {
        for j in 0..TILE {
            dots[i][j] = simd.reduce_add(sums[i][j]);
        }
    }
    dots
}

/// Turns a query's scores of one step into weights, updates its running maximum and total, and returns the
/// factor for the previous sums.
#[inline(always)]
fn soften<S: Simd>(simd: S, scores: &mut [f32], max: &mut f32, total: &mut f32) -> f32 {
    assert!(scores.len() == STEP);
    let mut highest = simd.splat(f32::NEG_INFINITY);
    for at in (0..STEP).step_by(S::LANES) {
        // SAFETY: the step is a whole number of vectors.
        highest = simd.max(highest, unsafe { simd.load(scores.as_ptr().add(at)) });
    }
    let new = max.max(simd.reduce_max(highest));
    let shift = simd.splat(new);
    let mut sum = simd.zero();
    for at in (0..STEP).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let p = scores.as_mut_ptr().add(at);
            let weight = simd.exp(simd.sub(simd.load(p), shift));
            simd.store(p, weight);
            sum = simd.add(sum, weight);
        }
    }
    // In the first step this is exp(-inf) = 0, which multiplies sums that are 0.
    let mut decay = [0.0; 16];
    // SAFETY: 16 elements hold any vector.
    unsafe { simd.store(decay.as_mut_ptr(), simd.exp(simd.splat(*max - new))) };
    *max = new;
    *total = *total * decay[0] + simd.reduce_add(sum);
    decay[0]
}

/// Inputs of [`accumulate`].
struct Operands<'a> {
    /// Keys that all of the queries see.
    n: usize,
    /// `[queries, STEP]`.
    weights: &'a [f32],
    /// One per query.
    decay: &'a [f32],
    values: Rows<'a>,
    /// Distance between the queries' sums, a multiple of the lanes and at most the values' stride.
    v_stride: usize,
}

/// `sums[query] = sums[query] * decay + Σ_j weight[j] * v[j]` for `Q` queries, keys in ascending order.
#[inline(always)]
fn accumulate<S: Simd, const Q: usize>(simd: S, operands: &Operands<'_>, sums: &mut [f32]) {
    let mut at = 0;
    while at < operands.v_stride {
        if operands.v_stride - at >= TILE * S::LANES {
            add_values::<S, Q, TILE>(simd, operands, at, sums);
            at += TILE * S::LANES;
        } else {
            add_values::<S, Q, 1>(simd, operands, at, sums);
            at += S::LANES;
        }
    }
}

/// Accumulates a register tile of `Q` queries and `V` vectors of the value, starting at element `at`.
#[inline(always)]
fn add_values<S: Simd, const Q: usize, const V: usize>(
    simd: S,
    operands: &Operands<'_>,
    at: usize,
    sums: &mut [f32],
) {
    let Operands {
        n,
        weights,
        decay,
        values,
        v_stride,
    } = *operands;
    let end = at + V * S::LANES;
    assert!(end <= v_stride && v_stride <= values.stride);
    assert!(values.data.len() >= n * values.stride && weights.len() >= (Q - 1) * STEP + n);
    assert!(sums.len() >= (Q - 1) * v_stride + end && decay.len() >= Q);
    // SAFETY: in bounds by the assertions.
    unsafe {
        let mut tile = [[simd.zero(); V]; Q];
        for i in 0..Q {
            let decay = simd.splat(decay[i]);
            for v in 0..V {
                let sum = simd.load(sums.as_ptr().add(i * v_stride + at + v * S::LANES));
                tile[i][v] = simd.mul(sum, decay);
            }
        }
        for j in 0..n {
            let value = values.data.as_ptr().add(j * values.stride + at);
            let mut vectors = [simd.zero(); V];
            for v in 0..V {
                vectors[v] = simd.load(value.add(v * S::LANES));
            }
            for i in 0..Q {
                let weight = simd.splat(*weights.as_ptr().add(i * STEP + j));
                for v in 0..V {
                    tile[i][v] = simd.fma(weight, vectors[v], tile[i][v]);
                }
            }
        }
        for i in 0..Q {
            for v in 0..V {
                let p = sums.as_mut_ptr().add(i * v_stride + at + v * S::LANES);
                simd.store(p, tile[i][v]);
            }
        }
    }
}
