//! Nodes and their agents, reduced to what decisions need.

use std::collections::BTreeMap;

use hearth_crds::NodeProfileStatus;
use jiff::Timestamp;

/// A node as placement sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// Whether its kubelet reports Ready.
    pub is_ready: bool,
    /// Since when it does.
    pub ready_since: Option<Timestamp>,
    /// Since when it does not; `None` while it does.
    pub not_ready_since: Option<Timestamp>,
    /// Whether it is cordoned.
    pub is_cordoned: bool,
    /// GPUs that the device plugin offers.
    pub gpus: u32,
    /// CPUs for Pods, in thousandths.
    pub cpu_millis: u64,
    /// Memory for Pods in bytes.
    pub memory_bytes: u64,
    /// Ranges of its Pods' addresses, where the cluster gives them.
    pub pod_cidrs: Vec<String>,
    /// Its own addresses.
    pub addresses: Vec<std::net::IpAddr>,
    /// What the agent measured; none before the first measurement.
    pub profile: Option<NodeProfileStatus>,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// Such as `node.kubernetes.io/not-ready`.
    pub key: String,
    /// Often empty.
    pub value: String,
    /// NoSchedule, PreferNoSchedule or NoExecute.
    pub effect: String,
    /// When it was added, or first seen.
    pub since: Option<Timestamp>,
}

/// A running agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentEndpoint {
    /// The node of its Pod, which it speaks for.
    pub node: String,
    /// Of its Pod.
    pub address: String,
    /// Uid of its Pod.
    pub pod_uid: String,
}
