//! The whole choice: which devices, in which order, with which layers, in how many rounds.
//!
//! 1. Each set of devices (of many devices, what leaving out one after the other gives) is split greedily for a few numbers
//!    of rounds, and simulated.
//! 2. The most promising sets get an integer program for each number of layers a round, until the limits are reached.
//! 3. The fastest candidates, one for each set and number of rounds, are improved under the simulator.
//! 4. A device more or less than the best ring has is tried, until neither makes a token faster.

use std::collections::{BTreeMap, BTreeSet};

use super::choice::{Alternative, Choice, Dropped, Effort, Limits};
use super::greedy;
use super::polish::{Candidate, Judge};
use super::program;
use super::round::{Ring, Round};
use super::tours::{Set, Tours, members};
use crate::ring_error::RingError;
use crate::ring_problem::Problem;
use crate::ring_simulator::Simulator;

/// Most devices of which each set is tried.
const MAX_DEVICES_OF_ALL_SETS: usize = 5;
/// Most layers for which sets are compared by every number of layers a round.
const MAX_LAYERS_OF_ALL_WIDTHS: usize = 16;
/// Most rounds by which sets are compared, where there are more layers.
const MAX_COMPARED_ROUNDS: usize = 6;
/// Candidates that are improved at least, one each for a set and number of rounds; more where each takes less.
const IMPROVED: usize = 16;
/// Parts of the time to read what has no room that greedy splits count with: all of it as the objective does, or less, as
/// if other devices' windows hid it.
const OVERFLOW_PARTS: [f64; 3] = [1.0, 0.25, 0.0];
/// How many equal shares of the solver's nodes that are left a program may take.
const SHARES_OF_NODES: u64 = 4;
/// Alternatives that are reported.
const ALTERNATIVES: usize = 8;
/// Each device and each round more must make a token faster by this share: what does not help is left out.
const WORTH: f64 = 1e-3;

/// A choice in the making.
struct Search<'a> {
    problem: &'a Problem,
    limits: Limits,
    tours: Tours,
    judge: Judge<'a>,
    effort: Effort,
    /// The fastest candidate of each order and number of layers a round.
    pool: BTreeMap<(Vec<usize>, usize), Candidate>,
}

/// Chooses a ring for a problem; the same problem and limits give the same ring.
///
/// # Errors
///
/// A problem that [`Problem::check`] refuses, and one that fits no ring ([`RingError::NoRoom`]).
pub fn choose(problem: &Problem, limits: Limits) -> Result<Choice, RingError> {
    problem.check()?;
    let mut search = Search {
        problem,
        limits,
        tours: Tours::new(problem),
        judge: Judge {
            problem,
            simulator: Simulator::new(problem),
            count: 0,
            limit: limits.simulations,
        },
        effort: Effort::default(),
        pool: BTreeMap::new(),
    };
    let sets = search.compare_sets();
    search.solve_programs(&sets);
    search.improve_best();
    search.try_neighbours();
    search.escape();
    let Some(best) = search.best() else {
        return Err(no_room(problem));
    };
    Ok(search.choice(best))
}

impl Search<'_> {
    /// Splits sets greedily; the most promising set first.
    fn compare_sets(&mut self) -> Vec<Set> {
        let mut scores = Vec::new();
        if self.problem.devices.len() <= MAX_DEVICES_OF_ALL_SETS {
            for set in 0..=self.tours.all() {
                scores.push((self.compare(set), set));
            }
        } else {
            let mut set = self.tours.all();
            scores.push((self.compare(set), set));
            while set != 0 {
                let fewer = members(set).map(|device| set & !(1 << device));
                let next: Vec<Set> = fewer.collect();
                let mut of_fewer: Vec<(f64, Set)> = next
                    .into_iter()
                    .map(|set| (self.compare(set), set))
                    .collect();
                of_fewer.sort_by(|a, b| a.0.total_cmp(&b.0));
                set = of_fewer.first().map_or(0, |best| best.1);
                scores.extend(of_fewer);
            }
        }
        scores.sort_by(|a, b| a.0.total_cmp(&b.0));
        scores.into_iter().map(|(_, set)| set).collect()
    }

    /// The fastest greedy split of a set, in milliseconds; infinite if none fits.
    fn compare(&mut self, set: Set) -> f64 {
        let layers = self.problem.layers.len();
        let mut best_ms = f64::INFINITY;
        for order in self.tours.orders(set) {
            let ring = Ring::new(self.problem, order);
            let widths: Vec<usize> = match layers <= MAX_LAYERS_OF_ALL_WIDTHS {
                true => (ring.len()..=layers).collect(),
                false => (1..=MAX_COMPARED_ROUNDS)
                    .map(|rounds| layers.div_ceil(rounds))
                    .filter(|&width| width >= ring.len())
                    .collect(),
            };
            for width in widths {
                best_ms = best_ms.min(self.split_greedily(&ring, width));
            }
        }
        best_ms
    }

    fn split_greedily(&mut self, ring: &Ring, width: usize) -> f64 {
        let mut round = Round::new(ring, width);
        let mut best_ms = f64::INFINITY;
        for overflow_part in OVERFLOW_PARTS {
            round.overflow_part = overflow_part;
            let (sizes, cost) = greedy::split(&round);
            if cost.fits() {
                best_ms = best_ms.min(self.add(ring, &sizes));
            }
        }
        best_ms
    }

    /// Simulates a split and keeps it if it is the fastest of its order and number of layers a round.
    fn add(&mut self, ring: &Ring, sizes: &[usize]) -> f64 {
        match self.judge.candidate(ring, sizes) {
            Some(candidate) => self.keep(candidate),
            None => f64::INFINITY,
        }
    }

    fn keep(&mut self, candidate: Candidate) -> f64 {
        let tpot_ms = candidate.tpot_ms;
        let key = (candidate.order.clone(), candidate.width());
        let kept = self.pool.get(&key);
        if kept.is_none_or(|kept| tpot_ms < kept.tpot_ms) {
            self.pool.insert(key, candidate);
        }
        tpot_ms
    }

    /// One program for each number of layers a round, from all layers down, of one set after the other.
    fn solve_programs(&mut self, sets: &[Set]) {
        let layers = self.problem.layers.len();
        for &set in sets {
            let ring = Ring::new(self.problem, self.tours.order(set));
            if ring.len() > layers {
                continue;
            }
            let widths = (ring.len()..=layers).rev();
            let left = self.limits.programs.saturating_sub(self.effort.programs);
            for width in widths.take(left) {
                self.solve_program(&ring, width);
            }
        }
    }

    fn solve_program(&mut self, ring: &Ring, width: usize) {
        let round = Round::new(ring, width);
        let (sizes, cost) = greedy::split(&round);
        let start = cost.fits().then_some(&*sizes);
        // A few programs take many nodes and most take few, so one may take several shares of what is left.
        let programs_left = (self.limits.programs - self.effort.programs).max(1) as u64;
        let nodes_left = self.limits.nodes.saturating_sub(self.effort.nodes);
        let nodes = (nodes_left * SHARES_OF_NODES / programs_left).clamp(1, nodes_left.max(1));
        let program::Outcome { solved, nodes } = program::solve(&round, start, nodes);
        self.effort.programs += 1;
        self.effort.nodes += nodes;
        match solved {
            Some(solved) => {
                self.effort.proven += usize::from(solved.is_proven);
                self.add(ring, &solved.sizes);
            }
            None => self.effort.unsolved += 1,
        }
        if cost.fits() {
            self.add(ring, &sizes);
        }
    }

    /// Improves the fastest candidates, each with as many simulations at most.
    fn improve_best(&mut self) {
        let limit = self.judge.count + self.judge.limit / 2;
        for candidate in self.by_speed() {
            let left = limit.saturating_sub(self.judge.count);
            let each = self.judge.limit / 2 / IMPROVED;
            self.improve(candidate, each.min(left));
        }
    }

    fn improve(&mut self, candidate: Candidate, simulations: usize) {
        let limit = self.judge.count + simulations;
        let better = self.judge.improve(candidate, limit);
        self.keep(better);
    }

    /// Tries the best ring with a device more or less, as long as that makes a token faster.
    fn try_neighbours(&mut self) {
        let devices = self.problem.devices.len();
        let mut tried = BTreeSet::new();
        let each = self.judge.limit / 4 / devices;
        while let Some(best) = self.best() {
            let set = best.set();
            if !tried.insert(set) {
                return;
            }
            for device in 0..devices - 1 {
                let neighbour = set ^ (1 << device);
                self.compare(neighbour);
                if let Some(candidate) = self.best_of(neighbour) {
                    self.improve(candidate, each);
                }
            }
        }
    }

    /// Spends what is left of the simulations on two changes at once, of one candidate after the other: first those that
    /// have the best one's devices in the same order.
    fn escape(&mut self) {
        let best_order = self.best().map(|best| best.order);
        let mut candidates = self.by_speed();
        candidates.sort_by_key(|candidate| Some(&candidate.order) != best_order.as_ref());
        for mut candidate in candidates {
            let limit = self.judge.limit;
            while self.judge.count < limit && self.judge.resize_twice(&mut candidate, limit) {
                candidate = self.judge.improve(candidate, limit);
            }
            self.keep(candidate);
        }
    }

    /// The pool, the fastest first, but the fastest of each order and number of rounds before any second one.
    fn by_speed(&self) -> Vec<Candidate> {
        let mut all: Vec<&Candidate> = self.pool.values().collect();
        all.sort_by(|a, b| a.tpot_ms.total_cmp(&b.tpot_ms));
        let mut seen = BTreeMap::new();
        let mut ranked: Vec<(usize, &Candidate)> = all
            .into_iter()
            .map(|candidate| {
                let key = (&candidate.order, self.rounds(candidate));
                let rank = seen.entry(key).or_insert(0);
                *rank += 1;
                (*rank, candidate)
            })
            .collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        ranked
            .into_iter()
            .map(|(_, candidate)| candidate.clone())
            .collect()
    }

    fn rounds(&self, candidate: &Candidate) -> usize {
        self.problem.layers.len().div_ceil(candidate.width())
    }

    /// The fastest candidate of a set.
    fn best_of(&self, set: Set) -> Option<Candidate> {
        let of_set = self
            .pool
            .values()
            .filter(|candidate| candidate.set() == set);
        let fastest = of_set.min_by(|a, b| a.tpot_ms.total_cmp(&b.tpot_ms));
        fastest.cloned()
    }

    /// The fastest candidate, without devices and rounds that hardly help.
    fn best(&self) -> Option<Candidate> {
        let worth_ms = |candidate: &Candidate| {
            let parts = candidate.order.len() + self.rounds(candidate);
            candidate.tpot_ms * (1.0 + WORTH * parts as f64)
        };
        let candidates = self.pool.values();
        let best = candidates.min_by(|a, b| worth_ms(a).total_cmp(&worth_ms(b)));
        best.cloned()
    }

    fn choice(self, best: Candidate) -> Choice {
        let problem = self.problem;
        let set = best.set();
        let dropped = (0..problem.devices.len() - 1)
            .filter(|device| set & (1 << device) == 0)
            .map(|device| Dropped {
                device: device + 1,
                with_tpot_ms: self.best_of(set | (1 << device)).map(|with| with.tpot_ms),
            });
        let windows = Ring::new(problem, best.order.clone()).windows(&best.sizes);
        Choice {
            layers_a_round: best.width(),
            rounds: self.rounds(&best),
            tpot_ms: best.tpot_ms,
            ttft_ms: self.judge.simulator.ttft_ms(&windows),
            objective_ms: objective_ms(problem, &best),
            shares: self.judge.simulator.shares(&windows),
            dropped: dropped.collect(),
            alternatives: self.alternatives(&best),
            order: best.order,
            windows,
            effort: Effort {
                simulations: self.judge.count,
                ..self.effort
            },
        }
    }

    /// The fastest candidates of other devices or numbers of rounds.
    fn alternatives(&self, best: &Candidate) -> Vec<Alternative> {
        let mut seen = BTreeSet::from([(best.set(), self.rounds(best))]);
        let mut all: Vec<&Candidate> = self.pool.values().collect();
        all.sort_by(|a, b| a.tpot_ms.total_cmp(&b.tpot_ms));
        all.into_iter()
            .filter(|candidate| seen.insert((candidate.set(), self.rounds(candidate))))
            .take(ALTERNATIVES)
            .map(|candidate| Alternative {
                order: candidate.order.clone(),
                layers_a_round: candidate.width(),
                rounds: self.rounds(candidate),
                tpot_ms: candidate.tpot_ms,
                objective_ms: objective_ms(self.problem, candidate),
            })
            .collect()
    }
}

/// A candidate's time by the paper's objective.
fn objective_ms(problem: &Problem, candidate: &Candidate) -> f64 {
    let ring = Ring::new(problem, candidate.order.clone());
    let round = Round::new(&ring, candidate.width());
    round.cost(&candidate.sizes).ms
}

fn no_room(problem: &Problem) -> RingError {
    let layers = problem.layers.iter();
    let devices = 0..problem.devices.len();
    RingError::NoRoom {
        needed_bytes: layers
            .map(|layer| layer.stored_bytes + layer.kv_bytes)
            .sum(),
        memory_bytes: devices
            .clone()
            .filter(|&device| problem.devices[device].must_fit)
            .map(|device| problem.room_bytes(device))
            .sum(),
        gpu_bytes: devices.map(|device| problem.gpu_room_bytes(device)).sum(),
    }
}
