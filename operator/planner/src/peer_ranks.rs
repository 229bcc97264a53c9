//! Ranks of a plan that read prompts together: the prefill rank, their head, and followers.

use std::collections::BTreeSet;

use hearth_crds::{PlanKvGather, PlanMlaForm, PlanPeers, PlanRank, PlanRole};

use crate::draft::Draft;
use crate::expert_parallel::expert_parallel;

/// Makes the prefill rank and the stages of a plan with peers one group: each gets its place, its share of the experts, and what
/// must be the same at all of them.
pub(crate) fn form(draft: &Draft<'_>, ranks: &mut [PlanRank]) {
    let peers = draft.peers();
    let is_member = |rank: &&mut PlanRank| matches!(rank.role, PlanRole::Prefill | PlanRole::Stage);
    let heads = ranks.iter().find(|rank| rank.role == PlanRole::Prefill);
    let Some(head) = heads.cloned().filter(|_| peers > 0) else {
        return;
    };
    let stand_ins = stand_ins(draft, ranks, peers);
    let kv = |rank: &PlanRank| rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes);
    let kv_bytes = ranks
        .iter_mut()
        .filter(is_member)
        .map(|rank| kv(rank))
        .min();
    for (place, rank) in ranks.iter_mut().filter(is_member).enumerate() {
        let place = u32::try_from(place).unwrap_or(u32::MAX);
        rank.peers = Some(PlanPeers {
            head: head.name.clone(),
            place,
            ranks: peers,
            experts: expert_parallel(draft.demand.facts, peers),
            stands_in: place > 0 && stand_ins.contains(&rank.node),
            // Followers learn it from the head.
            kv: match place {
                0 => draft.kv_gather(),
                _ => PlanKvGather::Direct,
            },
        });
        keep_kv(rank, kv_bytes.unwrap_or(0));
        if place > 0 {
            follow(draft, rank, (place, peers), head.mla_form);
        }
    }
}

/// Nodes whose followers can share prompts with fewer peers: a rank there keeps all experts in the node's memory, so that those of
/// others cost a follower nothing. Of two peers, nobody is left to share with.
fn stand_ins(draft: &Draft<'_>, ranks: &[PlanRank], peers: u32) -> BTreeSet<String> {
    let experts = draft.demand.facts.bytes.routed_experts;
    let has_all = |rank: &&PlanRank| {
        rank.role != PlanRole::Stage
            && !rank.has_expert_budget()
            && rank.host_weight_bytes() >= experts
    };
    let having = ranks.iter().filter(|_| peers > 2).filter(has_all);
    having.map(|rank| rank.node.clone()).collect()
}

/// What differs from a rank that reads prompts alone: it has the head's form of attention, and maps its own experts and no others,
/// unless it stands in for those who have them.
fn follow(draft: &Draft<'_>, rank: &mut PlanRank, (place, peers): (u32, u32), form: PlanMlaForm) {
    rank.mla_form = form;
    if rank.peers.as_ref().is_some_and(|peers| peers.stands_in) {
        return;
    }
    let facts = draft.demand.facts;
    let first = |place: u32| u64::from(place) * u64::from(facts.experts) / u64::from(peers);
    let own = (first(place + 1) - first(place)) * u64::from(facts.routed_layers());
    let left_bytes = facts
        .bytes
        .routed_experts
        .saturating_sub(own * facts.expert_bytes());
    if let Some(residency) = &mut rank.residency {
        residency.weight_bytes = residency.weight_bytes.saturating_sub(left_bytes);
        residency.host_bytes = residency.host_bytes.saturating_sub(left_bytes);
    }
}

/// Lowers a rank's cache to what all members have room for: the head uses no more blocks than each has.
fn keep_kv(rank: &mut PlanRank, kv_bytes: u64) {
    let Some(kv) = &mut rank.kv else {
        return;
    };
    let less_bytes = kv.memory_bytes.saturating_sub(kv_bytes);
    kv.memory_bytes -= less_bytes;
    rank.gpu_memory_bytes = rank.gpu_memory_bytes.saturating_sub(less_bytes);
    if let Some(memory) = &mut rank.device_memory {
        memory.kv_bytes = memory.kv_bytes.saturating_sub(less_bytes);
    }
}
