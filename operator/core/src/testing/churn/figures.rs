//! Times of decisions, and how much of the nodes is booked.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::observed::NodeView;

/// A clock that runs while something is computed: time since any fixed moment.
pub type Watch = fn() -> Duration;

/// What a rank books of its node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Booked {
    /// Of the node's memory.
    pub(super) memory_bytes: u64,
    /// Of the memory of its GPUs.
    pub(super) gpu_bytes: u64,
}

/// Times, in milliseconds, and what was booked.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The planner alone, for plans that are no rings.
    pub plans_ms: Vec<f64>,
    /// The planner alone, for rings.
    pub ring_plans_ms: Vec<f64>,
    /// Plans that the planner alone does not make again: what runs was changed in place instead, or the node that is left is the
    /// reason.
    pub differ: usize,
    /// Whole decisions that made a plan.
    pub decisions_with_plan_ms: Vec<f64>,
    /// Whole decisions that found no room, or no better one.
    pub decisions_without_room_ms: Vec<f64>,
    /// All others.
    pub other_decisions_ms: Vec<f64>,
    /// Starts of workers without a request.
    pub preloads: usize,
    /// What the plans booked.
    pub utilisation: Utilisation,
}

/// Shares of the Ready nodes that plans book, one after each step.
#[derive(Clone, Debug, Default)]
pub struct Utilisation {
    steps: usize,
    memory: f64,
    gpu_memory: f64,
    both: f64,
    pub(super) placed: usize,
}

impl Utilisation {
    /// Adds what is booked after a step.
    pub(super) fn add<'a>(
        &mut self,
        nodes: &BTreeMap<String, Arc<NodeView>>,
        booked: impl Iterator<Item = &'a (String, Booked)>,
    ) {
        let is_up = |node: &str| nodes.get(node).is_some_and(|node| node.is_ready);
        let (mut memory, mut gpu_memory) = (0_u64, 0_u64);
        for (_, of_rank) in booked.filter(|(node, _)| is_up(node)) {
            memory += of_rank.memory_bytes;
            gpu_memory += of_rank.gpu_bytes;
        }
        let (mut all_memory, mut all_gpu_memory) = (0_u64, 0_u64);
        for node in nodes.values().filter(|node| node.is_ready) {
            all_memory += node.memory_bytes;
            let gpus = node.profile.iter().flat_map(|profile| &profile.gpus);
            all_gpu_memory += gpus.map(|gpu| gpu.memory_bytes).sum::<u64>();
        }
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64;
        self.steps += 1;
        self.memory += share(memory, all_memory);
        self.gpu_memory += share(gpu_memory, all_gpu_memory);
        self.both += share(memory + gpu_memory, all_memory + all_gpu_memory);
    }

    /// Mean share of the nodes' memory.
    pub fn memory(&self) -> f64 {
        self.memory / self.steps.max(1) as f64
    }

    /// Mean share of the GPUs' memory.
    pub fn gpu_memory(&self) -> f64 {
        self.gpu_memory / self.steps.max(1) as f64
    }

    /// Mean share of all memory, on nodes and GPUs.
    pub fn both(&self) -> f64 {
        self.both / self.steps.max(1) as f64
    }

    /// Mean number of deployments that have a place.
    pub fn placed(&self) -> f64 {
        self.placed as f64 / self.steps.max(1) as f64
    }
}
