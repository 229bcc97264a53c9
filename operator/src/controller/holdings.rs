//! What the deployments hold of the nodes: their Pods, and the plans whose Pods are not made yet.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hearth_crds::InferencePlanSpec;

use super::build::rank_holding;
use super::observed::{Holding, PodView};

/// Holdings by node.
pub(crate) type ByNode = BTreeMap<String, Holding>;

/// What all deployments hold, kept up while they change.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    by_owner: HashMap<Arc<str>, ByNode>,
    totals: HashMap<String, Total>,
}

#[derive(Debug, Default)]
struct Total {
    owners: usize,
    cpu_millis: u64,
    memory_bytes: u64,
    gpus: u32,
    /// How many hold each CPU as their own.
    exclusive_cpus: BTreeMap<u32, u32>,
    /// How many claim each GPU.
    claimed_gpus: BTreeMap<String, u32>,
}

impl Holdings {
    /// Says anew what one deployment holds. Returns whether some node has more room than before.
    pub(crate) fn set(&mut self, owner: &Arc<str>, holding: ByNode) -> bool {
        let before = self.by_owner.remove(owner).unwrap_or_default();
        if before == holding {
            if !holding.is_empty() {
                self.by_owner.insert(Arc::clone(owner), holding);
            }
            return false;
        }
        let has_freed = before.iter().any(|(node, held)| match holding.get(node) {
            None => true,
            Some(now) => {
                now.cpu_millis < held.cpu_millis
                    || now.memory_bytes < held.memory_bytes
                    || now.gpus < held.gpus
                    || now.exclusive_cpus.len() < held.exclusive_cpus.len()
                    || now.claimed_gpus.len() < held.claimed_gpus.len()
            }
        });
        for (node, held) in &before {
            self.subtract(node, held);
        }
        for (node, held) in &holding {
            self.totals.entry(node.clone()).or_default().add(held);
        }
        if !holding.is_empty() {
            self.by_owner.insert(Arc::clone(owner), holding);
        }
        has_freed
    }

    /// What all but `owner` hold.
    pub(crate) fn of_others(&self, owner: &str) -> ByNode {
        let own = self.by_owner.get(owner);
        let mut others = ByNode::new();
        for (node, total) in &self.totals {
            let own = own.and_then(|own| own.get(node));
            let holding = total.without(own);
            if holding != Holding::default() {
                others.insert(node.clone(), holding);
            }
        }
        others
    }

    /// Owners that hold something of a node.
    pub(crate) fn owners_on<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Arc<str>> {
        let owners = self.by_owner.iter();
        owners.filter_map(move |(owner, nodes)| nodes.contains_key(node).then_some(owner))
    }

    fn subtract(&mut self, node: &str, held: &Holding) {
        let Some(total) = self.totals.get_mut(node) else {
            return;
        };
        total.subtract(held);
        if total.owners == 0 {
            self.totals.remove(node);
        }
    }
}

impl Total {
    fn add(&mut self, held: &Holding) {
        self.owners += 1;
        self.cpu_millis += held.cpu_millis;
        self.memory_bytes += held.memory_bytes;
        self.gpus += held.gpus;
        for cpu in &held.exclusive_cpus {
            *self.exclusive_cpus.entry(*cpu).or_default() += 1;
        }
        for uuid in &held.claimed_gpus {
            *self.claimed_gpus.entry(uuid.clone()).or_default() += 1;
        }
    }

    fn subtract(&mut self, held: &Holding) {
        self.owners = self.owners.saturating_sub(1);
        self.cpu_millis = self.cpu_millis.saturating_sub(held.cpu_millis);
        self.memory_bytes = self.memory_bytes.saturating_sub(held.memory_bytes);
        self.gpus = self.gpus.saturating_sub(held.gpus);
        for cpu in &held.exclusive_cpus {
            if let Some(count) = self.exclusive_cpus.get_mut(cpu) {
                *count = count.saturating_sub(1);
            }
        }
        self.exclusive_cpus.retain(|_, count| *count > 0);
        for uuid in &held.claimed_gpus {
            if let Some(count) = self.claimed_gpus.get_mut(uuid) {
                *count = count.saturating_sub(1);
            }
        }
        self.claimed_gpus.retain(|_, count| *count > 0);
    }

    fn without(&self, own: Option<&Holding>) -> Holding {
        let none = Holding::default();
        let own = own.unwrap_or(&none);
        let is_others = |cpu: &u32, count: &u32| {
            let mine = u32::from(own.exclusive_cpus.contains(cpu));
            *count > mine
        };
        Holding {
            cpu_millis: self.cpu_millis.saturating_sub(own.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_sub(own.memory_bytes),
            gpus: self.gpus.saturating_sub(own.gpus),
            exclusive_cpus: self
                .exclusive_cpus
                .iter()
                .filter(|(cpu, count)| is_others(cpu, count))
                .map(|(cpu, _)| *cpu)
                .collect(),
            claimed_gpus: self
                .claimed_gpus
                .iter()
                .filter(|(uuid, count)| **count > u32::from(own.claimed_gpus.contains(*uuid)))
                .map(|(uuid, _)| uuid.clone())
                .collect(),
        }
    }
}

/// What one deployment holds: on each node, what its Pods hold or what its plan is going to, whichever is more.
pub(crate) fn of_deployment<'a>(
    pods: impl Iterator<Item = &'a PodView>,
    plan: Option<&InferencePlanSpec>,
) -> ByNode {
    let mut by_pods = ByNode::new();
    for pod in pods {
        let node = if pod.node.is_empty() {
            &pod.wanted_node
        } else {
            &pod.node
        };
        let has_ended = pod.phase == "Succeeded" || pod.phase == "Failed";
        if node.is_empty() || has_ended {
            continue;
        }
        let held = by_pods.entry(node.clone()).or_default();
        held.cpu_millis += pod.cpu_millis;
        held.memory_bytes += pod.memory_bytes;
        held.gpus += pod.gpus;
        held.exclusive_cpus.extend(&pod.exclusive_cpus);
        held.claimed_gpus.extend(pod.claimed_gpus.iter().cloned());
    }
    let mut by_plan = ByNode::new();
    for (plan, rank) in plan
        .into_iter()
        .flat_map(|plan| plan.ranks.iter().map(move |rank| (plan, rank)))
    {
        let wanted = rank_holding(plan, rank);
        let held = by_plan.entry(rank.node.clone()).or_default();
        held.cpu_millis += wanted.cpu_millis;
        held.memory_bytes += wanted.memory_bytes;
        held.gpus += wanted.gpus;
        held.exclusive_cpus.extend(wanted.exclusive_cpus);
        held.claimed_gpus.extend(wanted.claimed_gpus);
    }
    for (node, planned) in by_plan {
        let held = by_pods.entry(node).or_default();
        held.cpu_millis = held.cpu_millis.max(planned.cpu_millis);
        held.memory_bytes = held.memory_bytes.max(planned.memory_bytes);
        held.gpus = held.gpus.max(planned.gpus);
        held.exclusive_cpus.extend(planned.exclusive_cpus);
        held.claimed_gpus.extend(planned.claimed_gpus);
    }
    for held in by_pods.values_mut() {
        held.exclusive_cpus.sort_unstable();
        held.exclusive_cpus.dedup();
    }
    by_pods
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(memory_bytes: u64, gpus: u32, cpus: &[u32]) -> Holding {
        Holding {
            cpu_millis: memory_bytes,
            memory_bytes,
            gpus,
            exclusive_cpus: cpus.to_vec(),
            ..Holding::default()
        }
    }

    fn on(node: &str, holding: Holding) -> ByNode {
        ByNode::from([(node.to_owned(), holding)])
    }

    #[test]
    fn others_are_all_but_oneself() {
        let mut holdings = Holdings::default();
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        holdings.set(&a, on("n", held(10, 1, &[0, 1])));
        holdings.set(&b, on("n", held(5, 0, &[2])));
        assert_eq!(holdings.of_others("a"), on("n", held(5, 0, &[2])));
        assert_eq!(holdings.of_others("b"), on("n", held(10, 1, &[0, 1])));
        assert_eq!(holdings.of_others(""), on("n", held(15, 1, &[0, 1, 2])));
        assert_eq!(holdings.owners_on("n").count(), 2);
    }

    #[test]
    fn what_is_given_back_is_told() {
        let mut holdings = Holdings::default();
        let a: Arc<str> = "a".into();
        assert!(!holdings.set(&a, on("n", held(10, 0, &[]))));
        assert!(!holdings.set(&a, on("n", held(12, 0, &[]))));
        assert!(holdings.set(&a, on("n", held(3, 0, &[]))));
        assert!(holdings.set(&a, ByNode::new()));
        assert_eq!(holdings.of_others("b"), ByNode::new());
    }

    #[test]
    fn pods_that_wait_for_a_node_hold_it_and_those_that_ended_do_not() {
        let pod = |node: &str, wanted: &str, phase: &str| PodView {
            node: node.to_owned(),
            wanted_node: wanted.to_owned(),
            phase: phase.to_owned(),
            cpu_millis: 4,
            memory_bytes: 4,
            ..PodView::default()
        };
        let pods = [
            pod("n", "n", "Running"),
            pod("", "n", "Pending"),
            pod("n", "n", "Failed"),
        ];
        assert_eq!(of_deployment(pods.iter(), None), on("n", held(8, 0, &[])));
    }
}
