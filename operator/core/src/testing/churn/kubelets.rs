//! The scheduler, which counts what Pods request, and the kubelets, which start them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::cause::node_of;
use crate::observed::{ContainerEnd, ContainerView, NodeView, Others, PodRole, PodView, Requests};

/// What bound Pods have of each node.
pub(super) struct Kubelets<'a> {
    nodes: &'a BTreeMap<String, Arc<NodeView>>,
    requested: BTreeMap<String, Requests>,
    claimed: BTreeSet<String>,
}

impl<'a> Kubelets<'a> {
    pub(super) fn new<'b>(
        nodes: &'a BTreeMap<String, Arc<NodeView>>,
        others: Others,
        pods: impl Iterator<Item = &'b Arc<PodView>>,
    ) -> Self {
        let mut kubelets = Self {
            nodes,
            requested: others.requests,
            claimed: BTreeSet::new(),
        };
        pods.filter(|pod| !pod.node.is_empty() && !pod.has_ended())
            .for_each(|pod| kubelets.bind(pod));
        kubelets
    }

    fn bind(&mut self, pod: &PodView) {
        let sum = self.requested.entry(node_of(pod).to_owned()).or_default();
        *sum = sum.plus(requests(pod));
        self.claimed.extend(pod.claimed_gpus.iter().cloned());
    }

    /// Whether the kubelet of a node answers.
    pub(super) fn is_up(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|node| node.is_ready)
    }

    /// Lets Pods of a deployment come a step nearer to being gone, or to being ready, which those of a plan that `is_broken`
    /// says so of never are. One that reads a model's facts has read them. `number` counts bound Pods. Returns whether anything
    /// has changed.
    pub(super) fn turn(
        &mut self,
        pods: &mut Vec<Arc<PodView>>,
        facts: Option<&String>,
        is_broken: impl Fn(u64) -> bool,
        number: &mut u32,
    ) -> bool {
        let count_before = pods.len();
        pods.retain(|pod| !(pod.is_deleting && self.is_up(node_of(pod))));
        let mut has_changed = pods.len() < count_before;
        for pod in pods {
            if pod.role == PodRole::Inspect && pod.phase == "Pending" {
                read(Arc::make_mut(pod), facts);
                has_changed = true;
            } else if pod.is_ready || !self.is_up(node_of(pod)) {
                continue;
            } else if pod.node.is_empty() {
                *number += 1;
                has_changed |= self.schedule(Arc::make_mut(pod), *number);
            } else if pod.role.is_gateway() || !is_broken(pod.plan_generation) {
                Arc::make_mut(pod).is_ready = true;
                has_changed = true;
            }
        }
        has_changed
    }

    /// Binds a Pod, if its node has what it requests; returns whether it knows more than before.
    fn schedule(&mut self, pod: &mut PodView, number: u32) -> bool {
        let view = &self.nodes[&pod.wanted_node];
        let before = self.requested.get(&pod.wanted_node).copied();
        let then = before.unwrap_or_default().plus(requests(pod));
        let has = Requests::new(view.cpu_millis, view.memory_bytes, view.gpus);
        let are_free = pod
            .claimed_gpus
            .iter()
            .all(|uuid| !self.claimed.contains(uuid));
        if then.max(has) != has || !are_free {
            let words = "Unschedulable: 0/1 nodes are available";
            return pod.unschedulable.replace(words.to_owned()).is_none();
        }
        pod.unschedulable = None;
        pod.node.clone_from(&pod.wanted_node);
        pod.ip = format!(
            "10.{}.{}.{}",
            number >> 16,
            (number >> 8) & 255,
            number & 255
        );
        pod.phase = "Running".to_owned();
        self.bind(pod);
        true
    }
}

fn requests(pod: &PodView) -> Requests {
    Requests::new(pod.cpu_millis, pod.memory_bytes, pod.gpus)
}

fn read(pod: &mut PodView, facts: Option<&String>) {
    pod.phase = "Succeeded".to_owned();
    let end = ContainerEnd {
        message: facts.cloned().unwrap_or_default(),
        ..ContainerEnd::default()
    };
    pod.container = Some(ContainerView {
        last_end: Some(end),
        ..ContainerView::default()
    });
}
