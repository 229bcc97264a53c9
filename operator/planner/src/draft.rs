//! A finished placement, before it is written down as a plan.

use std::time::Duration;

use hearth_crds::{
    DurationText, NodeProfileStatus, PlanKvGather, PlanKvType, PlanPrediction, PlanRank, PlanRole,
    PlanRouting, PlanStrategy, PrefillMode, RankDevice,
};

use crate::gpus::GpuSlot;
use crate::host_experts::HostChoice;
use crate::predict::Predictor;

use crate::cpus::CpuSet;
use crate::estimator::Estimator;
use crate::input::PlanInput;
use crate::memory::{Demand, NodeBudget};
use crate::peers::{OtherPeer, Peer};
use crate::place::{Placement, Refused};
use crate::stream_loading::StreamedTime;

/// Longest stall of a decode rank's streams caused by one chunk, if the spec sets no time per output token.
pub(crate) const DEFAULT_STALL_MS: f64 = 100.0;

/// Time for which nothing may have been decoded for a prompt to be read by all peers (hybrid MoE paper, section 3.3.2).
const DEFAULT_QUIET_WINDOW: Duration = Duration::from_secs(300);

/// Tokens of a long prompt (hybrid MoE paper, figure 3).
const LONG_PROMPT_TOKENS: u32 = 20_000;

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

    /// Number of ranks that read prompts together; 0 where each prefill rank reads them alone.
    pub(crate) fn peers(&self) -> u32 {
        let placed = self.placement.ranks.iter();
        placed.map(|ranks| ranks.peers).max().unwrap_or(0)
    }

    /// Tokens of a long prompt, by which peers are chosen and explained.
    pub(crate) fn long_prompt_tokens(&self) -> u32 {
        LONG_PROMPT_TOKENS.min(self.demand.context_length)
    }

    /// Time for which nothing may have been decoded for a prompt to be read by all peers, in milliseconds; `None` without peers.
    pub(crate) fn together_after_quiet_ms(&self) -> Option<u64> {
        let prefill = &self.input.spec.prefill;
        let default = match prefill.mode {
            PrefillMode::DistributedStreamLoading => Duration::ZERO,
            PrefillMode::Auto | PrefillMode::Chunked | PrefillMode::StreamLoading => {
                DEFAULT_QUIET_WINDOW
            }
        };
        let window = prefill.quiet_window.map_or(default, DurationText::get);
        let window_ms = u64::try_from(window.as_millis()).unwrap_or(u64::MAX);
        (self.peers() > 0).then_some(window_ms)
    }

    /// Milliseconds to the first token of a prompt of `tokens` through a prefill rank, with its peers if these read every prompt.
    pub(crate) fn prefill_ttft_ms(&self, prefill: &PlanRank, tokens: u32) -> Option<f64> {
        match self.together_after_quiet_ms() {
            Some(0) => self.together_ttft_ms(prefill, tokens),
            Some(_) | None => self.alone_ttft_ms(prefill, tokens),
        }
    }

    /// The same through all peers.
    pub(crate) fn together_ttft_ms(&self, head: &PlanRank, tokens: u32) -> Option<f64> {
        let (n, _) = self.node_of(head)?;
        let time = self.together(tokens)?;
        let link = self.estimator.link_gbps(n, &self.placement.ranks);
        let predictor = self.predictor_of(head)?;
        Some(time.total_ms + predictor.hand_over_ms(tokens, link))
    }

    /// How keys and values come to all peers: as it takes less time for a long prompt.
    pub(crate) fn kv_gather(&self) -> PlanKvGather {
        let tokens = self.long_prompt_tokens();
        let total_ms = |gather| self.gathered(tokens, gather).map(|time| time.total_ms);
        match (
            total_ms(PlanKvGather::Direct),
            total_ms(PlanKvGather::PassedOn),
        ) {
            (Some(direct_ms), Some(passed_on_ms)) if passed_on_ms < direct_ms => {
                PlanKvGather::PassedOn
            }
            _ => PlanKvGather::Direct,
        }
    }

    /// What the slowest peer does in a prompt of `tokens` that all read together.
    pub(crate) fn together(&self, tokens: u32) -> Option<StreamedTime> {
        self.gathered(tokens, self.kv_gather())
    }

    /// The same with keys and values that come to all peers in this way.
    pub(crate) fn gathered(&self, tokens: u32, gather: PlanKvGather) -> Option<StreamedTime> {
        let members = self.members();
        let (_, head) = members.first()?;
        let times = members.iter().enumerate().filter_map(|(own, (n, member))| {
            let others = members
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != own);
            // The peers of a node share its way to other nodes.
            let here = members.iter().filter(|(m, _)| m == n).count();
            let others = others.map(|(_, (m, _))| OtherPeer {
                node: *m,
                hop: match n == m {
                    true => self.estimator.hop(*n, *m),
                    false => self.estimator.hop(*n, *m).shared_by(here),
                },
            });
            let others: Vec<OtherPeer> = others.collect();
            let member = Predictor {
                mla_form: head.mla_form,
                ..*member
            };
            member.together(tokens, Peer::among(*n, &others, gather))
        });
        times.max_by(|a, b| a.total_ms.total_cmp(&b.total_ms))
    }

    /// Predictors of all peers with their nodes, the head first; none without peers.
    fn members(&self) -> Vec<(usize, Predictor<'a>)> {
        if self.peers() == 0 {
            return Vec::new();
        }
        let of_role = |role: PlanRole| {
            let placed = self.placement.ranks.iter().enumerate();
            placed.flat_map(move |(n, ranks)| {
                let slots = self.estimator.slots(n, *ranks).ok();
                let slots = slots.map(|slots| slots.of(role).to_vec());
                let slots = slots.into_iter().flatten();
                slots.filter_map(move |slot| {
                    let budget = self.placement.budgets[n].as_ref()?;
                    // A rank that streams uses its CPUs for nothing that is predicted.
                    let set = CpuSet::default();
                    let predictor = self.estimator.predictor(n, &set, Some(&slot), budget);
                    Some((n, predictor))
                })
            })
        };
        let (head, followers) = (of_role(PlanRole::Prefill), of_role(PlanRole::Stage));
        head.chain(followers).collect()
    }

    /// Milliseconds to the first token of a prompt of `tokens` that a prefill rank reads alone.
    pub(crate) fn alone_ttft_ms(&self, prefill: &PlanRank, tokens: u32) -> Option<f64> {
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
