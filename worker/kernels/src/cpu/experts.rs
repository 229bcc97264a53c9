//! Routed experts with one barrier per expert instead of one for all (OSDI '26, section 3.5.1).
//!
//! Stage one computes `silu(gate x) * (up x)` in segments of an expert's intermediate dimension and immediately packs
//! the result for stage two. Stage two takes a segment of the output through all experts in the order of
//! the calls, so sums have one order, and waits at each expert for that expert's own segments only. All
//! pieces are in one queue, stage one first: a waiting thread waits for work that another thread has started.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::arch::{PackedRows, Packing, RowSet, packed_len};
use crate::ops::ExpertOps;
use crate::thread_pool::Piece;
use crate::{ExpertCall, ExpertWeights, HostMatrix, KernelError, Routing, SCALE_BLOCK, checks};

use super::CpuBackend;
use super::linear::{Packed, row_cost};
use super::memory::{CpuTensor, PooledBuf, SharedMatrix};

/// Intermediate elements in a stage-one segment: the unit of packing, so that each segment is packed independently.
const SEGMENT: usize = SCALE_BLOCK;

/// One call with rows, and the location of its intermediate activations.
struct Work<'a> {
    call: &'a ExpertCall<'a, HostMatrix>,
    inner: Inner,
    first_piece: usize,
    segments: usize,
    finished: AtomicUsize,
}

/// Packed intermediate activations of one call: `[rows, row_len]`.
struct Inner {
    buffer: PooledBuf,
    packing: Packing,
    row_len: usize,
}

impl ExpertOps for CpuBackend {
    type ExpertBank = Infallible;

    fn experts(
        &self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        calls: &[ExpertCall<'_, HostMatrix>],
    ) -> Result<(), KernelError> {
        for call in calls {
            check(out, x, call)?;
        }
        let mut inputs = [const { None }; Packing::COUNT];
        let mut first_piece = 0;
        let mut works = Vec::with_capacity(calls.len());
        for call in calls.iter().filter(|call| !call.rows.is_empty()) {
            for matrix in [call.gate, call.up] {
                let packing = self.packing(matrix.dtype());
                inputs[packing.index()]
                    .get_or_insert_with(|| self.pack(x.as_slice(), x.rows(), packing));
            }
            let packing = self.packing(call.down.dtype());
            let row_len = packed_len(call.down.cols());
            let segments = call.gate.rows().div_ceil(SEGMENT);
            works.push(Work {
                call,
                inner: Inner {
                    buffer: self.buffer(call.rows.len() * row_len),
                    packing,
                    row_len,
                },
                first_piece,
                segments,
                finished: AtomicUsize::new(0),
            });
            first_piece += segments;
        }
        self.run_stages(out, &inputs, &mut works, first_piece);
        Ok(())
    }

    /// Returns `None`: the host is the device and always knows the choice.
    fn expert_bank(
        &self,
        _experts: &[ExpertWeights<'_, HostMatrix>],
    ) -> Result<Option<Infallible>, KernelError> {
        Ok(None)
    }

    fn banked_experts(
        &self,
        _out: &mut CpuTensor,
        _x: &CpuTensor,
        _chosen: &Routing,
        bank: &Infallible,
    ) -> Result<(), KernelError> {
        match *bank {}
    }
}

impl CpuBackend {
    fn run_stages(
        &self,
        out: &mut CpuTensor,
        inputs: &[Option<Packed>; Packing::COUNT],
        works: &mut [Work<'_>],
        stage_one: usize,
    ) {
        let hidden = out.cols();
        let cost = works
            .iter()
            .map(|w| row_cost(w.call.down, w.call.rows.len()))
            .sum();
        let most_rows = works.iter().map(|w| w.call.rows.len()).max().unwrap_or(0);
        let split = self.split_weight_rows(hidden, cost, most_rows);
        let shared_out = SharedMatrix::new(out.as_mut_slice(), hidden);
        // The packed rows are written by stage one and read by stage two of the same run.
        let mut inners = Vec::with_capacity(works.len());
        let mut stages = Vec::with_capacity(works.len());
        for work in works.iter_mut() {
            let Work {
                call,
                inner,
                first_piece,
                segments,
                finished,
            } = work;
            let elements = call.rows.len() * inner.row_len;
            inners.push((
                SharedMatrix::new(inner.buffer.f32s_mut(elements), inner.row_len),
                inner.packing,
            ));
            stages.push((&**call, *first_piece, *segments, &*finished));
        }
        self.pool.run(stage_one + split.pieces(), |piece| {
            if piece.index < stage_one {
                let at = stages.partition_point(|stage| stage.1 <= piece.index) - 1;
                let (call, first_piece, _, finished) = stages[at];
                let (inner, packing) = &inners[at];
                let begin = (piece.index - first_piece) * SEGMENT;
                let segment = begin..call.gate.rows().min(begin + SEGMENT);
                self.gate_and_up(piece, call, inputs, segment, inner, *packing);
                finished.fetch_add(1, Ordering::Release);
                return;
            }
            let columns = split.range(piece.index - stage_one);
            for ((call, _, segments, finished), (inner, packing)) in stages.iter().zip(&inners) {
                if !wait_for(finished, *segments, piece) {
                    return;
                }
                // SAFETY: all segments of this call are finished, which the counter's release and acquire
                // published; they are no longer written.
                let values = unsafe { inner.rows(0..call.rows.len()) };
                let x = PackedRows {
                    values,
                    packing: *packing,
                    cols: call.down.cols(),
                    rows: RowSet::Range {
                        first: 0,
                        count: call.rows.len(),
                    },
                };
                self.down(piece, call, &x, columns.clone(), &shared_out);
            }
        });
    }

    /// Computes `silu(gate x) * (up x)` for a segment of intermediate elements, packed.
    fn gate_and_up(
        &self,
        piece: Piece<'_>,
        call: &ExpertCall<'_, HostMatrix>,
        inputs: &[Option<Packed>; Packing::COUNT],
        segment: Range<usize>,
        inner: &SharedMatrix<'_, f32>,
        packing: Packing,
    ) {
        let tokens = call.rows.len();
        let mut scratch = self.scratch(piece.worker);
        let scratch = &mut *scratch;
        let len = segment.len();
        let gate = scratch.tile.f32s_mut(2 * len * tokens);
        let up = scratch.tile2.f32s_mut(len * tokens);
        {
            let (gate, _) = gate.split_at_mut(len * tokens);
            for (matrix, out) in [(call.gate, &mut *gate), (call.up, &mut *up)] {
                let input = self.packing(matrix.dtype()).index();
                // `experts` packed the input for each of these layouts.
                let Some(input) = &inputs[input] else { return };
                let x = input.rows(RowSet::List(call.rows));
                self.kernels
                    .linear(matrix, segment.clone(), &x, &mut scratch.kernel, out);
            }
        }
        let (gate, gated) = gate.split_at_mut(len * tokens);
        self.kernels.silu_mul(gate, up, gated);
        let packed_segment = segment.start..segment.start + packed_len(len);
        let row = &mut up[..len];
        for t in 0..tokens {
            for (i, value) in row.iter_mut().enumerate() {
                *value = gated[i * tokens + t];
            }
            // SAFETY: a piece writes its own segment of each row, and no one reads it before it is finished.
            let packed = unsafe { inner.part(t, packed_segment.clone()) };
            self.kernels.pack(packing, row, packed);
        }
    }

    /// Adds `weight * down(inner)` to the columns `columns` of the call's rows.
    fn down(
        &self,
        piece: Piece<'_>,
        call: &ExpertCall<'_, HostMatrix>,
        x: &PackedRows<'_>,
        columns: Range<usize>,
        out: &SharedMatrix<'_, f32>,
    ) {
        let tokens = x.len();
        let mut scratch = self.scratch(piece.worker);
        let scratch = &mut *scratch;
        let tile = scratch.tile.f32s_mut(columns.len() * tokens);
        self.kernels
            .linear(call.down, columns.clone(), x, &mut scratch.kernel, tile);
        for (t, (&row, &weight)) in call.rows.iter().zip(call.weights).enumerate() {
            // SAFETY: stage-two pieces have disjoint ranges of columns.
            let out = unsafe { out.part(row as usize, columns.clone()) };
            for (i, out) in out.iter_mut().enumerate() {
                *out += weight * tile[i * tokens + t];
            }
        }
    }
}

/// Waits until a call's segments are finished; returns false if the run is aborted.
fn wait_for(finished: &AtomicUsize, segments: usize, piece: Piece<'_>) -> bool {
    let mut turns = 0u32;
    while finished.load(Ordering::Acquire) < segments {
        if piece.aborted() {
            return false;
        }
        turns += 1;
        if turns < 200 {
            std::hint::spin_loop();
        } else {
            // The other thread may have lost its CPU to another process.
            std::thread::yield_now();
        }
    }
    true
}

fn check(
    out: &CpuTensor,
    x: &CpuTensor,
    call: &ExpertCall<'_, HostMatrix>,
) -> Result<(), KernelError> {
    let matrices = [call.gate, call.up, call.down].map(|m| (m.rows(), m.cols()));
    let (out, input) = ((out.rows(), out.cols()), (x.rows(), x.cols()));
    checks::expert(out, input, matrices)?;
    checks::expert_rows(call.rows, call.weights.len(), x.rows())
}
