//! Parts of a profile that remain valid while the hardware is the same.

use std::collections::BTreeSet;
use std::path::Path;

use hearth_crds::{MemoryProfile, NodeProfileStatus};

use crate::summary::isa_names;
use crate::tree::{Tree, format_id_list};

/// Lines of `/proc/cpuinfo` that identify a CPU: the first on x86, the others on ARM.
const CPU_NAMES: [&str; 4] = ["model name", "CPU implementer", "CPU part", "CPU variant"];

/// Describes the hardware that rates were measured on: if two descriptions are equal, the rates of one apply to the
/// other. Includes Hearth's version, since the rates depend on its kernels.
///
/// Excludes the amount of memory, which does not affect rates and changes with a virtual machine's balloon.
pub fn hardware(profile: &NodeProfileStatus, root: &Path) -> String {
    let cpuinfo = Tree::new(root).read("/proc/cpuinfo").unwrap_or_default();
    let names: BTreeSet<&str> = cpuinfo
        .lines()
        .filter(|line| CPU_NAMES.iter().any(|name| line.starts_with(name)))
        .filter_map(|line| Some(line.split_once(':')?.1.trim()))
        .collect();
    let names: Vec<&str> = names.into_iter().collect();
    let cpus = |ids: &mut dyn Iterator<Item = u32>| format_id_list(&ids.collect());
    let numa: Vec<String> = profile
        .numa_nodes
        .iter()
        .map(|node| format!("{}: {}", node.id, cpus(&mut node.cpus.iter().copied())))
        .collect();
    format!(
        "hearth {}; {}; {}; CPUs {}, cores {}; NUMA {}",
        env!("CARGO_PKG_VERSION"),
        names.join(" "),
        isa_names(profile),
        cpus(&mut profile.cpus.iter().map(|cpu| cpu.id)),
        cpus(&mut profile.cpus.iter().map(|cpu| cpu.core)),
        numa.join(", ")
    )
}

/// Copies the rates of a measured profile, and the time of their measurement, into one that was only observed.
pub fn take_rates(profile: &mut NodeProfileStatus, measured: &NodeProfileStatus) {
    let MemoryProfile {
        total_bytes: _,
        available_bytes: _,
        least_available_bytes: _,
        least_over_seconds: _,
        read_one_thread_gbps,
        read_all_threads_gbps,
    } = measured.memory;
    profile.memory.read_one_thread_gbps = read_one_thread_gbps;
    profile.memory.read_all_threads_gbps = read_all_threads_gbps;
    profile.compute = measured.compute.clone();
    for node in &mut profile.numa_nodes {
        let same = measured.numa_nodes.iter().find(|other| other.id == node.id);
        node.read_gbps = same.map_or(0.0, |other| other.read_gbps);
    }
    for disk in &mut profile.disks {
        let same = measured.disks.iter().find(|other| other.path == disk.path);
        disk.read_gbps = same.map_or(0.0, |other| other.read_gbps);
        disk.mapped_read_gbps = same.map_or(0.0, |other| other.mapped_read_gbps);
    }
    for gpu in &mut profile.gpus {
        let same = measured.gpus.iter().find(|other| other.uuid == gpu.uuid);
        if let Some(measured) = same.filter(|other| other.is_measured()) {
            gpu.take_rates(measured);
        }
    }
    profile.measured_at.clone_from(&measured.measured_at);
    profile.busy_percent = measured.busy_percent;
}
