//! The integer program against all splits, on the paper's objective.

use crate::halda::greedy::{self, Moves};
use crate::halda::round::{Ring, Round};
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
