//! The operator's cluster: each deployment is decided about as the operator does, and its Pods come up, end, and are lost with
//! their nodes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeployment, InferencePlan, InferencePlanSpec, PlanRank, PlanStrategy};
use jiff::{SignedDuration, Timestamp};

use super::audit::{self, Account};
use super::events::Event;
use super::figures::{Booked, Figures, Watch};
use super::kubelets::Kubelets;
use super::shapes::{Size, Wish, claimable};
use super::{Setting, name_of, node_name, planned_alone};
use crate::age::age;
use crate::build::rank_holding;
use crate::cause::node_of;
use crate::conditions::{self, DECODE_READY, holds_nothing};
use crate::decide::decide;
use crate::decision::Decision;
use crate::key::Key;
use crate::ledger::holdings::{Holdings, of_deployment};
use crate::observed::{Asker, Demand, Neighbour, NodeView, Observed, PodRole, PodView};
use crate::plan_record::ahead;
use crate::preload::preloaded_since;
use crate::status::waits;
use crate::testing::carry_out::carry_out;
use crate::testing::observed;
use crate::validate::progress_deadline;

/// Namespace of all deployments.
const NAMESPACE: &str = "default";

/// A deployment.
struct Member {
    /// What was last observed of it, but for the cluster around it.
    observed: Observed,
    /// The plan that it follows, unless it rests.
    ahead: Option<Arc<InferencePlan>>,
    /// What that books.
    booked: Vec<(String, Booked)>,
    /// Whether something has happened that it is decided about for.
    is_due: bool,
    /// Time at which it is, whatever happens.
    due_at: Option<Timestamp>,
    /// Whether it waits for room.
    waits: bool,
    /// When it was last asked for something.
    asked_at: Timestamp,
    /// Whether a request waits for its workers.
    has_request: bool,
    /// Whether the workers of plans for its spec never become ready.
    is_broken: bool,
    /// Generations of plans of which that holds.
    broken: BTreeSet<u64>,
}

/// Whom a deployment asks to end its workers, and since when it has asked.
struct Asked {
    priority: i32,
    since: Timestamp,
    of: Vec<Key>,
}

/// The cluster.
pub(super) struct Cluster {
    setting: Setting,
    watch: Watch,
    now: Timestamp,
    pub(super) nodes: BTreeMap<String, Arc<NodeView>>,
    holdings: Holdings,
    members: BTreeMap<Arc<str>, Member>,
    /// Pods of deployments that were deleted.
    leaving: BTreeMap<Arc<str>, Vec<Arc<PodView>>>,
    asked: BTreeMap<Key, Asked>,
    /// Nodes that the workers of some will have once others have ended theirs.
    awaited: BTreeMap<Key, BTreeSet<String>>,
    /// Those that wait for room, the one that has not been decided about for longest first.
    queue: VecDeque<Arc<str>>,
    facts: BTreeMap<&'static str, String>,
    made: u32,
    pub(super) figures: Figures,
}

impl Cluster {
    pub(super) fn new(setting: Setting, watch: Watch) -> Self {
        let facts = Size::ALL.map(|size| {
            let text = serde_json::to_string(&size.facts()).expect("facts as JSON");
            (size.claim(), text)
        });
        Self {
            now: crate::testing::at(0),
            nodes: setting.all_nodes(),
            setting,
            watch,
            holdings: Holdings::default(),
            members: BTreeMap::new(),
            leaving: BTreeMap::new(),
            asked: BTreeMap::new(),
            awaited: BTreeMap::new(),
            queue: VecDeque::new(),
            facts: BTreeMap::from(facts),
            made: 0,
            figures: Figures::default(),
        }
    }

    /// Lets one thing happen and time pass, and decides about all that are concerned, and about a few of those that wait for room.
    pub(super) fn step(&mut self, event: &Event) -> Result<(), String> {
        self.turn();
        self.now += SignedDuration::try_from(self.setting.step).expect("a short time");
        self.happen(event);
        let now = self.now;
        let is_due = |member: &Member| {
            let is_late = member.due_at.is_some_and(|at| at <= now);
            member.is_due || (is_late && !member.waits)
        };
        let members = self.members.iter();
        let due = members.filter(|(_, member)| is_due(member));
        let due: Vec<Arc<str>> = due.map(|(name, _)| Arc::clone(name)).collect();
        for name in due {
            self.reconcile(&name)?;
        }
        for _ in 0..self.setting.retries.min(self.queue.len()) {
            if let Some(name) = self.queue.pop_front() {
                self.reconcile(&name)?;
            }
        }
        let booked = self.members.values().flat_map(|member| &member.booked);
        self.figures.utilisation.add(&self.nodes, booked);
        let placed = self.members.values().filter(|it| it.ahead.is_some());
        self.figures.utilisation.placed += placed.count();
        self.audit()
    }

    fn happen(&mut self, event: &Event) {
        match event {
            Event::Create(number, wish) => self.create(*number, wish),
            Event::Change(number, wish) => {
                let member = self.members.get_mut(&*name_of(*number));
                let member = member.expect("a deployment that is there");
                let deployment = Arc::make_mut(&mut member.observed.deployment);
                deployment.spec = wish.spec();
                member.is_broken = wish.is_broken;
                let generation = &mut deployment.metadata.generation;
                *generation = generation.map(|generation| generation + 1);
                member.is_due = true;
            }
            Event::Delete(number) => self.delete(&name_of(*number)),
            Event::Request(number) => {
                let member = self.members.get_mut(&*name_of(*number));
                let member = member.expect("a deployment that is there");
                (member.asked_at, member.has_request, member.is_due) = (self.now, true, true);
            }
            Event::Lose(number) => self.change_node(*number, false),
            Event::Return(number) => self.change_node(*number, true),
        }
    }

    fn create(&mut self, number: usize, wish: &Wish) {
        let name: Arc<str> = name_of(number).into();
        let mut deployment = InferenceDeployment::new(&name, wish.spec());
        deployment.metadata.namespace = Some(NAMESPACE.to_owned());
        deployment.metadata.uid = Some(name.to_string());
        deployment.metadata.generation = Some(1);
        let member = Member {
            observed: Observed {
                claim_modes: vec!["ReadOnlyMany".to_owned()],
                others: self.setting.others(),
                ..observed(deployment)
            },
            ahead: None,
            booked: Vec::new(),
            is_due: true,
            due_at: None,
            waits: false,
            asked_at: self.now,
            has_request: false,
            is_broken: false,
            broken: BTreeSet::new(),
        };
        self.members.insert(name, member);
    }

    /// Its plans go at once, its Pods when their processes have ended.
    fn delete(&mut self, name: &str) {
        let Some((name, member)) = self.members.remove_entry(name) else {
            return;
        };
        self.queue.retain(|other| *other != name);
        let key = Key::new(NAMESPACE, &name);
        self.asked.remove(&key);
        self.awaited.remove(&key);
        let pods = member.observed.pods.into_iter();
        let mut pods: Vec<Arc<PodView>> = pods.filter(|pod| is_of_rank(pod)).collect();
        for pod in &mut pods {
            Arc::make_mut(pod).is_deleting = true;
        }
        let held = of_deployment(pods.iter().map(|pod| &**pod), &[], None);
        self.holdings.set(&name, held);
        self.leaving.insert(name, pods);
    }

    fn change_node(&mut self, number: usize, is_ready: bool) {
        let node = node_name(number);
        let view = self.nodes.get_mut(&node).expect("a node that is there");
        let view = Arc::make_mut(view);
        view.is_ready = is_ready;
        view.ready_since = is_ready.then_some(self.now);
        view.not_ready_since = (!is_ready).then_some(self.now);
        for member in self.members.values_mut() {
            let mut booked = member.booked.iter();
            member.is_due |= booked.any(|(name, _)| *name == node);
            for pod in &mut member.observed.pods {
                if pod.node == node && pod.is_ready && !is_ready {
                    Arc::make_mut(pod).is_ready = false;
                    member.is_due = true;
                }
            }
        }
    }

    /// The scheduler and the kubelets do their work: Pods are bound, then ready, or gone.
    fn turn(&mut self) {
        let members = self.members.values();
        let pods = members.flat_map(|member| &member.observed.pods);
        let pods = pods.chain(self.leaving.values().flatten());
        let mut kubelets = Kubelets::new(&self.nodes, self.setting.others(), pods);
        for (name, member) in &mut self.members {
            let source = &member.observed.deployment.spec.model.source;
            let claim = source.persistent_volume_claim.as_ref();
            let facts = claim.and_then(|claim| self.facts.get(&*claim.claim_name));
            let pods = &mut member.observed.pods;
            let is_broken = |generation: u64| member.broken.contains(&generation);
            if kubelets.turn(pods, facts, is_broken, &mut self.made) {
                member.is_due = true;
                count(&mut self.holdings, name, member);
            }
        }
        self.leaving.retain(|name, pods| {
            pods.retain(|pod| !kubelets.is_up(node_of(pod)));
            let held = of_deployment(pods.iter().map(|pod| &**pod), &[], None);
            self.holdings.set(name, held);
            !pods.is_empty()
        });
    }

    /// Decides about a deployment, and carries that out.
    fn reconcile(&mut self, name: &Arc<str>) -> Result<(), String> {
        let Some(observed) = self.observe(name) else {
            return Ok(());
        };
        let before = (self.watch)();
        let decision = decide(&observed);
        let decision_ms = 1e3 * ((self.watch)() - before).as_secs_f64();
        let waits_now = waits(&decision, false);
        match &decision.create_plan {
            Some(plan) => {
                audit::check_plan(&plan.spec, &self.nodes)?;
                self.figures.decisions_with_plan_ms.push(decision_ms);
                self.time_planner(&observed, &plan.spec);
            }
            None if waits_now => self.figures.decisions_without_room_ms.push(decision_ms),
            None => self.figures.other_decisions_ms.push(decision_ms),
        }
        self.ask(name, &decision);
        let Some(member) = self.members.get_mut(name) else {
            return Ok(());
        };
        let made = &mut self.made;
        member.observed = observed;
        let (pods, plans) = (member.observed.pods.clone(), member.observed.plans.clone());
        let told = member.observed.deployment.status.clone();
        carry_out(&mut member.observed, &decision, || {
            *made += 1;
            made.to_string()
        });
        let status = member.observed.deployment.status.as_ref();
        let is_at_zero = status.is_some_and(|status| status.is_at_zero());
        let started = preloaded_since(status).filter(|_| preloaded_since(told.as_ref()).is_none());
        self.figures.preloads += usize::from(started.is_some());
        member.has_request &= is_at_zero || waits_now;
        member.is_due = pods != member.observed.pods
            || plans != member.observed.plans
            || (told.as_ref() != status && !waits_now);
        member.due_at = decision.requeue_after.map(|after| {
            self.now + SignedDuration::try_from(after).unwrap_or(SignedDuration::ZERO)
        });
        if let Some(plan) = decision.create_plan.filter(|_| member.is_broken) {
            member.broken.insert(plan.spec.generation);
        }
        member.waits = waits_now;
        self.queue.retain(|other| other != name);
        if waits_now {
            self.queue.push_back(Arc::clone(name));
        }
        count(&mut self.holdings, name, member);
        Ok(())
    }

    /// What is observed of a deployment now.
    fn observe(&self, name: &Arc<str>) -> Option<Observed> {
        let member = self.members.get(name)?;
        let key = Key::new(NAMESPACE, name);
        let mut observed = member.observed.clone();
        observed.now = self.now;
        observed.nodes.clone_from(&self.nodes);
        observed.held_by_others = self.holdings.of_others(name);
        observed.claimable = self.claimable_for(name);
        let rests = observed.deployment.spec.may_rest();
        observed.demand = rests.then(|| demand(self.now, member));
        let asked = self.asked.iter().filter(|(_, it)| it.of.contains(&key));
        let askers = asked.map(|(key, it)| Asker {
            key: key.clone(),
            priority: it.priority,
            since: it.since,
        });
        observed.askers = askers.collect();
        let status = observed.deployment.status.as_ref();
        let is_at_zero = status.is_some_and(|status| status.is_at_zero());
        if observed.deployment.spec.autoscaling.preload && is_at_zero {
            let others = self.awaited.iter().filter(|(other, _)| **other != key);
            observed.awaited_nodes = others
                .flat_map(|(_, nodes)| nodes.iter().cloned())
                .collect();
        } else {
            observed.awaited_nodes.clear();
        }
        let seeks_room = member.waits || member.ahead.is_none();
        observed.neighbours = match seeks_room {
            true => self.neighbours_of(name),
            false => Vec::new(),
        };
        Some(observed)
    }

    /// GPUs that no Pod of others has claimed.
    fn claimable_for(&self, name: &Arc<str>) -> BTreeMap<String, BTreeSet<String>> {
        let members = self.members.iter();
        let pods = members.map(|(other, member)| (other, &member.observed.pods));
        let pods = pods
            .chain(&self.leaving)
            .filter(|(other, _)| *other != name);
        let pods = pods.flat_map(|(_, pods)| pods);
        let taken: BTreeSet<&String> = pods.flat_map(|pod| &pod.claimed_gpus).collect();
        let offered = self.nodes.iter().filter_map(|(node, view)| {
            let mut uuids = claimable(view)?;
            uuids.retain(|uuid| !taken.contains(uuid));
            Some((node.clone(), uuids))
        });
        offered.collect()
    }

    /// Others whose workers may end for this one's.
    fn neighbours_of(&self, name: &Arc<str>) -> Vec<Neighbour> {
        let others = self.members.iter().filter(|(other, _)| *other != name);
        let neighbours = others.filter_map(|(other, member)| {
            let deployment = &member.observed.deployment;
            let status = deployment.status.as_ref();
            let is_leaving = status.is_some_and(|status| status.is_at_zero());
            let ready = conditions::of(status, DECODE_READY);
            let is_ready = ready.is_some_and(|ready| ready.status == "True");
            let may_rest = deployment.spec.may_rest();
            let preloaded_since = preloaded_since(status);
            let is_unasked = preloaded_since.is_some() && !member.has_request;
            let pods = member.observed.pods.iter().map(|pod| &**pod);
            let workers = pods.filter(|pod| is_of_rank(pod) && !pod.role.is_gateway());
            let workers: Vec<&PodView> = workers.collect();
            let may_end = is_ready || is_leaving || is_unasked;
            let since = conditions::starting_since(status);
            let may_start =
                since.is_some_and(|since| age(since, self.now) < progress_deadline(deployment));
            if !may_rest || workers.is_empty() || !(may_end || may_start) {
                return None;
            }
            Some(Neighbour {
                key: Key::new(NAMESPACE, other),
                priority: deployment.spec.priority,
                keeps: deployment.spec.autoscaling.keep,
                idle_s: Some(age(member.asked_at, self.now).as_secs_f64()),
                preloaded_since,
                is_leaving,
                is_starting: !may_end,
                holding: of_deployment(workers.into_iter(), &member.observed.plans, None),
            })
        });
        neighbours.collect()
    }

    /// Records whom a deployment asks; they are decided about next.
    fn ask(&mut self, name: &str, decision: &Decision) {
        let key = Key::new(NAMESPACE, name);
        match decision.awaits.is_empty() {
            true => self.awaited.remove(&key),
            false => self.awaited.insert(key.clone(), decision.awaits.clone()),
        };
        let Some(member) = self.members.get(name).filter(|_| !decision.asks.is_empty()) else {
            self.asked.remove(&key);
            return;
        };
        let asked = self.asked.entry(key).or_insert(Asked {
            priority: member.observed.deployment.spec.priority,
            since: self.now,
            of: Vec::new(),
        });
        asked.of.clone_from(&decision.asks);
        for of in &decision.asks {
            if let Some(other) = self.members.get_mut(&of.name) {
                other.is_due = true;
            }
        }
    }

    /// Times the planner alone, on what the decision was made from.
    fn time_planner(&mut self, observed: &Observed, plan: &InferencePlanSpec) {
        let facts = plan.inputs.as_ref().map(|inputs| &inputs.model_facts);
        let facts = facts.and_then(|facts| serde_json::from_value(facts.clone()).ok());
        let Some(facts) = facts.filter(|_| self.setting.times_planner) else {
            return;
        };
        let candidates = super::candidates_of(observed);
        let before = (self.watch)();
        let again = planned_alone(&observed.deployment, &facts, &candidates, None);
        let ms = 1e3 * ((self.watch)() - before).as_secs_f64();
        // It is looked at, so that it is made.
        let is_made = again.is_ok();
        let figures = &mut self.figures;
        match plan.strategy {
            PlanStrategy::PipedRing => figures.ring_plans_ms.push(ms),
            _ => figures.plans_ms.push(ms),
        }
        figures.differ += usize::from(!is_made);
    }

    /// Checks that nothing is booked twice.
    fn audit(&self) -> Result<(), String> {
        let accounts = self.members.iter().map(|(name, member)| Account {
            owner: name,
            plan: member.ahead.as_ref().map(|plan| &plan.spec),
            pods: &member.observed.pods,
        });
        let leaving = self.leaving.iter().map(|(name, pods)| Account {
            owner: name,
            plan: None,
            pods,
        });
        let others = self.setting.others();
        let checked = audit::check(&self.nodes, &others, accounts.chain(leaving));
        checked.map_err(|why| {
            let named = self
                .members
                .iter()
                .filter(|(name, _)| why.contains(&***name));
            let told: Vec<String> = named.map(|(name, it)| told(name, it)).collect();
            format!("{why}\n{}", told.join("\n"))
        })
    }
}

/// A deployment's plans, Pods and conditions, in words.
fn told(name: &str, member: &Member) -> String {
    let Observed {
        deployment,
        plans,
        pods,
        ..
    } = &member.observed;
    let plans = plans.iter().map(|plan| {
        let outcome = plan.status.as_ref().and_then(|it| it.outcome.as_deref());
        let ranks = plan.spec.ranks.iter();
        let nodes: Vec<String> = ranks
            .map(|it| format!("{} on {}", it.name, it.node))
            .collect();
        format!("{} {outcome:?}: {nodes:?}", plan.spec.generation)
    });
    let pods = pods.iter().map(|pod| {
        let state = (pod.is_ready, pod.is_deleting);
        format!(
            "{} of {} on {} {state:?}",
            pod.rank,
            pod.plan_generation,
            node_of(pod)
        )
    });
    let status = deployment
        .status
        .iter()
        .flat_map(|status| &status.conditions);
    let conditions = status.map(|it| format!("{}={}:{}", it.type_, it.status, it.reason));
    let (plans, pods): (Vec<_>, Vec<_>) = (plans.collect(), pods.collect());
    let conditions: Vec<_> = conditions.collect();
    let has_place = member.ahead.is_some();
    format!("{name}: has a place: {has_place}; plans {plans:?}; Pods {pods:?}; {conditions:?}")
}

/// Counts what a deployment holds, in the ledger and in its plan's figures.
fn count(holdings: &mut Holdings, name: &Arc<str>, member: &mut Member) {
    let observed = &member.observed;
    let deployment = &observed.deployment;
    let rests = deployment.spec.suspend || holds_nothing(deployment.status.as_ref());
    let status = deployment.status.as_ref();
    let followed = status.and_then(|status| Some(status.plan.as_ref()?.generation));
    let ahead = ahead(&observed.plans, followed).filter(|_| !rests).cloned();
    let pods = observed.pods.iter().map(|pod| &**pod);
    let plan = ahead.as_ref().map(|plan| &plan.spec);
    holdings.set(name, of_deployment(pods, &observed.plans, plan));
    member.booked = plan.map(booked_by).unwrap_or_default();
    member.ahead = ahead;
}

/// What a plan books of each node, by its ranks.
pub(super) fn booked_by(plan: &InferencePlanSpec) -> Vec<(String, Booked)> {
    let of_rank = |rank: &PlanRank| {
        let held = rank_holding(plan, rank);
        let booked = Booked {
            memory_bytes: held.memory_bytes,
            gpu_bytes: rank.gpu_memory_bytes,
        };
        (rank.node.clone(), booked)
    };
    plan.ranks.iter().map(of_rank).collect()
}

fn is_of_rank(pod: &PodView) -> bool {
    pod.role != PodRole::Inspect
}

/// The load of a deployment whose workers may end: requests are answered at once, or wait.
fn demand(now: Timestamp, member: &Member) -> Demand {
    let waiting = f64::from(u8::from(member.has_request));
    let idle = match member.has_request {
        true => Duration::ZERO,
        false => age(member.asked_at, now),
    };
    Demand {
        age_s: 1.0,
        span_s: 60.0,
        long_span_s: 300.0,
        recent_span_s: 15.0,
        arrivals: waiting,
        unanswered: waiting,
        queued: waiting,
        held: waiting,
        idle_s: Some(idle.as_secs_f64()),
        ..Demand::default()
    }
}
