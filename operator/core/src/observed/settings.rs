//! The operator's settings.

use std::time::Duration;

use ipnet::IpNet;

use super::requests::Requests;
use crate::host_paths::HostPath;

/// The operator's settings.
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
    /// RuntimeClass of Pods that hold GPUs, if the deployment names none; `None`: the cluster's default.
    pub gpu_runtime_class: Option<String>,
    /// Whether GPUs are claimed by UUID where the cluster has dynamic resource allocation.
    pub claims: bool,
    /// Share of the nodes that is left to others.
    pub ledger: LedgerSettings,
    /// Directory on the nodes where agents keep fetched models.
    pub model_cache: String,
    /// Directories of nodes below which deployments may name one; empty: none.
    pub host_paths: Vec<HostPath>,
    /// Address ranges of Pods and Services, as configured or derived from the API server's addresses.
    pub cluster_ranges: Vec<IpNet>,
    /// Address of the hub that repositories are fetched from.
    pub hub_endpoint: String,
    /// Whether NetworkPolicies are made.
    pub network_policies: bool,
    /// Where spans of gateways and workers go; `None`: nowhere.
    pub tracing: Option<Tracing>,
    /// Whether the certificate authority outlives the operator's Deployment, as the CRDs do.
    pub keeps_authority: bool,
    /// Lifetime of a deployment's certificate.
    pub certificate_lifetime: Duration,
    /// Handling of nodes that are NotReady, have taints, or are shared by deployments.
    pub nodes: NodeSettings,
}

/// Traces of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Tracing {
    /// The collector's URL, to which `/v1/traces` is added.
    pub endpoint: String,
    /// Its host: a name or an address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Share of the traces that no client has begun, from 0 to 1.
    pub sample_ratio: f64,
}

/// Accounting of Pods that are not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerSettings {
    /// Whether all Pods of the cluster are watched.
    pub all_pods: bool,
    /// CPU of each node that is never planned, in thousandths of a CPU.
    pub reserve_cpu_millis: u64,
    /// Requests that other Pods are assumed to have on each node if they cannot be seen.
    pub unseen: Requests,
}

/// Handling of nodes that are NotReady, have taints, or are shared by deployments.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Time after which the work of a NotReady node is planned on others, where it fits.
    pub move_after: Duration,
    /// Time after which unwanted Pods of a NotReady node are deleted without waiting for its kubelet.
    pub forget_after: Duration,
    /// Time for which workers that have become ready stay before they end for another deployment's.
    pub min_residence: Duration,
    /// Keys of NoExecute taints that are temporary: workers stay for [`PASSING_TAINT`].
    pub passing_taints: Vec<String>,
}

/// Time for which workers tolerate a temporary NoExecute taint.
pub const PASSING_TAINT: Duration = Duration::from_secs(300);
