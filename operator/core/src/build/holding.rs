//! Resources of a node that Pods of ranks hold.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_crds::{GPU_RESOURCE, InferencePlan, InferencePlanSpec, PlanRank, PlanRole};
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::claims::claimed;
use crate::observed::{Holding, PodView};

/// Resources of its node that a rank holds once its Pod exists: those of a second rank are held by the first of its Pod.
pub fn rank_holding(plan: &InferencePlanSpec, rank: &PlanRank) -> Holding {
    let held = Held::of(plan, rank);
    Holding {
        cpu_millis: held.cpu_millis,
        memory_bytes: held.memory_bytes,
        gpus: held.gpus,
        exclusive_cpus: held.exclusive_cpus,
        claimed_gpus: held.claimed_gpus,
        virtual_bytes: held.virtual_bytes,
    }
}

/// The rank of a Pod, in the plan that it was made for.
pub(crate) fn planned_rank<'a>(
    pod: &PodView,
    plans: &'a [Arc<InferencePlan>],
) -> Option<(&'a InferencePlanSpec, &'a PlanRank)> {
    let mut plans = plans.iter().map(|plan| &plan.spec);
    let plan = plans.find(|plan| plan.generation == pod.plan_generation)?;
    let rank = plan.ranks.iter().find(|rank| rank.name == pod.rank)?;
    Some((plan, rank))
}

/// Memory that a bound Pod holds: what it requests, or what its plan has it request by now. A worker that stayed where the one left
/// that requested the memory for the weights maps them still.
pub(crate) fn held_memory_bytes(pod: &PodView, plans: &[Arc<InferencePlan>]) -> u64 {
    let planned = planned_rank(pod, plans).filter(|(_, rank)| rank.node == pod.node);
    let planned = planned.map_or(0, |(plan, rank)| rank_holding(plan, rank).memory_bytes);
    planned.max(pod.memory_bytes)
}

/// Bytes of mapped weights for each byte of page tables: a 4 KiB page takes an entry of eight bytes.
const MAPPED_BYTES_PER_TABLE_BYTE: u64 = 512;

/// Resources of its node that the Pod of a rank holds.
#[derive(Default)]
pub(super) struct Held {
    pub(super) memory_bytes: u64,
    /// The part of `memory_bytes` for the weights that the node's ranks share.
    pub(super) weight_bytes: u64,
    pub(super) cpu_millis: u64,
    pub(super) exclusive_cpus: Vec<u32>,
    pub(super) gpus: u32,
    /// The part of `gpus` that is requested from the device plugin.
    plugin_gpus: u32,
    claimed_gpus: BTreeSet<String>,
    virtual_bytes: u64,
}

impl Held {
    /// What the Pod of a rank holds; nothing for a rank in the Pod of another.
    pub(super) fn of(plan: &InferencePlanSpec, rank: &PlanRank) -> Self {
        if rank.in_pod_of.is_some() {
            return Self::default();
        }
        let mut held = Self::of_one(plan, rank);
        if let Some(second) = plan.second_in_pod_of(&rank.name) {
            let second = Self::of_one(plan, second);
            held.memory_bytes = held.memory_bytes.saturating_add(second.memory_bytes);
            held.weight_bytes = held.weight_bytes.saturating_add(second.weight_bytes);
            held.cpu_millis += second.cpu_millis;
            held.virtual_bytes = held.virtual_bytes.saturating_add(second.virtual_bytes);
        }
        held
    }

    /// The first of the workers that keep most of the weights in the node's memory accounts for them, and of peers that have
    /// shares alone there each for its own: all workers there map one copy, the kernel charges its pages to the process that
    /// touches them first, and workers whose limit has no room for them wait for it. A worker that rereads them within a limit
    /// of its own accounts for its window, and one that has only some experts in memory for these. Weights on a GPU take none of
    /// the node's memory. Page tables are charged to each process.
    fn of_one(plan: &InferencePlanSpec, rank: &PlanRank) -> Self {
        let here = || plan.ranks.iter().filter(|other| other.node == rank.node);
        let mut sharing = here().filter(|other| !other.has_expert_budget());
        let most = sharing.clone().map(PlanRank::host_weight_bytes).max();
        let most = most.filter(|most| *most > 0);
        let first = sharing.find(|other| Some(other.host_weight_bytes()) == most);
        let is_share = |rank: &PlanRank| {
            let peers = rank.peers.as_ref().filter(|peers| !peers.stands_in);
            peers.is_some() && rank.role == PlanRole::Stage
        };
        let weights = match first {
            Some(first) if first.name == rank.name || is_share(first) && is_share(rank) => {
                rank.host_weight_bytes()
            }
            _ => 0,
        };
        Self {
            memory_bytes: weights
                .max(rank.own_weight_bytes())
                .saturating_add(rank.host_weight_bytes() / MAPPED_BYTES_PER_TABLE_BYTE)
                .saturating_add(rank.host_kv_bytes())
                .saturating_add(rank.virtual_memory_bytes())
                .saturating_add(rank.scratch_bytes),
            weight_bytes: weights,
            cpu_millis: rank.cpu_millis(),
            exclusive_cpus: rank.exclusive_cpus().to_vec(),
            gpus: rank.gpus,
            plugin_gpus: if rank.claims_gpus { 0 } else { rank.gpus },
            claimed_gpus: claimed(rank).iter().cloned().collect(),
            virtual_bytes: rank.virtual_memory_bytes(),
        }
    }

    /// A Pod with exclusive CPUs is Guaranteed, as the kubelet's static policy requires. Any other has no limits: idle
    /// CPUs are for any Pod that has work, and the plan bounds the memory.
    pub(super) fn resources(&self) -> ResourceRequirements {
        let cpu = if self.cpu_millis.is_multiple_of(1000) {
            (self.cpu_millis / 1000).to_string()
        } else {
            format!("{}m", self.cpu_millis)
        };
        let requests = amounts([("cpu", cpu), ("memory", self.memory_bytes.to_string())]);
        let mut limits = if self.exclusive_cpus.is_empty() {
            BTreeMap::new()
        } else {
            requests.clone()
        };
        if self.plugin_gpus > 0 {
            limits.extend(amounts([(GPU_RESOURCE, self.plugin_gpus.to_string())]));
        }
        ResourceRequirements {
            requests: Some(requests),
            limits: Some(limits).filter(|limits| !limits.is_empty()),
            ..ResourceRequirements::default()
        }
    }
}

/// Quantities by resource.
pub(super) fn amounts<const N: usize>(pairs: [(&str, String); N]) -> BTreeMap<String, Quantity> {
    pairs
        .into_iter()
        .map(|(name, amount)| (name.to_owned(), Quantity(amount)))
        .collect()
}
