//! Logical CPUs: which of them may be used, and which share a core.

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::CpuProfile;

use crate::cgroup::Limits;
use crate::tree::{Tree, format_id_list, parse_id_list};
use crate::{ProfileError, Scope};

const CPUS: &str = "/sys/devices/system/cpu";

/// Returns the CPUs that this process may use, or those of the node, in ascending order. Under a CPU quota, returns
/// only as many as the quota covers: more threads would be throttled in the middle of a step.
pub(crate) fn usable_cpus(
    tree: &Tree,
    limits: &Limits,
    scope: Scope,
) -> Result<Vec<CpuProfile>, ProfileError> {
    let online = online(tree);
    let mut usable = online.clone();
    let affinity = match scope {
        Scope::Process => tree
            .read("/proc/self/status")
            .as_deref()
            .and_then(|text| status_list(text, "Cpus_allowed_list")),
        Scope::Node => {
            let isolated = tree.ids(&format!("{CPUS}/isolated")).unwrap_or_default();
            Some(online.difference(&isolated).copied().collect())
        }
    };
    for allowed in [&affinity, &limits.cpus].into_iter().flatten() {
        usable.retain(|cpu| allowed.contains(cpu));
    }
    if usable.is_empty() {
        let allowed = affinity.or_else(|| limits.cpus.clone()).unwrap_or_default();
        return Err(ProfileError::NoCpu {
            online: format_id_list(&online),
            allowed: format_id_list(&allowed),
        });
    }
    let numa = numa_of_cpus(tree);
    let mut cpus: Vec<CpuProfile> = usable
        .iter()
        .map(|&id| CpuProfile {
            id,
            core: core_of(tree, id),
            numa_node: numa.get(&id).copied().unwrap_or(0),
            max_mhz: max_mhz(tree, id),
            cache_bytes: l2_bytes(tree, id),
        })
        .collect();
    if let Some(quota_cpus) = limits.quota_cpus {
        limit_to_quota(tree, &mut cpus, quota_cpus);
    }
    Ok(cpus)
}

/// Returns the first usable CPU of each core, in ascending order.
pub(crate) fn one_of_each_core(cpus: &[CpuProfile]) -> Vec<u32> {
    let mut seen = BTreeSet::new();
    let first = cpus.iter().filter(|cpu| seen.insert(cpu.core));
    first.map(|cpu| cpu.id).collect()
}

/// Reads a list of ids in `/proc/self/status`.
pub(crate) fn status_list(status: &str, name: &str) -> Option<BTreeSet<u32>> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    parse_id_list(line).filter(|set| !set.is_empty())
}

pub(crate) fn online(tree: &Tree) -> BTreeSet<u32> {
    if let Some(ids) = tree
        .ids(&format!("{CPUS}/online"))
        .filter(|s| !s.is_empty())
    {
        return ids;
    }
    let cpuinfo = tree.read("/proc/cpuinfo").unwrap_or_default();
    let ids: BTreeSet<u32> = cpuinfo
        .lines()
        .filter_map(|line| {
            let number = line.strip_prefix("processor")?.trim().strip_prefix(':')?;
            number.trim().parse().ok()
        })
        .collect();
    tree.warn(format!(
        "{CPUS}/online cannot be read: CPUs {} taken from /proc/cpuinfo",
        format_id_list(&ids)
    ));
    ids
}

/// Returns the lowest of the CPUs that share a core with this one: unique in the node, unlike the kernel's `core_id`,
/// which restarts in each package.
pub(crate) fn core_of(tree: &Tree, id: u32) -> u32 {
    let names = ["core_cpus_list", "thread_siblings_list"];
    let siblings = names
        .iter()
        .find_map(|name| tree.ids(&format!("{CPUS}/cpu{id}/topology/{name}")));
    match siblings.as_ref().and_then(BTreeSet::first) {
        Some(&first) if siblings.iter().any(|s| s.contains(&id)) => first,
        _ => {
            tree.warn(format!(
                "{CPUS}/cpu*/topology does not report which CPUs share a core: each is counted as a core"
            ));
            id
        }
    }
}

fn max_mhz(tree: &Tree, id: u32) -> u32 {
    let khz: Option<u32> = tree.number(&format!("{CPUS}/cpu{id}/cpufreq/cpuinfo_max_freq"));
    khz.map_or(0, |khz| khz / 1000)
}

fn l2_bytes(tree: &Tree, id: u32) -> u64 {
    let caches = caches(tree, id);
    let l2 = caches.iter().find(|cache| cache.level == 2);
    l2.map_or(0, |cache| cache.bytes)
}

/// Total size of the last-level caches of all sockets or chiplets.
pub(crate) fn last_level_cache_bytes(tree: &Tree, cpus: &[CpuProfile]) -> u64 {
    let mut counted = BTreeSet::new();
    let mut bytes = 0;
    for cpu in cpus {
        let last = caches(tree, cpu.id).into_iter().max_by_key(|c| c.level);
        let Some(last) = last else { continue };
        if counted.insert(last.shared_by.first().copied().unwrap_or(cpu.id)) {
            bytes += last.bytes;
        }
    }
    bytes
}

struct Cache {
    level: u32,
    bytes: u64,
    shared_by: BTreeSet<u32>,
}

fn caches(tree: &Tree, id: u32) -> Vec<Cache> {
    let base = format!("{CPUS}/cpu{id}/cache");
    let names = tree.names(&base).unwrap_or_default();
    let indices = names.iter().filter(|name| name.starts_with("index"));
    indices
        .filter_map(|name| {
            let cache = format!("{base}/{name}");
            Some(Cache {
                level: tree.number(&format!("{cache}/level"))?,
                bytes: size_bytes(&tree.read(&format!("{cache}/size"))?)?,
                shared_by: tree
                    .ids(&format!("{cache}/shared_cpu_list"))
                    .unwrap_or_default(),
            })
        })
        .collect()
}

/// Parses `2048K`, `1M` or a number of bytes.
fn size_bytes(text: &str) -> Option<u64> {
    let (digits, factor) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix('M') {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// Returns the NUMA node of each CPU, where the kernel reports it.
pub(crate) fn numa_of_cpus(tree: &Tree) -> BTreeMap<u32, u32> {
    let mut nodes = BTreeMap::new();
    for node in numa_node_ids(tree) {
        let cpus = tree.ids(&format!("{NODES}/node{node}/cpulist"));
        nodes.extend(cpus.unwrap_or_default().into_iter().map(|cpu| (cpu, node)));
    }
    nodes
}

pub(crate) const NODES: &str = "/sys/devices/system/node";

/// NUMA nodes listed by the kernel; empty on a kernel without NUMA.
pub(crate) fn numa_node_ids(tree: &Tree) -> Vec<u32> {
    let names = tree.names(NODES).unwrap_or_default();
    let mut ids: Vec<u32> = names
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .collect();
    ids.sort_unstable();
    ids
}

/// Keeps as many CPUs as the quota covers: whole cores of the lowest NUMA node first, one CPU of each core
/// before any sibling.
fn limit_to_quota(tree: &Tree, cpus: &mut Vec<CpuProfile>, quota_cpus: f64) {
    let keep = (quota_cpus.floor() as usize).max(1);
    if keep >= cpus.len() {
        return;
    }
    tree.warn(format!(
        "the CPU quota pays for {quota_cpus:.1} of {} CPUs: {keep} are used",
        cpus.len()
    ));
    let first_of_core: BTreeSet<u32> = one_of_each_core(cpus).into_iter().collect();
    cpus.sort_by_key(|cpu| (!first_of_core.contains(&cpu.id), cpu.numa_node, cpu.id));
    cpus.truncate(keep);
    cpus.sort_by_key(|cpu| cpu.id);
}
