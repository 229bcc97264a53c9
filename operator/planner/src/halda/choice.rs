//! What was chosen, with the figures that explain it.

use crate::ring_simulator::{Share, Window};

/// Limits of the effort for one choice. They count work, not time, so that the same problem gives the same choice on every
/// machine. With the defaults, 8 devices and 80 layers take a second at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Greedy splits by which sets of devices are compared; each set gets a few in any case.
    pub splits: usize,
    /// Integer programs; beyond them the greedy split stands alone.
    pub programs: usize,
    /// Nodes of the solver's trees, of all programs together. Those of a program with many variables count several times.
    pub nodes: u64,
    /// Simulations of improvements.
    pub simulations: usize,
}

impl Effort {
    /// What two choices took.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            splits: self.splits + other.splits,
            programs: self.programs + other.programs,
            proven: self.proven + other.proven,
            unsolved: self.unsolved + other.unsolved,
            nodes: self.nodes + other.nodes,
            simulations: self.simulations + other.simulations,
        }
    }
}

impl Limits {
    /// An equal share of them for each of `count` choices.
    pub fn shared_by(self, count: usize) -> Self {
        let count = count.max(1);
        Self {
            splits: self.splits / count,
            programs: self.programs / count,
            nodes: self.nodes / count as u64,
            simulations: self.simulations / count,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            splits: 3000,
            programs: 80,
            nodes: 1600,
            simulations: 40_000,
        }
    }
}

/// A ring: the devices' order, their layers, and predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Devices of the ring in the order of a token's way, the head first.
    pub order: Vec<usize>,
    /// All windows in the order of computation. A last round may be shorter and end before the ring does.
    pub windows: Vec<Window>,
    /// `W`: layers of a full round.
    pub layers_a_round: usize,
    /// `k`: rounds of a token, a shorter last one included.
    pub rounds: usize,
    /// Predicted milliseconds from one token to the next.
    pub tpot_ms: f64,
    /// Predicted milliseconds until the first token of the problem's prompt.
    pub ttft_ms: f64,
    /// The same token by the paper's objective, which reads nothing ahead.
    pub objective_ms: f64,
    /// What each of the problem's devices keeps and reads; nothing for one that is not in the ring.
    pub shares: Vec<Share>,
    /// Devices that would make a token slower, or no faster.
    pub dropped: Vec<Dropped>,
    /// The fastest rings of other devices or numbers of rounds.
    pub alternatives: Vec<Alternative>,
    /// What the choice took.
    pub effort: Effort,
}

/// A device that is not in the ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropped {
    /// Its index in the problem.
    pub device: usize,
    /// Milliseconds from one token to the next of the best ring found that has it beside the chosen ones, which may be a
    /// thousandth less than without it; `None` if no such ring fits.
    pub with_tpot_ms: Option<f64>,
    /// Milliseconds until the first token of the problem's prompt of that ring.
    pub with_ttft_ms: Option<f64>,
}

/// A ring that is slower than the chosen one.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// Its devices, the head first.
    pub order: Vec<usize>,
    /// Layers of a full round.
    pub layers_a_round: usize,
    /// Rounds of a token.
    pub rounds: usize,
    /// Predicted milliseconds from one token to the next.
    pub tpot_ms: f64,
    /// Predicted milliseconds until the first token of the problem's prompt.
    pub ttft_ms: f64,
    /// A token by the paper's objective.
    pub objective_ms: f64,
}

/// What a choice took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Greedy splits by which sets were compared.
    pub splits: usize,
    /// Integer programs.
    pub programs: usize,
    /// Those of them whose answer is proven to be the lowest of the objective.
    pub proven: usize,
    /// Those without an answer that fits, where the greedy split stood in.
    pub unsolved: usize,
    /// Nodes of the solver's trees, as the limit counts them.
    pub nodes: u64,
    /// Simulations.
    pub simulations: usize,
}
