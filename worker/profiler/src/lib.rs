//! Measures this machine: CPUs, NUMA nodes, memory, disk and GPUs, into a [`NodeProfileSpec`].
//!
//! What the kernel tells is read below a root path, so that tests run on recorded trees; what must be measured
//! goes through a [`Meter`]. Limits of a container count: its CPU set, its CPU quota and its memory limit are the
//! machine. Whatever is missing or malformed is replaced by a plain fallback and a line in
//! [`Measured::warnings`]; only a machine without a usable CPU or without memory is an error.
//!
//! A whole profile takes about a second. Callers keep the result: nothing here is cached.

#![forbid(unsafe_code)]

mod cgroup;
mod cpu;
mod disk;
mod error;
mod gpu;
mod memory;
mod meter;
mod summary;
mod tree;

use std::path::PathBuf;
use std::time::SystemTime;

use hearth_crds::{ComputeProfile, IsaProfile, MemoryProfile, NodeProfileSpec, NumaNodeProfile};

pub use error::ProfileError;
pub use meter::{CpuMeter, Gflops, Meter};
pub use summary::summary;
pub use tree::parse_id_list;

use tree::Tree;

/// What to measure, and how it is called.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Name of the node; none: the host name.
    pub node: Option<String>,
    /// A directory whose disk is measured, by reading the files in it; none: no disk.
    pub disk: Option<PathBuf>,
    /// When it is measured; none: now.
    pub measured_at: Option<SystemTime>,
    /// Where `proc` and `sys` are found; `/` but in tests.
    pub root: PathBuf,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self {
            node: None,
            disk: None,
            measured_at: None,
            root: PathBuf::from("/"),
        }
    }
}

/// A profile, and what had to be guessed for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The profile.
    pub profile: NodeProfileSpec,
    /// One line for each fact that was missing or odd, with what was assumed instead.
    pub warnings: Vec<String>,
}

/// Measures this machine and logs the warnings.
///
/// # Errors
/// As [`measure`].
pub fn profile(options: &ProfileOptions) -> Result<NodeProfileSpec, ProfileError> {
    let Measured { profile, warnings } = measure(options, &CpuMeter)?;
    for warning in warnings {
        tracing::warn!("profile: {warning}");
    }
    Ok(profile)
}

/// Reads the facts below `options.root` and takes rates from `meter`.
///
/// # Errors
/// [`ProfileError::NoCpu`] and [`ProfileError::NoMemory`] when nothing can be found out about either;
/// [`ProfileError::Clock`] for a time outside of the calendar.
pub fn measure(options: &ProfileOptions, meter: &dyn Meter) -> Result<Measured, ProfileError> {
    let tree = Tree::new(&options.root);
    let limits = cgroup::limits(&tree);
    let mut cpus = cpu::usable_cpus(&tree, &limits)?;
    let mut memory = memory::memory(&tree, &limits)?;
    let mut numa_nodes = memory::numa_nodes(&tree, &mut cpus, &memory);

    let rates = Rates {
        tree: &tree,
        meter,
        cache_bytes: cpu::last_level_cache_bytes(&tree, &cpus),
    };
    let all = cpu::one_of_each_core(&cpus);
    rates.of_memory(&all, &mut memory, &mut numa_nodes);
    let compute = rates.of_compute(&all);
    let disk = options.disk.as_deref();
    let profile = NodeProfileSpec {
        node: options.node.clone().unwrap_or_else(|| tree.host_name()),
        cpus,
        isa: isa(&tree, meter),
        numa_nodes,
        memory,
        compute,
        gpus: gpu::gpus(&tree),
        disks: disk
            .and_then(|d| disk::measure(&tree, d))
            .into_iter()
            .collect(),
        links: Vec::new(),
        measured_at: rfc3339(options.measured_at.unwrap_or_else(SystemTime::now))?,
    };
    Ok(Measured {
        profile,
        warnings: tree.into_warnings(),
    })
}

/// Instruction sets; tiles only where the kernel tells of them, for it must save them.
fn isa(tree: &Tree, meter: &dyn Meter) -> IsaProfile {
    let cpuinfo = tree.read("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    IsaProfile {
        amx: flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "amx_bf16")),
        ..meter.isa()
    }
}

/// What the meter tells, and a warning with a rate of 0 where it cannot.
struct Rates<'a> {
    tree: &'a Tree,
    meter: &'a dyn Meter,
    cache_bytes: u64,
}

impl Rates<'_> {
    fn read_gbps(&self, cpus: &[u32], free_bytes: u64) -> f64 {
        let bytes = meter::probe_bytes(free_bytes, self.cache_bytes);
        self.or_warn("read bandwidth", self.meter.read_gbps(cpus, bytes))
    }

    fn or_warn<T: Default>(&self, what: &str, rate: Result<T, String>) -> T {
        rate.unwrap_or_else(|error| {
            let text = format!("{what} could not be measured: {error}: given as 0");
            self.tree.warn(text);
            T::default()
        })
    }

    /// `all`: one CPU of each core.
    fn of_memory(&self, all: &[u32], memory: &mut MemoryProfile, nodes: &mut [NumaNodeProfile]) {
        let one = self.read_gbps(&all[..1], memory.available_bytes);
        let together = if all.len() > 1 {
            self.read_gbps(all, memory.available_bytes)
        } else {
            one
        };
        memory.read_one_thread_gbps = one;
        // Neighbours on a shared host can make the longer measurement the slower one.
        memory.read_all_threads_gbps = together.max(one);
        if let [only] = nodes {
            only.read_gbps = memory.read_all_threads_gbps;
            return;
        }
        for node in nodes {
            let own: Vec<u32> = all
                .iter()
                .copied()
                .filter(|cpu| node.cpus.contains(cpu))
                .collect();
            if !own.is_empty() {
                node.read_gbps = self.read_gbps(&own, node.free_bytes);
            }
        }
    }

    fn of_compute(&self, all: &[u32]) -> ComputeProfile {
        let gflops = |cpus| self.or_warn("arithmetic", self.meter.gflops(cpus));
        let one = gflops(&all[..1]);
        let together = if all.len() > 1 { gflops(all) } else { one };
        ComputeProfile {
            bf16_one_thread_gflops: one.bf16,
            bf16_all_threads_gflops: together.bf16.max(one.bf16),
            f32_one_thread_gflops: one.f32,
            f32_all_threads_gflops: together.f32.max(one.f32),
        }
    }
}

/// Whole seconds of UTC, such as `2026-11-21T09:00:00Z`.
fn rfc3339(time: SystemTime) -> Result<String, ProfileError> {
    let time = jiff::Timestamp::try_from(time).map_err(|e| ProfileError::Clock(e.to_string()))?;
    let seconds = jiff::Timestamp::from_second(time.as_second())
        .map_err(|e| ProfileError::Clock(e.to_string()))?;
    Ok(seconds.to_string())
}
