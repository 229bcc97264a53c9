//! What the Pods of a node hold.

use std::collections::BTreeSet;

use crate::observed::Requests;

/// Resources that Pods of one node hold together.
#[derive(Default)]
pub(super) struct Need {
    amounts: Requests,
    exclusive_cpus: BTreeSet<u32>,
    claimed_gpus: BTreeSet<String>,
}

impl Need {
    /// Adds a Pod; `false` if it wants a CPU or a GPU that another one has exclusively.
    pub(super) fn add(
        &mut self,
        amounts: Requests,
        exclusive_cpus: &[u32],
        claimed_gpus: &[String],
    ) -> bool {
        self.amounts = self.amounts.plus(amounts);
        let fresh = exclusive_cpus
            .iter()
            .fold(true, |fresh, cpu| fresh & self.exclusive_cpus.insert(*cpu));
        let gpus = claimed_gpus.iter().cloned();
        gpus.fold(fresh, |fresh, uuid| fresh & self.claimed_gpus.insert(uuid))
    }

    pub(super) fn is_within(&self, room: &Requests) -> bool {
        self.amounts.max(*room) == *room
    }
}
