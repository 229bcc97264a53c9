//! The integer program of one ring and one number of layers a round (equations 6 to 10), on the solver microlp.
//!
//! The paper knows a device's case only after the solution, so it solves again until the cases stay. Here cases 3 and 4
//! are one: an overflow is a variable of its own, at least 0 and at least what memory lacks, which the minimum makes the
//! larger of the two, because the maximum is convex; a device whose layers must fit has none. Of a model with experts it
//! has a second one, of the weights that each token reads. Each round is cut alike,
//! so the variables are the sizes of slots, by stretches of positions that cost the same: in a full last round of equal
//! layers there is one stretch, and the program is the paper's. Where positions differ (a partial last round, dense layers
//! before those with experts), binaries keep each slot's positions together: a slot that reaches into a stretch leaves
//! nothing of the stretches before to the slots behind it.
//!
//! The solver gets a limit of nodes and none of time: its clock fills its statistics only.
//!
//! Coefficients are in milliseconds and GiB, which keeps them within what the solver handles well. Its answers are rounded
//! and checked against the exact limits in bytes before they count.

use microlp::{
    ComparisonOp, OptimizationDirection, Solution, SolutionStatus, SolveOptions, Variable,
};

use super::greedy::{Moves, improve};
use super::round::{GIB, Round, Slot};

/// What the solver made of a program.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// `None` if it found no split, failed, or its answer breaks a limit.
    pub solved: Option<Solved>,
    /// Nodes of its tree, where it says so, as the limit counts them.
    pub nodes: u64,
}

/// A split that the solver found.
#[derive(Clone, Debug)]
pub(super) struct Solved {
    pub sizes: Vec<usize>,
    /// Whether no split costs less.
    pub is_proven: bool,
}

/// Positions of a round that cost the same: `first..first + len`.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    first: usize,
    len: usize,
}

impl Stretch {
    fn end(self) -> usize {
        self.first + self.len
    }
}

/// Most variables for counts of a program; with more of them it takes seconds.
const MAX_COUNTS: usize = 160;

/// A program under construction.
struct Program<'p, 'r, 'a> {
    round: &'p Round<'r, 'a>,
    stretches: Vec<Stretch>,
    problem: microlp::Problem,
    /// By slot, then by stretch: how many of its positions the slot has.
    counts: Vec<Vec<Variable>>,
    /// By slot, then by stretch but the last: whether the slots up to this one have all of it.
    filled: Vec<Vec<Variable>>,
    /// By slot, whether it has an overflow, where that takes room from KV.
    passing: Vec<(usize, Variable)>,
}

/// Counts of a program whose nodes count once; they take as long as the cube of the counts.
const FEW_COUNTS: usize = 64;

/// Solves the program within `nodes` of its tree; `start` is a split that fits, if one is known.
pub(super) fn solve(round: &Round, start: Option<&[usize]>, nodes: u64) -> Outcome {
    let (stretches, is_exact) = stretches(round);
    let times = (stretches.len() * round.ring.slots.len()).div_ceil(FEW_COUNTS) as u64;
    let weight = times.pow(3);
    let program = Program::new(round, stretches);
    let mut options = SolveOptions::default();
    options.node_limit = Some((nodes / weight).max(1));
    options.warm_start = start.map(|sizes| program.values(sizes));
    let Ok(outcome) = program.problem.solve_with(options) else {
        return Outcome {
            solved: None,
            nodes: 0,
        };
    };
    let solved = outcome.solution().and_then(|solution| {
        let is_proven = is_exact && solution.status() == SolutionStatus::Optimal;
        program.checked(solution, is_proven)
    });
    Outcome {
        solved,
        nodes: outcome.stats().nodes_solved * weight,
    }
}

impl<'p, 'r, 'a> Program<'p, 'r, 'a> {
    fn new(round: &'p Round<'r, 'a>, stretches: Vec<Stretch>) -> Self {
        let mut program = Self {
            round,
            stretches,
            problem: microlp::Problem::new(OptimizationDirection::Minimize),
            counts: Vec::new(),
            filled: Vec::new(),
            passing: Vec::new(),
        };
        program.add_counts();
        program.keep_together();
        program.give_each_device_a_layer();
        for slot in 0..round.ring.slots.len() {
            program.limit_memory(slot);
        }
        program
    }

    /// The split of a solution, rounded to whole layers and checked against the exact limits.
    fn checked(&self, solution: &Solution, is_proven: bool) -> Option<Solved> {
        let size = |counts: &Vec<Variable>| {
            let values = counts.iter().map(|&count| solution.var_value(count));
            values.map(|value| value.round() as usize).sum::<usize>()
        };
        let sizes: Vec<usize> = self.counts.iter().map(size).collect();
        let round = self.round;
        if sizes.iter().sum::<usize>() != round.width || !round.ring.has_all(&sizes) {
            return None;
        }
        let (sizes, cost) = match is_proven {
            true => (sizes.clone(), round.cost(&sizes)),
            false => improve(round, sizes, Moves::Double),
        };
        cost.fits().then_some(Solved { sizes, is_proven })
    }

    /// Counts of each slot, which together are the round.
    fn add_counts(&mut self) {
        for ms in &self.round.ms {
            let variables = self.stretches.iter().map(|stretch| {
                let ms = ms[stretch.end()] - ms[stretch.first];
                let mean_ms = ms / stretch.len as f64;
                self.problem
                    .add_integer_var(mean_ms, (0, stretch.len as i32))
            });
            self.counts.push(variables.collect());
        }
        for (index, stretch) in self.stretches.iter().enumerate() {
            let all = self.counts.iter().map(|counts| (counts[index], 1.0));
            self.problem
                .add_constraint(all, ComparisonOp::Eq, stretch.len as f64);
        }
    }

    /// Stretches are used up one after the other by the slots in their order, and a device whose window begins behind the
    /// last round's end has none in it.
    fn keep_together(&mut self) {
        let round = self.round;
        let ring = round.ring;
        for slot in 0..ring.slots.len() - 1 {
            let starts = ring.slots[slot + 1].place;
            let is_border = ring.first_slot(starts) == slot + 1;
            let mut filled = Vec::new();
            for index in 0..self.stretches.len() - 1 {
                let len = self.stretches[index].len;
                let ends_round = self.stretches[index].end() == round.rest;
                let saved_ms = match is_border && ends_round {
                    true => self.last_window_ms(starts),
                    false => 0.0,
                };
                let is_filled = self.problem.add_binary_var(-saved_ms);
                let len = len as f64;
                let next_len = self.stretches[index + 1].len as f64;
                let before = self.up_to(slot, index);
                let next = self.up_to(slot, index + 1);
                let with = |terms: &[(Variable, f64)], factor: f64| {
                    let mut terms = terms.to_vec();
                    terms.push((is_filled, factor));
                    terms
                };
                self.problem
                    .add_constraint(with(&before, -len), ComparisonOp::Ge, 0.0);
                self.problem
                    .add_constraint(with(&next, -next_len), ComparisonOp::Le, 0.0);
                if ends_round {
                    self.problem
                        .add_constraint(with(&before, -1.0), ComparisonOp::Le, len - 1.0);
                }
                filled.push(is_filled);
            }
            self.filled.push(filled);
        }
    }

    /// Milliseconds that a place's window adds to a last round which would else end at the place before.
    fn last_window_ms(&self, place: usize) -> f64 {
        let round_ms = &self.round.ring.round_ms;
        round_ms[place] - round_ms[place - 1]
    }

    /// Counts of one stretch in the slots up to `slot`.
    fn up_to(&self, slot: usize, stretch: usize) -> Vec<(Variable, f64)> {
        let slots = self.counts[..=slot].iter();
        slots.map(|counts| (counts[stretch], 1.0)).collect()
    }

    fn give_each_device_a_layer(&mut self) {
        let ring = self.round.ring;
        for place in 0..ring.len() {
            let slots = &self.counts[ring.first_slot(place)..=ring.cpu_slots[place]];
            let all = slots.iter().flatten().map(|&count| (count, 1.0));
            self.problem.add_constraint(all, ComparisonOp::Ge, 1.0);
        }
    }

    /// Memory of a GPU and of a device where layers must fit is a limit; elsewhere weights may overflow, KV and what they pass
    /// through may not.
    fn limit_memory(&mut self, index: usize) {
        let round = self.round;
        let Slot {
            room_bytes,
            disk_ms_per_byte,
            ..
        } = round.ring.slots[index];
        let all = |at: usize| round.stored[at] + round.kv[at];
        let dense = |at: usize| round.dense[at] + round.kv[at];
        if all(round.width) <= room_bytes {
            return;
        }
        let Some(ms_per_byte) = disk_ms_per_byte else {
            return self.limit(index, &all, room_bytes, None);
        };
        let share = round.ring.chosen_share;
        let overflow = self.overflow(share * ms_per_byte);
        self.limit(index, &all, room_bytes, Some((overflow, -1.0)));
        if share < 1.0 && dense(round.width) > room_bytes {
            let beyond = self.overflow((1.0 - share) * ms_per_byte);
            self.limit(index, &dense, room_bytes, Some((beyond, -1.0)));
        }
        self.limit_passing(index, overflow);
    }

    /// A variable of GiB that cost so much a byte.
    fn overflow(&mut self, ms_per_byte: f64) -> Variable {
        self.problem
            .add_var(ms_per_byte * GIB, (0.0, f64::INFINITY))
    }

    /// KV leaves room for what passes through memory where there is an overflow, which a binary says.
    fn limit_passing(&mut self, index: usize, overflow: Variable) {
        let round = self.round;
        let (room_bytes, window_bytes) = (
            round.ring.slots[index].room_bytes,
            round.ring.problem.window_bytes,
        );
        let kv = |at: usize| round.kv[at];
        if kv(round.width).saturating_add(window_bytes) <= room_bytes {
            return;
        }
        let has_overflow = self.problem.add_binary_var(0.0);
        let most = (round.stored[round.width] + kv(round.width)) as f64 / GIB;
        self.problem.add_constraint(
            [(overflow, 1.0), (has_overflow, -most)],
            ComparisonOp::Le,
            0.0,
        );
        self.passing.push((index, has_overflow));
        // Without one, KV is no more than the room anyway.
        let window = (has_overflow, window_bytes as f64 / GIB);
        self.limit(index, &kv, room_bytes, Some(window));
    }

    /// Limits a slot's bytes, of which `of` gives the sum over a round's first positions, to `room`; `more` is a term in GiB
    /// beside them.
    fn limit(
        &mut self,
        slot: usize,
        of: &dyn Fn(usize) -> u64,
        room: u64,
        more: Option<(Variable, f64)>,
    ) {
        let counts = self.counts[slot].iter().zip(&self.stretches);
        let gib = |stretch: &Stretch| {
            let bytes = of(stretch.end()) - of(stretch.first);
            bytes as f64 / stretch.len as f64 / GIB
        };
        let mut terms: Vec<(Variable, f64)> = counts
            .map(|(&count, stretch)| (count, gib(stretch)))
            .collect();
        terms.extend(more);
        self.problem
            .add_constraint(terms, ComparisonOp::Le, room as f64 / GIB);
    }

    /// The counts of a split, which stretches it fills and which slots overflow, to start from.
    fn values(&self, sizes: &[usize]) -> Vec<(Variable, f64)> {
        let round = self.round;
        let has_overflow = |slot: usize| {
            let begin: usize = sizes[..slot].iter().sum();
            let sum = |of: &[u64]| of[begin + sizes[slot]] - of[begin];
            sum(&round.stored) + sum(&round.kv) > round.ring.slots[slot].room_bytes
        };
        let passing = self.passing.iter();
        let mut values: Vec<(Variable, f64)> = passing
            .map(|&(slot, variable)| (variable, f64::from(u8::from(has_overflow(slot)))))
            .collect();
        let mut begin = 0;
        for (slot, (counts, size)) in self.counts.iter().zip(sizes).enumerate() {
            let end = begin + size;
            for (&count, stretch) in counts.iter().zip(&self.stretches) {
                let shared = end
                    .min(stretch.end())
                    .saturating_sub(begin.max(stretch.first));
                values.push((count, shared as f64));
            }
            let filled = self.filled.get(slot).map_or(&[][..], Vec::as_slice);
            for (&is_filled, stretch) in filled.iter().zip(&self.stretches) {
                let is_within = stretch.end() <= end;
                values.push((is_filled, f64::from(u8::from(is_within))));
            }
            begin = end;
        }
        values
    }
}

/// Cuts a round's positions where their costs change, and where the last round ends. Where that makes too many stretches,
/// positions of the last round, and those behind it, count as equal at their mean: the second value is false, and the split
/// is only a good start.
fn stretches(round: &Round) -> (Vec<Stretch>, bool) {
    let kinds = &round.ring.kinds;
    let kinds_at = |position: usize| {
        let layers = kinds[position..].iter().step_by(round.width);
        let mut kinds: Vec<usize> = layers.copied().collect();
        kinds.sort_unstable();
        kinds
    };
    let mut firsts = vec![0];
    let mut last = kinds_at(0);
    for position in 1..round.width {
        let kinds = kinds_at(position);
        if kinds != last {
            firsts.push(position);
        }
        last = kinds;
    }
    let is_exact = firsts.len() * round.ring.slots.len() <= MAX_COUNTS;
    if !is_exact {
        firsts.retain(|&first| first == 0 || first == round.rest);
    }
    let ends = firsts.iter().skip(1).copied().chain([round.width]);
    let cut = |(&first, end): (&usize, usize)| Stretch {
        first,
        len: end - first,
    };
    (firsts.iter().zip(ends).map(cut).collect(), is_exact)
}
