//! Status of an `InferenceDeployment`: its state as observed by the operator.

use serde::{Deserialize, Serialize};

/// State as observed by the operator. There is no phase: conditions state what holds and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct InferenceDeploymentStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions Ready, Planned, ModelReady, GatewayReady, PrefillReady, DecodeReady, Placed, Progressing, Degraded and
    /// ExactFailover.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 16)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["type".into()])))]
    pub conditions: Vec<Condition>,
    /// The plan in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanRef>,
    /// Pools of the deployment: gateway, prefill and decode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 16)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["name".into()])))]
    pub pool_statuses: Vec<PoolStatus>,
    /// Where all workers may end, for want of requests or because an autoscaler asks for none, whether they have; unset before they
    /// first did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_to_zero: Option<ScaleToZeroStatus>,
    /// The model and the progress of its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// Running topology, such as `hybrid on office`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<String>,
    /// Resources of each rank, as reported by its process: the achieved topology.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 256)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["rank".into()])))]
    pub placement: Vec<RankPlacement>,
    /// Ranks that run one model together, rings and peers, with the state of each member: those of the plan in force, and
    /// those of an earlier one that still run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 128)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["plan".into(), "head".into()])))]
    pub groups: Vec<GroupStatus>,
    /// Latencies that the plan predicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<LatencyStatus>,
    /// Latencies that the gateway measures (median of the last minutes).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<LatencyStatus>,
    /// The base URL for OpenAI clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_url: Option<String>,
    /// Pods of decode workers, of all plans, counted as a Deployment counts its own: without those that have ended or are
    /// ending. For the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Label selector of the decode workers of all plans, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
}

/// One condition, following the Kubernetes API conventions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// The condition's name in CamelCase.
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    pub status: String,
    /// The generation of the spec that this condition describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Time at which `status` last changed (RFC 3339).
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub last_transition_time: String,
    /// A CamelCase word that a program can match.
    pub reason: String,
    /// A sentence that a person can act on.
    pub message: String,
}

/// The plan in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanRef {
    /// The InferencePlan's name.
    pub name: String,
    /// Its generation.
    pub generation: u64,
}

/// The Pods of one pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// The pool's name: gateway, prefill or decode.
    pub name: String,
    /// Role of its Pods: Gateway, Prefill or Decode.
    pub role: String,
    /// Pods that the plan requires; without a plan, those that the spec requests.
    pub desired: u32,
    /// Pods that exist, of this plan or an earlier one, and are not being deleted.
    pub replicas: u32,
    /// Required Pods that are ready, including those in the form of an earlier plan.
    pub ready: u32,
    /// Existing Pods that match the plan.
    pub updated: u32,
    /// Ready and desired Pods in one text for the printed column, such as `1/2`.
    pub summary: String,
    /// With scaling.mode Auto, what Hearth decided about the number of workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<PoolAutoscaling>,
}

/// What Hearth decided about the number of workers of a pool, and what the next decision has to know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PoolAutoscaling {
    /// Number of workers that was decided, within the bounds of scaling.
    pub replicas: u32,
    /// The last decision and the figures behind it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Time of the last decision (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub changed_at: Option<String>,
    /// Why there are fewer workers than the load asks for; unset if there are as many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    /// Time since which fewer workers would have sufficed (RFC 3339); unset if they would not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub fewer_since: Option<String>,
    /// The most workers that were needed since then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fewer: Option<u32>,
}

/// Whether all workers have ended, for want of requests or because an autoscaler asks for none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct ScaleToZeroStatus {
    /// Whether there are no workers until a request comes, or until the autoscaler asks for some.
    pub at_zero: bool,
    /// Time of the last change (RFC 3339).
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub since: String,
    /// Why it changed.
    pub reason: String,
}

impl InferenceDeploymentStatus {
    /// Whether all workers have ended, for want of requests or because an autoscaler asks for none.
    pub fn is_at_zero(&self) -> bool {
        let zero = self.scale_to_zero.as_ref();
        zero.is_some_and(|zero| zero.at_zero)
    }
}

/// The model and the progress of its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// The model's name in the OpenAI API.
    pub served_name: String,
    /// Bytes that are present and verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downloaded_bytes: Option<u64>,
    /// Total bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Present and verified share in whole percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
    /// How far its fetch is, at which rate, and how long the rest takes at that rate, such as
    /// `43 %, 110.5 MiB/s, 3 min left`; unset when it is not being fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<String>,
}

/// Resources of a rank, as reported by its process. Lists use the kernel's format, such as `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct RankPlacement {
    /// The rank's name in the plan, such as `decode-0`.
    pub rank: String,
    /// Its Pod.
    pub pod: String,
    /// The node that it runs on.
    pub node: String,
    /// CPUs that its threads may run on. In a container the kubelet chooses them; those of the plan are a preference.
    pub cpus: String,
    /// NUMA nodes of these CPUs.
    pub numa_nodes: String,
    /// NUMA nodes that hold a tenth of its memory or more: weights that it has mapped, KV cache, activations.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub memory_numa_nodes: String,
    /// UUID of the GPU that it computes on; unset on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// Shortfalls against the plan, in words; unset if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortfalls: Option<String>,
    /// What became of the group of ranks that it leads, in words: which member was lost, and whether the group is complete
    /// again. Unset: it has lost none, or leads none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Ranks that run one model together, as a ring or as peers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct GroupStatus {
    /// Generation of its plan.
    pub plan: u64,
    /// Name of the rank that leads it, such as `decode-0`.
    pub head: String,
    /// Ring or Peers.
    pub kind: String,
    /// Ready members and all members in one text for the printed column, such as `2/3`.
    pub summary: String,
    /// Its members in the order of their places, the head first.
    #[cfg_attr(feature = "kube", schemars(length(max = 256)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["rank".into()])))]
    pub members: Vec<GroupMember>,
}

/// A member of a group, and its state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct GroupMember {
    /// The rank's name in the plan, such as `stage-1`.
    pub rank: String,
    /// The node that the plan gives it.
    pub node: String,
    /// Its layers, such as `0-3, 12-15`; unset among peers, which have all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// Its Pod; unset while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Ready; Starting: it has not been ready with this plan yet; Failing: that, and something keeps it from it; Lost: it was
    /// ready before.
    pub state: String,
    /// A CamelCase word that a program can match, as in the conditions; unset if it is Ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it is not Ready, and what is done about it; unset if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl GroupMember {
    /// State of a member that computes.
    pub const READY: &'static str = "Ready";
    /// State of a member that comes.
    pub const STARTING: &'static str = "Starting";
    /// State of a member that is kept from coming.
    pub const FAILING: &'static str = "Failing";
    /// State of a member that was there.
    pub const LOST: &'static str = "Lost";
}

/// Latencies in milliseconds with two significant digits, such as 1400 and 41.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct LatencyStatus {
    /// Time from the request to its first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_to_first_token_milliseconds: Option<f64>,
    /// Time from one token to the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_per_output_token_milliseconds: Option<f64>,
}

impl InferenceDeploymentStatus {
    /// Returns the status of the pool with that name.
    pub fn pool(&self, name: &str) -> Option<&PoolStatus> {
        self.pool_statuses.iter().find(|pool| pool.name == name)
    }
}
