//! Control groups of a cluster's nodes: one tree with the cluster's name, in each cgroup v1 hierarchy or in the v2
//! one.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// The v1 hierarchies that kubelet and runc use.
const HIERARCHIES: [&str; 9] = [
    "blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids", "systemd",
];
/// v2 controllers that a kubelet needs for its Pods' groups.
const CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"];

/// The control groups of a machine.
pub(super) struct Groups {
    root: PathBuf,
    is_v2: bool,
}

impl Groups {
    /// Returns this machine's groups.
    pub(super) fn of_machine() -> Self {
        Self::at(Path::new("/sys/fs/cgroup"))
    }

    fn at(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
            is_v2: root.join("cgroup.controllers").exists(),
        }
    }

    /// Whether v1 groups of the kind that clusters have run in are present: memory in a v1 hierarchy.
    pub(super) fn are_v1(&self) -> bool {
        self.root.join("memory/cgroup.procs").exists()
    }

    /// Creates a node's group and, in it, `sys` for the node's own processes, in each hierarchy.
    pub(super) fn make(&self, id: &str, node: &str) -> anyhow::Result<()> {
        if self.is_v2 {
            return self.make_v2(id, node);
        }
        for hierarchy in HIERARCHIES.map(|name| self.root.join(name)) {
            if !hierarchy.is_dir() {
                continue;
            }
            let mut path = hierarchy.clone();
            for part in [tree(id).as_str(), node, "sys"] {
                path.push(part);
                std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
                // A new cpuset is empty, and no process can enter it.
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    if let Ok(all) = std::fs::read(hierarchy.join(file)) {
                        write(&path.join(file), &all)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Delegates controllers from each group above `sys`; processes are only in `sys`, as v2 then requires.
    fn make_v2(&self, id: &str, node: &str) -> anyhow::Result<()> {
        let available = read(&self.root.join("cgroup.controllers"))?;
        let wanted: Vec<String> = available
            .split_whitespace()
            .filter(|name| CONTROLLERS.contains(name))
            .map(|name| format!("+{name}"))
            .collect();
        let mut path = self.root.clone();
        for part in [tree(id).as_str(), node, "sys"] {
            write(
                &path.join("cgroup.subtree_control"),
                wanted.join(" ").as_bytes(),
            )?;
            path.push(part);
            std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Returns all processes in the groups of a cluster.
    pub(super) fn processes(&self, id: &str) -> Vec<u32> {
        self.trees(id)
            .iter()
            .flat_map(|tree| processes_in(tree))
            .collect()
    }

    /// Returns all processes in the groups of a node.
    pub(super) fn processes_of_node(&self, id: &str, node: &str) -> Vec<u32> {
        processes_in(&self.one_tree(id).join(node))
    }

    /// Returns all processes in the group of a container, which is named after the container's id.
    pub(super) fn processes_of_container(&self, id: &str, node: &str, container: &str) -> Vec<u32> {
        groups(&self.one_tree(id).join(node))
            .iter()
            .filter(|group| group.ends_with(container))
            .flat_map(|group| processes_in(group))
            .collect()
    }

    /// Removes the groups of a cluster; fails while a process is in one.
    pub(super) fn remove(&self, id: &str) -> anyhow::Result<()> {
        for tree in self.trees(id) {
            for group in groups(&tree).iter().rev() {
                std::fs::remove_dir(group).with_context(|| group.display().to_string())?;
            }
        }
        Ok(())
    }

    /// Returns the tree that contains each process of a cluster once.
    fn one_tree(&self, id: &str) -> PathBuf {
        let hierarchy = if self.is_v2 { "" } else { "memory" };
        self.root.join(hierarchy).join(tree(id))
    }

    /// Returns a cluster's tree in each hierarchy where it exists; runc creates one in v1's unified hierarchy too.
    fn trees(&self, id: &str) -> Vec<PathBuf> {
        if self.is_v2 {
            let tree = self.one_tree(id);
            return tree.is_dir().then_some(tree).into_iter().collect();
        }
        let hierarchies = std::fs::read_dir(&self.root).into_iter().flatten();
        hierarchies
            .flatten()
            .map(|hierarchy| hierarchy.path().join(tree(id)))
            .filter(|tree| tree.is_dir())
            .collect()
    }
}

/// Returns the name of a cluster's tree.
fn tree(id: &str) -> String {
    format!("hearth-{id}")
}

/// Returns a node's group in the form that the kubelet is given.
pub(super) fn of_node(id: &str, node: &str) -> String {
    format!("/{}/{node}", tree(id))
}

/// Returns a group and all below it, parents first.
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

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

fn write(file: &Path, content: &[u8]) -> anyhow::Result<()> {
    std::fs::write(file, content).with_context(|| file.display().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use super::*;

    /// Lays out a tree: each file with its content. On a real machine the kernel creates a group's files; here a Pod's
    /// are written too, as runc leaves them.
    fn laid_out(files: &[(&str, &str)]) -> (tempfile::TempDir, Groups) {
        let directory = tempfile::tempdir().unwrap();
        for (file, content) in files {
            let path = directory.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        let groups = Groups::at(directory.path());
        (directory, groups)
    }

    fn content(directory: &tempfile::TempDir, file: &str) -> String {
        std::fs::read_to_string(directory.path().join(file)).unwrap()
    }

    /// Debian 11's v1 hierarchies, with runc's group in the unified one.
    const V1: [(&str, &str); 8] = [
        ("cpuset/cpuset.cpus", "0-1\n"),
        ("cpuset/cpuset.mems", "0\n"),
        ("memory/cgroup.procs", "1\n"),
        (
            "memory/hearth-c1/node-1/kubepods/besteffort/pod7/abc/cgroup.procs",
            "41\n42\n",
        ),
        ("memory/hearth-c1/node-1/sys/cgroup.procs", "40\n"),
        ("pids/hearth-c1/node-1/sys/cgroup.procs", "40\n"),
        ("memory/hearth-c1/node-2/sys/cgroup.procs", "50\n"),
        ("unified/hearth-c1/node-1/cgroup.procs", ""),
    ];
    /// Debian 12's single hierarchy.
    const V2: [(&str, &str); 6] = [
        (
            "cgroup.controllers",
            "cpuset cpu io memory hugetlb pids rdma misc\n",
        ),
        ("cgroup.subtree_control", ""),
        ("system.slice/cgroup.procs", "1\n"),
        (
            "hearth-c1/node-1/kubepods/besteffort/pod7/abc/cgroup.procs",
            "41\n42\n",
        ),
        ("hearth-c1/node-1/sys/cgroup.procs", "40\n"),
        ("hearth-c1/node-2/sys/cgroup.procs", "50\n"),
    ];

    #[test]
    fn processes_are_found_in_both_kinds() {
        for (files, is_v1, all) in [(&V1[..], true, 5), (&V2[..], false, 4)] {
            let (_directory, groups) = laid_out(files);
            assert_eq!(groups.are_v1(), is_v1);
            let mut of_node = groups.processes_of_node("c1", "node-1");
            of_node.sort_unstable();
            assert_eq!(of_node, [40, 41, 42]);
            assert_eq!(
                groups.processes_of_container("c1", "node-1", "abc"),
                [41, 42]
            );
            assert_eq!(groups.processes("c1").len(), all);
            assert!(groups.processes("c2").is_empty());
        }
    }

    #[test]
    fn a_new_v1_cpuset_has_what_the_machine_has() {
        let (directory, groups) = laid_out(&V1);
        groups.make("c2", "node-1").unwrap();
        for group in ["hearth-c2", "hearth-c2/node-1", "hearth-c2/node-1/sys"] {
            assert_eq!(
                content(&directory, &format!("cpuset/{group}/cpuset.cpus")),
                "0-1\n"
            );
            assert!(directory.path().join("memory").join(group).is_dir());
        }
        assert!(
            !directory.path().join("blkio").exists(),
            "no such hierarchy"
        );
    }

    #[test]
    fn v2_groups_hand_controllers_down_to_where_pods_are_made() {
        let (directory, groups) = laid_out(&V2);
        groups.make("c2", "node-1").unwrap();
        for group in ["", "hearth-c2/", "hearth-c2/node-1/"] {
            assert_eq!(
                content(&directory, &format!("{group}cgroup.subtree_control")),
                "+cpuset +cpu +io +memory +hugetlb +pids"
            );
        }
        // A group with processes cannot delegate controllers.
        let own = directory.path().join("hearth-c2/node-1/sys");
        assert!(own.is_dir() && !own.join("cgroup.subtree_control").exists());
    }
}
