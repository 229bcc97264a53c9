//! The ledger as metrics: what each node has, who holds it, and what is left for plans.

use std::collections::BTreeSet;

use hearth_controller_core::candidates::room;
use hearth_controller_core::key::Key;
use hearth_controller_core::observed::{Holding, LedgerSettings, NodeView};
use jiff::Timestamp;

use crate::cluster::cache::State;
use crate::telemetry::cluster::{Amounts, NodeRoom, Share};

/// What each node has and who holds it. Nothing is free on a node that takes no plan because it is not Ready or cordoned.
pub(super) fn of_nodes(state: &State, settings: &LedgerSettings) -> Vec<NodeRoom> {
    let (held, others) = (state.holdings.of_others(""), state.others());
    let (offered, claimable) = (
        state.devices().claimable(),
        state.devices().free_for(&Key::new("", "")),
    );
    let none = Holding::default();
    let nodes = state.nodes.iter();
    nodes
        .map(|(name, node)| {
            let holding = held.get(name).unwrap_or(&none);
            let requested = others.on(name, settings.unseen);
            let claimable = claimable.get(name);
            let left: Option<BTreeSet<String>> = claimable.map(|it| it - &holding.claimed_gpus);
            let reserve = settings.reserve_cpu_millis;
            let free = room(node, Some(holding), requested, reserve, left.as_ref());
            let may_take = u64::from(node.is_ready && !node.is_cordoned);
            NodeRoom {
                node: name.clone(),
                memory_bytes: Amounts {
                    allocatable: node.memory_bytes,
                    hearth: holding.memory_bytes,
                    others: requested.memory_bytes,
                    free: may_take * free.memory_bytes,
                },
                gpus: Amounts {
                    allocatable: match offered.get(name) {
                        Some(gpus) => u64::from(gpus.offered),
                        None => u64::from(node.gpus),
                    },
                    hearth: gpus(holding),
                    others: u64::from(requested.gpus),
                    free: may_take * u64::from(free.gpus),
                },
                measured_s: measured(node),
            }
        })
        .collect()
}

/// What each deployment holds, by node.
pub(super) fn of_deployments(state: &State) -> Vec<Share> {
    let holdings = state.holdings.all();
    // What has no key is held by nobody's Pods that name a deployment as their controller.
    let known = holdings.filter_map(|(owner, nodes)| Some((state.keys.get(owner)?, nodes)));
    known
        .flat_map(|(key, nodes)| {
            nodes.iter().map(|(node, held)| Share {
                deployment: key.clone(),
                node: node.clone(),
                memory_bytes: held.memory_bytes,
                gpus: gpus(held),
            })
        })
        .collect()
}

fn gpus(held: &Holding) -> u64 {
    u64::from(held.gpus) + held.claimed_gpus.len() as u64
}

fn measured(node: &NodeView) -> Option<i64> {
    let at: Timestamp = node.profile.as_ref()?.measured_at.parse().ok()?;
    Some(at.as_second())
}
