//! Nodes that may take ranks, and the resources that each can still provide.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hearth_crds::{GpuProfile, NodeProfileStatus, PlacementSpec, TolerationSpec};
use hearth_planner::CpuRoom;
use jiff::Timestamp;

use crate::age::age;
use crate::observed::{Holding, NodeView, Observed, PASSING_TAINT, Requests, Taint};

/// Nodes that may take ranks of one deployment, and the reasons why the others may not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Candidates {
    /// Resources that each node can provide, by name: its profile minus what others hold.
    pub(crate) free: BTreeMap<String, NodeProfileStatus>,
    /// GPUs that each of them can provide.
    pub(crate) gpus_free: BTreeMap<String, u32>,
    /// UUIDs that may be claimed, for nodes whose GPUs are allocated by claims.
    pub(crate) claimable: BTreeMap<String, BTreeSet<String>>,
    /// CPU that may be requested on each of them.
    pub(crate) cpu_rooms: BTreeMap<String, CpuRoom>,
    /// Reason why each of the other nodes is left out, by name, such as `is cordoned`.
    pub(crate) left_out: BTreeMap<String, String>,
}

impl Candidates {
    /// Looks at every node of the cluster.
    pub(crate) fn of(observed: &Observed, placement: &PlacementSpec) -> Self {
        let mut candidates = Self::default();
        for (name, node) in &observed.nodes {
            let held = observed.held_by_others.get(name);
            let occupied = OccupiedNode {
                node,
                held,
                others: observed.others.on(name, observed.settings.ledger.unseen),
            };
            match occupied.free_profile(placement) {
                Ok(profile) => {
                    candidates.gpus_free.insert(name.clone(), occupied.gpus());
                    if let Some(uuids) = observed.claimable.get(name) {
                        let planned = held.map(|held| held.claimed_gpus.clone());
                        let left = uuids - &planned.unwrap_or_default();
                        candidates.claimable.insert(name.clone(), left);
                    }
                    let reserve_millis = observed.settings.ledger.reserve_cpu_millis;
                    let room = occupied.cpu_room(reserve_millis);
                    candidates.cpu_rooms.insert(name.clone(), room);
                    candidates.free.insert(name.clone(), profile);
                }
                Err(why) => {
                    candidates.left_out.insert(name.clone(), why);
                }
            }
        }
        candidates.try_virtual_devices_alone();
        candidates
    }

    /// Leaves real GPUs out if some node has a virtual device: a plan reckons with a driver on all of them or on none.
    fn try_virtual_devices_alone(&mut self) {
        let is_virtual = |gpu: &GpuProfile| gpu.virtual_device.is_some();
        let mut profiles = self.free.values();
        if !profiles.any(|profile| profile.gpus.iter().any(is_virtual)) {
            return;
        }
        let gpus = self.free.values_mut().flat_map(|profile| &mut profile.gpus);
        for gpu in gpus.filter(|gpu| !is_virtual(gpu)) {
            let why = "virtual devices are tried elsewhere (chart value agent.virtualDevices)";
            gpu.obstacle = Some(why.to_owned());
        }
    }

    /// Keeps only the nodes for which `keep` holds; the others are left out because of `why`.
    pub(crate) fn only(mut self, keep: impl Fn(&str) -> bool, why: &str) -> Self {
        let dropped: Vec<String> = self
            .free
            .keys()
            .filter(|name| !keep(name))
            .cloned()
            .collect();
        for name in dropped {
            self.free.remove(&name);
            self.gpus_free.remove(&name);
            self.cpu_rooms.remove(&name);
            self.claimable.remove(&name);
            self.left_out.insert(name, why.to_owned());
        }
        self
    }

    /// The nodes that are left out, with the reasons, as one sentence; `None` if there are none.
    pub(crate) fn left_out_sentence(&self) -> Option<String> {
        const NAMED: usize = 5;
        let count = self.left_out.len();
        if count == 0 {
            return None;
        }
        let total = count + self.free.len();
        let mut names: Vec<String> = self
            .left_out
            .iter()
            .take(NAMED)
            .map(|(name, why)| format!("{name} {why}"))
            .collect();
        if count > NAMED {
            names.push(format!("and {} more", count - NAMED));
        }
        let nodes = if total == 1 { "node" } else { "nodes" };
        Some(format!(
            "{count} of {total} {nodes} cannot take it: {}",
            names.join(", ")
        ))
    }
}

/// Whether a node is not Ready or not in the cluster, so that nothing on it can be assumed to answer. A kubelet that
/// is briefly unreachable leaves its containers running.
pub(crate) fn is_down(observed: &Observed, node: &str) -> bool {
    observed.nodes.get(node).is_none_or(|node| !node.is_ready)
}

/// Whether a node's work should move elsewhere: it is not in the cluster, or has not been Ready for a while in which
/// another node that is open to the deployment's workers was. If all were down, after a power cut or with a failed
/// switch, the first one that is back does not take over the work of the others.
pub(crate) fn is_lost(observed: &Observed, node: &str) -> bool {
    let Some(view) = observed.nodes.get(node) else {
        return true;
    };
    let patience = observed.settings.nodes.move_after;
    let placement = &observed.deployment.spec.placement;
    let mut others = observed.nodes.values();
    let has_other = others.any(|other| {
        let since = other.ready_since;
        other.is_ready
            && since.is_none_or(|since| age(since, observed.now) >= patience)
            && is_closed(other, placement).is_none()
            && lacking(other, placement).is_none()
    });
    has_other && has_been_down(observed, view, patience)
}

/// Nodes that are in the cluster but not Ready, with whether they have been so for long enough to be forgotten.
pub(crate) fn away(observed: &Observed) -> BTreeMap<String, bool> {
    let forget_after = observed.settings.nodes.forget_after;
    let nodes = observed.nodes.iter().filter(|(_, node)| !node.is_ready);
    nodes
        .map(|(name, node)| (name.clone(), has_been_down(observed, node, forget_after)))
        .collect()
}

/// Time until one of these nodes must be judged again even if nothing is reported about it.
pub(crate) fn next_judgement<'a>(
    observed: &Observed,
    nodes: impl IntoIterator<Item = &'a str>,
) -> Option<Duration> {
    let settings = &observed.settings.nodes;
    let mut next: Option<Duration> = None;
    let mut at = |since: Option<Timestamp>, patience: Duration| {
        let left = since.map(|since| patience.saturating_sub(age(since, observed.now)));
        let left = left.filter(|left| !left.is_zero());
        next = [next, left].into_iter().flatten().min();
    };
    let nodes: Vec<_> = nodes
        .into_iter()
        .filter_map(|name| observed.nodes.get(name))
        .collect();
    if nodes.iter().any(|node| !node.is_ready) {
        let others = observed.nodes.values();
        others.for_each(|other| at(other.ready_since, settings.move_after));
    }
    for node in nodes {
        at(node.not_ready_since, settings.move_after);
        at(node.not_ready_since, settings.forget_after);
        let passing = node.taints.iter().filter(|taint| passes(observed, taint));
        passing.for_each(|taint| at(taint.since, PASSING_TAINT));
    }
    next
}

fn has_been_down(observed: &Observed, node: &NodeView, patience: Duration) -> bool {
    let since = node.not_ready_since;
    !node.is_ready && since.is_none_or(|since| age(since, observed.now) >= patience)
}

/// Reason why a node takes no new Pod: it is cordoned, or has a taint that is not tolerated.
pub(crate) fn is_closed(node: &NodeView, placement: &PlacementSpec) -> Option<String> {
    closed_by(node, placement, |_| true)
}

/// The first label that is required and that a node does not have.
fn lacking<'a>(node: &NodeView, placement: &'a PlacementSpec) -> Option<(&'a String, &'a String)> {
    let mut wanted = placement.node_selector.iter();
    wanted.find(|(key, value)| node.labels.get(*key) != Some(value))
}

/// Reason why whatever runs on a node must leave it: the node is cordoned, or has a NoExecute taint that is not
/// tolerated. Taints with which the cluster itself marks the node's state are ignored, and those that the settings
/// name are ignored for a while.
pub(crate) fn is_to_be_left(
    observed: &Observed,
    node: &NodeView,
    placement: &PlacementSpec,
) -> Option<String> {
    closed_by(node, placement, |taint| {
        let has_lasted = || {
            let since = taint.since;
            since.is_some_and(|since| age(since, observed.now) >= PASSING_TAINT)
        };
        taint.effect == "NoExecute"
            && !taint.key.starts_with("node.kubernetes.io/")
            && (!passes(observed, taint) || has_lasted())
    })
}

fn passes(observed: &Observed, taint: &Taint) -> bool {
    taint.effect == "NoExecute" && observed.settings.nodes.passing_taints.contains(&taint.key)
}

fn closed_by(
    node: &NodeView,
    placement: &PlacementSpec,
    counts: impl Fn(&Taint) -> bool,
) -> Option<String> {
    if node.is_cordoned {
        return Some("is cordoned".to_owned());
    }
    let is_tolerated = |taint: &Taint| {
        let mut tolerations = placement.tolerations.iter();
        tolerations.any(|toleration| tolerates(toleration, taint))
    };
    let taint = node.taints.iter().find(|taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && counts(taint)
            && !is_tolerated(taint)
    })?;
    let value = match taint.value.as_str() {
        "" => String::new(),
        value => format!("={value}"),
    };
    Some(format!(
        "has the taint {}{value}:{}, which spec.placement.tolerations does not name",
        taint.key, taint.effect
    ))
}

/// Whether a toleration matches a taint, by the scheduler's rules.
fn tolerates(toleration: &TolerationSpec, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.as_deref().filter(|text| !text.is_empty()).is_some();
    if given(&toleration.effect) && toleration.effect.as_deref() != Some(taint.effect.as_str()) {
        return false;
    }
    if given(&toleration.key) && toleration.key.as_deref() != Some(taint.key.as_str()) {
        return false;
    }
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        None | Some("" | "Equal") => {
            given(&toleration.key) && toleration.value.as_deref().unwrap_or_default() == taint.value
        }
        Some(_) => false,
    }
}

/// A node, with everything on it that belongs to others.
#[derive(Clone, Copy)]
struct OccupiedNode<'a> {
    node: &'a NodeView,
    /// Resources that other deployments hold.
    held: Option<&'a Holding>,
    /// Requests of Pods that belong to no deployment.
    others: Requests,
}

impl OccupiedNode<'_> {
    fn free_profile(self, placement: &PlacementSpec) -> Result<NodeProfileStatus, String> {
        let Self { node, held, .. } = self;
        if !node.is_ready {
            return Err("is not Ready".to_owned());
        }
        if let Some(why) = is_closed(node, placement) {
            return Err(why);
        }
        if let Some((key, value)) = lacking(node, placement) {
            return Err(format!("lacks the label {key}={value}"));
        }
        let Some(profile) = &node.profile else {
            return Err("has not been measured yet (its agent has not answered)".to_owned());
        };
        let mut profile = profile.clone();
        if let Some(held) = held {
            let is_free = |id: u32| !held.exclusive_cpus.contains(&id);
            profile.cpus.retain(|cpu| is_free(cpu.id));
            for numa in &mut profile.numa_nodes {
                numa.cpus.retain(|id| is_free(*id));
            }
        }
        if profile.cpus.is_empty() {
            return Err("has no CPU that others do not hold exclusively".to_owned());
        }
        let memory = &mut profile.memory;
        let before = memory.available_bytes;
        let after = self.available_bytes();
        memory.available_bytes = after;
        memory.least_available_bytes = memory
            .least_available_bytes
            .map(|bytes| self.left_of(bytes));
        for numa in &mut profile.numa_nodes {
            numa.free_bytes = scaled(numa.free_bytes, after, before);
        }
        let gpus = profile.gpus.iter_mut();
        for gpu in gpus.filter(|gpu| gpu.virtual_device.is_some()) {
            gpu.free_bytes = self.virtual_room_bytes();
        }
        Ok(profile)
    }

    /// Bytes of the node's memory that this deployment's Pods may hold in total, beside that of a virtual device. The
    /// scheduler counts what Pods request, used or not; the agent measured what is in use, requested or not: the smaller
    /// result applies.
    fn available_bytes(self) -> u64 {
        let profile = self.node.profile.as_ref();
        self.left_of(profile.map_or(u64::MAX, |profile| profile.memory.available_bytes))
    }

    /// The same if so many bytes were measured.
    fn left_of(self, measured: u64) -> u64 {
        let by_requests = match self.node.memory_bytes {
            0 => u64::MAX,
            bytes => bytes
                .saturating_sub(self.others.memory_bytes)
                .saturating_sub(self.virtual_bytes()),
        };
        let held = self.held.map_or(0, |held| {
            held.memory_bytes.saturating_sub(held.virtual_bytes)
        });
        match by_requests.min(measured) {
            u64::MAX => 0,
            bytes => bytes.saturating_sub(held),
        }
    }

    /// Bytes of the node's memory that are those of its virtual device.
    fn virtual_bytes(self) -> u64 {
        let profile = self.node.profile.iter();
        let gpus = profile.flat_map(|profile| &profile.gpus);
        gpus.filter(|gpu| gpu.virtual_device.is_some())
            .map(|gpu| gpu.memory_bytes)
            .sum()
    }

    /// Bytes of them that other deployments leave.
    fn virtual_room_bytes(self) -> u64 {
        let held = self.held.map_or(0, |held| held.virtual_bytes);
        self.virtual_bytes().saturating_sub(held)
    }

    fn gpus(self) -> u32 {
        let held = self.held.map_or(0, |held| held.gpus);
        self.node
            .gpus
            .saturating_sub(held)
            .saturating_sub(self.others.gpus)
    }

    fn cpu_room(self, reserve_millis: u64) -> CpuRoom {
        let held = self.held.map_or(0, |held| held.cpu_millis);
        CpuRoom {
            allocatable_millis: self.node.cpu_millis,
            requested_millis: self.others.cpu_millis.saturating_add(held),
            reserve_millis,
        }
    }
}

fn scaled(bytes: u64, numerator: u64, denominator: u64) -> u64 {
    if denominator == 0 {
        return 0;
    }
    let wide = u128::from(bytes) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(wide).unwrap_or(u64::MAX)
}

/// Bytes of the available memory that the planner may assign: a twentieth, and at least 128 MiB, is left to everything
/// else that runs on a node.
pub(crate) fn usable(available_bytes: u64) -> u64 {
    const LEAST_RESERVE_BYTES: u64 = 128 << 20;
    available_bytes.saturating_sub(LEAST_RESERVE_BYTES.max(available_bytes / 20))
}

/// Resources that a deployment's Pods may request on a node, after the reserves: what is left by `held`, which other deployments
/// hold, and by `others`, the requests of all other Pods. `claimable` are the GPUs that it may claim, where they are claimed.
pub fn room(
    node: &NodeView,
    held: Option<&Holding>,
    others: Requests,
    reserve_cpu_millis: u64,
    claimable: Option<&BTreeSet<String>>,
) -> Requests {
    let occupied = OccupiedNode { node, held, others };
    Requests {
        cpu_millis: occupied.cpu_room(reserve_cpu_millis).free_millis(),
        memory_bytes: usable(occupied.available_bytes())
            .saturating_add(occupied.virtual_room_bytes()),
        gpus: match claimable {
            Some(uuids) => u32::try_from(uuids.len()).unwrap_or(u32::MAX),
            None => occupied.gpus(),
        },
    }
}

/// Resources that this deployment's Pods may request on each Ready node, after the reserves.
pub(crate) fn rooms(observed: &Observed) -> BTreeMap<String, Requests> {
    let ready = observed.nodes.iter().filter(|(_, node)| node.is_ready);
    let rooms = ready.filter_map(|(name, _)| Some((name.clone(), room_on(observed, name)?)));
    rooms.collect()
}

/// The same of one node, Ready or not; `None` if it is not in the cluster.
pub(crate) fn room_on(observed: &Observed, name: &str) -> Option<Requests> {
    let ledger = &observed.settings.ledger;
    let node = observed.nodes.get(name)?;
    let held = observed.held_by_others.get(name);
    let others = observed.others.on(name, ledger.unseen);
    let claimable = observed.claimable.get(name);
    let reserve_millis = ledger.reserve_cpu_millis;
    Some(room(node, held, others, reserve_millis, claimable))
}

#[cfg(test)]
mod tests;
