//! The integer program against all splits, on the paper's objective.

use std::collections::BTreeSet;

use crate::halda::Limits;
use crate::halda::greedy::{self, Moves};
use crate::halda::round::{Ring, Round, widths};
use crate::halda::testing::{
    Draws, Programs, drawn, lowest, programs_against_all_splits, small_problem,
};

#[test]
fn the_program_finds_the_lowest_of_all_splits() {
    let (mut programs, mut none) = (0, 0);
    for seed in 0..1000 {
        let Programs {
            all,
            without_split,
            unequal,
        } = programs_against_all_splits(&small_problem(seed));
        assert_eq!(unequal, 0, "seed {seed}");
        programs += all;
        none += without_split;
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
            let (_, cost) = greedy::split(&round, Moves::Double);
            splits += 1;
            near += u32::from(cost.fits() && cost.ms < lowest_ms * 1.01);
        }
    }
    assert!(near * 100 >= splits * 98, "{near} of {splits}");
}

#[test]
fn each_number_of_rounds_gets_a_program_before_any_gets_a_second() {
    for (devices, layers) in [(3, 32), (8, 80), (4, 61)] {
        let all: Vec<usize> = widths(devices, layers).collect();
        let rounds: BTreeSet<usize> = (devices..=layers).map(|it| layers.div_ceil(it)).collect();
        let first = all[..rounds.len()].iter();
        let first: Vec<usize> = first.map(|it| layers.div_ceil(*it)).collect();
        assert!(first.iter().eq(&rounds), "{all:?}");
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(devices..=layers), "{all:?}");
    }
    // Where each of three nodes is tried as the head, each has programs enough for all numbers of rounds of 32 layers.
    let of_a_head = Limits::default().shared_by(2 * 3);
    let tried = widths(3, 32).take(of_a_head.programs);
    let rounds: BTreeSet<usize> = tried.map(|it| 32_usize.div_ceil(it)).collect();
    assert_eq!(rounds, BTreeSet::from([1, 2, 3, 4, 5, 6, 7, 8, 11]));
}
