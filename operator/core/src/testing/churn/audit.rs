//! What is booked of each node, summed up from plans and Pods beside the ledger, whose sums it does not use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_crds::{InferencePlanSpec, Pinning, PlanRank, PlanRole};

use crate::cause::node_of;
use crate::observed::{NodeView, Others, PodView, Requests};

/// A deployment's plan and Pods.
pub(super) struct Account<'a> {
    pub(super) owner: &'a str,
    /// The plan that it follows; `None` if it has none, or rests.
    pub(super) plan: Option<&'a InferencePlanSpec>,
    pub(super) pods: &'a [Arc<PodView>],
}

/// What is booked of a node.
#[derive(Default)]
struct Booked<'a> {
    memory_bytes: u64,
    cpu_millis: u64,
    /// GPUs from the device plugin.
    gpus: u32,
    /// The owner of each CPU that one has to itself.
    cpus: BTreeMap<u32, &'a str>,
    /// The owner of each GPU that is claimed.
    claimed: BTreeMap<&'a str, &'a str>,
    /// What its plan and its Pods take, by owner.
    by: BTreeMap<&'a str, [Requests; 2]>,
}

/// Checks that all plans and Pods together ask no node for more than it has, and have no CPU and no GPU in common.
///
/// # Errors
/// What is booked twice, and by whom.
pub(super) fn check<'a>(
    nodes: &BTreeMap<String, Arc<NodeView>>,
    others: &Others,
    accounts: impl Iterator<Item = Account<'a>>,
) -> Result<(), String> {
    let mut booked: BTreeMap<&str, Booked<'a>> = BTreeMap::new();
    for account in accounts {
        let by_plan = by_node(account.plan.into_iter().flat_map(|plan| &plan.ranks));
        let mut by_pods: BTreeMap<&str, Requests> = BTreeMap::new();
        let mut cpus: BTreeSet<(&str, u32)> = BTreeSet::new();
        let mut claimed: BTreeSet<(&str, &str)> = BTreeSet::new();
        // One that waits for the scheduler has nothing yet.
        let is_there = |pod: &&Arc<PodView>| !pod.node.is_empty() && !pod.has_ended();
        for pod in account.pods.iter().filter(is_there) {
            let sum = by_pods.entry(node_of(pod)).or_default();
            *sum = sum.plus(Requests::new(pod.cpu_millis, pod.memory_bytes, pod.gpus));
            for cpu in &pod.exclusive_cpus {
                // Its own workers follow one another, too.
                if !cpus.insert((node_of(pod), *cpu)) {
                    let (node, owner) = (node_of(pod), account.owner);
                    return Err(format!("two Pods of {owner} have CPU {cpu} of {node}"));
                }
            }
            claimed.extend(pod.claimed_gpus.iter().map(|uuid| (node_of(pod), &**uuid)));
        }
        // Nothing is made on a node that is down, and nobody is planned there: of plans it holds nothing until it is back.
        let is_up = |node: &str| nodes.get(node).is_some_and(|view| view.is_ready);
        let ranks = account.plan.into_iter().flat_map(|plan| &plan.ranks);
        for rank in ranks.filter(|rank| is_up(&rank.node)) {
            cpus.extend(exclusive(rank).iter().map(|cpu| (&*rank.node, *cpu)));
            if rank.claims_gpus {
                claimed.extend(rank.gpu_uuids.iter().map(|uuid| (&*rank.node, &**uuid)));
            }
        }
        let places: BTreeSet<&str> = by_plan.keys().chain(by_pods.keys()).copied().collect();
        for node in places {
            let plan = by_plan.get(node).filter(|_| is_up(node));
            let plan = plan.copied().unwrap_or_default();
            let pods = by_pods.get(node).copied().unwrap_or_default();
            let most = plan.max(pods);
            let sum = booked.entry(node).or_default();
            sum.memory_bytes += most.memory_bytes;
            sum.cpu_millis += most.cpu_millis;
            sum.gpus += most.gpus;
            sum.by.insert(account.owner, [plan, pods]);
        }
        for (node, cpu) in cpus {
            let before = booked
                .entry(node)
                .or_default()
                .cpus
                .insert(cpu, account.owner);
            is_ones(before, account.owner, || format!("CPU {cpu} of {node}"))?;
        }
        for (node, uuid) in claimed {
            let before = booked
                .entry(node)
                .or_default()
                .claimed
                .insert(uuid, account.owner);
            is_ones(before, account.owner, || format!("{uuid} of {node}"))?;
        }
    }
    for (node, booked) in booked {
        let view = nodes
            .get(node)
            .ok_or_else(|| format!("there is no node {node}"))?;
        let foreign = others.on(node, Requests::default());
        let all = Requests::new(booked.cpu_millis, booked.memory_bytes, booked.gpus).plus(foreign);
        let has = Requests::new(view.cpu_millis, view.memory_bytes, view.gpus);
        if all.max(has) != has {
            let by = booked.by;
            return Err(format!(
                "{node} has {has:?}, and booked are {all:?}, by plans and Pods of {by:?}"
            ));
        }
    }
    Ok(())
}

fn is_ones(before: Option<&str>, owner: &str, what: impl Fn() -> String) -> Result<(), String> {
    match before {
        Some(other) => Err(format!("{other} and {owner} both have {}", what())),
        None => Ok(()),
    }
}

fn exclusive(rank: &PlanRank) -> &[u32] {
    match rank.pinning {
        Pinning::Exclusive => &rank.cpus,
        Pinning::Shared | Pinning::None => &[],
    }
}

/// What ranks take of each node: the weights once, or the different ones of peers that have shares alone, and everything else of
/// each rank.
fn by_node<'a>(ranks: impl Iterator<Item = &'a PlanRank>) -> BTreeMap<&'a str, Requests> {
    let mut sums: BTreeMap<&str, Requests> = BTreeMap::new();
    let mut weights: BTreeMap<&str, u64> = BTreeMap::new();
    for rank in ranks {
        let own = rank.own_weight_bytes();
        let bytes = rank.host_kv_bytes() + rank.scratch_bytes + own;
        let plugin_gpus = if rank.claims_gpus { 0 } else { rank.gpus };
        let gpus = if rank.in_pod_of.is_some() {
            0
        } else {
            plugin_gpus
        };
        let sum = sums.entry(&rank.node).or_default();
        *sum = sum.plus(Requests::new(rank.cpu_millis(), bytes, gpus));
        let shared = rank.host_weight_bytes() - own;
        let once = weights.entry(&rank.node).or_default();
        *once = match rank.role == PlanRole::Stage && rank.peers.is_some() {
            true => *once + shared,
            false => (*once).max(shared),
        };
    }
    for (node, bytes) in weights {
        let sum = sums.entry(node).or_default();
        *sum = sum.plus(Requests::new(0, bytes, 0));
    }
    sums
}

/// Checks a new plan alone: its nodes are Ready and have what it asks for, and no GPU is promised more than its memory.
///
/// # Errors
/// What is missing.
pub(super) fn check_plan(
    plan: &InferencePlanSpec,
    nodes: &BTreeMap<String, Arc<NodeView>>,
) -> Result<(), String> {
    let name = &plan.deployment.name;
    for (node, sum) in by_node(plan.ranks.iter()) {
        let view = nodes.get(node).filter(|view| view.is_ready);
        let profile = view.and_then(|view| view.profile.as_ref());
        let (Some(view), Some(profile)) = (view, profile) else {
            return Err(format!("{name} is planned on {node}, which is not Ready"));
        };
        let has_memory = sum.memory_bytes <= profile.memory.available_bytes;
        if !has_memory || sum.cpu_millis > view.cpu_millis || sum.gpus > view.gpus {
            return Err(format!("{name} asks {node} for {sum:?}"));
        }
        let here = || plan.ranks.iter().filter(|rank| rank.node == node);
        for rank in here() {
            let is_known = |cpu: &u32| profile.cpus.iter().any(|it| it.id == *cpu);
            if !rank.cpus.iter().all(is_known) {
                return Err(format!(
                    "{name} has CPUs that {node} has not: {:?}",
                    rank.cpus
                ));
            }
        }
        // A device plugin may hand out any of them.
        let least = profile.gpus.iter().map(|gpu| gpu.memory_bytes).min();
        for gpu in &profile.gpus {
            let on_it = here().filter(|rank| rank.gpu_uuids.contains(&gpu.uuid));
            let bytes: u64 = on_it.map(|rank| rank.gpu_memory_bytes).sum();
            let has_bytes = match view.gpus {
                0 => gpu.memory_bytes,
                _ => least.unwrap_or(0),
            };
            if bytes > has_bytes {
                return Err(format!("{name} takes {bytes} of {} of {node}", gpu.uuid));
            }
        }
    }
    Ok(())
}
