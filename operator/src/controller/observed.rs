//! Everything that one reconcile looks at, read before anything is decided. No client beyond this point.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeployment, InferencePlan, ModelFacts, NodeProfileSpec};
use ipnet::IpNet;
use jiff::Timestamp;

use super::forbidden::Forbidden;
use super::host_paths::HostPath;
use super::placements::Placement;
use super::turns::Turn;

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
    /// RuntimeClass of Pods that hold GPUs, where the deployment names none; `None`: the cluster's default.
    pub(crate) gpu_runtime_class: Option<String>,
    /// Whether GPUs are claimed by UUID where the cluster has dynamic resource allocation.
    pub(crate) claims: bool,
    /// What of the nodes is left to others.
    pub(crate) ledger: LedgerSettings,
    /// Directory on the nodes where agents keep fetched models.
    pub(crate) model_cache: String,
    /// Directories of nodes below which deployments may name one; empty: none.
    pub(crate) host_paths: Vec<HostPath>,
    /// Ranges of Pods' and Services' addresses that are given, or that follow from the API server's.
    pub(crate) cluster_ranges: Vec<IpNet>,
    /// Whether NetworkPolicies are made.
    pub(crate) network_policies: bool,
    /// Whether the certificate authority outlives the operator's Deployment, as the definitions do.
    pub(crate) keeps_authority: bool,
    /// How long a deployment's certificate is valid.
    pub(crate) certificate_lifetime: Duration,
    /// What is done about nodes that are NotReady or have taints.
    pub(crate) nodes: NodeSettings,
}

/// How Pods that are not ours are reckoned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LedgerSettings {
    /// Whether all Pods of the cluster are watched.
    pub(crate) all_pods: bool,
    /// CPU of each node that is never planned with, in thousandths of a CPU.
    pub(crate) reserve_cpu_millis: u64,
    /// What other Pods are taken to request of each node where they cannot be seen.
    pub(crate) unseen: Requests,
}

/// What is done about nodes that are NotReady or have taints.
#[derive(Clone, Debug)]
pub(crate) struct NodeSettings {
    /// A node that is NotReady for so long has its work planned on others, where it fits.
    pub(crate) move_after: Duration,
    /// What nobody wants on a node that is NotReady for so long is removed without waiting for its kubelet.
    pub(crate) forget_after: Duration,
    /// Keys of NoExecute taints that pass: workers stay for [`PASSING_TAINT`].
    pub(crate) passing_taints: Vec<String>,
}

/// How long workers tolerate a NoExecute taint that passes.
pub(crate) const PASSING_TAINT: Duration = Duration::from_secs(300);

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
    /// What Pods of nobody's deployment request of the nodes.
    pub(crate) others: Others,
    /// UUIDs of GPUs that this deployment may claim or has claimed, by node; a node that is not named has none to claim.
    pub(crate) claimable: BTreeMap<String, BTreeSet<String>>,
    /// Access modes of the claim that its model lies in; empty for other sources, and where they are not known.
    pub(crate) claim_modes: Vec<String>,
    /// Whether it may change to another worker image now.
    pub(crate) turn: Turn,
    /// Pods of its plan that the API server forbids.
    pub(crate) forbidden: Option<Forbidden>,
    /// What the agents say of a model behind a URL, by node; empty for other sources.
    pub(crate) fetches: BTreeMap<String, FetchView>,
    /// Latencies that the gateway measured lately.
    pub(crate) measured: Option<Measured>,
    /// What workers got of their machines, by their addresses, as far as a gateway has told.
    pub(crate) placements: BTreeMap<IpAddr, Placement>,
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
    /// Since when it does.
    pub(crate) ready_since: Option<Timestamp>,
    /// Since when it does not; none while it does.
    pub(crate) not_ready_since: Option<Timestamp>,
    /// Whether it is cordoned.
    pub(crate) is_cordoned: bool,
    /// GPUs that the device plugin offers.
    pub(crate) gpus: u32,
    /// CPUs for Pods, in thousandths.
    pub(crate) cpu_millis: u64,
    /// Memory for Pods in bytes.
    pub(crate) memory_bytes: u64,
    /// Ranges of its Pods' addresses, where the cluster gives them.
    pub(crate) pod_cidrs: Vec<String>,
    /// Its own addresses.
    pub(crate) addresses: Vec<std::net::IpAddr>,
    /// What the agent measured; none before the first measurement.
    pub(crate) profile: Option<NodeProfileSpec>,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taint {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) effect: String,
    /// When it was added, or first seen.
    pub(crate) since: Option<Timestamp>,
}

/// What Pods request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    /// CPU in thousandths of one.
    pub(crate) cpu_millis: u64,
    /// Bytes of memory.
    pub(crate) memory_bytes: u64,
    /// GPUs of the device plugin.
    pub(crate) gpus: u32,
}

impl Requests {
    pub(crate) fn new(cpu_millis: u64, memory_bytes: u64, gpus: u32) -> Self {
        Self {
            cpu_millis,
            memory_bytes,
            gpus,
        }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        self.each(other, u64::saturating_add, u32::saturating_add)
    }

    /// The larger amount of each.
    pub(crate) fn max(self, other: Self) -> Self {
        self.each(other, u64::max, u32::max)
    }

    fn each(self, other: Self, wide: fn(u64, u64) -> u64, narrow: fn(u32, u32) -> u32) -> Self {
        Self {
            cpu_millis: wide(self.cpu_millis, other.cpu_millis),
            memory_bytes: wide(self.memory_bytes, other.memory_bytes),
            gpus: narrow(self.gpus, other.gpus),
        }
    }
}

/// Whether the Pods of others can be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sight {
    /// They are not watched, as the operator was told.
    #[default]
    Off,
    /// They may not be watched.
    Forbidden,
    /// All of them.
    All,
}

/// What Pods of nobody's deployment request, by node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Others {
    pub(crate) sight: Sight,
    /// Empty unless all are seen.
    pub(crate) requests: BTreeMap<String, Requests>,
}

impl Others {
    /// What is to be reckoned with on a node; `unseen` where nothing can be seen.
    pub(crate) fn on(&self, node: &str, unseen: Requests) -> Requests {
        match self.sight {
            Sight::All => self.requests.get(node).copied().unwrap_or_default(),
            Sight::Off | Sight::Forbidden => unseen,
        }
    }
}

/// What Pods hold of one node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Holding {
    /// CPU that they request, in thousandths of one.
    pub(crate) cpu_millis: u64,
    /// Bytes of memory.
    pub(crate) memory_bytes: u64,
    /// GPUs.
    pub(crate) gpus: u32,
    /// CPUs held exclusively, by the kernel's number.
    pub(crate) exclusive_cpus: Vec<u32>,
    /// UUIDs of GPUs that are claimed, or will be by a plan.
    pub(crate) claimed_gpus: BTreeSet<String>,
}

impl Holding {
    /// What is requested.
    pub(crate) fn requests(&self) -> Requests {
        Requests::new(self.cpu_millis, self.memory_bytes, self.gpus)
    }

    /// Adds what another Pod holds.
    pub(crate) fn add(&mut self, other: &Self) {
        let sum = self.requests().plus(other.requests());
        self.cpu_millis = sum.cpu_millis;
        self.memory_bytes = sum.memory_bytes;
        self.gpus = sum.gpus;
        self.exclusive_cpus.extend(&other.exclusive_cpus);
        self.claimed_gpus.extend(other.claimed_gpus.iter().cloned());
    }
}

/// A running agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AgentPlace {
    /// The node of its Pod, which it speaks for.
    pub(crate) node: String,
    /// Of its Pod.
    pub(crate) address: String,
    pub(crate) pod_uid: String,
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
    /// See [`super::names::NOTE_FORM`].
    pub(crate) form: String,
    /// Generation of the plan that it was made for.
    pub(crate) plan_generation: u64,
    /// Digest of the model source, of inspect Pods.
    pub(crate) source: String,
    /// The routes that it was given last, of gateways.
    pub(crate) routes: String,
    /// The annotation that it reads its routes from, where that is not [`super::names::NOTE_ROUTES`].
    pub(crate) routes_note: Option<String>,
    /// The certificate's serial that it was told last.
    pub(crate) certificate: String,
    /// Whether it was made when the Secret with certificates had another name, and mounts that.
    pub(crate) mounts_old_certificates: bool,
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
    /// Whether its process was ready, still runs, and is not ready any more.
    pub(crate) has_lost_readiness: bool,
    /// Whether it has been asked to end.
    pub(crate) is_deleting: bool,
    /// When it was made.
    pub(crate) created: Option<Timestamp>,
    /// When the last step on its way was done: placed, set up, ready.
    pub(crate) progressed: Option<Timestamp>,
    /// Resources that it holds.
    pub(crate) cpu_millis: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) gpus: u32,
    pub(crate) exclusive_cpus: Vec<u32>,
    /// UUIDs of the GPUs that it claims.
    pub(crate) claimed_gpus: Vec<String>,
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
    /// When its process began; none while there is none.
    pub(crate) running_since: Option<Timestamp>,
    /// It runs, and its startup probe has not succeeded yet: it loads its model.
    pub(crate) is_starting: bool,
    /// Reason and message of waiting, such as ImagePullBackOff or CrashLoopBackOff.
    pub(crate) waiting: Option<(String, String)>,
    /// What it is to be made of, while it waits; empty afterwards.
    pub(crate) image: String,
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
