//! Everything that one reconcile looks at, read before anything is decided. No client beyond this point.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeployment, InferencePlan, ModelFacts, NodeProfileSpec};
use jiff::Timestamp;

/// How the operator was started.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Image of the workers and the agents.
    pub(crate) worker_image: String,
    /// Pull policy of that image: Always, IfNotPresent or Never.
    pub(crate) pull_policy: String,
    /// Secrets that image pulls use; they must exist in the deployment's namespace.
    pub(crate) pull_secrets: Vec<String>,
    /// Namespace of the operator and its agents.
    pub(crate) operator_namespace: String,
    /// Namespaces whose deployments are served; empty: all.
    pub(crate) namespaces: Vec<String>,
    /// Directory on the nodes where agents keep fetched models.
    pub(crate) model_cache: String,
    /// Whether NetworkPolicies are made.
    pub(crate) network_policies: bool,
    /// How long a deployment's certificate is valid.
    pub(crate) certificate_lifetime: Duration,
}

/// What is known of one deployment and of the cluster around it at `now`.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    /// The one clock of a reconcile.
    pub(crate) now: Timestamp,
    /// How the operator was started.
    pub(crate) settings: Arc<Settings>,
    /// The deployment, with its status as last written.
    pub(crate) deployment: Arc<InferenceDeployment>,
    /// Its plans, oldest first.
    pub(crate) plans: Vec<Arc<InferencePlan>>,
    /// Its Pods, inspect Pods among them, in the order of their names.
    pub(crate) pods: Vec<Arc<PodView>>,
    /// All nodes of the cluster, by name.
    pub(crate) nodes: BTreeMap<String, Arc<NodeView>>,
    /// What other deployments hold of the nodes, by node.
    pub(crate) held_by_others: BTreeMap<String, Holding>,
    /// What the agents say of a model behind a URL, by node; empty for other sources.
    pub(crate) fetches: BTreeMap<String, FetchView>,
    /// Latencies that the gateway measured lately.
    pub(crate) measured: Option<Measured>,
    /// Serial of the deployment's newest certificate; `None` while its Secret is not there.
    pub(crate) certificate: Option<String>,
    /// Address of the Service's load balancer, or its node port as `port`; none for a ClusterIP.
    pub(crate) external: Option<String>,
}

/// A node as placement sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct NodeView {
    /// Its name.
    pub(crate) name: String,
    /// Its labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Its taints.
    pub(crate) taints: Vec<Taint>,
    /// Whether its kubelet reports Ready.
    pub(crate) is_ready: bool,
    /// Whether it is cordoned.
    pub(crate) is_cordoned: bool,
    /// GPUs that the device plugin offers.
    pub(crate) gpus: u32,
    /// CPUs for Pods, in thousandths.
    pub(crate) cpu_millis: u64,
    /// Memory for Pods in bytes.
    pub(crate) memory_bytes: u64,
    /// What the agent measured; none before the first measurement.
    pub(crate) profile: Option<NodeProfileSpec>,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taint {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) effect: String,
}

/// What Pods hold of one node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Holding {
    /// Bytes of memory.
    pub(crate) memory_bytes: u64,
    /// GPUs.
    pub(crate) gpus: u32,
    /// CPUs held exclusively, by the kernel's number.
    pub(crate) exclusive_cpus: Vec<u32>,
}

/// A Pod of a deployment, reduced to what decisions need.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodView {
    pub(crate) name: String,
    pub(crate) uid: String,
    /// gateway, prefill, decode or inspect.
    pub(crate) role: String,
    /// The rank's name; empty for inspect Pods.
    pub(crate) rank: String,
    /// See [`super::names::NOTE_RANK_HASH`].
    pub(crate) rank_hash: String,
    /// Generation of the plan that it was made for.
    pub(crate) plan_generation: u64,
    /// Digest of the model source, of inspect Pods.
    pub(crate) source: String,
    /// The routes that it was given last, of gateways.
    pub(crate) routes: String,
    /// The certificate's serial that it was told last.
    pub(crate) certificate: String,
    /// Node that it is bound to; empty before that.
    pub(crate) node: String,
    /// Node that it was made for (required affinity); empty: any.
    pub(crate) wanted_node: String,
    /// Its address; empty before it has one.
    pub(crate) ip: String,
    /// Pending, Running, Succeeded, Failed or Unknown.
    pub(crate) phase: String,
    /// Whether its Ready condition is True.
    pub(crate) is_ready: bool,
    /// Whether it has been asked to end.
    pub(crate) is_deleting: bool,
    /// When it was made.
    pub(crate) created: Option<Timestamp>,
    /// Resources that it holds.
    pub(crate) memory_bytes: u64,
    pub(crate) gpus: u32,
    pub(crate) exclusive_cpus: Vec<u32>,
    /// Bytes of weights that it maps, shared by Pods of one node and model.
    pub(crate) weight_bytes: u64,
    /// Reason and message of `PodScheduled: False`.
    pub(crate) unschedulable: Option<String>,
    /// Whether its volumes and network are still being set up.
    pub(crate) is_setting_up: bool,
    /// Newest warning of the kubelet while it is being set up, such as a volume that cannot be mounted.
    pub(crate) setup_warning: Option<String>,
    /// Reason and message of the Pod itself, such as Evicted.
    pub(crate) reason: String,
    pub(crate) message: String,
    /// Its one container; none before the kubelet reports it.
    pub(crate) container: Option<ContainerView>,
}

/// The container of a worker Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerView {
    /// Starts after the first.
    pub(crate) restarts: u32,
    /// Reason and message of waiting, such as ImagePullBackOff or CrashLoopBackOff.
    pub(crate) waiting: Option<(String, String)>,
    /// How it ended last: exit code, reason such as OOMKilled, message (the last lines of its log).
    pub(crate) last_end: Option<ContainerEnd>,
}

/// How a container ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ContainerEnd {
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// A fetch of one model on one node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FetchView {
    /// The agent was not asked yet, or cannot be reached: why.
    Unknown(String),
    /// On its way.
    Fetching {
        bytes: u64,
        total_bytes: u64,
        bytes_per_second: u64,
    },
    /// In place, with its facts.
    Ready { facts: Box<ModelFacts>, bytes: u64 },
    /// Given up for now: why.
    Failed(String),
}

/// Medians of the last minutes in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) tpot_ms: Option<f64>,
}
