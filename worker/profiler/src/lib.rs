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

use hearth_crds::{ComputeProfile, IsaProfile, NodeProfileSpec};

pub use error::ProfileError;
pub use meter::{CpuMeter, Element, Meter};
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

    let all: Vec<u32> = cpu::one_of_each_core(&cpus);
    let one = &all[..1];
    let probe_bytes = meter::probe_bytes(memory.available_bytes);
    memory.read_one_thread_gbps = meter.read_gbps(one, probe_bytes);
    memory.read_all_threads_gbps = meter
        .read_gbps(&all, probe_bytes)
        .max(memory.read_one_thread_gbps);
    if let [only] = numa_nodes.as_mut_slice() {
        only.read_gbps = memory.read_all_threads_gbps;
    } else {
        for node in &mut numa_nodes {
            let own: Vec<u32> = all
                .iter()
                .copied()
                .filter(|c| node.cpus.contains(c))
                .collect();
            let bytes = probe_bytes.min(meter::probe_bytes(node.free_bytes));
            node.read_gbps = if own.is_empty() {
                0.0
            } else {
                meter.read_gbps(&own, bytes)
            };
        }
    }
    let compute = ComputeProfile {
        bf16_one_thread_gflops: meter.gflops(one, Element::Bf16),
        bf16_all_threads_gflops: meter.gflops(&all, Element::Bf16),
        f32_one_thread_gflops: meter.gflops(one, Element::F32),
        f32_all_threads_gflops: meter.gflops(&all, Element::F32),
    };
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

/// Whole seconds of UTC, such as `2026-11-21T09:00:00Z`.
fn rfc3339(time: SystemTime) -> Result<String, ProfileError> {
    let time = jiff::Timestamp::try_from(time).map_err(|e| ProfileError::Clock(e.to_string()))?;
    let seconds = jiff::Timestamp::from_second(time.as_second())
        .map_err(|e| ProfileError::Clock(e.to_string()))?;
    Ok(seconds.to_string())
}
