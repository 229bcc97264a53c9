//! Resources of the nodes that the deployments hold: through their Pods, and through plans whose Pods are not created
//! yet.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use hearth_crds::{InferencePlan, InferencePlanSpec};

use crate::build::{held_memory_bytes, planned_rank, rank_holding};
use crate::ledger::Sum;
use crate::observed::{Holding, PodView};

/// Holdings by node.
pub type ByNode = BTreeMap<String, Holding>;

/// Holdings of all deployments, updated as they change.
#[derive(Debug, Default)]
pub struct Holdings {
    /// Sorted slices: an owner has few nodes, and the smallest node of a map has room for eleven entries.
    by_owner: HashMap<Arc<str>, Box<[(String, Holding)]>>,
    totals: HashMap<String, Total>,
}

/// Sums that lose nothing: anything that is added can be subtracted again, however absurd it is.
#[derive(Debug, Default)]
struct Total {
    owners: usize,
    amounts: Sum,
    /// Number of owners that hold each CPU exclusively.
    exclusive_cpus: BTreeMap<u32, u32>,
    /// Number of owners that claim each GPU.
    claimed_gpus: BTreeMap<String, u32>,
    /// Memory of the virtual device.
    virtual_bytes: u128,
}

impl Holdings {
    /// Replaces one deployment's holdings. Returns whether some node has more room than before.
    pub fn set(&mut self, owner: &Arc<str>, holding: ByNode) -> bool {
        let known = self.by_owner.get(owner);
        if known.is_some_and(|known| known.iter().map(|(node, held)| (node, held)).eq(&holding)) {
            return false;
        }
        let before = self.by_owner.remove(owner).unwrap_or_default();
        let has_freed = before.iter().any(|(node, held)| match holding.get(node) {
            None => true,
            Some(now) => {
                now.cpu_millis < held.cpu_millis
                    || now.memory_bytes < held.memory_bytes
                    || now.gpus < held.gpus
                    || now.exclusive_cpus.len() < held.exclusive_cpus.len()
                    || now.claimed_gpus.len() < held.claimed_gpus.len()
                    || now.virtual_bytes < held.virtual_bytes
            }
        });
        for (node, held) in &before {
            self.subtract(node, held);
        }
        for (node, held) in &holding {
            self.totals.entry(node.clone()).or_default().add(held);
        }
        if !holding.is_empty() {
            let holding = holding.into_iter().collect();
            self.by_owner.insert(Arc::clone(owner), holding);
        }
        has_freed
    }

    /// Holdings of all deployments but `owner`.
    pub fn of_others(&self, owner: &str) -> ByNode {
        let own = self.by_owner.get(owner);
        let mut others = ByNode::new();
        for (node, total) in &self.totals {
            let own = own.and_then(|own| held_on(own, node));
            let holding = total.without(own);
            if holding != Holding::default() {
                others.insert(node.clone(), holding);
            }
        }
        others
    }

    /// Holdings of each owner, by node.
    pub fn all(&self) -> impl Iterator<Item = (&Arc<str>, &[(String, Holding)])> {
        let owners = self.by_owner.iter();
        owners.map(|(owner, nodes)| (owner, &**nodes))
    }

    /// Holdings of `owner`, by node.
    pub fn of<'a>(&'a self, owner: &str) -> impl Iterator<Item = (&'a str, &'a Holding)> {
        let own = self.by_owner.get(owner).map_or(&[][..], |own| &own[..]);
        own.iter().map(|(node, held)| (node.as_str(), held))
    }

    /// Owners that hold resources of a node.
    pub fn owners_on<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Arc<str>> {
        let owners = self.by_owner.iter();
        owners.filter_map(move |(owner, nodes)| held_on(nodes, node).map(|_| owner))
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

fn held_on<'a>(holding: &'a [(String, Holding)], node: &str) -> Option<&'a Holding> {
    let mut nodes = holding.iter();
    nodes.find_map(|(name, held)| (name == node).then_some(held))
}

impl Total {
    fn add(&mut self, held: &Holding) {
        self.owners += 1;
        self.amounts.add(held.requests());
        for cpu in &held.exclusive_cpus {
            *self.exclusive_cpus.entry(*cpu).or_default() += 1;
        }
        for uuid in &held.claimed_gpus {
            *self.claimed_gpus.entry(uuid.clone()).or_default() += 1;
        }
        self.virtual_bytes += u128::from(held.virtual_bytes);
    }

    fn subtract(&mut self, held: &Holding) {
        self.owners = self.owners.saturating_sub(1);
        self.amounts.subtract(held.requests());
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
        let bytes = u128::from(held.virtual_bytes);
        self.virtual_bytes = self.virtual_bytes.saturating_sub(bytes);
    }

    fn without(&self, own: Option<&Holding>) -> Holding {
        let none = Holding::default();
        let own = own.unwrap_or(&none);
        let is_others = |cpu: &u32, count: &u32| {
            let mine = u32::from(own.exclusive_cpus.contains(cpu));
            *count > mine
        };
        let mut amounts = self.amounts;
        amounts.subtract(own.requests());
        let amounts = amounts.total();
        Holding {
            cpu_millis: amounts.cpu_millis,
            memory_bytes: amounts.memory_bytes,
            gpus: amounts.gpus,
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
            virtual_bytes: {
                let others = self.virtual_bytes.saturating_sub(own.virtual_bytes.into());
                u64::try_from(others).unwrap_or(u64::MAX)
            },
        }
    }
}

/// Holdings of one deployment: on each node, those of its Pods or those that its plan will have, whichever are more.
///
/// Anyone who may create Pods can write anything on one. A bound Pod holds what it requests, since the scheduler has
/// found room for that, and one Pod of each rank what memory its plan has given it since; which CPUs and GPUs it has
/// exclusively, and where a waiting Pod is to go, is read from its plan. If there is no plan any more, the Pod itself says
/// which CPUs, up to as many as it requests.
pub fn of_deployment<'a>(
    pods: impl Iterator<Item = &'a PodView>,
    plans: &[Arc<InferencePlan>],
    ahead: Option<&InferencePlanSpec>,
) -> ByNode {
    let mut by_pods = ByNode::new();
    for share in shares(pods, plans) {
        by_pods.entry(share.node).or_default().add(&share.holding);
    }
    let mut by_plan = ByNode::new();
    let ranks = ahead
        .into_iter()
        .flat_map(|plan| plan.ranks.iter().map(move |rank| (plan, rank)));
    for (plan, rank) in ranks {
        let held = by_plan.entry(rank.node.clone()).or_default();
        held.add(&rank_holding(plan, rank));
    }
    for (node, planned) in by_plan {
        let held = by_pods.entry(node).or_default();
        held.cpu_millis = held.cpu_millis.max(planned.cpu_millis);
        held.memory_bytes = held.memory_bytes.max(planned.memory_bytes);
        held.gpus = held.gpus.max(planned.gpus);
        held.exclusive_cpus.extend(planned.exclusive_cpus);
        held.claimed_gpus.extend(planned.claimed_gpus);
        held.virtual_bytes = held.virtual_bytes.max(planned.virtual_bytes);
    }
    for held in by_pods.values_mut() {
        held.exclusive_cpus.sort_unstable();
        held.exclusive_cpus.dedup();
    }
    by_pods
}

/// What one Pod of a deployment holds of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The node.
    pub node: String,
    /// The Pod.
    pub pod: String,
    /// Its first rank; empty if it only reads a model's facts.
    pub rank: String,
    /// Generation of the plan that it was made for.
    pub plan_generation: u64,
    /// What it holds.
    pub holding: Holding,
}

/// What each Pod of a deployment holds, as [`of_deployment`] adds it up.
pub fn shares<'a>(
    pods: impl Iterator<Item = &'a PodView>,
    plans: &[Arc<InferencePlan>],
) -> Vec<Share> {
    let mut shares = Vec::new();
    let (mut waiting, mut bound) = (BTreeSet::new(), BTreeSet::new());
    for pod in pods {
        if pod.phase == "Succeeded" || pod.phase == "Failed" {
            continue;
        }
        let mut add = |node: &str, holding: Holding| {
            shares.push(Share {
                node: node.to_owned(),
                pod: pod.name.clone(),
                rank: pod.rank.clone(),
                plan_generation: pod.plan_generation,
                holding,
            });
        };
        let planned = planned_rank(pod, plans);
        if pod.node.is_empty() {
            // At most one Pod for each rank.
            let rank = planned.filter(|_| waiting.insert((pod.plan_generation, &*pod.rank)));
            if let Some((plan, rank)) = rank {
                add(&rank.node, rank_holding(plan, rank));
            }
            continue;
        }
        let mut holding = match planned.filter(|(_, rank)| rank.node == pod.node) {
            Some((plan, rank)) => rank_holding(plan, rank),
            None if planned.is_none() => Holding {
                exclusive_cpus: told_cpus(pod),
                ..Holding::default()
            },
            None => Holding::default(),
        };
        holding.cpu_millis = pod.cpu_millis;
        holding.memory_bytes = match bound.insert((pod.plan_generation, &*pod.rank)) {
            true => held_memory_bytes(pod, plans),
            false => pod.memory_bytes,
        };
        holding.gpus = pod.gpus;
        add(&pod.node, holding);
    }
    shares
}

/// CPUs that a bound Pod without a plan says it has exclusively, no more than it requests: its deployment may be
/// deleted while its process still runs on them.
fn told_cpus(pod: &PodView) -> Vec<u32> {
    let most = usize::try_from(pod.cpu_millis / 1000).unwrap_or(usize::MAX);
    pod.exclusive_cpus.iter().copied().take(most).collect()
}

#[cfg(test)]
mod tests {
    use hearth_crds::Pinning;

    use super::*;
    use crate::testing::samples;

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
    fn what_one_holds_is_told_by_node() {
        let mut holdings = Holdings::default();
        let a: Arc<str> = "a".into();
        holdings.set(&a, on("n", held(10, 1, &[0])));
        let of = |owner: &str| -> ByNode {
            let held = holdings.of(owner);
            held.map(|(node, held)| (node.to_owned(), held.clone()))
                .collect()
        };
        assert_eq!(of("a"), on("n", held(10, 1, &[0])));
        assert_eq!(of("b"), ByNode::new());
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

    /// A plan with an Exclusive decode worker on `node`, alone.
    fn plan(generation: u64, node: &str, cpus: &[u32]) -> Arc<InferencePlan> {
        let mut spec = samples::plan();
        spec.generation = generation;
        spec.ranks.retain(|rank| rank.name == "decode-0");
        spec.ranks[0].node = node.to_owned();
        spec.ranks[0].cpus = cpus.to_vec();
        spec.ranks[0].pinning = Pinning::Exclusive;
        Arc::new(InferencePlan::new("demo", spec))
    }

    fn pod(node: &str, wanted: &str, phase: &str) -> PodView {
        PodView {
            rank: "decode-0".to_owned(),
            plan_generation: 1,
            node: node.to_owned(),
            wanted_node: wanted.to_owned(),
            phase: phase.to_owned(),
            cpu_millis: 4,
            memory_bytes: 4,
            ..PodView::default()
        }
    }

    #[test]
    fn what_is_bound_holds_what_it_requests_or_its_plan_gave_it_since_and_what_waits_what_its_plan_says()
     {
        let plans = [plan(1, "n", &[2, 3])];
        let wanted = rank_holding(&plans[0].spec, &plans[0].spec.ranks[0]);
        let count = |pods: &[PodView]| of_deployment(pods.iter(), &plans, None);
        let ended = pod("n", "n", "Failed");
        let bound = pod("n", "n", "Running");
        let alone = shares([&bound, &ended].into_iter(), &plans);
        assert_eq!(alone.len(), 1, "one has ended");
        assert_eq!((&*alone[0].rank, &*alone[0].node), ("decode-0", "n"));
        let given = |cpu_millis: u64, more_bytes: u64| Holding {
            cpu_millis,
            memory_bytes: wanted.memory_bytes + more_bytes,
            ..held(0, 0, &[2, 3])
        };
        assert_eq!(count(&[bound.clone(), ended]), on("n", given(4, 0)));
        let two = count(&[bound.clone(), bound]);
        assert_eq!(two, on("n", given(8, 4)), "of two Pods of a rank one");
        let waiting = [pod("", "n", "Pending"), pod("", "n", "Pending")];
        assert_eq!(
            count(&waiting),
            on("n", wanted),
            "of two Pods of a rank one counts"
        );
    }

    /// Anyone who may create Pods can write anything on one.
    #[test]
    fn a_forged_pod_holds_no_more_than_the_scheduler_gave_it() {
        let forged = |node: &str, generation: u64| PodView {
            plan_generation: generation,
            exclusive_cpus: (0..256).collect(),
            claimed_gpus: vec!["GPU-1".to_owned()],
            ..pod(node, "node-1", "Pending")
        };
        let plans = [plan(1, "n", &[2, 3])];
        for generation in [1, 2] {
            let count = |node: &str| {
                let pod = forged(node, generation);
                of_deployment([&pod].into_iter(), &plans, None)
            };
            assert!(!count("").contains_key("node-1"));
            assert_eq!(count("node-1"), on("node-1", held(4, 0, &[])));
        }
        // A Pod of no deployment.
        let count = |node: &str| of_deployment([&pod(node, "n", "")].into_iter(), &[], None);
        assert_eq!(count("n"), on("n", held(4, 0, &[])));
        assert_eq!(count(""), ByNode::new());
    }

    /// The Pods of a deployment that was deleted or orphaned keep computing until they end.
    #[test]
    fn a_pod_without_a_plan_keeps_as_many_cpus_as_it_requests() {
        let orphan = |node: &str, cpu_millis: u64| PodView {
            exclusive_cpus: vec![2, 3, 4],
            cpu_millis,
            ..pod(node, "n", "Running")
        };
        let count = |pod: PodView| {
            let mut sum = of_deployment([&pod].into_iter(), &[], None);
            sum.remove("n").unwrap_or_default().exclusive_cpus
        };
        assert_eq!(count(orphan("n", 3200)), [2, 3, 4]);
        assert_eq!(count(orphan("n", 2999)), [2, 3], "of two it says three");
        assert_eq!(count(orphan("", 3200)), [0; 0], "nobody has placed it");
        let ended = PodView {
            phase: "Failed".to_owned(),
            ..orphan("n", 3200)
        };
        assert_eq!(count(ended), [0; 0]);
        // Where there is a plan, the plan counts.
        let planned = orphan("n", 3200);
        let sum = of_deployment([&planned].into_iter(), &[plan(1, "n", &[6])], None);
        assert_eq!(sum["n"].exclusive_cpus, [6]);
    }

    #[test]
    fn absurd_requests_leave_nothing_behind() {
        let mut holdings = Holdings::default();
        let (a, b, c): (Arc<str>, Arc<str>, Arc<str>) = ("a".into(), "b".into(), "c".into());
        holdings.set(&a, on("n", held(700, 1, &[])));
        for owner in [&b, &c] {
            holdings.set(owner, on("n", held(u64::MAX, u32::MAX, &[])));
        }
        assert_eq!(holdings.of_others("")["n"].cpu_millis, u64::MAX);
        for owner in [&b, &c] {
            holdings.set(owner, ByNode::new());
        }
        assert_eq!(holdings.of_others(""), on("n", held(700, 1, &[])));
        let pods = [u64::MAX, 1].map(|amount| PodView {
            cpu_millis: amount,
            ..pod("n", "n", "Running")
        });
        let sum = of_deployment(pods.iter(), &[], None);
        assert_eq!(sum["n"].cpu_millis, u64::MAX);
    }
}
