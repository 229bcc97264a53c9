//! All answers to a small problem.

use crate::halda::round::{Cost, Ring, Round};
use crate::ring_problem::Problem;
use crate::ring_simulator::Simulator;

/// Lowest cost of all splits of a round that give each device a layer and fit.
pub(in crate::halda) fn lowest(round: &Round) -> Option<f64> {
    fn next(round: &Round, sizes: &mut Vec<usize>, left: usize, best: &mut Option<f64>) {
        if sizes.len() + 1 == round.ring.slots.len() {
            sizes.push(left);
            let Cost { ms, excess_gib } = round.cost(sizes);
            if excess_gib == 0.0 && best.is_none_or(|best| ms < best) && round.ring.has_all(sizes) {
                *best = Some(ms);
            }
            sizes.pop();
            return;
        }
        for size in 0..=left {
            sizes.push(size);
            next(round, sizes, left - size, best);
            sizes.pop();
        }
    }
    let mut best = None;
    next(round, &mut Vec::new(), round.width, &mut best);
    best
}

/// All orders of some of the devices, the head first.
fn orders(problem: &Problem) -> Vec<Vec<usize>> {
    let mut all = vec![vec![0]];
    let mut begin = 0;
    while begin < all.len() {
        for device in 1..problem.devices.len() {
            if !all[begin].contains(&device) {
                let mut longer = all[begin].clone();
                longer.push(device);
                all.push(longer);
            }
        }
        begin += 1;
    }
    all
}

/// Least time of a token of all rings: all devices and orders, all numbers of layers a round, all splits.
pub(in crate::halda) fn fastest(problem: &Problem) -> Option<f64> {
    fn next(
        ring: &Ring,
        simulator: &Simulator,
        sizes: &mut Vec<usize>,
        left: usize,
        best: &mut Option<f64>,
    ) {
        if sizes.len() + 1 == ring.slots.len() {
            sizes.push(left);
            if ring.has_all(sizes)
                && let Some(ms) = simulator.tpot_ms(&ring.windows(sizes))
                && best.is_none_or(|best| ms < best)
            {
                *best = Some(ms);
            }
            sizes.pop();
            return;
        }
        for size in 0..=left {
            sizes.push(size);
            next(ring, simulator, sizes, left - size, best);
            sizes.pop();
        }
    }
    let simulator = Simulator::new(problem);
    let mut best = None;
    for order in orders(problem) {
        let ring = Ring::new(problem, order);
        for width in ring.len()..=problem.layers.len() {
            next(&ring, &simulator, &mut Vec::new(), width, &mut best);
        }
    }
    best
}
