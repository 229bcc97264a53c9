//! The groups of a cluster's nodes: one tree of its name in each cgroup v1 hierarchy.

use std::path::{Path, PathBuf};

use anyhow::Context;

const ROOT: &str = "/sys/fs/cgroup";
/// The hierarchies that kubelet and runc use.
const HIERARCHIES: [&str; 9] = [
    "blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids", "systemd",
];

/// The name of a cluster's tree.
fn tree(id: &str) -> String {
    format!("hearth-{id}")
}

/// The group of a node, as the kubelet is told of it.
pub(super) fn of_node(id: &str, node: &str) -> String {
    format!("/{}/{node}", tree(id))
}

/// Makes the group of a node and in it `sys`, for the node's own processes, in each hierarchy.
pub(super) fn make(id: &str, node: &str) -> anyhow::Result<()> {
    for hierarchy in HIERARCHIES.map(|name| Path::new(ROOT).join(name)) {
        if !hierarchy.is_dir() {
            continue;
        }
        let mut path = hierarchy.clone();
        for part in [tree(id).as_str(), node, "sys"] {
            path.push(part);
            std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
            // A new cpuset is empty, and no process may enter it.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(all) = std::fs::read(hierarchy.join(file)) {
                    std::fs::write(path.join(file), all)
                        .with_context(|| path.join(file).display().to_string())?;
                }
            }
        }
    }
    Ok(())
}

/// All processes in the groups of a cluster.
pub(super) fn processes(id: &str) -> Vec<u32> {
    trees(id)
        .iter()
        .flat_map(|tree| processes_in(tree))
        .collect()
}

/// All processes in the groups of a node.
pub(super) fn processes_of_node(id: &str, node: &str) -> Vec<u32> {
    processes_in(&Path::new(ROOT).join("memory").join(tree(id)).join(node))
}

/// All processes in the group of a container, which has the container's id for its name.
pub(super) fn processes_of_container(id: &str, node: &str, container: &str) -> Vec<u32> {
    groups(&Path::new(ROOT).join("memory").join(tree(id)).join(node))
        .iter()
        .filter(|group| group.ends_with(container))
        .flat_map(|group| processes_in(group))
        .collect()
}

/// Removes the groups of a cluster; fails while a process is in one.
pub(super) fn remove(id: &str) -> anyhow::Result<()> {
    for tree in trees(id) {
        for group in groups(&tree).iter().rev() {
            std::fs::remove_dir(group).with_context(|| group.display().to_string())?;
        }
    }
    Ok(())
}

/// A cluster's tree in each hierarchy where it exists; runc makes one in the unified hierarchy too.
fn trees(id: &str) -> Vec<PathBuf> {
    let hierarchies = std::fs::read_dir(ROOT).into_iter().flatten().flatten();
    hierarchies
        .map(|hierarchy| hierarchy.path().join(tree(id)))
        .filter(|tree| tree.is_dir())
        .collect()
}

/// A group and all below it, each before what is in it.
fn groups(top: &Path) -> Vec<PathBuf> {
    let mut found = vec![top.to_path_buf()];
    let mut next = 0;
    while let Some(group) = found.get(next) {
        let entries = std::fs::read_dir(group).into_iter().flatten().flatten();
        let inner: Vec<_> = entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect();
        found.extend(inner);
        next += 1;
    }
    found
}

fn processes_in(top: &Path) -> Vec<u32> {
    groups(top)
        .iter()
        .filter_map(|group| std::fs::read_to_string(group.join("cgroup.procs")).ok())
        .flat_map(|text| {
            text.lines()
                .filter_map(|line| line.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}
