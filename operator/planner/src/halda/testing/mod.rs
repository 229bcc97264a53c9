//! Drawn problems, and the choice against all answers to them: for tests and benchmarks.

mod enumeration;
mod problems;

pub(super) use enumeration::{fastest, lowest};
#[cfg(test)]
pub(super) use problems::times;
pub(super) use problems::{Draws, drawn};
use problems::{tighten, with_each_head};

use super::greedy::Moves;
use super::round::{Ring, Round};
use super::{Choice, Limits, Problem, RingError, choose_head, greedy, program};

/// Nodes of a program's tree: enough for all small ones.
const NODES: u64 = 100_000;

/// A problem of home machines, drawn from a seed, with so many devices and layers.
pub fn problem_of(seed: u64, devices: usize, layers: usize) -> Problem {
    drawn(&mut Draws::new(seed), devices, layers)
}

/// A problem of at most 4 devices and 12 layers, drawn from a seed.
pub fn small_problem(seed: u64) -> Problem {
    small(&mut Draws::new(seed))
}

/// That of [`problem_of`] with each of its devices as the head.
pub fn problems_by_head(seed: u64, devices: usize, layers: usize) -> Vec<Problem> {
    let mut draws = Draws::new(seed);
    let problem = drawn(&mut draws, devices, layers);
    with_each_head(&mut draws, &problem)
}

/// The same of slow disks, with about as much memory as the model needs: a ring may fit or not.
pub fn tight_problems_by_head(seed: u64, devices: usize, layers: usize) -> Vec<Problem> {
    let mut draws = Draws::new(seed);
    let mut problem = drawn(&mut draws, devices, layers);
    tighten(&mut draws, &mut problem);
    with_each_head(&mut draws, &problem)
}

/// That of [`small_problem`] with each of its devices as the head.
pub fn small_problems_by_head(seed: u64) -> Vec<Problem> {
    let mut draws = Draws::new(seed);
    let problem = small(&mut draws);
    with_each_head(&mut draws, &problem)
}

fn small(draws: &mut Draws) -> Problem {
    let devices = draws.whole(1, 4);
    let layers = draws.whole(devices, 12);
    drawn(draws, devices, layers)
}

/// Programs of a problem, against all splits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Programs {
    /// One for each number of layers a round.
    pub all: usize,
    /// Those of which no split fits.
    pub without_split: usize,
    /// Those whose answer is not the lowest of the objective, or was not proven to be.
    pub unequal: usize,
}

/// Solves the programs of a ring of all of a small problem's devices, in their order, and compares them with all splits.
pub fn programs_against_all_splits(problem: &Problem) -> Programs {
    let devices = problem.devices.len();
    let ring = Ring::new(problem, (0..devices).collect());
    let mut programs = Programs::default();
    for width in devices..=problem.layers.len() {
        let round = Round::new(&ring, width);
        let (sizes, cost) = greedy::split(&round, Moves::Double);
        let start = cost.fits().then_some(&*sizes);
        let solved = program::solve(&round, start, NODES).solved;
        let lowest_ms = lowest(&round);
        let is_equal = match (&solved, lowest_ms) {
            (Some(solved), Some(lowest_ms)) => {
                let ms = round.cost(&solved.sizes).ms;
                solved.is_proven && (ms / lowest_ms - 1.0).abs() < 1e-9
            }
            (solved, lowest) => solved.is_none() && lowest.is_none(),
        };
        programs.all += 1;
        programs.without_split += usize::from(lowest_ms.is_none());
        programs.unequal += usize::from(!is_equal);
    }
    programs
}

/// What was chosen, and the time of a token of the fastest of all rings.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Which of the problems it is a ring of, and the choice.
    pub choice: Result<(usize, Choice), RingError>,
    /// Milliseconds; `None` if no ring fits.
    pub fastest_ms: Option<f64>,
}

impl Compared {
    /// How many times as long as the fastest ring the chosen one takes; `None` if none fits, and infinite if one does and
    /// was not found.
    pub fn ratio(&self) -> Option<f64> {
        let fastest_ms = self.fastest_ms?;
        let chosen = self.choice.as_ref();
        Some(chosen.map_or(f64::INFINITY, |(_, choice)| choice.tpot_ms / fastest_ms))
    }
}

/// Chooses a ring of small problems, which differ by their head, and simulates all rings of all of them.
pub fn choice_against_all_rings(problems: &[Problem], limits: Limits) -> Compared {
    let fastest = problems.iter().filter_map(fastest);
    Compared {
        choice: choose_head(problems, limits),
        fastest_ms: fastest.min_by(f64::total_cmp),
    }
}
