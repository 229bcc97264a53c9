//! Everything that one reconcile looks at, read before anything is decided. No client beyond this point.

mod demand;
pub mod forbidden;
mod node;
pub mod placement;
mod pod;
mod requests;
mod scaler;
mod settings;
mod sharing;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use hearth_crds::{InferenceDeployment, InferencePlan, ModelFacts};
use jiff::Timestamp;

pub use demand::Demand;
pub use forbidden::Forbidden;
pub use node::{AgentEndpoint, NodeView, Taint};
pub use placement::{Placement, Reach};
pub use pod::{ContainerEnd, ContainerView, PodRole, PodView, SecondRank};
pub use requests::{Holding, Others, Requests, Sight};
pub use scaler::ScalerView;
pub use settings::{LedgerSettings, NodeSettings, PASSING_TAINT, Settings, Tracing};
pub use sharing::{Asker, Neighbour};
pub use turn::Turn;

/// State of one deployment and of the cluster around it at `now`.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The one clock of a reconcile.
    pub now: Timestamp,
    /// The operator's settings.
    pub settings: Arc<Settings>,
    /// The deployment, with its status as last written.
    pub deployment: Arc<InferenceDeployment>,
    /// Its plans, oldest first.
    pub plans: Vec<Arc<InferencePlan>>,
    /// Its Pods, inspect Pods among them, in the order of their names.
    pub pods: Vec<Arc<PodView>>,
    /// The scaler of its prefill workers; `None` if it has none, or if it may not be seen.
    pub scaler: Option<ScalerView>,
    /// All nodes of the cluster, by name.
    pub nodes: BTreeMap<String, Arc<NodeView>>,
    /// Resources that other deployments hold, by node.
    pub held_by_others: BTreeMap<String, Holding>,
    /// Other deployments whose workers may end for this one's.
    pub neighbours: Vec<Neighbour>,
    /// Other deployments that ask for the room of this one's workers.
    pub askers: Vec<Asker>,
    /// Nodes that the workers of yet others will have once some have ended theirs; known only where a deployment's workers may start
    /// without a request.
    pub awaited_nodes: BTreeSet<String>,
    /// Requests of Pods that belong to no deployment.
    pub others: Others,
    /// UUIDs of GPUs that this deployment may claim or has claimed, by node; a node without an entry has none to
    /// claim.
    pub claimable: BTreeMap<String, BTreeSet<String>>,
    /// Whether Pods can claim devices: the cluster has dynamic resource allocation, and the settings allow it.
    pub has_device_claims: bool,
    /// Access modes of the claim that holds its model; empty for other sources, and if unknown.
    pub claim_modes: Vec<String>,
    /// Whether it may change to another worker image now.
    pub turn: Turn,
    /// Time at which it may at the latest, if it may not now; nothing else wakes it then.
    pub turn_comes_at: Option<Timestamp>,
    /// Pods of its plan that the API server forbids.
    pub forbidden: Option<Forbidden>,
    /// State of the model behind a URL as the agents report it, by node; empty for other sources.
    pub fetches: BTreeMap<String, FetchView>,
    /// Nodes whose stores have that model, or some of it, as their profiles say: without what a single namespace may have.
    pub stored: BTreeMap<String, StoredCopy>,
    /// The commit that nodes have of it, if it is of a hub and one has told.
    pub fetched_commit: Option<String>,
    /// Latencies that the gateway measured recently.
    pub measured: Option<Measured>,
    /// Load that the gateways measured recently; `None` if none was read.
    pub demand: Option<Demand>,
    /// Resources that workers actually got on their machines, by the workers' addresses, as far as a gateway has
    /// reported them.
    pub placements: BTreeMap<SocketAddr, Placement>,
    /// Serial of the deployment's newest certificate; `None` while its Secret does not exist.
    pub certificate: Option<String>,
    /// Address of the Service's load balancer, or its node port as `port`; `None` for a ClusterIP.
    pub external: Option<String>,
}

/// State of one model's fetch on one node.
#[derive(Clone, Debug, PartialEq)]
pub enum FetchView {
    /// The agent was not asked yet, or cannot be reached; with the reason.
    Unknown(String),
    /// Under way.
    Fetching {
        /// Bytes fetched so far.
        bytes: u64,
        /// Bytes of the whole model.
        total_bytes: u64,
        /// Recent speed; 0: nothing arrives.
        bytes_per_second: u64,
        /// The node whose agent gives the bytes; `None`: a server does.
        from_node: Option<String>,
    },
    /// Fetched and in place, with its facts.
    Ready {
        /// Its facts.
        facts: Box<ModelFacts>,
        /// Bytes on the disk.
        bytes: u64,
    },
    /// Given up for now; with the reason.
    Failed(String),
}

/// What a node's store has of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredCopy {
    /// All of it.
    Whole,
    /// Its agent is fetching it.
    Coming,
}

/// Medians of the last minutes, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Time per token after the first.
    pub tpot_ms: Option<f64>,
}
