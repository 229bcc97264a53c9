//! GPUs for workers that are added to a plan, beside those that stay.

use std::collections::BTreeSet;

use hearth_crds::{GpuProfile, InferencePlanSpec, PlanRank, ResidencyPolicy};

use crate::candidates::Candidates;

/// What a worker does on a GPU, where its weights are, and whether the GPU is a virtual device; `None` on CPUs.
pub(super) fn device(rank: &PlanRank) -> Option<(Option<ResidencyPolicy>, bool)> {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    rank.is_on_gpu()
        .then_some((policy, rank.virtual_device.is_some()))
}

/// A worker of `new` as one more beside `ranks`: on a GPU that none of them has, if it is on one. That is the one that it is planned
/// on, or one like it that `new` has for another rank of the node: what is planned next to each other on the node before may be
/// in between. `None` if there is none, if its pool computes otherwise, or if it is not one by itself.
pub(super) fn beside(
    rank: &PlanRank,
    ranks: &[PlanRank],
    new: &InferencePlanSpec,
    free: &Candidates,
) -> Option<PlanRank> {
    let mut pool = ranks.iter().filter(|it| it.role == rank.role);
    if pool.any(|it| device(it) != device(rank)) {
        return None;
    }
    let Some(planned) = rank.device().gpu_uuid() else {
        return Some(rank.clone());
    };
    if rank.in_pod_of.is_some() || rank.peers.is_some() {
        return None;
    }
    if rank.gpus == 0 {
        // A virtual device, which ranks share as they fit.
        return Some(rank.clone());
    }
    let profile = free.free.get(&rank.node)?;
    let known = |uuid: &str| profile.gpus.iter().find(|gpu| gpu.uuid == uuid);
    let planned = known(planned)?;
    let is_there = |it: &&PlanRank| it.node == rank.node;
    let is_taken = |uuid: &String| {
        let mut there = ranks.iter().filter(is_there);
        there.any(|it| it.gpu_uuids.contains(uuid))
    };
    let there = new.ranks.iter().filter(is_there);
    let left = there
        .flat_map(|it| &it.gpu_uuids)
        .filter(|uuid| !is_taken(uuid))
        .filter_map(|uuid| known(uuid))
        .filter(|gpu| is_like(gpu, planned));
    // Its CPUs are near the one that it is planned on.
    let distance =
        |gpu: &&GpuProfile| (gpu.uuid != planned.uuid, gpu.numa_node != planned.numa_node);
    let uuid = &left.min_by_key(distance)?.uuid;
    Some(PlanRank {
        device_name: uuid.clone(),
        gpu_uuids: vec![uuid.clone()],
        ..rank.clone()
    })
}

/// Whether what is planned for one GPU of a node holds for another.
fn is_like(a: &GpuProfile, b: &GpuProfile) -> bool {
    let kind = |gpu: &GpuProfile| (gpu.memory_bytes, gpu.compute_capability);
    a.name == b.name && kind(a) == kind(b)
}

/// Whether a node has the GPUs of its ranks, and its virtual devices have the memory.
pub(super) fn holds(node: &str, ranks: &[PlanRank], free: &Candidates) -> bool {
    let there = || ranks.iter().filter(|rank| rank.node == node);
    let held = |is_claimed: bool| {
        let held = there().filter(|rank| rank.claims_gpus == is_claimed);
        held.map(|rank| rank.gpus as usize).sum::<usize>()
    };
    let nothing = BTreeSet::new();
    let claimable = free.claimable.get(node).unwrap_or(&nothing);
    let mut claimed = there()
        .filter(|rank| rank.claims_gpus)
        .flat_map(|rank| &rank.gpu_uuids);
    let has_room = |gpu: &GpuProfile| {
        let on_it = there().filter(|rank| rank.gpu_uuids.contains(&gpu.uuid));
        let bytes: u64 = on_it.map(PlanRank::virtual_memory_bytes).sum();
        gpu.virtual_device.is_none() || bytes <= gpu.free_bytes
    };
    let mut gpus = free.free.get(node).into_iter().flat_map(|it| &it.gpus);
    held(false) <= free.gpus_free.get(node).map_or(0, |gpus| *gpus as usize)
        && held(true) <= claimable.len()
        && claimed.all(|uuid| claimable.contains(uuid))
        && gpus.all(has_room)
}
