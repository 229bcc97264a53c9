//! Improvement of a split by the simulator, which sees what the objective does not: reading ahead, and whether a window
//! fits.

use super::greedy::pairs;
use super::round::{Ring, Slot};
use super::tours::Set;
use crate::ring_problem::Problem;
use crate::ring_simulator::Simulator;

/// A ring with a split, and the time of a token that the simulator gives it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    pub order: Vec<usize>,
    pub sizes: Vec<usize>,
    pub tpot_ms: f64,
}

impl Candidate {
    /// Layers of a full round.
    pub(super) fn width(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Its devices but the head.
    pub(super) fn set(&self) -> Set {
        let others = self.order.iter().skip(1);
        others.fold(0, |set, device| set | 1 << (device - 1))
    }
}

/// Counts and limits simulations.
#[derive(Clone, Debug)]
pub(super) struct Judge<'a> {
    pub problem: &'a Problem,
    pub simulator: Simulator<'a>,
    /// Simulations done.
    pub count: usize,
    /// Most simulations of improvements.
    pub limit: usize,
}

impl<'a> Judge<'a> {
    /// The candidate of a split, if it fits.
    pub(super) fn candidate(&mut self, ring: &Ring, sizes: &[usize]) -> Option<Candidate> {
        self.count += 1;
        let tpot_ms = self.simulator.tpot_ms(&ring.windows(sizes))?;
        Some(Candidate {
            order: ring.order.clone(),
            sizes: sizes.to_vec(),
            tpot_ms,
        })
    }

    /// Moves layers between slots, gives a round more or fewer layers, and swaps devices, as long as a token gets faster
    /// and no more than `limit` simulations were done in all.
    pub(super) fn improve(&mut self, mut best: Candidate, limit: usize) -> Candidate {
        let limit = limit.min(self.limit);
        let mut ring = Ring::new(self.problem, best.order.clone());
        let mut count = (best.width() / 4).max(1);
        while self.count < limit {
            let before_ms = best.tpot_ms;
            self.resize(&ring, &mut best, count, limit);
            if count == 1 {
                self.swap(&mut ring, &mut best, limit);
                if best.tpot_ms >= before_ms {
                    break;
                }
            }
            count = (count / 2).max(1);
        }
        best
    }

    /// Tries each slot with `count` layers more or fewer, alone or in exchange with another.
    fn resize(&mut self, ring: &Ring, best: &mut Candidate, count: usize, limit: usize) {
        for (from, to) in pairs(ring.slots.len() + 1) {
            if self.count >= limit {
                return;
            }
            if let Some(sizes) = resized(&best.sizes, from, to, count) {
                self.take_if_faster(ring, best, &sizes);
            }
        }
    }

    /// Tries two changes of one layer at once, each as of [`Self::resize`]: the way out of a split that no single one
    /// improves. Whether something was found.
    pub(super) fn resize_twice(&mut self, best: &mut Candidate, limit: usize) -> bool {
        let limit = limit.min(self.limit);
        let ring = Ring::new(self.problem, best.order.clone());
        let slots = ring.slots.len() + 1;
        let before = best.clone();
        let once = pairs(slots).filter_map(|(from, to)| resized(&before.sizes, from, to, 1));
        for sizes in once {
            for (from, to) in pairs(slots) {
                if self.count >= limit {
                    return best.tpot_ms < before.tpot_ms;
                }
                if let Some(sizes) = resized(&sizes, from, to, 1) {
                    self.take_if_faster(&ring, best, &sizes);
                }
            }
        }
        best.tpot_ms < before.tpot_ms
    }

    fn take_if_faster(&mut self, ring: &Ring, best: &mut Candidate, sizes: &[usize]) {
        let width: usize = sizes.iter().sum();
        if width > self.problem.layers.len() || !ring.has_all(sizes) {
            return;
        }
        if let Some(next) = self.candidate(ring, sizes)
            && next.tpot_ms < best.tpot_ms
        {
            *best = next;
        }
    }

    /// Tries each two devices behind the head in the other order, each with its layers.
    fn swap(&mut self, ring: &mut Ring<'a>, best: &mut Candidate, limit: usize) {
        for (a, b) in (1..ring.len()).flat_map(|a| (1..a).map(move |b| (a, b))) {
            if self.count >= limit {
                return;
            }
            let mut order = ring.order.clone();
            order.swap(a, b);
            let swapped = Ring::new(self.problem, order);
            let sizes = swapped.slots.iter().map(|slot| {
                let same =
                    |other: &Slot| (other.device, other.is_gpu) == (slot.device, slot.is_gpu);
                let index = ring.slots.iter().position(same);
                index.map_or(0, |index| best.sizes[index])
            });
            let sizes: Vec<usize> = sizes.collect();
            let before_ms = best.tpot_ms;
            self.take_if_faster(&swapped, best, &sizes);
            if best.tpot_ms < before_ms {
                *ring = swapped;
            }
        }
    }
}

/// Sizes with `count` layers from one slot to another, if there are as many; the slot behind the last stands for the
/// round's length.
fn resized(sizes: &[usize], from: usize, to: usize, count: usize) -> Option<Vec<usize>> {
    let mut sizes = sizes.to_vec();
    if let Some(size) = sizes.get_mut(from) {
        *size = size.checked_sub(count)?;
    }
    if let Some(size) = sizes.get_mut(to) {
        *size += count;
    }
    Some(sizes)
}
