//! Measures this machine: CPUs, NUMA nodes, memory, disk and GPUs, into a [`NodeProfileStatus`].
//!
//! Facts reported by the kernel are read below a root path, so that tests run on recorded trees; rates that must be
//! measured go through a [`Meter`]. A container's limits apply, unless the node around it is requested: its CPU set,
//! its CPU quota and its memory limit define the machine. Anything missing or malformed is replaced by a simple
//! fallback and a line in [`Measured::warnings`]; only a machine without a usable CPU or without memory is an error.
//!
//! A whole profile takes about three seconds. [`observe`] rereads whatever can change without new hardware, and
//! [`take_rates`] adds the rates of an earlier profile, as long as [`hardware`] is the same; [`measure_once`] stores
//! such rates in a file.

#![forbid(unsafe_code)]

mod cgroup;
mod cpu;
mod disk;
mod error;
mod gpu;
mod hardware;
mod kept;
mod load;
mod mapped;
mod memory;
mod meter;
mod nvml;
mod placement;
mod summary;
mod tree;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hearth_crds::{
    ComputeProfile, DiskProfile, GpuProfile, IsaProfile, MemoryProfile, NodeProfileStatus,
    NumaNodeProfile, READER_VERSION,
};

pub use error::ProfileError;
pub use hardware::{hardware, take_rates};
pub use kept::{Kept, measure_once};
pub use meter::{CpuMeter, Gflops, Meter};
pub use nvml::{GpuPower, NvmlUnavailable, gpu_power, open_nvml};
pub use placement::{CpuTopology, NumaMemory, cpu_topology, numa_free_bytes, own_memory};
pub use summary::summary;
pub use tree::{format_id_list, parse_id_list};

use cgroup::Limits;
use load::Load;
use tree::Tree;

/// Memory limit of this process's control group, including its ancestors' limits; `None` if there is no limit. `root`
/// is the directory that contains `proc` and `sys`.
pub fn memory_limit_bytes(root: &Path) -> Option<u64> {
    cgroup::limits(&Tree::new(root)).memory_bytes
}

/// Memory that this process can get without taking it from another, page cache included, within the limits of its control
/// group; `None` if the kernel does not say.
pub fn available_memory_bytes(root: &Path) -> Option<u64> {
    let tree = Tree::new(root);
    let memory = memory::memory(&tree, &cgroup::limits(&tree));
    memory.ok().map(|memory| memory.available_bytes)
}

/// The same of the whole node, whatever this process may have of it.
pub fn available_on_node_bytes(root: &Path) -> Option<u64> {
    let memory = memory::memory(&Tree::new(root), &Limits::default());
    memory.ok().map(|memory| memory.available_bytes)
}

/// Scope of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The resources that this process may use.
    #[default]
    Process,
    /// The node, regardless of what this process may use of it: an agent in a small container measures it for other
    /// processes. CPUs are those online and not isolated, since a container with exclusive CPUs takes them from the
    /// sets of other containers and not from the node.
    Node,
}

/// Options of a measurement.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// Name of the node; `None` means the host name.
    pub node: Option<String>,
    /// Part of the machine to measure.
    pub scope: Scope,
    /// Directory whose disk is measured by reading the files in it; `None` measures no disk.
    pub disk: Option<PathBuf>,
    /// Whether to write a temporary file, removed at once, if the directory has too little to read.
    pub probe_disk: bool,
    /// Time of the measurement; `None` uses the current time.
    pub measured_at: Option<SystemTime>,
    /// Directory that contains `proc` and `sys`; `/` except in tests.
    pub root: PathBuf,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self {
            node: None,
            scope: Scope::default(),
            disk: None,
            probe_disk: false,
            measured_at: None,
            root: PathBuf::from("/"),
        }
    }
}

/// A profile, and the assumptions made for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The profile.
    pub profile: NodeProfileStatus,
    /// One line for each fact that was missing or implausible, with the assumption made instead.
    pub warnings: Vec<String>,
}

/// Reads the facts below `options.root` and gets rates from `meter`.
///
/// # Errors
/// [`ProfileError::NoCpu`] and [`ProfileError::NoMemory`] if nothing can be found out about either;
/// [`ProfileError::Clock`] for a time outside the calendar.
pub fn measure(options: &ProfileOptions, meter: &dyn Meter) -> Result<Measured, ProfileError> {
    let tree = Tree::new(&options.root);
    let own = cgroup::limits(&tree);
    let mut profile = facts(&tree, options, meter, &own)?;
    let rates = Rates {
        tree: &tree,
        meter,
        cache_bytes: cpu::last_level_cache_bytes(&tree, &profile.cpus),
        own_bytes: own.available_bytes,
    };
    let all = cpu::one_of_each_core(&profile.cpus);
    let before = Load::now(&tree);
    for _ in 0..ROUNDS {
        rates.of_memory(&all, &mut profile.memory, &mut profile.numa_nodes);
        rates.of_compute(&all, &mut profile.compute);
    }
    profile.busy_percent = before.and_then(|load| load.others_percent(&tree));
    rates.of_gpus(&mut profile.gpus);
    let disk = options.disk.as_deref();
    if let Some(directory) = disk {
        meter.tell(&format!("reads of the disk below {}", directory.display()));
    }
    let measured = disk.and_then(|disk| disk::measure(&tree, disk, options.probe_disk));
    if let Some(measured) = measured {
        let cached_bytes = profile.disks.first().and_then(|disk| disk.cached_bytes);
        profile.disks = vec![DiskProfile {
            cached_bytes,
            ..measured
        }];
    } else {
        profile.disks.clear();
    }
    round_rates(&mut profile);
    Ok(Measured {
        profile,
        warnings: tree.into_warnings(),
    })
}

/// Rounds each measured rate to three digits.
fn round_rates(profile: &mut NodeProfileStatus) {
    let NodeProfileStatus {
        memory,
        compute,
        numa_nodes,
        disks,
        ..
    } = profile;
    let of_memory = [
        &mut memory.read_one_thread_gbps,
        &mut memory.read_all_threads_gbps,
    ];
    let nodes = numa_nodes.iter_mut().map(|node| &mut node.read_gbps);
    let disks = disks
        .iter_mut()
        .flat_map(|disk| [&mut disk.read_gbps, &mut disk.mapped_read_gbps]);
    let rates = of_memory.into_iter().chain(compute_rates(compute));
    for rate in rates.chain(nodes).chain(disks) {
        *rate = three_digits(*rate);
    }
}

/// Its rates, always in the same order.
fn compute_rates(compute: &mut ComputeProfile) -> [&mut f64; 10] {
    [
        &mut compute.bf16_one_thread_gflops,
        &mut compute.bf16_all_threads_gflops,
        &mut compute.f32_one_thread_gflops,
        &mut compute.f32_all_threads_gflops,
        &mut compute.fp8_one_thread_gflops,
        &mut compute.fp8_all_threads_gflops,
        &mut compute.f16_one_thread_gflops,
        &mut compute.f16_all_threads_gflops,
        &mut compute.f32_weights_one_thread_gflops,
        &mut compute.f32_weights_all_threads_gflops,
    ]
}

/// Rounds a measured rate to three digits: the rest is noise, and a short number survives being written and read
/// again, so stored profiles can be compared.
pub fn three_digits(rate: f64) -> f64 {
    format!("{rate:.2e}").parse().unwrap_or(rate)
}

/// Reads everything that needs no measurement, in about a millisecond: all rates are 0.
///
/// # Errors
/// Same as [`measure`].
pub fn observe(options: &ProfileOptions) -> Result<Measured, ProfileError> {
    let tree = Tree::new(&options.root);
    let own = cgroup::limits(&tree);
    let profile = facts(&tree, options, &CpuMeter, &own)?;
    Ok(Measured {
        profile,
        warnings: tree.into_warnings(),
    })
}

/// Builds the profile without its rates. `own` is this process's limits.
fn facts(
    tree: &Tree,
    options: &ProfileOptions,
    meter: &dyn Meter,
    own: &Limits,
) -> Result<NodeProfileStatus, ProfileError> {
    let unlimited = Limits::default();
    let limits = match options.scope {
        Scope::Process => own,
        Scope::Node => &unlimited,
    };
    let mut cpus = cpu::usable_cpus(tree, limits, options.scope)?;
    let memory = memory::memory(tree, limits)?;
    let numa_nodes = memory::numa_nodes(tree, &mut cpus, &memory, options.scope);
    let disk = options.disk.as_deref();
    Ok(NodeProfileStatus {
        node: options.node.clone().unwrap_or_else(|| tree.host_name()),
        cpus,
        isa: isa(tree, meter),
        numa_nodes,
        memory,
        compute: ComputeProfile::default(),
        gpus: gpu::gpus(tree),
        disks: disk
            .and_then(|d| disk::unmeasured(tree, d))
            .map(|disk| match options.scope {
                Scope::Process => disk::with_cached(disk),
                Scope::Node => disk,
            })
            .into_iter()
            .collect(),
        links: Vec::new(),
        busy_percent: None,
        reader_version: Some(READER_VERSION),
        store: None,
        models: Vec::new(),
        measured_at: rfc3339(options.measured_at.unwrap_or_else(SystemTime::now))?,
    })
}

/// Instruction sets; AMX tiles only if the kernel reports them, since it must save their state.
fn isa(tree: &Tree, meter: &dyn Meter) -> IsaProfile {
    let cpuinfo = tree.read("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    IsaProfile {
        amx: flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "amx_bf16")),
        ..meter.isa()
    }
}

/// Times that memory and arithmetic are measured, one after the other: a neighbour on the host can take a third of one measurement,
/// for longer than it lasts.
const ROUNDS: usize = 2;

/// Rates from the meter; where it fails, a rate of 0 and a warning.
struct Rates<'a> {
    tree: &'a Tree,
    meter: &'a dyn Meter,
    cache_bytes: u64,
    /// Memory left within this process's limits; `None` if there is no limit.
    own_bytes: Option<u64>,
}

impl Rates<'_> {
    fn read_gbps(&self, cpus: &[u32], free_bytes: u64) -> f64 {
        let bytes = meter::probe_bytes(free_bytes, self.own_bytes, self.cache_bytes);
        self.meter
            .tell(&format!("reads of memory with {}", threads(cpus.len())));
        if self.own_bytes.is_some() && (bytes as u64) < self.cache_bytes {
            self.tree.warn(format!(
                "reads are measured over {} MiB, and the caches hold {}: the rates may be those of a cache; \
                 with a higher memory limit they would be those of memory",
                bytes >> 20,
                self.cache_bytes >> 20
            ));
        }
        self.or_warn("read bandwidth", self.meter.read_gbps(cpus, bytes))
    }

    fn or_warn<T: Default>(&self, what: &str, rate: Result<T, String>) -> T {
        rate.unwrap_or_else(|error| {
            let text = format!("{what} could not be measured: {error}: given as 0");
            self.tree.warn(text);
            T::default()
        })
    }

    /// Measures memory rates, and keeps those that were higher before. `all` has one CPU of each core.
    fn of_memory(&self, all: &[u32], memory: &mut MemoryProfile, nodes: &mut [NumaNodeProfile]) {
        let one = self.read_gbps(&all[..1], memory.available_bytes);
        let together = if all.len() > 1 {
            self.read_gbps(all, memory.available_bytes)
        } else {
            one
        };
        memory.read_one_thread_gbps = memory.read_one_thread_gbps.max(one);
        // Because of neighbours on a shared host, the longer measurement may be the slower one.
        memory.read_all_threads_gbps = memory.read_all_threads_gbps.max(together).max(one);
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
                node.read_gbps = node.read_gbps.max(self.read_gbps(&own, node.free_bytes));
            }
        }
    }

    /// Measures GPUs of whose memory little is taken: a process that computes takes much.
    fn of_gpus(&self, gpus: &mut [GpuProfile]) {
        for gpu in gpus {
            let is_idle = gpu.free_bytes >= gpu.memory_bytes / 4 * 3;
            let Some(measured) = is_idle.then(|| self.meter.gpu(gpu)).flatten() else {
                continue;
            };
            match measured {
                Ok(measured) => gpu.take_rates(&measured),
                Err(error) => self.tree.warn(format!(
                    "GPU {} ({}) could not be measured: {error}: its rates are estimates",
                    gpu.name, gpu.uuid
                )),
            }
        }
    }

    /// Measures arithmetic rates, and keeps those that were higher before.
    fn of_compute(&self, all: &[u32], compute: &mut ComputeProfile) {
        let gflops = |cpus: &[u32]| {
            self.meter
                .tell(&format!("arithmetic with {}", threads(cpus.len())));
            self.or_warn("arithmetic", self.meter.gflops(cpus))
        };
        let one = gflops(&all[..1]);
        let together = if all.len() > 1 { gflops(all) } else { one };
        let mut measured = ComputeProfile {
            bf16_one_thread_gflops: one.bf16,
            bf16_all_threads_gflops: together.bf16.max(one.bf16),
            f32_one_thread_gflops: one.f32,
            f32_all_threads_gflops: together.f32.max(one.f32),
            fp8_one_thread_gflops: one.fp8,
            fp8_all_threads_gflops: together.fp8.max(one.fp8),
            f16_one_thread_gflops: one.f16,
            f16_all_threads_gflops: together.f16.max(one.f16),
            f32_weights_one_thread_gflops: one.f32_weights,
            f32_weights_all_threads_gflops: together.f32_weights.max(one.f32_weights),
        };
        for (kept, new) in compute_rates(compute)
            .into_iter()
            .zip(compute_rates(&mut measured))
        {
            *kept = kept.max(*new);
        }
    }
}

fn threads(count: usize) -> String {
    match count {
        1 => "one thread".to_owned(),
        count => format!("{count} threads"),
    }
}

/// Formats a time as whole seconds of UTC, such as `2026-11-21T09:00:00Z`.
fn rfc3339(time: SystemTime) -> Result<String, ProfileError> {
    let time = jiff::Timestamp::try_from(time).map_err(|e| ProfileError::Clock(e.to_string()))?;
    let seconds = jiff::Timestamp::from_second(time.as_second())
        .map_err(|e| ProfileError::Clock(e.to_string()))?;
    Ok(seconds.to_string())
}
