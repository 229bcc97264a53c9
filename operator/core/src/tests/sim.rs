//! A simulated scheduler and kubelets, which take their time, and the checks that watch a rollout.

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{PlanRole, Routes};
use jiff::Timestamp;

use crate::decision::Grace;
use crate::observed::forbidden::Quota;
use crate::observed::{ContainerView, PodRole, PodView, Requests};
use crate::rollout::ends::Ends;
use crate::rollout::{Mode, RolloutInput, Steps, Want, step};
use crate::routes::endpoint;
use crate::testing::{MIB, at};

/// A simulated Pod.
#[derive(Clone, Debug)]
pub(super) struct Paper {
    pub(super) view: PodView,
    /// Ticks until it is ready.
    start: u32,
    /// Ticks until it is gone.
    end: Option<u32>,
    /// Whether it never becomes ready.
    is_broken: bool,
}

/// Durations in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) worker_start: u32,
    pub(super) gateway_start: u32,
    pub(super) worker_end: u32,
    pub(super) gateway_end: u32,
}

/// The cluster.
#[derive(Clone, Debug)]
pub(super) struct Sim {
    pub(super) pods: BTreeMap<String, Paper>,
    pub(super) rooms: BTreeMap<String, Requests>,
    pub(super) away: BTreeMap<String, Requests>,
    pub(super) pace: Pace,
    /// Whether the nodes that are away are no longer waited for.
    pub(super) is_patience_over: bool,
    /// Forms whose Pods never become ready.
    pub(super) broken: BTreeSet<String>,
    /// Bytes of each node that other Pods take, unknown to the operator.
    pub(super) hidden_bytes: u64,
    /// Maximum number of Pods that the namespace may have; `None`: any number.
    pub(super) most_pods: Option<usize>,
    /// Set if the plan's Pods met that limit and no Pod has gone since: whether a gateway was among them.
    met: Option<bool>,
    /// See [`RolloutInput::short_for`].
    pub(super) short_for: Option<std::time::Duration>,
    pub(super) compatible_generations: BTreeSet<u64>,
    pub(super) generation: u64,
    tick: i64,
    made: u32,
}

impl Sim {
    pub(super) fn new(rooms: BTreeMap<String, Requests>, pace: Pace) -> Self {
        Self {
            pods: BTreeMap::new(),
            rooms,
            away: BTreeMap::new(),
            pace,
            is_patience_over: false,
            broken: BTreeSet::new(),
            hidden_bytes: 0,
            most_pods: None,
            short_for: None,
            met: None,
            compatible_generations: BTreeSet::new(),
            generation: 1,
            tick: 0,
            made: 0,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        at(self.tick * 5)
    }

    fn quota_state(&self) -> Quota {
        match self.met {
            None => Quota::Free,
            Some(false) => Quota::Tight,
            Some(true) => Quota::Full,
        }
    }

    /// The operator's decision for the current state.
    pub(super) fn decide(&self, wants: &[Want]) -> Steps {
        let pods: Vec<&PodView> = self.pods.values().map(|paper| &paper.view).collect();
        step(&RolloutInput {
            wants,
            pods: &pods,
            rooms: &self.rooms,
            away: &self
                .away
                .keys()
                .map(|name| (name.clone(), self.is_patience_over))
                .collect(),
            compatible_generations: &self.compatible_generations,
            begun_generations: &BTreeSet::new(),
            ends: &Ends::default(),
            quota: self.quota_state(),
            short_for: self.short_for,
            now: self.now(),
        })
    }

    /// Carries out one reconcile of the operator.
    pub(super) fn reconcile(&mut self, wants: &[Want]) -> Steps {
        let steps = self.decide(wants);
        let now = self.now();
        let mut refused = None;
        for (index, routes) in &steps.create {
            if self.most_pods.is_some_and(|most| self.pods.len() >= most) {
                let is_gateway = wants[*index].role == PlanRole::Gateway;
                refused = Some(is_gateway || refused == Some(true));
                continue;
            }
            self.create(&wants[*index], routes.clone().unwrap_or_default());
        }
        self.met = refused.or(self.met.filter(|_| steps.create.is_empty()));
        for (name, routes) in &steps.routes {
            let paper = self
                .pods
                .get_mut(name)
                .expect("routes of a Pod that is there");
            assert!(!paper.view.is_deleting, "its kubelet would not tell it");
            paper.view.routes.clone_from(routes);
            paper.view.routed = Some(now);
        }
        for end in &steps.end {
            let Some(paper) = self.pods.get_mut(&end.name) else {
                continue;
            };
            assert_eq!(paper.view.uid, end.uid);
            if end.grace == Grace::None {
                self.pods.remove(&end.name);
                continue;
            }
            assert!(!paper.view.is_deleting, "{} is ended twice", end.name);
            paper.view.is_deleting = true;
            paper.end = Some(match paper.view.role.is_gateway() {
                true => self.pace.gateway_end,
                false => self.pace.worker_end,
            });
        }
        steps
    }

    fn create(&mut self, want: &Want, routes: String) {
        assert!(
            !self.pods.contains_key(&want.name),
            "{} is made while it is there",
            want.name
        );
        assert!(
            self.rooms.contains_key(&want.node),
            "{} is made on a lost node",
            want.name
        );
        self.made += 1;
        let view = PodView {
            name: want.name.clone(),
            uid: self.made.to_string(),
            role: PodRole::Rank(want.role),
            rank: want.rank.clone(),
            second: want.second.clone(),
            form: want.form.clone(),
            plan_generation: self.generation,
            routes,
            wanted_node: want.node.clone(),
            phase: "Pending".to_owned(),
            created: Some(self.now()),
            cpu_millis: want.cpu_millis,
            memory_bytes: want.memory_bytes,
            gpus: want.gpus,
            exclusive_cpus: want.exclusive_cpus.clone(),
            ..PodView::default()
        };
        let start = match want.role {
            PlanRole::Gateway => self.pace.gateway_start,
            _ => self.pace.worker_start,
        };
        let paper = Paper {
            view,
            start,
            end: None,
            is_broken: self.broken.contains(&want.form),
        };
        self.pods.insert(want.name.clone(), paper);
    }

    /// Lets time pass without any action.
    pub(super) fn tick(&mut self) {
        self.tick += 1;
    }

    /// Lets the scheduler and the kubelets do a tick's work.
    pub(super) fn turn(&mut self) {
        self.tick();
        let gone: Vec<String> = self
            .pods
            .values_mut()
            .filter(|paper| self.rooms.contains_key(node(&paper.view)))
            .filter_map(|paper| {
                let left = paper.end.as_mut()?;
                *left = left.saturating_sub(1);
                (*left == 0).then(|| paper.view.name.clone())
            })
            .collect();
        for name in gone {
            self.met = self.met.map(|_| false);
            self.pods.remove(&name);
        }
        self.schedule();
        for paper in self.pods.values_mut() {
            let runs = self.rooms.contains_key(&paper.view.node);
            if !runs || paper.is_broken || paper.view.phase == "Failed" {
                continue;
            }
            paper.view.phase = "Running".to_owned();
            if paper.start > 0 {
                paper.start -= 1;
            } else {
                paper.view.is_ready = true;
                paper.view.container = Some(ContainerView {
                    running_since: Some(at(self.tick * 5)),
                    ..ContainerView::default()
                });
            }
        }
    }

    fn schedule(&mut self) {
        let names: Vec<String> = self.pods.keys().cloned().collect();
        for name in names {
            let view = self.pods[&name].view.clone();
            if !view.node.is_empty() || view.is_deleting {
                continue;
            }
            let Some(room) = self.rooms.get(&view.wanted_node) else {
                continue;
            };
            let bound = self.pods.values().filter(|other| {
                other.view.node == view.wanted_node && other.view.phase != "Failed"
            });
            let held: u64 = bound.map(|other| other.view.memory_bytes).sum();
            let fits = held + view.memory_bytes + self.hidden_bytes <= room.memory_bytes;
            self.made += 1;
            let number = self.made;
            let paper = self.pods.get_mut(&name).expect("listed above");
            if fits {
                paper.view.unschedulable = None;
                paper.view.node.clone_from(&view.wanted_node);
                paper.view.ip = format!("10.0.{}.{}", number / 256, number % 256);
            } else {
                paper.view.unschedulable = Some("Unschedulable: 1 Insufficient memory".to_owned());
            }
        }
    }

    pub(super) fn lose(&mut self, name: &str) {
        if let Some(room) = self.rooms.remove(name) {
            self.away.insert(name.to_owned(), room);
        }
    }

    pub(super) fn bring_back(&mut self) {
        self.rooms.append(&mut self.away);
    }

    /// Restarts its process.
    pub(super) fn crash(&mut self, name: &str) {
        if let Some(paper) = self.pods.get_mut(name) {
            paper.view.is_ready = false;
            paper.start = self.pace.worker_start;
        }
    }

    /// Has its process end whenever it starts.
    pub(super) fn break_down(&mut self, name: &str) {
        self.crash(name);
        if let Some(paper) = self.pods.get_mut(name) {
            paper.is_broken = true;
        }
    }

    pub(super) fn fail(&mut self, name: &str) {
        if let Some(paper) = self.pods.get_mut(name) {
            paper.view.is_ready = false;
            paper.view.phase = "Failed".to_owned();
        }
    }

    /// Ready gateways that get requests.
    pub(super) fn open_gateways(&self) -> impl Iterator<Item = &PodView> {
        self.open().filter(|view| view.role.is_gateway())
    }

    fn open(&self) -> impl Iterator<Item = &PodView> {
        let views = self.pods.values().map(|paper| &paper.view);
        views.filter(|view| {
            view.is_ready && !view.is_deleting && self.rooms.contains_key(node(view))
        })
    }

    /// Whether some open gateway routes to a ready Pod of every worker of `wants` that takes requests.
    pub(super) fn serves(&self, wants: &[Want]) -> bool {
        let workers: Vec<&Want> = wants
            .iter()
            .filter(|want| matches!(want.role, PlanRole::Prefill | PlanRole::Decode))
            .collect();
        self.open_gateways().any(|gateway| {
            let routes: Routes = serde_json::from_str(&gateway.routes).unwrap_or_default();
            workers.iter().all(|want| {
                self.open()
                    .filter(|view| view.name == want.name)
                    .filter_map(endpoint)
                    .any(|address| routes.workers.iter().any(|route| route.endpoint == address))
            })
        })
    }

    /// Asserts that no node holds, or is asked to hold, more than it has.
    pub(super) fn assert_capacity(&self) {
        for (name, room) in &self.rooms {
            let here = || {
                let views = self.pods.values().map(|paper| &paper.view);
                views.filter(|view| node(view) == name && view.phase != "Failed")
            };
            let memory: u64 = here().map(|view| view.memory_bytes).sum();
            assert!(memory <= room.memory_bytes, "{name} is to hold {memory}");
            let gpus: u32 = here().map(|view| view.gpus).sum();
            assert!(gpus <= room.gpus, "{name} is to hold {gpus} GPUs");
            let cpu_millis: u64 = here().map(|view| view.cpu_millis).sum();
            assert!(
                cpu_millis <= room.cpu_millis,
                "{name} is to hold {cpu_millis}m CPU"
            );
            let cpus: Vec<u32> = here()
                .flat_map(|view| view.exclusive_cpus.clone())
                .collect();
            let distinct: BTreeSet<u32> = cpus.iter().copied().collect();
            assert_eq!(distinct.len(), cpus.len(), "CPUs of {name} are given twice");
        }
    }

    /// Reconciles until nothing more is wanted; returns the modes that it went through.
    pub(super) fn settle(
        &mut self,
        wants: &[Want],
        mut look: impl FnMut(&Self, &Steps),
    ) -> Vec<Mode> {
        let mut modes: Vec<Mode> = Vec::new();
        for _ in 0..500 {
            let steps = self.reconcile(wants);
            if modes.last() != Some(&steps.progress.mode) {
                modes.push(steps.progress.mode);
            }
            look(self, &steps);
            if steps.progress.is_complete && is_quiet(&steps) {
                return modes;
            }
            self.turn();
            look(self, &steps);
        }
        panic!("the rollout does not end: {:#?}", self.pods);
    }
}

/// Whether there is nothing to do.
pub(super) fn is_quiet(steps: &Steps) -> bool {
    steps.create.is_empty() && steps.routes.is_empty() && steps.end.is_empty()
}

pub(super) fn node(view: &PodView) -> &str {
    if view.node.is_empty() {
        &view.wanted_node
    } else {
        &view.node
    }
}

pub(super) const PACE: Pace = Pace {
    worker_start: 3,
    gateway_start: 1,
    worker_end: 4,
    gateway_end: 6,
};

pub(super) fn rooms(mib: &[(&str, u64)]) -> BTreeMap<String, Requests> {
    let room = |mib: u64| Requests {
        cpu_millis: 64_000,
        memory_bytes: mib * MIB,
        gpus: 1,
    };
    mib.iter()
        .map(|(name, mib)| ((*name).to_owned(), room(*mib)))
        .collect()
}

/// A wanted Pod of `mib` MiB on `node`, in version `hash`.
pub(super) fn want(rank: &str, hash: &str, node: &str, mib: u64) -> Want {
    let role = match rank.split('-').next() {
        Some("gateway") => PlanRole::Gateway,
        Some("prefill") => PlanRole::Prefill,
        Some("stage") => PlanRole::Stage,
        _ => PlanRole::Decode,
    };
    Want {
        name: format!("demo-{rank}-{hash}"),
        second: None,
        group: Vec::new(),
        rank: rank.to_owned(),
        form: hash.to_owned(),
        role,
        node: node.to_owned(),
        memory_bytes: mib * MIB,
        cpu_millis: 100,
        gpus: 0,
        exclusive_cpus: Vec::new(),
        claimed_gpus: Vec::new(),
    }
}
