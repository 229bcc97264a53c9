//! Evaluation of the tree of [`expert_sum`](crate::expert_sum) with four matrices.

use crate::expert_sum::{LEAVES, PARTIAL_SUMS, leaf_of};

/// One step of a sum; matrices are named by index, below [`PARTIAL_SUMS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SumStep {
    /// Sets a matrix to zero.
    Zero { at: usize },
    /// Adds a call's outputs.
    Add { call: usize, at: usize },
    /// Adds one matrix to another.
    Join { from: usize, into: usize },
}

/// Partial sums between two calls.
#[derive(Debug, Default)]
pub(super) struct SumTree {
    /// The leaf that takes calls.
    leaf: usize,
    /// Matrix of the sum at each level, the open leaf's at level `leaf.count_ones()`; `None`: no call was added to it.
    levels: [Option<usize>; PARTIAL_SUMS],
}

impl SumTree {
    /// Yields the steps that add these experts, one call each, which ascend; `is_last`: and those that lead to the total,
    /// which is matrix 0 if there were any calls.
    pub(super) fn steps(
        &mut self,
        calls: impl Iterator<Item = usize>,
        experts: usize,
        is_last: bool,
    ) -> Vec<SumStep> {
        let mut steps = Vec::new();
        for (call, expert) in calls.enumerate() {
            self.advance(leaf_of(expert, experts), &mut steps);
            let level = self.leaf.count_ones() as usize;
            let at = self.levels[level].unwrap_or_else(|| {
                let is_free = |at: &usize| !self.levels.contains(&Some(*at));
                // Fewer than `PARTIAL_SUMS` sums wait while a leaf is begun.
                let at = (0..PARTIAL_SUMS).find(is_free).unwrap_or_default();
                steps.push(SumStep::Zero { at });
                at
            });
            self.levels[level] = Some(at);
            steps.push(SumStep::Add { call, at });
        }
        if is_last {
            self.advance(LEAVES, &mut steps);
        }
        steps
    }

    /// Closes leaves before `leaf`: as many sums are joined at the end of leaf `i` as `i` has trailing ones.
    fn advance(&mut self, leaf: usize, steps: &mut Vec<SumStep>) {
        while self.leaf < leaf {
            let first = (self.leaf + 1).count_ones() as usize;
            for level in (first..=self.leaf.count_ones() as usize).rev() {
                let Some(from) = self.levels[level].take() else {
                    continue;
                };
                match self.levels[level - 1] {
                    Some(into) => steps.push(SumStep::Join { from, into }),
                    None => self.levels[level - 1] = Some(from),
                }
            }
            self.leaf += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;

    /// Sum of `outputs` by the reference.
    fn defined(outputs: &[Option<f32>]) -> f32 {
        let chosen = outputs.iter().enumerate();
        let chosen: Vec<_> = chosen
            .filter_map(|(expert, output)| Some((expert, 1.0, (*output)?)))
            .collect();
        reference::expert_sum(&chosen, outputs.len())
    }

    /// The same by steps, in calls of `size` experts.
    fn stepped(outputs: &[Option<f32>], size: usize) -> f32 {
        let chosen: Vec<usize> = (0..outputs.len())
            .filter(|&e| outputs[e].is_some())
            .collect();
        let mut matrices = [f32::NAN; PARTIAL_SUMS];
        let mut tree = SumTree::default();
        let count = chosen.len().div_ceil(size);
        for (index, part) in chosen.chunks(size).enumerate() {
            let is_last = index + 1 == count;
            for step in tree.steps(part.iter().copied(), outputs.len(), is_last) {
                match step {
                    SumStep::Zero { at } => matrices[at] = 0.0,
                    SumStep::Add { call, at } => matrices[at] += outputs[part[call]].unwrap_or(0.0),
                    SumStep::Join { from, into } => matrices[into] += matrices[from],
                }
            }
        }
        matrices[0]
    }

    #[test]
    fn steps_give_the_sum_that_is_defined_however_calls_are_split() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for experts in [1, 2, 5, 8, 60, 256] {
            for every in [1, 2, 9] {
                let mut output = |_| {
                    let value = random() as f32 / 1e5 - 80.0;
                    random().is_multiple_of(every).then_some(value)
                };
                let outputs: Vec<_> = (0..experts).map(&mut output).collect();
                if outputs.iter().all(Option::is_none) {
                    continue;
                }
                for size in [1, 2, 3, experts] {
                    let (got, want) = (stepped(&outputs, size), defined(&outputs));
                    assert_eq!(got.to_bits(), want.to_bits(), "{experts} {every} {size}");
                }
            }
        }
    }

    #[test]
    fn one_expert_takes_one_matrix_and_no_join() {
        let steps = SumTree::default().steps([200].into_iter(), 256, true);
        assert_eq!(
            steps,
            [SumStep::Zero { at: 0 }, SumStep::Add { call: 0, at: 0 }]
        );
    }
}
