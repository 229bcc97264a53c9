//! First fit: each deployment goes to the first node, in the order of their names, that can hold it whole.
//!
//! What a deployment needs is no number of its own here. The planner itself says whether a node that is offered alone takes it,
//! and what it books there, so the requirements are the same to the byte, reserves included; only who chooses the node differs.
//! Whole means that no weights are read from a disk. The same events happen, the same nodes are lost, and after each step as many of
//! those that wait are tried again, the one that was not for longest first. A change of a spec, or the loss of a node, moves a
//! deployment at once, which costs the operator a rollout in which the old Pods still hold their place.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hearth_crds::{InferenceDeployment, InferencePlanSpec, ModelFacts};

use super::cluster::booked_by;
use super::events::Event;
use super::figures::{Booked, Utilisation};
use super::shapes::{Wish, claimable};
use super::{Setting, candidates_of, name_of, node_name, planned_alone};
use crate::ledger::holdings::{Holdings, of_deployment};
use crate::observed::{NodeView, Observed};
use crate::testing::observed;

/// A deployment.
struct Member {
    deployment: InferenceDeployment,
    facts: ModelFacts,
    plan: Option<InferencePlanSpec>,
    /// Whether that is for the current spec.
    is_current: bool,
    booked: Vec<(String, Booked)>,
}

/// The cluster.
pub(super) struct FirstFit {
    setting: Setting,
    nodes: BTreeMap<String, Arc<NodeView>>,
    holdings: Holdings,
    members: BTreeMap<Arc<str>, Member>,
    queue: VecDeque<Arc<str>>,
    pub(super) utilisation: Utilisation,
}

impl FirstFit {
    pub(super) fn new(setting: Setting) -> Self {
        Self {
            nodes: setting.all_nodes(),
            setting,
            holdings: Holdings::default(),
            members: BTreeMap::new(),
            queue: VecDeque::new(),
            utilisation: Utilisation::default(),
        }
    }

    /// Lets one thing happen, and tries a few of those that wait again.
    pub(super) fn step(&mut self, event: &Event) {
        match event {
            Event::Create(number, wish) | Event::Change(number, wish) => self.want(*number, wish),
            Event::Delete(number) => {
                let name: Arc<str> = name_of(*number).into();
                self.members.remove(&name);
                self.holdings.set(&name, BTreeMap::new());
                self.queue.retain(|other| *other != name);
            }
            Event::Request(_) => {}
            Event::Lose(number) => self.change_node(*number, false),
            Event::Return(number) => self.change_node(*number, true),
        }
        for _ in 0..self.setting.retries.min(self.queue.len()) {
            if let Some(name) = self.queue.pop_front() {
                self.place(&name);
            }
        }
        let booked = self.members.values().flat_map(|member| &member.booked);
        self.utilisation.add(&self.nodes, booked);
        let placed = self.members.values().filter(|it| it.plan.is_some());
        self.utilisation.placed += placed.count();
    }

    fn want(&mut self, number: usize, wish: &Wish) {
        let name: Arc<str> = name_of(number).into();
        let before = self.members.remove(&name);
        let (plan, booked) = before.map(|it| (it.plan, it.booked)).unwrap_or_default();
        let mut deployment = InferenceDeployment::new(&name, wish.spec());
        deployment.metadata.namespace = Some("default".to_owned());
        let member = Member {
            deployment,
            facts: wish.size.facts(),
            plan,
            is_current: false,
            booked,
        };
        self.members.insert(Arc::clone(&name), member);
        self.place(&name);
    }

    fn change_node(&mut self, number: usize, is_ready: bool) {
        let node = node_name(number);
        let view = self.nodes.get_mut(&node).expect("a node that is there");
        Arc::make_mut(view).is_ready = is_ready;
        let members = self.members.iter();
        let there = members.filter(|(_, it)| it.booked.iter().any(|(name, _)| *name == node));
        let there: Vec<Arc<str>> = there.map(|(name, _)| Arc::clone(name)).collect();
        for name in there {
            self.place(&name);
        }
    }

    /// Places a deployment that has no place, or none that suits it; where there is none, it keeps what it has, and waits.
    fn place(&mut self, name: &Arc<str>) {
        self.queue.retain(|other| other != name);
        let Some(member) = self.members.get(name) else {
            return;
        };
        let is_up = |(node, _): &(String, Booked)| self.nodes[node].is_ready;
        if member.plan.is_some() && member.is_current && member.booked.iter().all(is_up) {
            return;
        }
        let around = Observed {
            nodes: self.nodes.clone(),
            held_by_others: self.holdings.of_others(name),
            others: self.setting.others(),
            claimable: self
                .nodes
                .iter()
                .filter_map(|(node, view)| Some((node.clone(), claimable(view)?)))
                .collect(),
            ..observed(member.deployment.clone())
        };
        let candidates = candidates_of(&around);
        let nodes = candidates.free.keys();
        let mut plans = nodes.filter_map(|node| {
            let plan = planned_alone(
                &member.deployment,
                &member.facts,
                &candidates,
                Some(node.as_str()),
            );
            plan.ok().filter(is_whole)
        });
        let Some(plan) = plans.next() else {
            self.queue.push_back(Arc::clone(name));
            return;
        };
        let held = of_deployment(std::iter::empty(), &[], Some(&plan));
        self.holdings.set(name, held);
        if let Some(member) = self.members.get_mut(name) {
            member.booked = booked_by(&plan);
            member.plan = Some(plan);
            member.is_current = true;
        }
    }
}

fn is_whole(plan: &InferencePlanSpec) -> bool {
    plan.ranks.iter().all(|rank| rank.disk_weight_bytes() == 0)
}
