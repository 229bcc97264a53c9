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
    /// Time since which it reports Ready.
    pub ready_since: Option<Timestamp>,
    /// Time since which it does not; `None` while it does.
    pub not_ready_since: Option<Timestamp>,
    /// Whether it is cordoned.
    pub is_cordoned: bool,
    /// GPUs that the device plugin offers.
    pub gpus: u32,
    /// CPU for Pods, in thousandths of a CPU.
    pub cpu_millis: u64,
    /// Memory for Pods in bytes.
    pub memory_bytes: u64,
    /// Address ranges of its Pods, if the cluster assigns them.
    pub pod_cidrs: Vec<String>,
    /// Its own addresses.
    pub addresses: Vec<std::net::IpAddr>,
    /// The agent's measurements; `None` before the first one.
    pub profile: Option<NodeProfileStatus>,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// Key, such as `node.kubernetes.io/not-ready`.
    pub key: String,
    /// Value, often empty.
    pub value: String,
    /// Effect: NoSchedule, PreferNoSchedule or NoExecute.
    pub effect: String,
    /// Time at which it was added, or first seen.
    pub since: Option<Timestamp>,
}

/// A running agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentEndpoint {
    /// The node of its Pod, for which it answers.
    pub node: String,
    /// Address of its Pod.
    pub address: String,
    /// Uid of its Pod.
    pub pod_uid: String,
}
