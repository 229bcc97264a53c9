//! The whole choice: which devices, in which order, with which layers, in how many rounds.
//!
//! 1. Each set of devices (of many devices, what leaving out one after the other gives) is split greedily for a few numbers
//!    of rounds and in a few orders, and simulated.
//! 2. The most promising sets get an integer program for each number of layers a round, until the limits are reached.
//! 3. The fastest candidates, one for each set and number of rounds, are improved under the simulator.
//! 4. A device more or less than the best ring has is tried, until neither makes a token faster.
//!
//! Where none of that finds a ring that fits, each device gets as many layers as it has room for, in one round.

use std::collections::{BTreeMap, BTreeSet};

use super::choice::{Alternative, Choice, Dropped, Effort, Limits};
use super::greedy::{self, Moves};
use super::polish::{Candidate, Judge};
use super::program;
use super::round::{self, Ring, Round};
use super::tours::{Set, Tours, members};
use crate::ring_error::RingError;
use crate::ring_problem::Problem;
use crate::ring_simulator::Simulator;

/// Heads of which more rings are tried than of the others.
const BEST_HEADS: usize = 2;
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
/// The part of the greedy splits for all sets that are compared at first.
const COMPARED_SPLITS: f64 = 0.75;
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
    /// Sets that were compared.
    compared: BTreeSet<Set>,
    /// The part of a set's orders and numbers of rounds by which it is compared.
    part: f64,
    /// How long moves are looked for where sets are compared.
    moves: Moves,
    /// Whether the sets of many devices are compared until the limit of splits is reached, instead of each by a few.
    is_thorough: bool,
    /// The fastest candidate of each order and number of layers a round.
    pool: BTreeMap<(Vec<usize>, usize), Candidate>,
}

/// Chooses a ring for a problem; the same problem and limits give the same ring.
///
/// # Errors
///
/// A problem that [`Problem::check`] refuses, and one that fits no ring ([`RingError::NoRoom`]).
pub fn choose(problem: &Problem, limits: Limits) -> Result<Choice, RingError> {
    let quick = quickly(problem, limits);
    let found = quick.or_else(|_| thoroughly(problem, limits));
    found.or_else(|_| by_room(problem, limits))
}

/// Whether [`choose`] finds a ring; without a search where room alone says so, or that there is none.
pub(crate) fn has_ring(problem: &Problem, limits: Limits) -> bool {
    if check(problem).is_err() {
        return false;
    }
    let fits_by_room = greedy::by_room(problem).is_some_and(|(order, sizes)| {
        let windows = Ring::new(problem, order).windows(&sizes);
        Simulator::new(problem).tpot_ms(&windows).is_some()
    });
    fits_by_room || choose(problem, limits).is_ok()
}

/// A kind of search.
type Kind = fn(&Problem, Limits) -> Result<Choice, RingError>;

fn quickly(problem: &Problem, limits: Limits) -> Result<Choice, RingError> {
    check(problem)?;
    let mut search = Search::new(problem, limits);
    let sets = search.compare_sets();
    search.choose_among(&sets)
}

/// Of a problem of which hardly any ring fits.
fn thoroughly(problem: &Problem, limits: Limits) -> Result<Choice, RingError> {
    check(problem)?;
    let mut search = Search::thorough(problem, limits);
    let sets = search.compare_sets();
    search.choose_among(&sets)
}

/// From a split by room alone.
fn by_room(problem: &Problem, limits: Limits) -> Result<Choice, RingError> {
    check(problem)?;
    let (order, sizes) = greedy::by_room(problem).ok_or_else(|| no_room(problem))?;
    let mut search = Search::new(problem, limits);
    search.add(&Ring::new(problem, order), &sizes);
    search.choose_among(&[])
}

fn check(problem: &Problem) -> Result<(), RingError> {
    problem.check()?;
    match problem.may_have_room() {
        true => Ok(()),
        false => Err(no_room(problem)),
    }
}

/// Chooses among rings of several problems, which are one that differs by its head: the index of the one with the fastest
/// ring, the first of equal ones, and that ring. All choices together have these limits: each head gets an equal share of half
/// of them, and the best ones the other half.
///
/// # Errors
///
/// That of the first problem, if none has a ring.
pub fn choose_head(problems: &[Problem], limits: Limits) -> Result<(usize, Choice), RingError> {
    if let [problem] = problems {
        return choose(problem, limits).map(|choice| (0, choice));
    }
    let mut heads = Heads {
        problems,
        limits,
        choices: Vec::new(),
        effort: Effort::default(),
        refused: None,
    };
    let all: Vec<usize> = (0..problems.len()).collect();
    for kind in [quickly, thoroughly, by_room] {
        if heads.choices.is_empty() {
            heads.try_each(&all, kind);
        }
    }
    let best = heads.choices.iter().take(BEST_HEADS);
    let best: Vec<usize> = best.map(|(head, _)| *head).collect();
    heads.try_each(&best, quickly);
    let effort = heads.effort;
    match (heads.choices.into_iter().next(), heads.refused) {
        (Some((head, choice)), _) => Ok((head, Choice { effort, ..choice })),
        (None, refused) => Err(refused.unwrap_or(RingError::None { what: "device" })),
    }
}

/// A choice of the head in the making.
struct Heads<'a> {
    problems: &'a [Problem],
    limits: Limits,
    /// Rings by their heads, the fastest first.
    choices: Vec<(usize, Choice)>,
    effort: Effort,
    refused: Option<RingError>,
}

impl Heads<'_> {
    /// Chooses a ring for each of these heads, with half of the limits for all of them.
    fn try_each(&mut self, heads: &[usize], kind: Kind) {
        for &head in heads {
            let limits = self.limits.shared_by(2 * heads.len());
            match kind(&self.problems[head], limits) {
                Ok(choice) => {
                    self.effort = self.effort.and(choice.effort);
                    self.choices.push((head, choice));
                }
                Err(error) => self.refused = self.refused.take().or(Some(error)),
            }
        }
        self.choices
            .sort_by(|(_, a), (_, b)| a.tpot_ms.total_cmp(&b.tpot_ms));
    }
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, limits: Limits) -> Self {
        let mut search = Self {
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
            compared: BTreeSet::new(),
            part: 1.0,
            moves: match problem.devices.len() <= MAX_DEVICES_OF_ALL_SETS {
                true => Moves::Double,
                false => Moves::Single,
            },
            is_thorough: false,
            pool: BTreeMap::new(),
        };
        // What is left is for neighbours of the best set.
        let splits = limits.splits as f64 * COMPARED_SPLITS;
        search.part = (splits / search.splits_of_all_sets() as f64).min(1.0);
        search
    }

    /// One that tries all orders and numbers of rounds, of many devices as far as the limit of splits goes, and moves of two
    /// layers: for problems of which hardly any ring fits.
    fn thorough(problem: &'a Problem, limits: Limits) -> Self {
        Self {
            part: 1.0,
            moves: Moves::Double,
            is_thorough: problem.devices.len() > MAX_DEVICES_OF_ALL_SETS,
            ..Self::new(problem, limits)
        }
    }

    fn choose_among(mut self, sets: &[Set]) -> Result<Choice, RingError> {
        self.solve_programs(sets);
        self.improve_best();
        self.try_neighbours();
        self.escape();
        match self.best() {
            Some(best) => Ok(self.choice(best)),
            None => Err(no_room(self.problem)),
        }
    }
}

impl Search<'_> {
    /// Greedy splits of all sets that are compared, if each were in all of its orders and numbers of rounds.
    fn splits_of_all_sets(&self) -> usize {
        let devices = self.problem.devices.len();
        let others = devices - 1;
        let sets = |size: usize| match devices <= MAX_DEVICES_OF_ALL_SETS {
            true => (0..size).fold(1, |sets, n| sets * (others - n) / (n + 1)),
            false if size == others => 1,
            false => size + 1,
        };
        let splits = |size: usize| {
            let orders = Tours::count_of_orders(size);
            orders * self.widths(size + 1).len() * OVERFLOW_PARTS.len()
        };
        let sizes = 0..=others;
        sizes
            .map(|size| sets(size) * splits(size))
            .sum::<usize>()
            .max(1)
    }

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
        self.compared.insert(set);
        let mut orders = self.tours.orders(set);
        let mut widths = self.widths(set.count_ones() as usize + 1);
        let part =
            |count: usize, part: f64| ((count as f64 * part) as usize).clamp(1, count.max(1));
        // Fewer orders first, the shortest way among them, then fewer numbers of rounds.
        let kept = part(orders.len(), self.part);
        widths.truncate(part(
            widths.len(),
            self.part * orders.len() as f64 / kept as f64,
        ));
        orders.truncate(kept);
        let mut best_ms = f64::INFINITY;
        for order in orders {
            let ring = Ring::new(self.problem, order);
            for &width in &widths {
                if self.is_thorough && self.effort.splits >= self.limits.splits {
                    return best_ms;
                }
                best_ms = best_ms.min(self.split_greedily(&ring, width));
            }
        }
        best_ms
    }

    /// Numbers of layers a round by which a set of so many devices, the head among them, is compared: fewer rounds first.
    fn widths(&self, devices: usize) -> Vec<usize> {
        let layers = self.problem.layers.len();
        match layers <= MAX_LAYERS_OF_ALL_WIDTHS {
            true => (devices..=layers).rev().collect(),
            false => (1..=MAX_COMPARED_ROUNDS)
                .map(|rounds| layers.div_ceil(rounds))
                .filter(|&width| width >= devices)
                .collect(),
        }
    }

    fn split_greedily(&mut self, ring: &Ring, width: usize) -> f64 {
        let mut round = Round::new(ring, width);
        let mut best_ms = f64::INFINITY;
        for overflow_part in OVERFLOW_PARTS {
            round.overflow_part = overflow_part;
            let (sizes, cost) = greedy::split(&round, self.moves);
            self.effort.splits += 1;
            if cost.fits() {
                best_ms = best_ms.min(self.add(ring, &sizes));
            }
            if !ring.may_overflow() {
                break;
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

    /// One program for each number of layers a round, of one set after the other.
    fn solve_programs(&mut self, sets: &[Set]) {
        let layers = self.problem.layers.len();
        for &set in sets {
            let ring = Ring::new(self.problem, self.tours.order(set));
            if ring.len() > layers {
                continue;
            }
            let left = self.limits.programs.saturating_sub(self.effort.programs);
            for width in round::widths(ring.len(), layers).take(left) {
                if self.effort.nodes >= self.limits.nodes {
                    return;
                }
                self.solve_program(&ring, width);
            }
        }
    }

    fn solve_program(&mut self, ring: &Ring, width: usize) {
        let round = Round::new(ring, width);
        let (sizes, cost) = greedy::split(&round, Moves::Double);
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
                let may_compare = self.effort.splits < self.limits.splits;
                if may_compare && !self.compared.contains(&neighbour) {
                    self.compare(neighbour);
                }
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
            .map(|device| {
                let with = self.best_of(set | (1 << device));
                Dropped {
                    device: device + 1,
                    with_tpot_ms: with.as_ref().map(|with| with.tpot_ms),
                    with_ttft_ms: with.as_ref().map(|with| self.ttft_ms(with)),
                }
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
                ttft_ms: self.ttft_ms(candidate),
                objective_ms: objective_ms(self.problem, candidate),
            })
            .collect()
    }

    /// A candidate's time of the problem's prompt.
    fn ttft_ms(&self, candidate: &Candidate) -> f64 {
        let ring = Ring::new(self.problem, candidate.order.clone());
        self.judge
            .simulator
            .ttft_ms(&ring.windows(&candidate.sizes))
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
