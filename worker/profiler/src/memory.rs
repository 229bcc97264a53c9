//! Memory of the node and of its NUMA nodes.

use hearth_crds::{CpuProfile, MemoryProfile, NumaNodeProfile};

use crate::cgroup::Limits;
use crate::cpu::{NODES, numa_node_ids, status_list};
use crate::tree::{Tree, kib_line};
use crate::{ProfileError, Scope};

const MEMINFO: &str = "/proc/meminfo";

/// Reads the memory sizes in bytes; the rates are left at 0.
pub(crate) fn memory(tree: &Tree, limits: &Limits) -> Result<MemoryProfile, ProfileError> {
    let text = tree.read(MEMINFO).unwrap_or_default();
    let Some(total_bytes) = kib_line(&text, "MemTotal").filter(|n| *n > 0) else {
        return Err(ProfileError::NoMemory {
            path: MEMINFO.to_owned(),
        });
    };
    let available_bytes = kib_line(&text, "MemAvailable").unwrap_or_else(|| {
        tree.warn(format!(
            "{MEMINFO} has no MemAvailable: free and cached memory taken instead"
        ));
        let parts = ["MemFree", "Cached", "Buffers"];
        parts.iter().filter_map(|name| kib_line(&text, name)).sum()
    });
    let total_bytes = limits
        .memory_bytes
        .map_or(total_bytes, |n| n.min(total_bytes));
    let limit = limits.available_bytes.unwrap_or(u64::MAX);
    Ok(MemoryProfile {
        total_bytes,
        available_bytes: available_bytes.min(limit).min(total_bytes),
        ..MemoryProfile::default()
    })
}

/// NUMA nodes that have usable CPUs or usable memory; a single one with everything if the kernel reports none. CPUs
/// that belong to no node of the result are assigned to the first one. The rates are left at 0.
pub(crate) fn numa_nodes(
    tree: &Tree,
    cpus: &mut [CpuProfile],
    memory: &MemoryProfile,
    scope: Scope,
) -> Vec<NumaNodeProfile> {
    let status = tree.read("/proc/self/status").unwrap_or_default();
    let allowed = match scope {
        Scope::Process => status_list(&status, "Mems_allowed_list"),
        Scope::Node => None,
    };
    let mut nodes: Vec<NumaNodeProfile> = numa_node_ids(tree)
        .into_iter()
        .filter_map(|id| {
            let own: Vec<u32> = cpus
                .iter()
                .filter(|c| c.numa_node == id)
                .map(|c| c.id)
                .collect();
            let may_allocate = allowed.as_ref().is_none_or(|set| set.contains(&id));
            let (memory_bytes, free_bytes) = if may_allocate {
                node_memory(tree, id, memory)
            } else {
                (0, 0)
            };
            (!own.is_empty() || memory_bytes > 0).then_some(NumaNodeProfile {
                id,
                cpus: own,
                memory_bytes,
                free_bytes,
                read_gbps: 0.0,
            })
        })
        .collect();
    if nodes.iter().all(|node| node.memory_bytes == 0) {
        tree.warn(format!(
            "{NODES} reports no memory: treated as one NUMA node"
        ));
        for cpu in cpus.iter_mut() {
            cpu.numa_node = 0;
        }
        return vec![NumaNodeProfile {
            id: 0,
            cpus: cpus.iter().map(|cpu| cpu.id).collect(),
            memory_bytes: memory.total_bytes,
            free_bytes: memory.available_bytes,
            read_gbps: 0.0,
        }];
    }
    if let ([only], 1) = (nodes.as_mut_slice(), numa_node_ids(tree).len()) {
        // The totals are a better estimate of available memory than a single node's own counters.
        only.memory_bytes = memory.total_bytes;
        only.free_bytes = memory.available_bytes;
    }
    adopt_strays(tree, cpus, &mut nodes);
    nodes
}

/// Memory of a NUMA node, and how much of it is free or page cache, in bytes, within the overall limits.
fn node_memory(tree: &Tree, id: u32, memory: &MemoryProfile) -> (u64, u64) {
    let name = format!("{NODES}/node{id}/meminfo");
    let text = tree.read(&name).unwrap_or_default();
    let Some(total) = kib_line(&text, "MemTotal") else {
        tree.warn(format!(
            "{name} does not report MemTotal: treated as a node without memory"
        ));
        return (0, 0);
    };
    let part = |name| kib_line(&text, name).unwrap_or(0);
    // Shared memory counts as file pages but cannot be dropped.
    let cache = part("FilePages").saturating_sub(part("Shmem"));
    let free = part("MemFree") + cache + part("SReclaimable");
    (
        total.min(memory.total_bytes),
        free.min(total).min(memory.available_bytes),
    )
}

fn adopt_strays(tree: &Tree, cpus: &mut [CpuProfile], nodes: &mut [NumaNodeProfile]) {
    let Some(first) = nodes.first().map(|node| node.id) else {
        return;
    };
    for cpu in cpus {
        if !nodes.iter().any(|node| node.cpus.contains(&cpu.id)) {
            tree.warn(format!(
                "CPU {} belongs to no NUMA node: treated as one of node {first}",
                cpu.id
            ));
            cpu.numa_node = first;
            nodes[0].cpus.push(cpu.id);
            nodes[0].cpus.sort_unstable();
        }
    }
}
