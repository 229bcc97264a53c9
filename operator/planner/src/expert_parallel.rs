//! How rows come to experts that several ranks share out (hybrid MoE paper, section 3.2).

use hearth_crds::{ModelFacts, PlanExpertParallel};

/// Numbers of peers, the largest first.
pub(crate) const PEERS: [u32; 7] = [8, 7, 6, 5, 4, 3, 2];

/// Whether the bits of a prompt on so many peers are those of one rank by SmallEP, too: it adds the outputs of each rank's experts
/// first, and only 2, 4 or 8 ranks have whole branches of the tree in which one rank adds them.
pub(crate) const fn small_ep_keeps_bits(peers: u32) -> bool {
    peers.is_power_of_two()
}

/// How rows come to the experts of so many peers: of the ways that give the bits of one rank, by that which moves fewer bytes.
pub(crate) fn expert_parallel(facts: &ModelFacts, peers: u32) -> PlanExpertParallel {
    match peers > facts.experts_per_token || !small_ep_keeps_bits(peers) {
        true => PlanExpertParallel::Ep,
        false => PlanExpertParallel::SmallEp,
    }
}
