//! Limits of the control group that this process is in: v2, v1, or v1 beside v2.
//!
//! The limits of all ancestors apply too, so the group's path is walked up to the mount. In a container the mount
//! itself often is the group, while `/proc/self/cgroup` may name a path that only the host sees: then only the
//! mount is read.

use std::collections::BTreeSet;

use crate::tree::Tree;

/// Mount points of v2: alone, or beside v1.
const V2_MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// v1 expresses "no limit" as a number near 2⁶³; no machine has that much memory.
const V1_UNLIMITED_BYTES: u64 = 1 << 60;

/// Limits of the control group; `None` means no limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Limits {
    /// CPUs that may be used.
    pub(crate) cpus: Option<BTreeSet<u32>>,
    /// CPU time, in CPUs.
    pub(crate) quota_cpus: Option<f64>,
    /// Memory in bytes.
    pub(crate) memory_bytes: Option<u64>,
    /// Unused memory within the limit, in bytes; page cache counts as unused.
    pub(crate) available_bytes: Option<u64>,
}

pub(crate) fn limits(tree: &Tree) -> Limits {
    let groups = tree.read("/proc/self/cgroup").unwrap_or_default();
    let mut limits = Limits::default();
    for line in groups.lines() {
        // `hierarchy:controllers:path`; v2 is `0::path`.
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            tree.warn(format!("/proc/self/cgroup has the line {line:?}: ignored"));
            continue;
        };
        if controllers.is_empty() {
            for mount in V2_MOUNTS {
                if tree.path(&format!("{mount}/cgroup.controllers")).exists() {
                    read_v2(tree, &directories(tree, mount, path), &mut limits);
                }
            }
            continue;
        }
        let reader = |controller| match controller {
            "cpu" => Some(read_v1_cpu as Reader),
            "cpuset" => Some(read_v1_cpuset as Reader),
            "memory" => Some(read_v1_memory as Reader),
            _ => None,
        };
        for controller in controllers.split(',') {
            let Some(read) = reader(controller) else {
                continue;
            };
            let mounts = [controllers, controller].map(|name| format!("/sys/fs/cgroup/{name}"));
            if let Some(mount) = mounts.iter().find(|m| tree.path(m).exists()) {
                read(tree, &directories(tree, mount, path), &mut limits);
            }
        }
    }
    limits
}

type Reader = fn(&Tree, &[String], &mut Limits);

/// Directories of the group and its ancestors, innermost first.
fn directories(tree: &Tree, mount: &str, path: &str) -> Vec<String> {
    let mut directories = Vec::new();
    let mut path = path.trim_matches('/');
    let is_visible =
        !path.split('/').any(|part| part == "..") && tree.path(&format!("{mount}/{path}")).exists();
    while is_visible && !path.is_empty() {
        directories.push(format!("{mount}/{path}"));
        path = path.rsplit_once('/').map_or("", |(parent, _)| parent);
    }
    directories.push(mount.to_owned());
    directories
}

fn read_v2(tree: &Tree, directories: &[String], limits: &mut Limits) {
    let effective = |d: &String| tree.ids(&format!("{d}/cpuset.cpus.effective"));
    restrict(&mut limits.cpus, directories.iter().find_map(effective));
    for directory in directories {
        // `max 100000`, or `200000 100000`: microseconds of CPU time per period.
        if let Some(text) = tree.read(&format!("{directory}/cpu.max")) {
            let (quota, period) = text.split_once(' ').unwrap_or((&text, "100000"));
            if quota != "max" {
                quota_of(tree, &format!("{directory}/cpu.max"), quota, period, limits);
            }
        }
        let Some(max) = tree.read(&format!("{directory}/memory.max")) else {
            continue;
        };
        if max != "max" {
            let name = format!("{directory}/memory.max");
            let used = tree.number(&format!("{directory}/memory.current"));
            let cache = tree.read(&format!("{directory}/memory.stat"));
            let cache = cache.map_or(0, |text| {
                stat(&text, "active_file") + stat(&text, "inactive_file")
            });
            memory_of(tree, &name, &max, used, cache, limits);
        }
    }
}

fn read_v1_cpuset(tree: &Tree, directories: &[String], limits: &mut Limits) {
    let cpus = |d: &String| {
        let names = ["cpuset.effective_cpus", "cpuset.cpus"];
        names.iter().find_map(|n| tree.ids(&format!("{d}/{n}")))
    };
    restrict(&mut limits.cpus, directories.iter().find_map(cpus));
}

fn read_v1_cpu(tree: &Tree, directories: &[String], limits: &mut Limits) {
    for directory in directories {
        let name = format!("{directory}/cpu.cfs_quota_us");
        if let Some(quota) = tree.read(&name)
            && quota != "-1"
        {
            let period = tree.read(&format!("{directory}/cpu.cfs_period_us"));
            let period = period.unwrap_or_else(|| "100000".to_owned());
            quota_of(tree, &name, &quota, &period, limits);
        }
    }
}

fn read_v1_memory(tree: &Tree, directories: &[String], limits: &mut Limits) {
    for directory in directories {
        let name = format!("{directory}/memory.limit_in_bytes");
        if let Some(max) = tree.read(&name) {
            let used = tree.number(&format!("{directory}/memory.usage_in_bytes"));
            let cache = tree.read(&format!("{directory}/memory.stat"));
            let cache = cache.map_or(0, |text| {
                stat(&text, "total_active_file") + stat(&text, "total_inactive_file")
            });
            memory_of(tree, &name, &max, used, cache, limits);
        }
    }
}

fn quota_of(tree: &Tree, name: &str, quota: &str, period: &str, limits: &mut Limits) {
    match (quota.trim().parse::<f64>(), period.trim().parse::<f64>()) {
        (Ok(quota), Ok(period)) if quota > 0.0 && period > 0.0 => {
            let cpus = quota / period;
            let least = limits.quota_cpus.map_or(cpus, |other| other.min(cpus));
            limits.quota_cpus = Some(least);
        }
        _ => tree.warn(format!(
            "{name} is {quota:?} in {period:?} µs: treated as no quota"
        )),
    }
}

fn memory_of(
    tree: &Tree,
    name: &str,
    max: &str,
    used_bytes: Option<u64>,
    cache_bytes: u64,
    limits: &mut Limits,
) {
    let Ok(max_bytes) = max.parse::<u64>() else {
        tree.warn(format!(
            "{name} is {max:?}, not a number: treated as no limit"
        ));
        return;
    };
    if max_bytes >= V1_UNLIMITED_BYTES {
        return;
    }
    let used_bytes = used_bytes.unwrap_or(0).saturating_sub(cache_bytes);
    let available_bytes = max_bytes.saturating_sub(used_bytes);
    let least = |old: Option<u64>, new: u64| Some(old.map_or(new, |old| old.min(new)));
    limits.memory_bytes = least(limits.memory_bytes, max_bytes);
    limits.available_bytes = least(limits.available_bytes, available_bytes);
}

/// Returns the number that follows a name in `memory.stat`.
fn stat(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| {
            line.strip_prefix(name)?
                .strip_prefix(' ')?
                .trim()
                .parse()
                .ok()
        })
        .unwrap_or(0)
}

/// Intersects two CPU sets. An empty set in a group means that the parent's applies.
fn restrict(cpus: &mut Option<BTreeSet<u32>>, other: Option<BTreeSet<u32>>) {
    let Some(other) = other.filter(|set| !set.is_empty()) else {
        return;
    };
    *cpus = Some(match cpus.take() {
        Some(set) => set.intersection(&other).copied().collect(),
        None => other,
    });
}
