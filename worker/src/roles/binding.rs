//! CPU binding of a plan's process: to the plan's CPUs as far as the system allows them, and to others otherwise.
//!
//! In a container the kubelet decides: its static policy assigns CPUs by itself, and removes them from the sets of all
//! other containers while those run. So the plan's CPU numbers are a preference, the control group's CPUs are checked
//! repeatedly, and threads are bound again even if nothing seems to have changed, since kernels before 6.2 discard
//! threads' affinity whenever their cpuset is written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hearth_crds::{Pinning, PlanRank, format_bytes};
use hearth_kernels::affinity::{self, ThreadId};
use hearth_kernels::ops::DeviceOps;
use hearth_kernels::{Backend, CpuBackend, KernelError};
use hearth_profiler::{
    CpuTopology, NumaMemory, cpu_topology, format_id_list, numa_free_bytes, own_memory,
};
use hearth_transport::v1;

/// Share of a worker's memory above which a NUMA node is reported: the kernel places some of it wherever it likes.
const TOLD_SHARE: f64 = 0.1;

/// Binds the threads of this process, and records the resources they got.
pub(super) struct Binding {
    rank: PlanRank,
    machine: Vec<CpuTopology>,
    /// CPUs that this process was restricted to at its start, if fewer than its control group has.
    asked: Option<Vec<usize>>,
    state: Mutex<State>,
}

type BindThreads = Box<dyn Fn(&[usize]) -> Result<usize, KernelError> + Send>;

#[derive(Default)]
struct State {
    /// CPUs that the process runs on, in ascending order.
    home: Vec<usize>,
    /// Binds the compute threads.
    bind: Option<BindThreads>,
    got: Allocation,
}

/// Resources that a process actually got.
#[derive(Clone, Debug, Default, PartialEq)]
struct Allocation {
    cpus: BTreeSet<u32>,
    numa_nodes: BTreeSet<u32>,
    /// Number of threads that compute on CPUs.
    threads: usize,
    gpu_uuid: Option<String>,
    /// Memory by NUMA node, known once the model is loaded.
    memory: BTreeMap<u32, NumaMemory>,
}

impl Binding {
    /// Binds this thread and those that it starts, then checks all threads of the process every `interval`. Must be
    /// called before there are other threads.
    ///
    /// # Errors
    /// An error if the system does not report the CPUs. Getting other or fewer CPUs than planned is not an error.
    pub(super) fn start(rank: &PlanRank, interval: Duration) -> anyhow::Result<Arc<Self>> {
        let asking = "the system does not report which CPUs this process may run on";
        let started = affinity::bound(None).context(asking)?;
        let available = affinity::release().context(asking)?;
        let binding = Arc::new(Self {
            rank: rank.clone(),
            machine: cpu_topology(Path::new("/")),
            asked: (started != available).then_some(started),
            state: Mutex::default(),
        });
        binding.bind(available);
        let looking = Arc::clone(&binding);
        std::thread::Builder::new()
            .name("placement".to_owned())
            .spawn(move || {
                loop {
                    std::thread::sleep(interval);
                    looking.look();
                }
            })
            .context("a thread could not be started")?;
        Ok(binding)
    }

    /// CPUs, by NUMA node, whose threads touch the rank's memory first; empty if the memory may be on any node.
    pub(super) fn numa_cpus(&self) -> Vec<Vec<usize>> {
        let machine_nodes: BTreeSet<u32> = self.machine.iter().map(|cpu| cpu.numa_node).collect();
        if !self.is_pinned() || self.rank.numa_nodes.is_empty() || machine_nodes.len() < 2 {
            return Vec::new();
        }
        let mut nodes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for &cpu in &self.lock().home {
            if let Some(node) = self.numa_node(cpu) {
                nodes.entry(node).or_default().push(cpu);
            }
        }
        let is_planned = |node: &u32| self.rank.numa_nodes.contains(node);
        if nodes.keys().any(is_planned) {
            nodes.retain(|node, _| is_planned(node));
        }
        nodes.into_values().collect()
    }

    /// Binds the threads of a backend, and of the CPUs that compute experts beside it, now and at every later check. To be
    /// called once they have been started.
    pub(super) fn take<B: Backend>(&self, backend: &Arc<B>, host: Option<&Arc<CpuBackend>>) {
        let mut state = self.lock();
        state.got.gpu_uuid = backend.gpu_uuid();
        state.got.threads = self.rank.threads as usize;
        if self.is_pinned() {
            let (backend, host) = (Arc::clone(backend), host.cloned());
            state.bind = Some(Box::new(move |cpus| {
                let of_device = backend.bind_compute_threads(cpus)?;
                host.as_ref()
                    .map_or(Ok(of_device), |host| host.bind_compute_threads(cpus))
            }));
        }
        drop(state);
        self.look();
    }

    /// Whether weights in memory, as `weights` are mapped now, are on other NUMA nodes than planned although the
    /// planned nodes have room: the process that read the files first ran elsewhere. Reading them again costs as much
    /// as the first time.
    pub(super) fn should_read_again(&self, weights: &[PathBuf]) -> bool {
        let memory = own_memory(Path::new("/"), weights);
        let bytes = |node: &u32| memory.get(node).map_or(0, |memory| memory.weight_bytes);
        let all: u64 = memory.keys().map(bytes).sum();
        let is_planned = |node: &&u32| self.rank.numa_nodes.contains(node);
        let strayed = all - memory.keys().filter(is_planned).map(bytes).sum::<u64>();
        if (strayed as f64) < TOLD_SHARE * all as f64 || strayed == 0 {
            return false;
        }
        let nodes = self.rank.numa_nodes.iter();
        let free = nodes
            .map(|node| numa_free_bytes(Path::new("/"), *node))
            .sum::<u64>();
        let has_room = free >= strayed;
        tracing::info!(
            rank = self.rank.name,
            strayed = format_bytes(strayed),
            planned = ?self.rank.numa_nodes,
            free = format_bytes(free),
            reads_again = has_room,
            "weights were in the page cache of other NUMA nodes"
        );
        has_room
    }

    /// Records the process's memory by NUMA node, once all of it is allocated. `weights` are the model's files.
    pub(super) fn loaded(&self, weights: &[PathBuf]) {
        let memory = own_memory(Path::new("/"), weights);
        let mut state = self.lock();
        state.got.memory = memory;
        tracing::info!(rank = self.rank.name, memory = ?state.got.memory, planned = ?self.rank.numa_nodes, "memory by NUMA node");
        self.warn(&state.got);
    }

    /// Returns the resources that the process got, for its status.
    pub(super) fn placement(&self) -> v1::Placement {
        let got = self.lock().got.clone();
        let memory_numa_nodes: BTreeSet<u32> = memory_shares(&got).map(|(node, _)| node).collect();
        v1::Placement {
            cpus: format_id_list(&got.cpus),
            numa_nodes: format_id_list(&got.numa_nodes),
            threads: got.threads as u32,
            memory_numa_nodes: match memory_numa_nodes.is_empty() {
                true => String::new(),
                false => format_id_list(&memory_numa_nodes),
            },
            memory: got
                .memory
                .iter()
                .map(|(node, memory)| v1::NumaMemory {
                    numa_node: *node,
                    weight_bytes: memory.weight_bytes,
                    own_bytes: memory.own_bytes,
                })
                .collect(),
            shortfalls: shortfalls(&self.rank, &got),
            gpu_uuid: got.gpu_uuid.unwrap_or_default(),
        }
    }

    fn look(&self) {
        // This thread is bound again with all others before anything is computed.
        match affinity::release() {
            Ok(available) => self.bind(available),
            Err(error) => tracing::warn!(%error, "this process's CPUs cannot be read"),
        }
    }

    fn bind(&self, available: Vec<usize>) {
        let available = match &self.asked {
            Some(asked) if !both(&available, asked).is_empty() => both(&available, asked),
            _ => available,
        };
        let home = match self.is_pinned() {
            true => home(&self.rank, &self.machine, &available),
            false => available,
        };
        let mut state = self.lock();
        let has_changed = state.home != home;
        // Unless binding was requested, the system places threads, and a mask would only keep them off newly added
        // CPUs.
        if self.is_pinned() || self.asked.is_some() {
            bind_threads(&home, has_changed);
        }
        if let Some(place) = &state.bind {
            match place(&one_of_each_core_first(&home, &self.machine)) {
                Ok(threads) => state.got.threads = threads,
                // The set changed again in the meantime: the next check sees it.
                Err(error) => tracing::debug!(%error, "CPUs have changed while threads were bound"),
            }
        }
        if has_changed {
            state.got.cpus = home.iter().map(|&cpu| cpu as u32).collect();
            state.got.numa_nodes = home.iter().filter_map(|&cpu| self.numa_node(cpu)).collect();
            tracing::info!(
                rank = self.rank.name,
                pinning = ?self.rank.pinning,
                planned = ?self.rank.cpus,
                cpus = ?home,
                numa = ?state.got.numa_nodes,
                "CPUs"
            );
            self.warn(&state.got);
            state.home = home;
        }
    }

    fn warn(&self, got: &Allocation) {
        for shortfall in shortfalls(&self.rank, got) {
            tracing::warn!(rank = self.rank.name, "not as planned: {shortfall}");
        }
    }

    fn is_pinned(&self) -> bool {
        self.rank.pinning != Pinning::None && !self.rank.cpus.is_empty()
    }

    fn numa_node(&self, cpu: usize) -> Option<u32> {
        numa_node(&self.machine, cpu)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Binds every thread of this process that may run outside `cpus`, or all threads if `all`. Compute threads are bound
/// more tightly afterwards.
fn bind_threads(cpus: &[usize], all: bool) {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let numbers = threads.flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        ThreadId::from_raw(number)
    });
    for thread in numbers {
        let is_inside =
            || affinity::bound(Some(thread)).is_ok_and(|bound| both(&bound, cpus) == bound);
        // A thread that ended in the meantime needs no binding, and the next check sees a changed cpuset.
        if (all || !is_inside())
            && let Err(error) = affinity::bind(Some(thread), cpus)
        {
            tracing::debug!(%error, ?cpus, "a thread is not bound");
        }
    }
}

/// Selects the CPUs to run on: the planned ones that are available, and a substitute for each of the others,
/// preferably from the planned NUMA nodes. Returns as many as planned, or all available if there are fewer.
fn home(rank: &PlanRank, machine: &[CpuTopology], available: &[usize]) -> Vec<usize> {
    let planned: Vec<usize> = rank.cpus.iter().map(|&cpu| cpu as usize).collect();
    let mut home = both(available, &planned);
    let mut others: Vec<usize> = available.to_vec();
    others.retain(|cpu| !home.contains(cpu));
    others.sort_by_key(|&cpu| {
        let node = numa_node(machine, cpu);
        (
            !node.is_some_and(|node| rank.numa_nodes.contains(&node)),
            cpu,
        )
    });
    let missing = planned.len().saturating_sub(home.len());
    home.extend(others.into_iter().take(missing));
    home.sort_unstable();
    home
}

/// Orders the CPUs for assignment to threads: one of each core before any core's second.
fn one_of_each_core_first(cpus: &[usize], machine: &[CpuTopology]) -> Vec<usize> {
    let core = |cpu: usize| {
        let place = machine.iter().find(|place| place.id as usize == cpu);
        place.map_or(cpu, |place| place.core as usize)
    };
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    let mut turns: Vec<(usize, usize)> = cpus
        .iter()
        .map(|&cpu| {
            let turn = seen.entry(core(cpu)).or_default();
            *turn += 1;
            (*turn, cpu)
        })
        .collect();
    turns.sort_unstable();
    turns.into_iter().map(|(_, cpu)| cpu).collect()
}

/// Lists the resources that a process lacks compared with its plan, one sentence each. Other CPUs on the same NUMA
/// nodes do not count.
fn shortfalls(rank: &PlanRank, got: &Allocation) -> Vec<String> {
    let mut found = Vec::new();
    let list = |ids: &[u32]| format_id_list(&ids.iter().copied().collect());
    let (planned, has) = (rank.cpus.len(), got.cpus.len());
    let is_pinned = rank.pinning != Pinning::None && planned > 0;
    if is_pinned && has < planned {
        found.push(format!(
            "CPUs {} where {planned} are planned ({})",
            format_id_list(&got.cpus),
            list(&rank.cpus)
        ));
    }
    let wanted = rank.threads as usize;
    if got.threads > 0 && got.threads < wanted {
        found.push(format!("{} of {wanted} threads compute", got.threads));
    } else if !is_pinned && has < wanted {
        found.push(format!("{wanted} threads share {has} CPUs"));
    }
    // A rank without a UUID takes any GPU.
    if let (Some(gpu), Some(planned)) = (got.gpu_uuid.as_deref(), rank.device().gpu_uuid())
        && gpu != planned
    {
        found.push(format!("GPU {gpu} where {planned} is planned"));
    }
    if rank.numa_nodes.is_empty() {
        return found;
    }
    let is_stray = |node: &&u32| !rank.numa_nodes.contains(node);
    let strays: BTreeSet<u32> = got.numa_nodes.iter().filter(is_stray).copied().collect();
    if !strays.is_empty() {
        found.push(format!(
            "CPUs on NUMA node {} where {} is planned",
            format_id_list(&strays),
            list(&rank.numa_nodes)
        ));
    }
    let weights: u64 = got.memory.values().map(|memory| memory.weight_bytes).sum();
    let all: u64 = got
        .memory
        .values()
        .map(|memory| memory.own_bytes)
        .sum::<u64>()
        + weights;
    for (node, memory) in got.memory.iter().filter(|(node, _)| is_stray(node)) {
        for (what, bytes, whole) in [
            ("the weights", memory.weight_bytes, weights),
            ("its own memory", memory.own_bytes, all),
        ] {
            if bytes > 0 && bytes as f64 >= TOLD_SHARE * whole as f64 {
                found.push(format!(
                    "{} of {what} on NUMA node {node} where {} is planned",
                    format_bytes(bytes),
                    list(&rank.numa_nodes)
                ));
            }
        }
    }
    found
}

/// NUMA nodes that hold enough of the memory to be reported, with their share.
fn memory_shares(got: &Allocation) -> impl Iterator<Item = (u32, f64)> {
    let bytes = |memory: &NumaMemory| (memory.weight_bytes + memory.own_bytes) as f64;
    let all: f64 = got.memory.values().map(bytes).sum();
    let shares = got
        .memory
        .iter()
        .map(move |(node, memory)| (*node, bytes(memory) / all));
    shares.filter(|(_, share)| *share >= TOLD_SHARE)
}

fn numa_node(machine: &[CpuTopology], cpu: usize) -> Option<u32> {
    let place = machine.iter().find(|place| place.id as usize == cpu);
    place.map(|place| place.numa_node)
}

/// Returns the elements of `these` that are also in `those`.
fn both(these: &[usize], those: &[usize]) -> Vec<usize> {
    these
        .iter()
        .copied()
        .filter(|id| those.contains(id))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two NUMA nodes of two cores with two threads each: CPUs 0 to 3 and 4 to 7, with adjacent siblings.
    fn machine() -> Vec<CpuTopology> {
        let place = |id| CpuTopology {
            id,
            core: id / 2 * 2,
            numa_node: id / 4,
        };
        (0..8).map(place).collect()
    }

    fn rank(cpus: &[u32], numa_nodes: &[u32], threads: u32) -> PlanRank {
        let json = serde_json::json!({
            "name": "decode-0", "role": "Decode", "index": 0, "node": "office", "cpus": cpus, "numaNodes": numa_nodes,
            "threads": threads, "pinning": "Exclusive", "device": "cpu", "maxBatch": 1, "chunkTokens": 1, "scratchBytes": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_plans_cpus_are_a_preference() {
        let rank = rank(&[2, 3], &[0], 2);
        let home = |available: &[usize]| home(&rank, &machine(), available);
        assert_eq!(home(&[0, 1, 2, 3, 4, 5, 6, 7]), [2, 3]);
        // One was assigned to another container: the next CPU of the same NUMA node takes its place.
        assert_eq!(home(&[0, 3, 4, 5]), [0, 3]);
        assert_eq!(home(&[3, 4, 5]), [3, 4]);
        // The kubelet chose none of the planned CPUs.
        assert_eq!(home(&[6, 7]), [6, 7]);
        assert_eq!(home(&[5]), [5]);
    }

    #[test]
    fn threads_take_whole_cores_first() {
        assert_eq!(
            one_of_each_core_first(&[0, 1, 2, 3], &machine()),
            [0, 2, 1, 3]
        );
        assert_eq!(one_of_each_core_first(&[1, 4, 5], &machine()), [1, 4, 5]);
        assert_eq!(one_of_each_core_first(&[2, 1], &[]), [1, 2]);
    }

    fn got(cpus: &[u32], threads: usize) -> Allocation {
        let node = |cpu: &u32| cpu / 4;
        Allocation {
            cpus: cpus.iter().copied().collect(),
            numa_nodes: cpus.iter().map(node).collect(),
            threads,
            ..Allocation::default()
        }
    }

    #[test]
    fn what_is_less_than_planned_is_said_and_other_numbers_are_not() {
        let rank = rank(&[2, 3], &[0], 2);
        assert_eq!(shortfalls(&rank, &got(&[0, 1], 2)), Vec::<String>::new());
        assert_eq!(
            shortfalls(&rank, &got(&[5], 1)),
            [
                "CPUs 5 where 2 are planned (2-3)",
                "1 of 2 threads compute",
                "CPUs on NUMA node 1 where 0 is planned"
            ]
        );
        let memory = |weight_bytes, own_bytes| NumaMemory {
            weight_bytes,
            own_bytes,
        };
        let mut strayed = got(&[0, 1], 2);
        strayed.memory = BTreeMap::from([(0, memory(60, 20)), (1, memory(20, 4))]);
        assert_eq!(
            shortfalls(&rank, &strayed),
            ["20 B of the weights on NUMA node 1 where 0 is planned"]
        );
        strayed.memory = BTreeMap::from([(0, memory(96, 10)), (1, memory(4, 30))]);
        assert_eq!(
            shortfalls(&rank, &strayed),
            ["30 B of its own memory on NUMA node 1 where 0 is planned"]
        );
        strayed.memory = BTreeMap::from([(0, memory(96, 0)), (1, memory(4, 2))]);
        assert_eq!(shortfalls(&rank, &strayed), Vec::<String>::new());
    }

    #[test]
    fn another_gpu_than_planned_is_said_where_one_is_planned() {
        let mut rank = rank(&[2, 3], &[0], 2);
        let mut handed_out = got(&[2, 3], 2);
        handed_out.gpu_uuid = Some("GPU-2".to_owned());
        assert_eq!(shortfalls(&rank, &handed_out), Vec::<String>::new());
        rank.gpu_uuids = vec!["GPU-2".to_owned()];
        assert_eq!(shortfalls(&rank, &handed_out), Vec::<String>::new());
        rank.gpu_uuids = vec!["GPU-1".to_owned()];
        assert_eq!(
            shortfalls(&rank, &handed_out),
            ["GPU GPU-2 where GPU-1 is planned"]
        );
    }

    #[test]
    fn a_rank_without_pinning_only_counts() {
        let mut free = rank(&[0, 1, 2, 3], &[], 4);
        free.pinning = Pinning::None;
        assert_eq!(
            shortfalls(&free, &got(&[6, 7], 4)),
            ["4 threads share 2 CPUs"]
        );
        assert_eq!(
            shortfalls(&free, &got(&[0, 5, 6, 7], 4)),
            Vec::<String>::new()
        );
    }
}
