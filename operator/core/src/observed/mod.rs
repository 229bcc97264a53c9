//! Everything that one reconcile looks at, read before anything is decided. No client beyond this point.

pub mod forbidden;
mod node;
pub mod placement;
mod pod;
mod requests;
mod scaler;
mod settings;
mod turn;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use hearth_crds::{InferenceDeployment, InferencePlan, ModelFacts};
use jiff::Timestamp;

pub use forbidden::Forbidden;
pub use node::{AgentEndpoint, NodeView, Taint};
pub use placement::Placement;
pub use pod::{ContainerEnd, ContainerView, PodRole, PodView};
pub use requests::{Holding, Others, Requests, Sight};
pub use scaler::ScalerView;
pub use settings::{LedgerSettings, NodeSettings, PASSING_TAINT, Settings};
pub use turn::Turn;

/// What is known of one deployment and of the cluster around it at `now`.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The one clock of a reconcile.
    pub now: Timestamp,
    /// How the operator was started.
    pub settings: Arc<Settings>,
    /// The deployment, with its status as last written.
    pub deployment: Arc<InferenceDeployment>,
    /// Its plans, oldest first.
    pub plans: Vec<Arc<InferencePlan>>,
    /// Its Pods, inspect Pods among them, in the order of their names.
    pub pods: Vec<Arc<PodView>>,
    /// The scaler of its prefill workers; `None` where it has none, and where it may not be seen.
    pub scaler: Option<ScalerView>,
    /// All nodes of the cluster, by name.
    pub nodes: BTreeMap<String, Arc<NodeView>>,
    /// What other deployments hold of the nodes, by node.
    pub held_by_others: BTreeMap<String, Holding>,
    /// What Pods of nobody's deployment request of the nodes.
    pub others: Others,
    /// UUIDs of GPUs that this deployment may claim or has claimed, by node; a node that is not named has none to claim.
    pub claimable: BTreeMap<String, BTreeSet<String>>,
    /// Whether Pods can claim devices: the cluster has dynamic resource allocation, and the settings allow it.
    pub has_device_claims: bool,
    /// Access modes of the claim that its model lies in; empty for other sources, and where they are not known.
    pub claim_modes: Vec<String>,
    /// Whether it may change to another worker image now.
    pub turn: Turn,
    /// Pods of its plan that the API server forbids.
    pub forbidden: Option<Forbidden>,
    /// What the agents say of a model behind a URL, by node; empty for other sources.
    pub fetches: BTreeMap<String, FetchView>,
    /// Latencies that the gateway measured lately.
    pub measured: Option<Measured>,
    /// What workers got of their machines, by their addresses, as far as a gateway has told.
    pub placements: BTreeMap<IpAddr, Placement>,
    /// Serial of the deployment's newest certificate; `None` while its Secret is not there.
    pub certificate: Option<String>,
    /// Address of the Service's load balancer, or its node port as `port`; `None` for a ClusterIP.
    pub external: Option<String>,
}

/// A fetch of one model on one node.
#[derive(Clone, Debug, PartialEq)]
pub enum FetchView {
    /// The agent was not asked yet, or cannot be reached: why.
    Unknown(String),
    /// On its way.
    Fetching {
        /// Bytes that are there.
        bytes: u64,
        /// Bytes of the whole model.
        total_bytes: u64,
        /// Speed of the last moments; 0: nothing comes.
        bytes_per_second: u64,
    },
    /// In place, with its facts.
    Ready {
        /// Its facts.
        facts: Box<ModelFacts>,
        /// Bytes on the disk.
        bytes: u64,
    },
    /// Given up for now: why.
    Failed(String),
}

/// Medians of the last minutes in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Time per token after the first.
    pub tpot_ms: Option<f64>,
}
