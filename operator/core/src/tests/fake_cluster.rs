//! A simulated cluster around one deployment: decisions are carried out, and Pods come up.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{Condition, InferenceDeploymentStatus};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_core::ResourceExt;

use crate::decide::decide;
use crate::decision::{Decision, Grace, ScalerStep, Transition};
use crate::names::{
    ANNOTATION_CERTIFICATE, ANNOTATION_FORM, ANNOTATION_PLAN, ANNOTATION_PLAN_GENERATION,
    ANNOTATION_ROUTES, ANNOTATION_SOURCE, LABEL_RANK, LABEL_ROLE,
};
use crate::observed::{NodeView, Observed, PodRole, PodView, ScalerView, SecondRank};
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

    fn apply(&mut self, decision: &Decision) {
        let now = self.observed.now;
        let plans = &mut self.observed.plans;
        if let Some(plan) = &decision.create_plan {
            assert!(
                plans
                    .iter()
                    .all(|old| old.spec.generation < plan.spec.generation)
            );
            let mut plan = plan.clone();
            plan.metadata.creation_timestamp = Some(Time(now));
            plans.push(Arc::new(plan));
        }
        for change in &decision.plan_statuses {
            let plan = plans.iter_mut().find(|plan| plan.name_any() == change.name);
            let plan = Arc::make_mut(plan.expect("the status of a plan that is there"));
            plan.status = Some(change.status.clone());
        }
        plans.retain(|plan| !decision.delete_plans.contains(&plan.name_any()));
        for pod in &decision.create_pods {
            let view = self.view(pod, now);
            assert!(
                self.observed
                    .pods
                    .iter()
                    .all(|other| other.name != view.name),
                "{} is there",
                view.name
            );
            self.observed.pods.push(Arc::new(view));
        }
        for marks in &decision.mark_pods {
            let pods = &mut self.observed.pods;
            let pod = pods.iter_mut().find(|pod| pod.name == marks.name);
            let pod = Arc::make_mut(pod.expect("marks of a Pod that is there"));
            for (key, value) in &marks.annotations {
                match key.as_str() {
                    ANNOTATION_ROUTES => pod.routes.clone_from(value),
                    ANNOTATION_CERTIFICATE => pod.certificate.clone_from(value),
                    ANNOTATION_PLAN_GENERATION => pod.plan_generation = value.parse().unwrap(),
                    other => panic!("mark {other}"),
                }
            }
        }
        for end in &decision.delete_pods {
            let pods = &mut self.observed.pods;
            if end.grace == Grace::None {
                pods.retain(|pod| pod.uid != end.uid);
            } else if let Some(pod) = pods.iter_mut().find(|pod| pod.uid == end.uid) {
                Arc::make_mut(pod).is_deleting = true;
            }
        }
        self.scale(decision.scaler.as_ref());
        self.observed.pods.sort_by(|a, b| a.name.cmp(&b.name));
        let mut deployment = (*self.observed.deployment).clone();
        deployment.status = Some(decision.status.clone());
        self.observed.deployment = Arc::new(deployment);
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

    fn view(&mut self, pod: &Pod, now: Timestamp) -> PodView {
        self.made += 1;
        let label = |name: &str| pod.labels().get(name).cloned().unwrap_or_default();
        let annotation = |name: &str| pod.annotations().get(name).cloned().unwrap_or_default();
        let value = serde_json::to_value(pod).unwrap();
        let node = value.pointer(
            "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution\
             /nodeSelectorTerms/0/matchFields/0/values/0",
        );
        let slice: serde_json::Value =
            serde_json::from_str(&annotation(ANNOTATION_PLAN)).unwrap_or_default();
        let told = |at: &str| slice.pointer(at).and_then(|text| text.as_str());
        let second = told("/ranks/1/name").and_then(|name| {
            let first = told("/ranks/0/name").unwrap_or_default();
            SecondRank::named(name.to_owned(), first, told("/ranks/1/inPodOf"))
        });
        let memory = value.pointer("/spec/containers/0/resources/requests/memory");
        let memory = memory.and_then(|memory| memory.as_str());
        let gpus = value.pointer("/spec/containers/0/resources/limits/nvidia.com~1gpu");
        let gpus = gpus.and_then(|gpus| gpus.as_str());
        PodView {
            name: pod.name_any(),
            uid: self.made.to_string(),
            role: PodRole::of_label(&label(LABEL_ROLE)),
            rank: label(LABEL_RANK),
            second,
            form: annotation(ANNOTATION_FORM),
            plan_generation: annotation(ANNOTATION_PLAN_GENERATION).parse().unwrap_or(0),
            source: annotation(ANNOTATION_SOURCE),
            routes: annotation(ANNOTATION_ROUTES),
            certificate: annotation(ANNOTATION_CERTIFICATE),
            wanted_node: node
                .and_then(|node| node.as_str())
                .unwrap_or_default()
                .to_owned(),
            phase: "Pending".to_owned(),
            created: Some(now),
            memory_bytes: memory.and_then(|memory| memory.parse().ok()).unwrap_or(0),
            gpus: gpus.and_then(|gpus| gpus.parse().ok()).unwrap_or(0),
            ..PodView::default()
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
