//! Resource requests of a Pod, counted as the scheduler counts them.

use std::collections::BTreeMap;

use hearth_controller_core::key::Key;
use hearth_controller_core::ledger::Charge;
use hearth_controller_core::names::LABEL_DEPLOYMENT;
use hearth_controller_core::observed::Requests;
use hearth_controller_core::quantity::{bytes, millis, whole};
use hearth_crds::GPU_RESOURCE;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ObjectMeta;
use serde::Deserialize;

use super::slim;

/// Amounts by resource, as in `requests` and `limits`.
pub(super) type Amounts = BTreeMap<String, Quantity>;

/// The parts of a Pod's spec that request resources.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Asking {
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    overhead: Amounts,
    /// Resources of the Pod as a whole; they replace the containers' sum for each resource named.
    resources: Resources,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    image: String,
    /// `Always` turns an init container into a sidecar.
    restart_policy: String,
    resources: Resources,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    requests: Amounts,
}

/// Resources that the kubelet has granted a container; they may lag behind a resize.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Granted {
    name: String,
    resources: Resources,
    allocated_resources: Amounts,
}

impl Granted {
    /// Name of the container.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Asking {
    /// Image of the container `name`; empty if there is none.
    pub(super) fn image(&self, name: &str) -> &str {
        let container = self.containers.iter().find(|it| it.name == name);
        container.map_or("", |container| &container.image)
    }

    /// Returns the Pod's total requests. Containers run together; init containers run before them one by one, each
    /// alongside the sidecars before it. The overhead of the runtime class is added. During a resize the larger amount
    /// counts.
    pub(super) fn requests(&self, granted: &[Granted]) -> Requests {
        let of = |container: &Container| {
            let asked = requests_of(&container.resources.requests);
            let now = granted.iter().find(|now| now.name == container.name);
            now.map_or(asked, |now| {
                asked
                    .max(requests_of(&now.resources.requests))
                    .max(requests_of(&now.allocated_resources))
            })
        };
        let mut sidecars = Requests::default();
        let mut starting = Requests::default();
        for container in &self.init_containers {
            let asked = of(container);
            if container.restart_policy == "Always" {
                sidecars = sidecars.plus(asked);
                starting = starting.max(sidecars);
            } else {
                starting = starting.max(sidecars.plus(asked));
            }
        }
        let running = self.containers.iter().map(of);
        let running = running.fold(sidecars, Requests::plus);
        let mut all = running.max(starting);
        let whole = requests_of(&self.resources.requests);
        if self.resources.requests.contains_key("cpu") {
            all.cpu_millis = whole.cpu_millis;
        }
        if self.resources.requests.contains_key("memory") {
            all.memory_bytes = whole.memory_bytes;
        }
        all.plus(requests_of(&self.overhead))
    }
}

/// Converts `amounts` to requests; missing resources are zero.
fn requests_of(amounts: &Amounts) -> Requests {
    let amount = |name: &str| amounts.get(name).map(|quantity| quantity.0.as_str());
    Requests {
        cpu_millis: amount("cpu").and_then(millis).unwrap_or(0),
        memory_bytes: amount("memory").and_then(bytes).unwrap_or(0),
        gpus: amount(GPU_RESOURCE).and_then(whole).unwrap_or(0),
    }
}

/// Any Pod of the cluster, reduced to the resources that it takes.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct AnyPod {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    spec: AnySpec,
    #[serde(default)]
    status: AnyStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct AnySpec {
    node_name: String,
    #[serde(flatten)]
    asking: Asking,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct AnyStatus {
    phase: String,
    container_statuses: Vec<Granted>,
    init_container_statuses: Vec<Granted>,
}

impl AnyPod {
    /// Field selector for Pods that take resources: assigned to a node and unfinished.
    pub(crate) const FIELDS: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

    /// Namespace and name.
    pub(crate) fn key(&self) -> Key {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        Key::new(namespace, self.metadata.name.as_deref().unwrap_or_default())
    }

    /// The node and the resources that it takes there; `None` for a Pod that is unassigned or has ended, and for one
    /// of a served deployment, which is counted as part of that deployment.
    pub(crate) fn charge(&self, is_served: impl Fn(&str) -> bool) -> Option<Charge> {
        let labels = self.metadata.labels.as_ref();
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let is_ours = labels.is_some_and(|labels| labels.contains_key(LABEL_DEPLOYMENT));
        let has_ended = matches!(self.status.phase.as_str(), "Succeeded" | "Failed");
        if self.spec.node_name.is_empty() || has_ended || (is_ours && is_served(namespace)) {
            return None;
        }
        let status = &self.status;
        let granted = [
            &status.container_statuses[..],
            &status.init_container_statuses[..],
        ]
        .concat();
        Some(Charge {
            node: self.spec.node_name.as_str().into(),
            requests: self.spec.asking.requests(&granted),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn container(name: &str, cpu: &str, memory: &str) -> Value {
        json!({"name": name, "resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    fn requests(spec: Value, status: Value) -> (u64, u64) {
        let pod: AnyPod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n"}, "spec": spec, "status": status,
        }))
        .unwrap();
        let charge = pod.charge(|_| true).unwrap();
        assert_eq!(&*charge.node, "office");
        (charge.requests.cpu_millis, charge.requests.memory_bytes)
    }

    #[test]
    fn requests_are_counted_as_the_scheduler_counts_them() {
        let running = json!({"phase": "Running"});
        let two = json!([container("a", "100m", "64Mi"), container("b", "1", "1Ki")]);
        let spec = json!({"nodeName": "office", "containers": two});
        assert_eq!(requests(spec, running.clone()), (1100, (64 << 20) + 1024));
        // The largest init container, if it requests more than all containers.
        let spec = json!({"nodeName": "office", "containers": two, "overhead": {"cpu": "250m", "memory": "1Mi"},
            "initContainers": [container("first", "3", "1Mi"), container("second", "10m", "1Mi")]});
        assert_eq!(requests(spec, running.clone()), (3250, (65 << 20) + 1024));
        // A sidecar runs alongside the init containers after it, and alongside the containers.
        let mut sidecar = container("sidecar", "500m", "0");
        sidecar["restartPolicy"] = "Always".into();
        let spec = json!({"nodeName": "office", "containers": [container("a", "1", "0")],
            "initContainers": [container("before", "1200m", "0"), sidecar, container("after", "1300m", "0")]});
        assert_eq!(requests(spec, running.clone()), (1800, 0));
        // Pod-level requests replace those of its containers.
        let spec = json!({"nodeName": "office", "containers": two, "resources": {"requests": {"cpu": "2"}}});
        assert_eq!(requests(spec, running), (2000, (64 << 20) + 1024));
        // A container that is being shrunk still holds what the kubelet granted it.
        let status = json!({"phase": "Running", "containerStatuses": [
            {"name": "a", "allocatedResources": {"cpu": "700m", "memory": "64Mi"}}]});
        let spec = json!({"nodeName": "office", "containers": [container("a", "100m", "64Mi")]});
        assert_eq!(requests(spec, status), (700, 64 << 20));
    }

    #[test]
    fn only_pods_that_take_room_and_are_nobodys_deployment_are_charged() {
        let pod = |node: &str, phase: &str, labels: Value| -> AnyPod {
            serde_json::from_value(json!({
                "metadata": {"name": "p", "namespace": "team", "labels": labels},
                "spec": {"nodeName": node, "containers": []}, "status": {"phase": phase},
            }))
            .unwrap()
        };
        let none = json!({});
        let ours = json!({LABEL_DEPLOYMENT: "demo"});
        assert!(
            pod("office", "Running", none.clone())
                .charge(|_| true)
                .is_some()
        );
        assert!(pod("", "Pending", none.clone()).charge(|_| true).is_none());
        assert!(pod("office", "Succeeded", none).charge(|_| true).is_none());
        assert!(
            pod("office", "Running", ours.clone())
                .charge(|_| true)
                .is_none()
        );
        // In a namespace that this operator does not serve, a deployment's Pod counts like any other Pod.
        assert!(
            pod("office", "Running", ours)
                .charge(|n| n != "team")
                .is_some()
        );
    }
}
