//! A simulated cluster around one deployment: decisions are carried out, and Pods come up.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{Condition, InferenceDeploymentStatus};
use kube_core::ResourceExt;

use crate::decide::decide;
use crate::decision::{Decision, ScalerStep, Transition};
use crate::observed::{NodeView, Observed, PodRole, PodView, ScalerView};
use crate::testing::carry_out::carry_out;
use crate::testing::{deployment, observed};

pub(super) struct FakeCluster {
    pub(super) observed: Observed,
    pub(super) events: Vec<Transition>,
    /// Workers of plans from this generation on never become ready.
    pub(super) broken_from: u64,
    made: u32,
}

impl FakeCluster {
    pub(super) fn new(yaml: &str) -> Self {
        Self {
            observed: observed(deployment(yaml)),
            events: Vec::new(),
            broken_from: u64::MAX,
            made: 0,
        }
    }

    /// Changes the spec.
    pub(super) fn change(&mut self, yaml: &str) {
        let mut changed = (*self.observed.deployment).clone();
        changed.spec = deployment(yaml).spec;
        changed.metadata.generation = changed.metadata.generation.map(|generation| generation + 1);
        self.observed.deployment = Arc::new(changed);
    }

    pub(super) fn node(&mut self, name: &str, change: impl FnOnce(&mut NodeView)) {
        let mut node = (*self.observed.nodes[name]).clone();
        change(&mut node);
        self.observed.nodes.insert(name.to_owned(), Arc::new(node));
    }

    pub(super) fn pod(&mut self, name: &str, change: impl FnOnce(&mut PodView)) {
        let pods = &mut self.observed.pods;
        let pod = pods.iter_mut().find(|pod| pod.name.starts_with(name));
        change(Arc::make_mut(pod.expect("a Pod of that name")));
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.observed.now += jiff::SignedDuration::try_from(time).unwrap();
    }

    /// Decides, and carries the decision out.
    pub(super) fn reconcile(&mut self) -> Decision {
        let decision = decide(&self.observed);
        self.apply(&decision);
        decision
    }

    pub(super) fn apply(&mut self, decision: &Decision) {
        let made = &mut self.made;
        carry_out(&mut self.observed, decision, || {
            *made += 1;
            made.to_string()
        });
        self.scale(decision.scaler.as_ref());
        self.events.extend(decision.events.iter().cloned());
    }

    fn scale(&mut self, step: Option<&ScalerStep>) {
        let scaler = &mut self.observed.scaler;
        match step {
            None => {}
            Some(ScalerStep::Create(made)) => {
                assert_eq!(*scaler, None, "a scaler is there");
                *scaler = Some(ScalerView {
                    name: made.name_any(),
                    uid: "scaler".to_owned(),
                    generation: Some(1),
                    replicas: made.spec.replicas,
                    status: None,
                });
            }
            Some(ScalerStep::Status { status, .. }) => {
                let scaler = scaler
                    .as_mut()
                    .expect("the status of a scaler that is there");
                scaler.status = Some(status.clone());
            }
            Some(ScalerStep::Remove { .. }) => *scaler = None,
        }
    }

    /// Lets a second pass: Pods are bound, then ready, or gone.
    pub(super) fn turn(&mut self) {
        self.pass(Duration::from_secs(1));
        let observed = &mut self.observed;
        observed.pods.retain(|pod| !pod.is_deleting);
        for (index, pod) in observed.pods.iter_mut().enumerate() {
            let pod = Arc::make_mut(pod);
            if pod.role == PodRole::Inspect || pod.unschedulable.is_some() {
                continue;
            }
            let node = observed.nodes.get(&pod.wanted_node);
            if !node.is_some_and(|node| node.is_ready) {
                pod.is_ready = false;
                continue;
            }
            if pod.node.is_empty() {
                pod.node.clone_from(&pod.wanted_node);
                pod.ip = format!("10.0.{}.{index}", pod.uid);
                pod.phase = "Running".to_owned();
            } else if pod.container.is_none()
                && (pod.role.is_gateway() || pod.plan_generation < self.broken_from)
            {
                pod.is_ready = true;
            }
        }
    }

    /// Reconciles until two reconciles agree and write nothing.
    pub(super) fn settle(&mut self) {
        for _ in 0..100 {
            let before = self.observed.deployment.status.clone();
            let pods = self.observed.pods.clone();
            let decision = self.reconcile();
            self.turn();
            let is_same = before.as_ref() == Some(&decision.status);
            if is_same && !decision.writes_objects() && pods == self.observed.pods {
                assert!(decision.events.is_empty(), "{:?}", decision.events);
                return;
            }
        }
        panic!("it does not settle: {:#?}", self.status());
    }

    pub(super) fn status(&self) -> &InferenceDeploymentStatus {
        self.observed
            .deployment
            .status
            .as_ref()
            .expect("a reconcile")
    }

    pub(super) fn condition(&self, type_: &str) -> &Condition {
        let mut conditions = self.status().conditions.iter();
        conditions.find(|c| c.type_ == type_).expect("a condition")
    }

    /// Status and reason of a condition.
    pub(super) fn says(&self, type_: &str) -> (&str, &str) {
        let condition = self.condition(type_);
        (&condition.status, &condition.reason)
    }

    /// Reasons of all events since the last call.
    pub(super) fn told(&mut self) -> Vec<String> {
        let events = std::mem::take(&mut self.events);
        events.into_iter().map(|event| event.reason).collect()
    }

    pub(super) fn ranks(&self) -> Vec<(String, String)> {
        let pods = self.observed.pods.iter();
        pods.map(|pod| (pod.rank.clone(), pod.wanted_node.clone()))
            .collect()
    }
}
