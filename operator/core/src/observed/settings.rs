//! How the operator was started.

use std::time::Duration;

use ipnet::IpNet;

use super::requests::Requests;
use crate::host_paths::HostPath;

/// How the operator was started.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Image of the workers and the agents.
    pub worker_image: String,
    /// Pull policy of that image: Always, IfNotPresent or Never.
    pub pull_policy: String,
    /// Secrets that image pulls use; they must exist in the deployment's namespace.
    pub pull_secrets: Vec<String>,
    /// Namespace of the operator and its agents.
    pub operator_namespace: String,
    /// Namespaces whose deployments are served; empty: all.
    pub namespaces: Vec<String>,
    /// RuntimeClass of Pods that hold GPUs, where the deployment names none; `None`: the cluster's default.
    pub gpu_runtime_class: Option<String>,
    /// Whether GPUs are claimed by UUID where the cluster has dynamic resource allocation.
    pub claims: bool,
    /// What of the nodes is left to others.
    pub ledger: LedgerSettings,
    /// Directory on the nodes where agents keep fetched models.
    pub model_cache: String,
    /// Directories of nodes below which deployments may name one; empty: none.
    pub host_paths: Vec<HostPath>,
    /// Ranges of Pods' and Services' addresses that are given, or that follow from the API server's.
    pub cluster_ranges: Vec<IpNet>,
    /// Whether NetworkPolicies are made.
    pub network_policies: bool,
    /// Whether the certificate authority outlives the operator's Deployment, as the definitions do.
    pub keeps_authority: bool,
    /// How long a deployment's certificate is valid.
    pub certificate_lifetime: Duration,
    /// What is done about nodes that are NotReady or have taints.
    pub nodes: NodeSettings,
}

/// How Pods that are not ours are reckoned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerSettings {
    /// Whether all Pods of the cluster are watched.
    pub all_pods: bool,
    /// CPU of each node that is never planned with, in thousandths of a CPU.
    pub reserve_cpu_millis: u64,
    /// What other Pods are taken to request of each node where they cannot be seen.
    pub unseen: Requests,
}

/// What is done about nodes that are NotReady or have taints.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// A node that is NotReady for so long has its work planned on others, where it fits.
    pub move_after: Duration,
    /// What nobody wants on a node that is NotReady for so long is removed without waiting for its kubelet.
    pub forget_after: Duration,
    /// Keys of NoExecute taints that pass: workers stay for [`PASSING_TAINT`].
    pub passing_taints: Vec<String>,
}

/// How long workers tolerate a NoExecute taint that passes.
pub const PASSING_TAINT: Duration = Duration::from_secs(300);
