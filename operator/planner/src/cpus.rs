//! Assignment of CPUs to ranks: NUMA policies and pinning over the cores of one node.

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    GPU_RANK_THREADS, NodeProfileStatus, NumaPolicy, Pinning, PlanRole, cpu_request_millis,
};

use crate::node_ranks::NodeRanks;

/// CPUs that ranks may request on their nodes.
#[derive(Clone, Copy, Debug)]
pub enum CpuOffer<'a> {
    /// One machine: all of its CPUs; nothing is requested.
    Machine,
    /// A cluster: CPU that the deployment's Pods may request, by node; none on a node that is missing.
    Requests(&'a BTreeMap<String, CpuRoom>),
}

/// CPU of one node that Pods may request, in thousandths of a CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuRoom {
    /// Allocatable CPU of the node.
    pub allocatable_millis: u64,
    /// Sum of the requests of all other Pods on the node.
    pub requested_millis: u64,
    /// CPU that is kept free in addition.
    pub reserve_millis: u64,
}

impl CpuRoom {
    /// Returns the CPU that the deployment's Pods may request in total.
    pub fn free_millis(self) -> u64 {
        let taken = self.requested_millis.saturating_add(self.reserve_millis);
        self.allocatable_millis.saturating_sub(taken)
    }
}

impl CpuOffer<'_> {
    /// CPU that may be requested on a node; `None` if requests are not counted.
    pub(crate) fn room(self, node: &NodeProfileStatus) -> Option<CpuRoom> {
        match self {
            Self::Machine => None,
            Self::Requests(rooms) => Some(rooms.get(&node.node).copied().unwrap_or_default()),
        }
    }
}

/// Shortage of CPUs on a node for the ranks placed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CpuLack {
    /// Fewer whole cores than workers, under `Exclusive`, which gives each worker at least one.
    Cores {
        /// Workers that need cores of their own.
        workers: usize,
        /// Cores that may be assigned to them.
        cores: usize,
        /// Logical CPUs of one core.
        core_cpus: usize,
        /// Requests of gateway Pods on the same node.
        gateway_millis: u64,
    },
    /// Less CPU than the ranks' Pods request.
    Requests { needs_millis: u64, free_millis: u64 },
}

impl CpuLack {
    /// Whether less is lacking than with `other`.
    pub(crate) fn is_nearer_than(&self, other: &Self) -> bool {
        let lacks = |lack: &Self| match *lack {
            Self::Requests {
                needs_millis,
                free_millis,
            } => (0, needs_millis.saturating_sub(free_millis)),
            Self::Cores { workers, cores, .. } => (1, workers.saturating_sub(cores) as u64),
        };
        lacks(self) < lacks(other)
    }
}

/// CPUs of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuSet {
    /// Logical CPUs, in ascending order.
    pub cpus: Vec<u32>,
    /// NUMA nodes that memory is bound to, in ascending order; any if empty.
    pub numa_nodes: Vec<u32>,
    /// Compute threads, one per core.
    pub threads: u32,
}

impl CpuSet {
    /// Whether the rank may use memory of this NUMA node.
    pub(crate) fn touches_numa(&self, id: u32) -> bool {
        self.numa_nodes.is_empty() || self.numa_nodes.contains(&id)
    }
}

/// CPUs in the kernel's notation: `0-3,8`. Expects ascending order; `-` if empty.
pub fn format_cpu_list(cpus: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    if runs.is_empty() {
        return "-".to_owned();
    }
    let text = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

/// A core with its logical CPUs.
#[derive(Clone, Debug)]
struct Core {
    numa: u32,
    cpus: Vec<u32>,
}

/// The cores of a node, by NUMA node and then by number.
fn cores_of(node: &NodeProfileStatus) -> Vec<Core> {
    let mut cores: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
    for cpu in &node.cpus {
        cores
            .entry((cpu.numa_node, cpu.core))
            .or_default()
            .push(cpu.id);
    }
    cores
        .into_iter()
        .map(|((numa, _), mut cpus)| {
            cpus.sort_unstable();
            Core { numa, cpus }
        })
        .collect()
}

/// Number of cores of a node.
pub(crate) fn core_count(node: &NodeProfileStatus) -> usize {
    cores_of(node).len()
}

/// The CPU set made of whole cores.
fn set_of(cores: &[Core], numa: NumaPolicy) -> CpuSet {
    let mut cpus: Vec<u32> = cores
        .iter()
        .flat_map(|core| core.cpus.iter().copied())
        .collect();
    cpus.sort_unstable();
    let numa_nodes = match numa {
        NumaPolicy::Any => Vec::new(),
        NumaPolicy::Compact | NumaPolicy::Spread => cores
            .iter()
            .map(|core| core.numa)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect(),
    };
    CpuSet {
        cpus,
        numa_nodes,
        threads: u32::try_from(cores.len()).unwrap_or(u32::MAX),
    }
}

/// CPU sets of a node's ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeCpus {
    pub gateways: Vec<CpuSet>,
    pub prefill: Vec<CpuSet>,
    pub decode: Vec<CpuSet>,
    /// Those of followers of peers.
    pub stages: Vec<CpuSet>,
}

impl NodeCpus {
    pub(crate) fn of(&self, role: PlanRole) -> &[CpuSet] {
        match role {
            PlanRole::Gateway => &self.gateways,
            PlanRole::Prefill => &self.prefill,
            PlanRole::Decode => &self.decode,
            PlanRole::Stage => &self.stages,
        }
    }
}

/// Pinning and NUMA policy of a node's ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub pinning: Pinning,
    pub numa: NumaPolicy,
}

/// Divides the CPUs of `node` among its ranks.
pub(crate) fn divide(
    node: &NodeProfileStatus,
    ranks: NodeRanks,
    Binding { pinning, numa }: Binding,
    offer: CpuOffer<'_>,
) -> Result<NodeCpus, CpuLack> {
    let room = offer.room(node);
    let mut sets = match pinning {
        Pinning::Exclusive => divide_exclusive(node, ranks, numa, room)?,
        Pinning::Shared => divide_shared(node, ranks, numa),
        Pinning::None => {
            let all = set_of(&cores_of(node), NumaPolicy::Any);
            NodeCpus {
                gateways: vec![gateway_of(&all); ranks.gateways as usize],
                prefill: vec![all.clone(); ranks.prefill as usize],
                stages: vec![all.clone(); ranks.followers as usize],
                decode: vec![all; ranks.decode as usize],
            }
        }
    };
    let of_gpus = [
        (PlanRole::Prefill, &mut sets.prefill),
        (PlanRole::Decode, &mut sets.decode),
        (PlanRole::Stage, &mut sets.stages),
    ];
    for (_, sets) in of_gpus
        .into_iter()
        .filter(|(role, _)| !ranks.devices.of(*role).uses_cpus())
    {
        for set in sets {
            set.threads = set.threads.clamp(1, GPU_RANK_THREADS);
        }
    }
    match room {
        Some(room) => within(sets, pinning, room),
        None => Ok(sets),
    }
}

/// Returns the sets if the CPU that their Pods request is available.
fn within(sets: NodeCpus, pinning: Pinning, room: CpuRoom) -> Result<NodeCpus, CpuLack> {
    let workers = sets.prefill.iter().chain(&sets.decode).chain(&sets.stages);
    let needs_millis = workers.map(|set| request_millis(set, pinning)).sum::<u64>()
        + sets.gateways.iter().map(gateway_millis).sum::<u64>();
    let free_millis = room.free_millis();
    if needs_millis <= free_millis {
        return Ok(sets);
    }
    Err(CpuLack::Requests {
        needs_millis,
        free_millis,
    })
}

fn request_millis(set: &CpuSet, pinning: Pinning) -> u64 {
    cpu_request_millis(pinning, set.cpus.len(), set.threads)
}

/// CPU request of a gateway's Pod, which never has CPUs of its own.
fn gateway_millis(set: &CpuSet) -> u64 {
    request_millis(set, GATEWAY_UNDER_EXCLUSIVE)
}

/// Pinning of the gateway in an `Exclusive` deployment: it copies and tokenises only now and then, so a dedicated core
/// would idle.
pub(crate) const GATEWAY_UNDER_EXCLUSIVE: Pinning = Pinning::Shared;

/// CPUs of the gateway, which tokenises and copies: two threads suffice, on any CPU.
fn gateway_of(all: &CpuSet) -> CpuSet {
    CpuSet {
        threads: all.threads.clamp(1, 2),
        numa_nodes: Vec::new(),
        cpus: all.cpus.clone(),
    }
}

/// Sets that may overlap: under `Compact` one NUMA node per rank in turn, otherwise all CPUs.
fn divide_shared(node: &NodeProfileStatus, ranks: NodeRanks, numa: NumaPolicy) -> NodeCpus {
    let cores = cores_of(node);
    let all = set_of(&cores, numa);
    let ids: BTreeSet<u32> = cores.iter().map(|core| core.numa).collect();
    let sets: Vec<CpuSet> = if numa == NumaPolicy::Compact {
        let of = |id| {
            cores
                .iter()
                .filter(|core| core.numa == id)
                .cloned()
                .collect::<Vec<_>>()
        };
        ids.iter().map(|id| set_of(&of(*id), numa)).collect()
    } else {
        vec![all.clone()]
    };
    // Decode first: it gets the first NUMA node; prefill gets the next one, if any.
    let mut turn = sets.iter().cycle();
    let mut take = |ranks: u32| -> Vec<CpuSet> {
        (0..ranks)
            .map(|_| turn.next().cloned().unwrap_or_else(|| all.clone()))
            .collect()
    };
    let decode = take(ranks.decode);
    let prefill = take(ranks.prefill);
    let stages = take(ranks.followers);
    NodeCpus {
        gateways: vec![gateway_of(&all); ranks.gateways as usize],
        prefill,
        decode,
        stages,
    }
}

/// Disjoint sets of whole cores: one core for each rank on a GPU; among the others, decode takes as many as saturate
/// memory bandwidth, at most half; prefill, which is compute-bound, takes the rest. The gateway runs on the cores that
/// no worker owns.
fn divide_exclusive(
    node: &NodeProfileStatus,
    ranks: NodeRanks,
    numa: NumaPolicy,
    room: Option<CpuRoom>,
) -> Result<NodeCpus, CpuLack> {
    let all = cores_of(node);
    let workers = ranks.workers() as usize;
    let gateway = gateway_of(&set_of(&all, NumaPolicy::Any));
    let gateway_millis = gateway_millis(&gateway) * u64::from(ranks.gateways);
    let may_request = room.map(|room| room.free_millis().saturating_sub(gateway_millis));
    let mut free = own_cores(&all, ranks, may_request);
    if free.len() < workers {
        return Err(CpuLack::Cores {
            workers,
            cores: free.len(),
            core_cpus: all.iter().map(|core| core.cpus.len()).max().unwrap_or(1),
            gateway_millis,
        });
    }
    let prefill = ranks.using_cpus(PlanRole::Prefill) as usize;
    let decode = ranks.using_cpus(PlanRole::Decode) as usize;
    let on_cpus = free.len() - (workers - prefill - decode);
    let for_decode = if prefill == 0 {
        on_cpus
    } else if decode == 0 {
        0
    } else {
        let one = node.memory.read_one_thread_gbps.max(f64::MIN_POSITIVE);
        let saturating = (node.memory.read_all_threads_gbps / one).ceil().max(1.0) as usize;
        saturating.min(on_cpus / 2).clamp(decode, on_cpus - prefill)
    };
    let mut take = |cores: usize| set_of(&take_cores(&mut free, cores, numa), numa);
    let shares = |cores: usize, ranks: usize| {
        (0..ranks).map(move |i| cores / ranks + usize::from(i < cores % ranks))
    };
    let mut decode_sets: Vec<CpuSet> = shares(for_decode, decode).map(&mut take).collect();
    let mut prefill_sets: Vec<CpuSet> = shares(on_cpus - for_decode, prefill)
        .map(&mut take)
        .collect();
    let mut stage_sets = Vec::new();
    for (role, sets) in [
        (PlanRole::Prefill, &mut prefill_sets),
        (PlanRole::Decode, &mut decode_sets),
        (PlanRole::Stage, &mut stage_sets),
    ] {
        if !ranks.devices.of(role).uses_cpus() {
            sets.extend((0..ranks.of(role)).map(|_| take(1)));
        }
    }
    let taken: BTreeSet<u32> = decode_sets
        .iter()
        .chain(&prefill_sets)
        .chain(&stage_sets)
        .flat_map(|set| set.cpus.iter().copied())
        .collect();
    Ok(NodeCpus {
        gateways: vec![gateway_beside(&all, &taken); ranks.gateways as usize],
        prefill: prefill_sets,
        decode: decode_sets,
        stages: stage_sets,
    })
}

/// CPUs of the gateway: those that no worker owns, or all of them if workers own every one.
fn gateway_beside(cores: &[Core], taken: &BTreeSet<u32>) -> CpuSet {
    let is_left = |core: &&Core| core.cpus.iter().all(|cpu| !taken.contains(cpu));
    let left: Vec<Core> = cores.iter().filter(is_left).cloned().collect();
    let cores = if left.is_empty() { cores } else { &left };
    gateway_of(&set_of(cores, NumaPolicy::Any))
}

/// Cores that workers may own: as many whole ones as their Pods may request. On a single machine one core is left to
/// the gateway if there are enough. The first cores are left to other programs, as the kubelet does for the system.
fn own_cores(all: &[Core], ranks: NodeRanks, may_request_millis: Option<u64>) -> Vec<Core> {
    let cpus: usize = all.iter().map(|core| core.cpus.len()).sum();
    let workers = ranks.workers() as usize;
    let mut cpus = match may_request_millis {
        Some(millis) => usize::try_from(millis / 1000).unwrap_or(usize::MAX),
        None if ranks.gateways > 0 && all.len() > workers => {
            cpus - all.first().map_or(0, |core| core.cpus.len())
        }
        None => cpus,
    };
    let mut own: Vec<Core> = Vec::new();
    for core in all.iter().rev() {
        if core.cpus.len() > cpus {
            break;
        }
        cpus -= core.cpus.len();
        own.push(core.clone());
    }
    own.reverse();
    own
}

/// Takes `count` cores out of `free`, following the NUMA policy.
fn take_cores(free: &mut Vec<Core>, count: usize, numa: NumaPolicy) -> Vec<Core> {
    let mut taken: Vec<Core> = Vec::new();
    while taken.len() < count && !free.is_empty() {
        let mut by_numa: BTreeMap<u32, usize> = BTreeMap::new();
        for core in free.iter() {
            *by_numa.entry(core.numa).or_default() += 1;
        }
        let wanted = count - taken.len();
        let chosen = match numa {
            // The smallest NUMA node that holds all wanted cores, otherwise the one with the most.
            NumaPolicy::Compact => by_numa
                .iter()
                .filter(|(_, cores)| **cores >= wanted)
                .min_by_key(|(id, cores)| (**cores, **id))
                .or_else(|| {
                    by_numa
                        .iter()
                        .max_by_key(|(id, cores)| (**cores, std::cmp::Reverse(**id)))
                })
                .map(|(id, cores)| (*id, wanted.min(*cores))),
            // One core of the NUMA node from which the rank has the fewest.
            NumaPolicy::Spread => by_numa
                .keys()
                .min_by_key(|id| (taken.iter().filter(|core| core.numa == **id).count(), **id))
                .map(|id| (*id, 1)),
            NumaPolicy::Any => free.first().map(|core| (core.numa, 1)),
        };
        let Some((id, mut cores)) = chosen else { break };
        free.retain(|core| {
            let take = cores > 0 && core.numa == id;
            if take {
                cores -= 1;
                taken.push(core.clone());
            }
            !take
        });
    }
    taken
}

/// Restricts a set to the CPUs on a GPU's NUMA node, if it has any there: the others reach the GPU only through that
/// node.
pub(crate) fn keep_beside(set: &mut CpuSet, node: &NodeProfileStatus, numa_node: u32) {
    let is_beside = |id: &u32| {
        node.cpus
            .iter()
            .any(|cpu| cpu.id == *id && cpu.numa_node == numa_node)
    };
    if set.numa_nodes.is_empty() || !set.cpus.iter().any(is_beside) {
        return;
    }
    set.cpus.retain(is_beside);
    set.numa_nodes = vec![numa_node];
    let cores: BTreeSet<u32> = node
        .cpus
        .iter()
        .filter(|cpu| set.cpus.contains(&cpu.id))
        .map(|cpu| cpu.core)
        .collect();
    set.threads = set
        .threads
        .min(u32::try_from(cores.len()).unwrap_or(u32::MAX));
}

/// Adds NUMA nodes to a `Compact` set until their free memory holds `needs_bytes`: threads stay, memory may be taken
/// from neighbouring NUMA nodes.
pub(crate) fn widen_memory(set: &mut CpuSet, node: &NodeProfileStatus, needs_bytes: u64) {
    if set.numa_nodes.is_empty() {
        return;
    }
    let free = |ids: &[u32]| -> u64 {
        node.numa_nodes
            .iter()
            .filter(|numa| ids.contains(&numa.id))
            .map(|numa| numa.free_bytes)
            .sum()
    };
    for numa in &node.numa_nodes {
        if free(&set.numa_nodes) >= needs_bytes {
            break;
        }
        if !set.numa_nodes.contains(&numa.id) {
            set.numa_nodes.push(numa.id);
        }
    }
    set.numa_nodes.sort_unstable();
}

#[cfg(test)]
mod tests {
    use super::format_cpu_list;

    #[test]
    fn cpu_lists_are_in_the_kernels_notation() {
        assert_eq!(format_cpu_list(&[0, 1, 2, 3, 8]), "0-3,8");
        assert_eq!(format_cpu_list(&[5]), "5");
        assert_eq!(format_cpu_list(&[]), "-");
    }
}
