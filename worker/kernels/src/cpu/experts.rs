//! Routed experts with one barrier per expert instead of one for all (OSDI '26, section 3.5.1).
//!
//! Stage one computes `silu(gate x) * (up x)` in segments of an expert's intermediate dimension and immediately packs
//! the result for stage two. Stage two takes a segment of the output through all experts in the order of
//! the tree of sums, and waits at each expert for that expert's own segments only. All
//! pieces are in one queue, stage one first: a waiting thread waits for work that another thread has started.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::arch::{PackedRows, Packing, RowSet, packed_len};
use crate::expert_sum::{ExpertOrder, PARTIAL_SUMS};
use crate::ops::{ExpertOps, MemoryOps};
use crate::thread_pool::Piece;
use crate::{
    ExpertCall, ExpertProducts, ExpertWeights, HostMatrix, KernelError, Routing, SCALE_BLOCK,
    checks,
};

use super::CpuBackend;
use super::linear::{Packed, row_cost};
use super::memory::{CpuTensor, PooledBuf, SharedMatrix};
use super::sum_tree::{SumStep, SumTree};

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

/// Sum of the outputs of a layer's experts.
pub struct CpuExpertSum {
    order: ExpertOrder,
    tree: SumTree,
    /// The tree's matrices `[tokens, hidden]`; those that no call needed are absent.
    sums: [Option<CpuTensor>; PARTIAL_SUMS],
    tokens: usize,
    hidden: usize,
}

impl ExpertOps for CpuBackend {
    type ExpertBank = Infallible;
    type ExpertSum = CpuExpertSum;

    fn expert_sum(
        &self,
        tokens: usize,
        hidden: usize,
        experts: usize,
    ) -> Result<CpuExpertSum, KernelError> {
        Ok(CpuExpertSum {
            order: ExpertOrder::new(experts),
            tree: SumTree::default(),
            sums: [const { None }; PARTIAL_SUMS],
            tokens,
            hidden,
        })
    }

    fn experts(
        &self,
        sum: &mut CpuExpertSum,
        x: &CpuTensor,
        calls: &[ExpertCall<'_, HostMatrix>],
        is_last: bool,
    ) -> Result<(), KernelError> {
        for call in calls {
            check((sum.tokens, sum.hidden), x, call)?;
        }
        sum.order.take(calls, is_last)?;
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
        let experts = works.iter().map(|work| work.call.expert as usize);
        let steps = sum.tree.steps(experts, sum.order.experts(), is_last);
        for step in &steps {
            if let SumStep::Zero { at } = step {
                sum.sums[*at].get_or_insert_with(|| self.tensor(sum.tokens, sum.hidden));
            }
        }
        self.run_stages(sum, &steps, &inputs, &mut works, first_piece);
        Ok(())
    }

    fn expert_total(&self, sum: CpuExpertSum) -> Result<CpuTensor, KernelError> {
        checks::ensure(sum.order.is_complete(), "experts", || {
            "the total of a sum without its last calls".to_owned()
        })?;
        let [total, ..] = sum.sums;
        total.map_or_else(|| self.zeros(sum.tokens, sum.hidden), Ok)
    }

    fn product_sum(
        &self,
        products: &CpuTensor,
        of: ExpertProducts<'_>,
    ) -> Result<CpuTensor, KernelError> {
        self.sum_of_products(products, of)
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
        _x: &CpuTensor,
        _chosen: &Routing,
        bank: &Infallible,
    ) -> Result<CpuTensor, KernelError> {
        match *bank {}
    }
}

impl CpuBackend {
    fn run_stages(
        &self,
        sum: &mut CpuExpertSum,
        steps: &[SumStep],
        inputs: &[Option<Packed>; Packing::COUNT],
        works: &mut [Work<'_>],
        stage_one: usize,
    ) {
        let (tokens, hidden) = (sum.tokens, sum.hidden);
        let cost = works
            .iter()
            .map(|w| row_cost(w.call.down, w.call.rows.len()))
            .sum();
        let most_rows = works.iter().map(|w| w.call.rows.len()).max().unwrap_or(0);
        let split = self.split_weight_rows(hidden, cost, most_rows);
        let sums = sum.sums.each_mut().map(|sum| {
            let values = sum.as_mut().map_or(&mut [][..], CpuTensor::as_mut_slice);
            SharedMatrix::new(values, hidden)
        });
        let stages: Vec<Stage<'_>> = works.iter_mut().map(Stage::new).collect();
        self.pool.run(stage_one + split.pieces(), |piece| {
            if piece.index < stage_one {
                let at = stages.partition_point(|stage| stage.first_piece <= piece.index) - 1;
                self.gate_and_up(piece, &stages[at], inputs);
                return;
            }
            let columns = split.range(piece.index - stage_one);
            for step in steps {
                match *step {
                    SumStep::Zero { at } => zero(&sums[at], tokens, &columns),
                    SumStep::Join { from, into } => {
                        join(&sums[from], &sums[into], tokens, &columns);
                    }
                    SumStep::Add { call, at } => {
                        if !stages[call].wait(piece) {
                            return;
                        }
                        self.down(piece, &stages[call], columns.clone(), &sums[at]);
                    }
                }
            }
        });
    }

    /// Computes a piece of stage one: `silu(gate x) * (up x)` for a segment of intermediate elements, packed.
    fn gate_and_up(
        &self,
        piece: Piece<'_>,
        stage: &Stage<'_>,
        inputs: &[Option<Packed>; Packing::COUNT],
    ) {
        let Stage {
            call,
            inner,
            packing,
            ..
        } = stage;
        let begin = (piece.index - stage.first_piece) * SEGMENT;
        let segment = begin..call.gate.rows().min(begin + SEGMENT);
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
            self.kernels.pack(*packing, row, packed);
        }
        stage.finished.fetch_add(1, Ordering::Release);
    }

    /// Adds `weight * down(inner)` to the columns `columns` of the call's rows; stage one of the call is finished.
    fn down(
        &self,
        piece: Piece<'_>,
        stage: &Stage<'_>,
        columns: Range<usize>,
        out: &SharedMatrix<'_, f32>,
    ) {
        let call = stage.call;
        let tokens = call.rows.len();
        let x = PackedRows {
            // SAFETY: all segments of this call are finished, which the counter's release and acquire
            // published; they are no longer written.
            values: unsafe { stage.inner.rows(0..tokens) },
            packing: stage.packing,
            cols: call.down.cols(),
            rows: RowSet::Range {
                first: 0,
                count: tokens,
            },
        };
        let mut scratch = self.scratch(piece.worker);
        let scratch = &mut *scratch;
        let tile = scratch.tile.f32s_mut(columns.len() * tokens);
        self.kernels
            .linear(call.down, columns.clone(), &x, &mut scratch.kernel, tile);
        for (t, (&row, &weight)) in call.rows.iter().zip(call.weights).enumerate() {
            // SAFETY: stage-two pieces have disjoint ranges of columns.
            let out = unsafe { out.part(row as usize, columns.clone()) };
            for (i, out) in out.iter_mut().enumerate() {
                *out += weight * tile[i * tokens + t];
            }
        }
    }
}

/// A call while its pieces run.
struct Stage<'a> {
    call: &'a ExpertCall<'a, HostMatrix>,
    /// Packed intermediate activations, written by stage one and read by stage two of the same run.
    inner: SharedMatrix<'a, f32>,
    packing: Packing,
    first_piece: usize,
    segments: usize,
    finished: &'a AtomicUsize,
}

impl<'a> Stage<'a> {
    fn new(work: &'a mut Work<'_>) -> Self {
        let Inner {
            buffer,
            packing,
            row_len,
        } = &mut work.inner;
        let elements = work.call.rows.len() * *row_len;
        Self {
            call: work.call,
            inner: SharedMatrix::new(buffer.f32s_mut(elements), *row_len),
            packing: *packing,
            first_piece: work.first_piece,
            segments: work.segments,
            finished: &work.finished,
        }
    }

    /// Waits until stage one of the call is finished; returns false if the run is aborted.
    fn wait(&self, piece: Piece<'_>) -> bool {
        let mut turns = 0u32;
        while self.finished.load(Ordering::Acquire) < self.segments {
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
}

/// Sets columns of a matrix to zero.
fn zero(sum: &SharedMatrix<'_, f32>, tokens: usize, columns: &Range<usize>) {
    for row in 0..tokens {
        // SAFETY: stage-two pieces have disjoint ranges of columns.
        unsafe { sum.part(row, columns.clone()) }.fill(0.0);
    }
}

/// Adds columns of one matrix to those of another one.
fn join(
    from: &SharedMatrix<'_, f32>,
    into: &SharedMatrix<'_, f32>,
    tokens: usize,
    columns: &Range<usize>,
) {
    for row in 0..tokens {
        // SAFETY: stage-two pieces have disjoint ranges of columns.
        let (from, into) = unsafe {
            (
                from.part(row, columns.clone()),
                into.part(row, columns.clone()),
            )
        };
        for (into, from) in into.iter_mut().zip(&*from) {
            *into += *from;
        }
    }
}

fn check(
    out: (usize, usize),
    x: &CpuTensor,
    call: &ExpertCall<'_, HostMatrix>,
) -> Result<(), KernelError> {
    let matrices = [call.gate, call.up, call.down].map(|m| (m.rows(), m.cols()));
    checks::expert(out, (x.rows(), x.cols()), matrices)?;
    checks::expert_rows(call.rows, call.weights.len(), x.rows())
}
