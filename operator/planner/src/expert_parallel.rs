//! How rows come to experts that several ranks share out (hybrid MoE paper, section 3.2).

use hearth_crds::{ModelFacts, PlanExpertParallel};

/// Numbers of peers, best first: of these, the bits of a prompt are those of one rank, whichever way rows come to their experts.
pub(crate) const PEERS: [u32; 3] = [8, 4, 2];

/// How rows come to the experts of so many peers: by the way that moves fewer bytes.
pub(crate) fn expert_parallel(facts: &ModelFacts, peers: u32) -> PlanExpertParallel {
    match peers > facts.experts_per_token {
        true => PlanExpertParallel::Ep,
        false => PlanExpertParallel::SmallEp,
    }
}
