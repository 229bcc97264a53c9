//! What is said where no ring has room: what the model needs, what each node has, and a change that fits.

use std::cmp::Reverse;

use hearth_crds::{
    FieldError, GpuProfile, NodeProfileStatus, RING_VERSION, Strategy, format_bytes,
};

use super::members::{Member, Members};
use super::problem::kv_layer_bytes;
use super::{RingPlanning, too_old};
use crate::advice::smaller_kv;
use crate::disks;
use crate::error::{Advice, PlanError};
use crate::halda::{Limits, Problem, RingError, has_ring};
use crate::memory::Demand;

/// What of memory is lacking.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// A node that holds what is on the head's alone.
    Head,
    /// Memory of all members together.
    Total,
    /// Anything else.
    Other,
}

impl RingPlanning<'_> {
    /// The error where no node and no GPU can be a member.
    pub(super) fn nobody(&self, members: &Members<'_>) -> PlanError {
        let why = left_out(members);
        if members.lack_memory {
            let accounts = format!("no member has room for a layer: {}", why.join("; "));
            return self.no_room(accounts, Vec::new(), Lack::Other);
        }
        let why = match why.is_empty() {
            true => "no node has CPUs for a member".to_owned(),
            false => why.join("; "),
        };
        let strategy = self.input.spec.strategy;
        PlanError::Unsupported(vec![FieldError::new(
            "spec.strategy",
            format!("is \"{strategy:?}\", and no node can be in a ring"),
            why,
        )])
    }

    /// The error for members of which no ring has room.
    pub(super) fn refusal(&self, members: &Members<'_>, error: RingError) -> PlanError {
        if !matches!(
            error,
            RingError::NoRoom { .. } | RingError::FullBefore { .. }
        ) {
            return PlanError::NoRing(error);
        }
        let problem = members.problem(self, self.longest_passes());
        let devices = problem.devices.iter();
        let room_bytes: u64 = devices
            .map(|device| device.memory_bytes.saturating_sub(device.buffer_bytes))
            .sum();
        let has_gateways = |n: usize| n == members.all[0].n || self.input.spec.gateway.replicas > 1;
        let rooms = members.all.iter().zip(&problem.devices);
        let rooms: Vec<String> = rooms
            .map(|(member, device)| account(member, device.buffer_bytes, has_gateways(member.n)))
            .collect();
        let no_head = self.no_head(members);
        let lack = match (&no_head, room_bytes < self.all_bytes()) {
            (Some(_), _) => Lack::Head,
            (None, true) => Lack::Total,
            (None, false) => Lack::Other,
        };
        let tried = match &*members.all {
            [_] => String::new(),
            all => format!("each was tried as the head; with {} as it, ", all[0].name),
        };
        let room = format!("{tried}there is room for {}", rooms.join(", "));
        let mut accounts = vec![no_head.unwrap_or(room)];
        accounts.extend(must_fit(members));
        accounts.extend(left_out(members));
        let disks = self.measured_disks(members).into_iter().collect();
        self.no_room(accounts.join("; "), disks, lack)
    }

    /// What is said where a ring would fit if its head took no more than any other member: no node has room for what is on the
    /// head's alone.
    fn no_head(&self, members: &Members<'_>) -> Option<String> {
        let gateway_bytes = self.demand.gateway_scratch_bytes();
        let cpus = || members.all.iter().filter(|member| member.gpu.is_none());
        let fits = self.fits_with(members, |problem| {
            (problem.head.stored_bytes, problem.head.embedding_bytes) = (0, 0);
            let head = &mut problem.devices[0];
            if cpus().any(|member| member.name == head.name) {
                head.buffer_bytes = head.buffer_bytes.saturating_sub(gateway_bytes);
            }
        });
        let most = cpus().max_by_key(|member| member.memory_bytes())?;
        let processes_bytes =
            self.demand.worker_scratch_bytes() + self.host_bytes(members.gpus_on(most.n), 0);
        let gateways_bytes = self.host_bytes(0, self.input.spec.gateway.replicas.max(1));
        let ends = &members.layers.ends.bytes;
        // Where weights may be mapped, the embedding takes no memory.
        let (ends_bytes, name) = match most.rates.disk_gbps < disks::SLOW_GBPS {
            true => (ends.total(), "embedding and output head"),
            false => (ends.head, "output head"),
        };
        let layer_bytes = members.layers.layer(0).bytes.total() + kv_layer_bytes(self);
        let all_bytes = processes_bytes + gateways_bytes + ends_bytes + layer_bytes;
        let is_cause = fits && all_bytes > most.memory_bytes();
        is_cause.then(|| {
            format!(
                "no node has room for the head, which takes {}: {} for gateways, {} for processes, {} for {name}, and {} for a layer with its KV; most is free on {}, {}",
                format_bytes(all_bytes),
                format_bytes(gateways_bytes),
                format_bytes(processes_bytes),
                format_bytes(ends_bytes),
                format_bytes(layer_bytes),
                most.node.node,
                format_bytes(most.memory_bytes())
            )
        })
    }

    /// Bytes of the model's weights and of the KV that a ring has at the least.
    fn all_bytes(&self) -> u64 {
        self.demand.facts.bytes.total() + self.kv_bytes()
    }

    /// The error where there are accounts of too little room, with advice that was found, and with more memory where that is what
    /// is lacking or nothing else was found.
    fn no_room(&self, mut accounts: String, mut advice: Vec<Advice>, lack: Lack) -> PlanError {
        let fits = |demand: &Demand<'_>| RingPlanning { demand, ..*self }.fits();
        advice.extend(smaller_kv(self.demand, fits));
        if lack != Lack::Other || advice.is_empty() {
            let more = self.more_memory(lack);
            let (more, alone) = more.unwrap_or((Advice::SmallerModel, String::new()));
            accounts += &alone;
            advice.push(more);
        }
        PlanError::NoRoomInRing {
            weights_bytes: self.demand.facts.bytes.total(),
            kv_bytes: self.kv_bytes(),
            kv_of: match self.demand.kv_memory_bytes {
                Some(_) => "spec.decode.kvCache.memory".to_owned(),
                None => format!("one context of {} tokens", self.demand.context_length),
            },
            accounts,
            advice,
        }
    }

    /// Bytes of KV that a ring has at the least.
    fn kv_bytes(&self) -> u64 {
        let demand = self.demand;
        let asked = demand.kv_memory_bytes;
        asked.unwrap_or_else(|| demand.kv_bytes(demand.context_length))
    }

    /// Disks that were not measured, where a ring would fit if they are fast enough to be read for each token.
    fn measured_disks(&self, members: &Members<'_>) -> Option<Advice> {
        let cpus = members.all.iter().filter(|member| member.gpu.is_none());
        let unmeasured = cpus.filter(|member| member.rates.disk_gbps <= 0.0);
        let (names, nodes): (Vec<&str>, Vec<&str>) = unmeasured
            .map(|member| (&*member.name, &*member.node.node))
            .unzip();
        if names.is_empty() {
            return None;
        }
        let fits = self.fits_with(members, |problem| {
            let devices = problem.devices.iter_mut();
            for device in devices.filter(|device| names.contains(&&*device.name)) {
                device.must_fit = false;
                device.disk_read_gbps = disks::SLOW_GBPS;
            }
        });
        fits.then(|| Advice::MeasureDisks(nodes.join(", ")))
    }

    /// The least more memory of one node, of those with the most, with which a ring fits: of what others use there now; and what is
    /// said of the memory with which that node could do without the others. Where the spec asks for a ring and that would be none,
    /// it is the memory of two nodes that makes one.
    fn more_memory(&self, lack: Lack) -> Option<(Advice, String)> {
        let nodes = self.estimator.nodes();
        let (n, most) = self.nodes_by_memory().next()?;
        let memory = &most.memory;
        let used_bytes = memory.total_bytes.saturating_sub(memory.available_bytes);
        let fits = |mib: u64| self.with_more(&[(n, mib)], |ring| ring.fits());
        let name = &most.node;
        let alone = |most_bytes: u64| {
            let fits_alone = |mib: u64| {
                let freed = with_more(most, mib);
                let alone = [&freed];
                let estimator = &self.estimator.with_nodes(&alone);
                RingPlanning { estimator, ..*self }.fits()
            };
            let alone_mib = least_mib(most_bytes >> 20, 16, fits_alone);
            let alone_mib = alone_mib.filter(|_| nodes.len() > 1);
            alone_mib.map_or_else(String::new, |mib| {
                format!("; with {mib} MiB more, {name} could serve the model alone")
            })
        };
        if let Some(mib) = least_mib(used_bytes >> 20, 16, fits) {
            let is_asked = self.input.spec.strategy == Strategy::PipedRing;
            let is_none = is_asked && self.with_more(&[(n, mib)], |ring| ring.is_of_one());
            let both = is_none.then(|| self.memory_of_two(n)).flatten();
            let advice = both.unwrap_or_else(|| Advice::FreeMemoryOf(name.clone(), mib << 20));
            return Some((advice, alone(used_bytes)));
        }
        if lack != Lack::Head {
            return None;
        }
        let all_bytes = self.all_bytes() + self.host_bytes(0, 1);
        let mib = least_mib(all_bytes >> 20, 16, fits)?;
        let advice = Advice::MoreMemoryOf(name.clone(), mib << 20);
        Some((advice, alone(all_bytes)))
    }

    /// More memory of two nodes with which there is a ring of several members, of what others use there now: of that with the most
    /// after `n`, unless it is a member, as much as makes it one with half the model, and of `n` the least that a ring then lacks.
    fn memory_of_two(&self, n: usize) -> Option<Advice> {
        let (second, other) = self.nodes_by_memory().find(|(at, _)| *at != n)?;
        let used_mib = |node: &NodeProfileStatus| {
            let memory = &node.memory;
            memory.total_bytes.saturating_sub(memory.available_bytes) >> 20
        };
        let is_member = |mib: u64| {
            self.with_more(&[(second, mib)], |ring| {
                let mut members = Members::of(ring, &|_| false).all.into_iter();
                members.any(|member| member.n == second)
            })
        };
        let half_mib = (self.all_bytes() / 2) >> 20;
        let other_mib = match is_member(0) {
            true => 0,
            false => least_mib(used_mib(other), 16, is_member)?.saturating_add(half_mib),
        };
        let other_mib = other_mib.min(used_mib(other));
        let most = self.estimator.nodes()[n];
        let with_both = |mib: u64| [(second, other_mib), (n, mib)];
        let fits = |mib: u64| self.with_more(&with_both(mib), |ring| ring.fits());
        let mib = least_mib(used_mib(most), u64::MAX, fits)?;
        let is_none = self.with_more(&with_both(mib), |ring| ring.is_of_one());
        let more = [(most, mib), (other, other_mib)].into_iter();
        let more = more.filter(|(_, mib)| *mib > 0);
        let more = more.map(|(node, mib)| (node.node.clone(), mib << 20));
        (!is_none).then(|| Advice::FreeMemoryOfNodes(more.collect()))
    }

    /// Nodes that may be in a ring with their indices, those with the most memory first.
    fn nodes_by_memory(&self) -> impl Iterator<Item = (usize, &NodeProfileStatus)> {
        let nodes = self.estimator.nodes().iter().copied().enumerate();
        let may_be_in = nodes.filter(|(_, node)| node.reads_up_to() >= RING_VERSION);
        let mut nodes: Vec<(usize, &NodeProfileStatus)> = may_be_in.collect();
        nodes.sort_by_key(|(n, node)| Reverse((node.memory.available_bytes, *n)));
        nodes.into_iter()
    }

    /// What is told of rings once nodes, by their indices, have so many MiB more.
    fn with_more(&self, more: &[(usize, u64)], tell: impl Fn(&RingPlanning<'_>) -> bool) -> bool {
        let nodes = self.estimator.nodes();
        let more_of = |n: usize| more.iter().find(|(at, _)| *at == n).map(|(_, mib)| *mib);
        let freed = nodes.iter().enumerate();
        let freed = freed.map(|(n, node)| with_more(node, more_of(n).unwrap_or(0)));
        let freed: Vec<NodeProfileStatus> = freed.collect();
        let freed: Vec<&NodeProfileStatus> = freed.iter().collect();
        let estimator = &self.estimator.with_nodes(&freed);
        tell(&RingPlanning { estimator, ..*self })
    }

    /// Whether the best ring, by greedy splits alone, is one member alone. Where none has room for all layers, as is usual once a
    /// node has the least more with which a ring fits, that takes no search.
    fn is_of_one(&self) -> bool {
        let has_room = self.holds_of_some(|members| {
            let problems = members.problems_by_head(self, self.longest_passes());
            let mut problems = problems.iter();
            problems.any(|problem| problem.end_by_room(0, 0).1 == problem.layers.len())
        });
        if !has_room {
            return false;
        }
        let members = Members::of(self, &|_| true);
        let chosen = self.choose(&members, greedy_limits(members.all.len()));
        chosen.is_ok_and(|chosen| chosen.size() == 1)
    }

    /// Whether some ring has room, of all that may be members or of the CPUs alone, by greedy splits alone.
    fn fits(&self) -> bool {
        self.holds_of_some(|members| self.fits_with(members, |_| {}))
    }

    /// Whether something holds of all that may be members, or of the CPUs alone.
    fn holds_of_some(&self, holds: impl Fn(&Members<'_>) -> bool) -> bool {
        let of = |may_use: &dyn Fn(&GpuProfile) -> bool| holds(&Members::of(self, may_use));
        let mut nodes = self.estimator.nodes().iter();
        let has_gpus = nodes.any(|node| !node.gpus.is_empty());
        of(&|_| true) || has_gpus && of(&|_| false)
    }

    /// Whether some ring of members has room after a change to its problem, by greedy splits alone.
    fn fits_with(&self, members: &Members<'_>, change: impl Fn(&mut Problem)) -> bool {
        let limits = greedy_limits(members.all.len());
        let mut problems = members
            .problems_by_head(self, self.longest_passes())
            .into_iter();
        problems.any(|mut problem| {
            change(&mut problem);
            has_ring(&problem, limits)
        })
    }
}

/// A node of whose memory so many MiB more are available.
fn with_more(node: &NodeProfileStatus, mib: u64) -> NodeProfileStatus {
    let mut freed = node.clone();
    freed.memory.available_bytes += mib << 20;
    freed
}

/// The least MiB up to `most` that are enough, to one of so many parts of them; `None` if none are.
fn least_mib(most: u64, parts: u64, is_enough: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut less, mut enough) = (0, most);
    if enough == 0 || !is_enough(enough) {
        return None;
    }
    while enough - less > enough / parts + 1 {
        let middle = less.midpoint(enough);
        match is_enough(middle) {
            true => enough = middle,
            false => less = middle,
        }
    }
    Some(enough)
}

/// Who cannot be a member, each with the reason.
fn left_out(members: &Members<'_>) -> Vec<String> {
    let mut why = [&*members.refused_cpus, &*members.refused_gpus].concat();
    if !members.too_old.is_empty() {
        why.push(too_old(&members.too_old));
    }
    why
}

/// Limits with which refusals look for rings of so many members: without integer programs.
fn greedy_limits(members: usize) -> Limits {
    Limits {
        programs: 0,
        nodes: 0,
        ..Limits::default().shared_by(members)
    }
}

/// What a member has.
fn account(member: &Member<'_>, buffer_bytes: u64, has_gateways: bool) -> String {
    let left = format_bytes(member.memory_bytes().saturating_sub(buffer_bytes));
    let all = format_bytes(member.memory_bytes());
    let rest = match &member.gpu {
        Some(_) => "activations and padding",
        None if has_gateways => "processes and gateways",
        None => "processes",
    };
    format!("{} {left} (of {all}, the rest for {rest})", member.name)
}

/// Whose disks are no help, so that all of their layers must fit.
fn must_fit(members: &Members<'_>) -> Vec<String> {
    let of = |is_meant: &dyn Fn(f64) -> bool, [one, more]: [&str; 2]| {
        let cpus = members.all.iter().filter(|member| member.gpu.is_none());
        let meant = cpus.filter(|member| is_meant(member.rates.disk_gbps));
        let nodes: Vec<&str> = meant.map(|member| &*member.node.node).collect();
        match nodes.len() {
            0 => None,
            1 => Some(format!(
                "the disk of {} {one}, so that all of its layers must fit",
                nodes[0]
            )),
            _ => Some(format!(
                "the disks of {} {more}, so that all of their layers must fit",
                nodes.join(", ")
            )),
        }
    };
    let unmeasured = of(
        &|gbps| gbps <= 0.0,
        ["was not measured", "were not measured"],
    );
    let slow = of(
        &|gbps| gbps > 0.0 && gbps < disks::SLOW_GBPS,
        ["is slow", "are slow"],
    );
    unmeasured.into_iter().chain(slow).collect()
}
