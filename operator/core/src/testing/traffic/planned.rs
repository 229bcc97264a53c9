//! Hearth's whole decision as a rule: from the load to numbers that the nodes have room for, through planner and rollout.
//!
//! A deployment on paper is decided about as by the operator, its status, plans and Pods carry over from one decision to the next,
//! and its Pods are ready when the simulated workers are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole};
use jiff::{SignedDuration, Timestamp};

use super::World;
use super::rules::{PREDICTED, Rule, View};
use crate::decide::decide;
use crate::observed::{NodeView, Observed, PodView};
use crate::testing::carry_out::carry_out;
use crate::testing::{GIB, deployment, node, observed};

/// The pools, in the order of their numbers.
const POOLS: [PlanRole; 2] = [PlanRole::Prefill, PlanRole::Decode];
/// The most reconciles that follow from one observation.
const MOST_RECONCILES: usize = 20;

/// Hearth's own, every five seconds, with a cluster.
#[derive(Clone, Debug)]
pub struct Planned {
    world: World,
    observed: Observed,
    /// The cluster's time when the load begins.
    began: Timestamp,
    /// Pods and addresses so far.
    made: u32,
    /// Numbers of prefill and decode workers of each plan that was made.
    pub plans: Vec<[u32; 2]>,
    /// What the status has said about pools with fewer workers than the load asks for.
    pub limits: BTreeSet<String>,
    /// Ranks that stayed in the plan while their Pod was replaced or is on another node.
    pub moved: Vec<String>,
}

impl Planned {
    /// On three nodes with room for more than the most workers, so that the first worker of one may be a later one of its pool: the
    /// first on a node requests the memory for the weights there.
    pub fn new(world: World) -> Self {
        // Two CPUs a core, as a kubelet counts them.
        let nodes = ["attic", "cellar", "office"].map(|name| NodeView {
            cpu_millis: 8000,
            ..node(name, 4, 4 * GIB)
        });
        Self::on(world, [world.max; 2], nodes)
    }

    /// On these nodes, with at most so many prefill and decode workers.
    pub fn on(world: World, most: [u32; 2], nodes: impl IntoIterator<Item = NodeView>) -> Self {
        let [prefill, decode] = most;
        let spec = format!(
            "prefill: {{scaling: {{mode: Auto, minReplicas: 1, maxReplicas: {prefill}}}}}\n\
             decode: {{maxBatch: {}, scaling: {{mode: Auto, minReplicas: 1, maxReplicas: {decode}}}}}\n\
             objectives: {{timeToFirstToken: {}ms, timePerOutputToken: {}ms}}\n",
            world.slots_per_worker, world.ttft_ms, world.tpot_ms,
        );
        let nodes = nodes
            .into_iter()
            .map(|node| (node.name.clone(), Arc::new(node)));
        let observed = Observed {
            nodes: nodes.collect(),
            ..observed(deployment(&spec))
        };
        let mut planned = Self {
            world,
            began: observed.now + seconds(world.start_s),
            observed,
            made: 0,
            plans: Vec::new(),
            limits: BTreeSet::new(),
            moved: Vec::new(),
        };
        // The first workers have started when the load begins, and taken as long as later ones will.
        planned.settle();
        planned.observed.now = planned.began;
        let first = planned.numbers();
        planned.start(first);
        planned.settle();
        planned
    }

    /// Numbers of the newest plan.
    fn numbers(&self) -> [u32; 2] {
        let newest = self.observed.plans.last();
        newest.map_or([0, 0], |plan| numbers_of(&plan.spec))
    }

    /// Lets so many workers of each pool be ready, the first ones first.
    fn start(&mut self, ready: [u32; 2]) {
        let Some(plan) = self.observed.plans.last().cloned() else {
            return;
        };
        let took = seconds(self.world.start_s);
        for (role, ready) in POOLS.into_iter().zip(ready) {
            for rank in plan.spec.ranks_of(role).take(ready as usize) {
                let starts = |pod: &PodView| pod.has_rank(&rank.name) && !pod.is_ready;
                let mut pods = self.observed.pods.iter_mut();
                if let Some(pod) = pods.find(|pod| starts(pod)) {
                    let pod = Arc::make_mut(pod);
                    pod.is_ready = true;
                    pod.progressed = pod.created.map(|created| created + took);
                }
            }
        }
    }

    /// Reconciles until nothing more follows.
    fn settle(&mut self) {
        for _ in 0..MOST_RECONCILES {
            let (pods, plans) = (self.observed.pods.clone(), self.observed.plans.clone());
            self.reconcile();
            if pods == self.observed.pods && plans == self.observed.plans {
                return;
            }
        }
        let status = &self.observed.deployment.status;
        panic!("after {MOST_RECONCILES} reconciles it goes on: {status:#?}");
    }

    /// Decides, and carries the decision out. The model on paper is not that of the world, so plans predict what the world takes, as
    /// inexactly as for [`super::rules::Auto`].
    fn reconcile(&mut self) {
        let mut decision = decide(&self.observed);
        if let Some(plan) = &mut decision.create_plan {
            for rank in &mut plan.spec.ranks {
                predict(&self.world, rank);
            }
            self.plans.push(numbers_of(&plan.spec));
        }
        let made = &mut self.made;
        carry_out(&mut self.observed, &decision, || {
            *made += 1;
            made.to_string()
        });
        self.turn();
    }

    /// Pods that end are gone, and new ones are bound. Gateways are ready at once.
    fn turn(&mut self) {
        let pods = &mut self.observed.pods;
        pods.retain(|pod| !pod.is_deleting);
        for pod in pods.iter_mut().filter(|pod| pod.node.is_empty()) {
            self.made += 1;
            let [_, high, middle, low] = self.made.to_be_bytes();
            let pod = Arc::make_mut(pod);
            pod.node.clone_from(&pod.wanted_node);
            pod.ip = format!("10.{high}.{middle}.{low}");
            pod.phase = "Running".to_owned();
            pod.is_ready = pod.role.is_gateway();
        }
    }

    /// Uid and node of each rank's Pod.
    fn places(&self) -> BTreeMap<String, (String, String)> {
        let pods = self.observed.pods.iter();
        let place = |pod: &PodView| (pod.rank.clone(), (pod.uid.clone(), pod.node.clone()));
        pods.map(|pod| place(pod)).collect()
    }

    /// Notes who is not where it was before, and what the status says of the numbers.
    fn note(&mut self, before: &BTreeMap<String, (String, String)>) {
        let now = self.places();
        let newest = self.observed.plans.last();
        let stays = |rank: &str| newest.is_some_and(|plan| plan.spec.rank(rank).is_some());
        let moved = before
            .iter()
            .filter(|(rank, place)| stays(rank) && now.get(*rank) != Some(*place));
        self.moved.extend(moved.map(|(rank, _)| rank.clone()));
        let status = self.observed.deployment.status.iter();
        let pools = status.flat_map(|status| POOLS.map(|role| status.pool(role.as_str())));
        let limits = pools.filter_map(|pool| pool?.autoscaling.as_ref()?.limited_by.clone());
        self.limits.extend(limits);
    }
}

impl Rule for Planned {
    fn first(&self) -> [u32; 2] {
        self.numbers()
    }

    fn every_s(&self) -> f64 {
        5.0
    }

    fn decide(&mut self, view: &View) -> [u32; 2] {
        self.observed.now = self.began + seconds(view.now_s);
        self.observed.demand = Some(view.demand.clone());
        self.start(view.ready);
        let before = self.places();
        self.settle();
        self.note(&before);
        self.numbers()
    }
}

fn numbers_of(plan: &InferencePlanSpec) -> [u32; 2] {
    POOLS.map(|role| plan.ranks_of(role).count() as u32)
}

/// Writes what a plan for this world would predict of a worker.
fn predict(world: &World, rank: &mut PlanRank) {
    let (role, slots) = (rank.role, f64::from(rank.max_batch));
    let Some(predicted) = &mut rank.predicted else {
        return;
    };
    match role {
        PlanRole::Prefill => {
            predicted.tokens_per_second = 1e3 / (world.prefill_ms_per_token * PREDICTED);
        }
        PlanRole::Decode => {
            predicted.tpot_ms = Some(world.step.at(1.0) * PREDICTED);
            predicted.tokens_per_second = slots * 1e3 / (world.step.at(slots) * PREDICTED);
        }
        PlanRole::Gateway | PlanRole::Stage => {}
    }
}

/// In whole milliseconds.
fn seconds(seconds: f64) -> SignedDuration {
    SignedDuration::from_millis((seconds * 1e3).round() as i64)
}
