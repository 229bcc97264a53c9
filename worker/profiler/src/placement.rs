//! Placement of a process on its machine: the cores and NUMA nodes of CPUs, and the NUMA nodes that hold its memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::cpu;
use crate::tree::{Tree, kib_line};

/// A CPU with its core and NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTopology {
    /// The kernel's CPU number.
    pub id: u32,
    /// Lowest of the CPUs that share its core.
    pub core: u32,
    /// Its NUMA node; 0 on a kernel that reports none.
    pub numa_node: u32,
}

/// Memory of a process on one NUMA node, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumaMemory {
    /// Mapped pages of weights.
    pub weight_bytes: u64,
    /// The process's own memory: KV cache, activations, heap.
    pub own_bytes: u64,
}

/// Returns all online CPUs, in ascending order, whether or not this process may use them. `root` is the directory that
/// contains `proc` and `sys`.
pub fn cpu_topology(root: &Path) -> Vec<CpuTopology> {
    let tree = Tree::new(root);
    let nodes = cpu::numa_of_cpus(&tree);
    let place = |id| CpuTopology {
        id,
        core: cpu::core_of(&tree, id),
        numa_node: nodes.get(&id).copied().unwrap_or(0),
    };
    cpu::online(&tree).into_iter().map(place).collect()
}

/// Reads this process's memory on each NUMA node from `/proc/self/numa_maps`: containers may read it even if they may
/// not query single pages (`move_pages`). Pages of `weights` count if this process has mapped them. Empty on a kernel
/// that does not report it. The kernel walks all pages for this, which takes about a second for 100 GiB.
pub fn own_memory(root: &Path, weights: &[PathBuf]) -> BTreeMap<u32, NumaMemory> {
    let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let weights: Vec<PathBuf> = weights.iter().map(real).collect();
    let text = std::fs::read_to_string(root.join("proc/self/numa_maps")).unwrap_or_default();
    let mut memory: BTreeMap<u32, NumaMemory> = BTreeMap::new();
    for line in text.lines() {
        let Some(mapping) = Mapping::parse(line) else {
            continue;
        };
        let is_weights = match &mapping.file {
            Some(file) if weights.contains(file) => true,
            // Program code and other files.
            Some(_) => continue,
            None => false,
        };
        for (node, bytes) in mapping.bytes {
            let sum = memory.entry(node).or_default();
            match is_weights {
                true => sum.weight_bytes += bytes,
                false => sum.own_bytes += bytes,
            }
        }
    }
    memory
}

/// Bytes of a NUMA node's memory that are completely free, without page cache: the kernel allocates on another node
/// before it reclaims page cache.
pub fn numa_free_bytes(root: &Path, node: u32) -> u64 {
    let text = Tree::new(root).read(&format!("{}/node{node}/meminfo", cpu::NODES));
    kib_line(&text.unwrap_or_default(), "MemFree").unwrap_or(0)
}

/// Parsed form of a line such as `7f12a000 default file=/models/a.safetensors mapped=30 N0=20 N1=10
/// kernelpagesize_kB=4`.
struct Mapping {
    file: Option<PathBuf>,
    bytes: Vec<(u32, u64)>,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_ascii_whitespace().skip(2).collect();
        let value = |name: &str| fields.iter().find_map(|field| field.strip_prefix(name));
        let page_bytes = value("kernelpagesize_kB=")?.parse::<u64>().ok()? << 10;
        let bytes = fields.iter().filter_map(|field| {
            let (node, pages) = field.strip_prefix('N')?.split_once('=')?;
            let pages: u64 = pages.parse().ok()?;
            Some((node.parse().ok()?, pages.saturating_mul(page_bytes)))
        });
        Some(Self {
            file: value("file=").map(|file| PathBuf::from(unescape(file))),
            bytes: bytes.collect(),
        })
    }
}

/// Undoes the kernel's escapes: it writes white space, `=` and `\` in a path as octal numbers, such as `\040`.
fn unescape(path: &str) -> String {
    let mut parts = path.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use std::io::Write;

    use super::*;

    #[test]
    fn memory_is_told_by_node_and_kind() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let maps = "\
            7f0000000000 default file=/m/a\\040b.safetensors mapped=30 active=0 N0=20 N1=10 kernelpagesize_kB=4\n\
            7f1000000000 default file=/usr/lib/libc.so.6 mapped=5 N0=5 kernelpagesize_kB=4\n\
            7f2000000000 default anon=3 dirty=3 N1=3 kernelpagesize_kB=2048\n\
            7f3000000000 interleave:0-1 heap anon=2 dirty=2 N0=1 N1=1 kernelpagesize_kB=4\n\
            7ffd00000000 default stack\n\
            what is this\n";
        std::fs::write(root.path().join("proc/self/numa_maps"), maps).unwrap();
        let memory = own_memory(root.path(), &[PathBuf::from("/m/a b.safetensors")]);
        let node = |weight_pages: u64, own_bytes| NumaMemory {
            weight_bytes: weight_pages << 12,
            own_bytes,
        };
        let expected = [(0, node(20, 4096)), (1, node(10, (6 << 20) + 4096))];
        assert_eq!(memory, BTreeMap::from(expected));
    }

    #[test]
    fn what_a_node_has_free_is_without_its_page_cache() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join("sys/devices/system/node/node1");
        std::fs::create_dir_all(&node).unwrap();
        let text = "Node 1 MemTotal:  1000 kB\nNode 1 MemFree:  40 kB\nNode 1 FilePages: 500 kB\n";
        std::fs::write(node.join("meminfo"), text).unwrap();
        assert_eq!(numa_free_bytes(root.path(), 1), 40 << 10);
        assert_eq!(numa_free_bytes(root.path(), 0), 0);
    }

    #[test]
    fn this_process_has_memory_somewhere() {
        if !Path::new("/proc/self/numa_maps").exists() {
            let _ = writeln!(std::io::stderr(), "SKIPPED: this kernel is without NUMA");
            return;
        }
        let memory = own_memory(Path::new("/"), &[]);
        assert!(memory.values().any(|node| node.own_bytes > 0), "{memory:?}");
        let places = cpu_topology(Path::new("/"));
        assert!(!places.is_empty());
    }
}
