//! Nodes reduced to what placement reads.

use std::collections::BTreeMap;

use hearth_controller_core::observed::{NodeView, Taint};
use hearth_controller_core::quantity::{bytes, millis, whole};
use hearth_crds::GPU_RESOURCE;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::ObjectMeta;
use serde::Deserialize;

use super::slim;

/// A Node.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LeanNode {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    unschedulable: bool,
    taints: Vec<LeanTaint>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct LeanTaint {
    key: String,
    value: String,
    effect: String,
    time_added: Option<Time>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    allocatable: BTreeMap<String, Quantity>,
    addresses: Vec<Address>,
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Address {
    address: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    last_transition_time: Option<Time>,
}

impl LeanNode {
    /// Converts it to the view that placement reads, without a profile.
    pub(crate) fn into_view(self) -> NodeView {
        let amount = |name: &str| self.status.allocatable.get(name).map(|q| q.0.as_str());
        let mut conditions = self.status.conditions.iter();
        let ready = conditions.find(|condition| condition.type_ == "Ready");
        let is_ready = ready.is_some_and(|ready| ready.status == "True");
        let changed = ready.and_then(|ready| ready.last_transition_time.as_ref());
        NodeView {
            is_ready,
            ready_since: changed.filter(|_| is_ready).map(|Time(at)| *at),
            not_ready_since: changed.filter(|_| !is_ready).map(|Time(at)| *at),
            is_cordoned: self.spec.unschedulable,
            gpus: amount(GPU_RESOURCE).and_then(whole).unwrap_or(0),
            cpu_millis: amount("cpu").and_then(millis).unwrap_or(0),
            memory_bytes: amount("memory").and_then(bytes).unwrap_or(0),
            name: self.metadata.name.unwrap_or_default(),
            labels: self.metadata.labels.unwrap_or_default(),
            taints: self
                .spec
                .taints
                .into_iter()
                .map(|taint| Taint {
                    key: taint.key,
                    value: taint.value,
                    effect: taint.effect,
                    since: taint.time_added.map(|Time(at)| at),
                })
                .collect(),
            pod_cidrs: self.spec.pod_cidrs,
            addresses: {
                let told = self.status.addresses.iter();
                // Host names are among them.
                told.filter_map(|told| told.address.parse().ok()).collect()
            },
            profile: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_read() {
        let node: LeanNode = serde_json::from_value(json!({
            "metadata": {"name": "office", "labels": {"disk": "fast"}},
            "spec": {"unschedulable": true, "taints": [{"key": "k", "effect": "NoSchedule"}]},
            "status": {
                "addresses": [{"type": "InternalIP", "address": "192.168.7.1"}, {"type": "Hostname", "address": "office"}],
                "allocatable": {"cpu": "3920m", "memory": "8Gi", "nvidia.com/gpu": "2"},
                "conditions": [{"type": "Ready", "status": "Unknown"}],
            },
        }))
        .unwrap();
        let view = node.into_view();
        assert_eq!(
            (view.is_ready, view.is_cordoned, view.gpus),
            (false, true, 2)
        );
        assert_eq!((view.cpu_millis, view.memory_bytes), (3920, 8 << 30));
        assert_eq!(view.taints[0].effect, "NoSchedule");
        assert_eq!(view.labels["disk"], "fast");
        assert_eq!(
            view.addresses,
            ["192.168.7.1".parse::<std::net::IpAddr>().unwrap()]
        );
    }
}
