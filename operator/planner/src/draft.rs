//! A finished placement, before it is written down as a plan.

use hearth_crds::{NodeProfileStatus, PlanKvType, PlanRank, PlanRole, RankDevice, ResidencyPolicy};

use crate::cpus::CpuSet;
use crate::estimator::Estimator;
use crate::input::PlanInput;
use crate::memory::Demand;
use crate::place::{Placement, Refused};

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

impl<'a> Draft<'a> {
    /// The node of a rank, with its index among the nodes.
    pub(crate) fn node_of(&self, rank: &PlanRank) -> Option<(usize, &'a NodeProfileStatus)> {
        let n = self.nodes.iter().position(|node| node.node == rank.node)?;
        Some((n, self.nodes[n]))
    }

    /// Milliseconds to the first token of a prompt that a decode rank prefills itself, in its own chunks.
    pub(crate) fn chunked_ttft_ms(&self, decode: &PlanRank) -> Option<f64> {
        let (n, _) = self.node_of(decode)?;
        let budget = self.placement.budgets[n].as_ref()?;
        let set = CpuSet {
            cpus: decode.cpus.clone(),
            numa_nodes: decode.numa_nodes.clone(),
            threads: decode.threads,
        };
        let slots = self.estimator.slots(n, self.placement.ranks[n]).ok()?;
        let mut slots = slots.decode.iter();
        let slot = slots.find(|slot| decode.device() == RankDevice::Gpu(&slot.gpu.uuid));
        let predictor = self.estimator.predictor(n, &set, slot, budget);
        Some(predictor.prefill_ms(self.estimator.prompt_tokens(), decode.chunk_tokens))
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

/// Ranks of one role, in the order of `ranks`.
pub(crate) fn ranks_of(ranks: &[PlanRank], role: PlanRole) -> impl Iterator<Item = &PlanRank> {
    ranks.iter().filter(move |rank| rank.role == role)
}
