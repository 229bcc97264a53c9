//! The integer program against all splits, on the paper's objective.

use super::problems::{Draws, drawn};
use crate::halda::greedy;
use crate::halda::program;
use crate::halda::round::{Cost, Ring, Round};

/// Lowest cost of all splits of a round that give each device a layer and fit.
fn lowest(round: &Round) -> Option<f64> {
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

#[test]
fn the_program_finds_the_lowest_of_all_splits() {
    let (mut programs, mut none) = (0, 0);
    for seed in 0..1000 {
        let mut draws = Draws::new(seed);
        let devices = draws.whole(1, 4);
        let layers = draws.whole(devices, 12);
        let problem = drawn(&mut draws, devices, layers);
        let ring = Ring::new(&problem, (0..devices).collect());
        for width in devices..=layers {
            let round = Round::new(&ring, width);
            let (sizes, cost) = greedy::split(&round);
            let start = cost.fits().then_some(&*sizes);
            let solved = program::solve(&round, start, 100_000).solved;
            let lowest_ms = lowest(&round);
            programs += 1;
            none += u32::from(lowest_ms.is_none());
            let of_solver = solved.as_ref().map(|solved| round.cost(&solved.sizes).ms);
            let is_same = match (of_solver, lowest_ms) {
                (Some(ms), Some(lowest_ms)) => (ms / lowest_ms - 1.0).abs() < 1e-9,
                (solver, lowest) => solver == lowest,
            };
            assert!(
                is_same && solved.is_none_or(|solved| solved.is_proven),
                "seed {seed}, {width} layers a round: {of_solver:?}, but {lowest_ms:?}"
            );
        }
    }
    assert!(programs > 5000 && none > 500);
}

#[test]
fn the_greedy_split_is_near_the_lowest() {
    let (mut near, mut splits) = (0, 0);
    for seed in 0..300 {
        let mut draws = Draws::new(seed);
        let devices = draws.whole(1, 4);
        let layers = draws.whole(devices, 12);
        let problem = drawn(&mut draws, devices, layers);
        let ring = Ring::new(&problem, (0..devices).collect());
        let round = Round::new(&ring, draws.whole(devices, layers));
        if let Some(lowest_ms) = lowest(&round) {
            let (_, cost) = greedy::split(&round);
            splits += 1;
            near += u32::from(cost.fits() && cost.ms < lowest_ms * 1.01);
        }
    }
    assert!(near * 100 >= splits * 98, "{near} of {splits}");
}
