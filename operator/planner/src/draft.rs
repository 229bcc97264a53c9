//! A finished placement, before it is written down as a plan.

use hearth_crds::{
    NodeProfileStatus, PlanKvType, PlanPrediction, PlanRank, PlanRole, PlanRouting, PlanStrategy,
    RankDevice, ResidencyPolicy,
};

use crate::gpus::GpuSlot;
use crate::host_experts::HostChoice;
use crate::predict::Predictor;

use crate::cpus::CpuSet;
use crate::estimator::Estimator;
use crate::input::PlanInput;
use crate::memory::{Demand, NodeBudget};
use crate::place::{Placement, Refused};

/// Longest stall of a decode rank's streams caused by one chunk, if the spec sets no time per output token.
pub(crate) const DEFAULT_STALL_MS: f64 = 100.0;

/// A placement with everything needed to write it down as a plan.
pub(crate) struct Draft<'a> {
    pub input: &'a PlanInput<'a>,
    pub nodes: &'a [&'a NodeProfileStatus],
    pub demand: Demand<'a>,
    pub placement: Placement,
    /// Devices that would have been preferred, with what they lack.
    pub refused: Vec<Refused>,
    pub estimator: &'a Estimator<'a>,
    pub key_type: PlanKvType,
    pub value_type: PlanKvType,
}

/// The node, its memory budget and the GPU that a rank is assigned.
#[derive(Clone, Copy)]
pub(crate) struct RankHost<'a> {
    pub n: usize,
    pub budget: &'a NodeBudget,
    /// `None` for a rank on CPUs.
    pub slot: Option<&'a GpuSlot<'a>>,
}

/// What differs between plans of one input.
pub(crate) struct Written {
    pub strategy: PlanStrategy,
    pub ranks: Vec<PlanRank>,
    pub routing: PlanRouting,
    pub predicted: PlanPrediction,
    pub mixed_numerics: Vec<String>,
    pub why: Vec<String>,
    pub not_chosen: Vec<String>,
}

impl<'a> Draft<'a> {
    /// The node of a rank, with its index among the nodes.
    pub(crate) fn node_of(&self, rank: &PlanRank) -> Option<(usize, &'a NodeProfileStatus)> {
        let n = self.nodes.iter().position(|node| node.node == rank.node)?;
        Some((n, self.nodes[n]))
    }

    /// Milliseconds to the first token of a prompt of `tokens` that a decode rank prefills itself, in its own chunks.
    pub(crate) fn chunked_ttft_ms(&self, decode: &PlanRank, tokens: u32) -> Option<f64> {
        let predictor = self.predictor_of(decode)?;
        Some(predictor.prefill_ms(tokens, decode.chunk_tokens))
    }

    /// Milliseconds to the first token of a prompt of `tokens` through a prefill rank.
    pub(crate) fn prefill_ttft_ms(&self, prefill: &PlanRank, tokens: u32) -> Option<f64> {
        let (n, _) = self.node_of(prefill)?;
        let predictor = self.predictor_of(prefill)?;
        let link = self.estimator.link_gbps(n, &self.placement.ranks);
        let prefill_ms = predictor.prefill_ms(tokens, prefill.chunk_tokens);
        Some(prefill_ms + predictor.hand_over_ms(tokens, link))
    }

    /// The predictor of a rank that is written already.
    pub(crate) fn predictor_of(&self, rank: &PlanRank) -> Option<Predictor<'a>> {
        let (n, _) = self.node_of(rank)?;
        let budget = self.placement.budgets[n].as_ref()?;
        let slot = self.slot_of(rank);
        let predictor = self
            .estimator
            .predictor(n, &set_of(rank), slot.as_ref(), budget);
        Some(predictor)
    }

    /// The share of a GPU that a rank has; `None` on CPUs.
    pub(crate) fn slot_of(&self, rank: &PlanRank) -> Option<GpuSlot<'a>> {
        let (n, _) = self.node_of(rank)?;
        let slots = self.estimator.slots(n, self.placement.ranks[n]).ok()?;
        let mut slots = slots.of(rank.role).iter();
        let slot = slots.find(|slot| rank.device() == RankDevice::Gpu(&slot.gpu.uuid));
        slot.copied()
    }

    /// What a rank does with experts that its CPUs compute; `None` where they do not.
    pub(crate) fn host_choice_of(&self, rank: &PlanRank) -> Option<HostChoice> {
        let (n, _) = self.node_of(rank)?;
        let budget = self.placement.budgets[n].as_ref()?;
        let slot = self.slot_of(rank)?;
        self.estimator.host_choice(n, &set_of(rank), &slot, budget)
    }

    /// Whether any node keeps only part of the weights in memory.
    pub(crate) fn is_prefetching(&self) -> bool {
        self.placement
            .budgets
            .iter()
            .flatten()
            .any(|budget| budget.policy == ResidencyPolicy::MmapPrefetch)
    }
}

/// The CPUs of a rank.
fn set_of(rank: &PlanRank) -> CpuSet {
    CpuSet {
        cpus: rank.cpus.clone(),
        numa_nodes: rank.numa_nodes.clone(),
        threads: rank.threads,
    }
}

/// Ranks of one role, in the order of `ranks`.
pub(crate) fn ranks_of(ranks: &[PlanRank], role: PlanRole) -> impl Iterator<Item = &PlanRank> {
    ranks.iter().filter(move |rank| rank.role == role)
}
