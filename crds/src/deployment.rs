//! `InferenceDeployment`: the user's request.
//!
//! Every rule is a CEL expression in the schema, so the API server and `hearth up` refuse the same specs with the same
//! messages. A message gives the remedy; the field and its value are added around it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::capability::NOT_INTERLEAVED_SAYS;
use crate::decode::DecodeSpec;
use crate::model::{ModelSpec, SecretRef};
use crate::pod_template::PodTemplateSpec;
use crate::quantity::DurationText;
#[cfg(feature = "kube")]
use crate::rules;
use crate::scaling::{ScalingSpec, planned};
#[cfg(feature = "kube")]
use crate::status::InferenceDeploymentStatus;

/// An inference service: its model, how it runs, and its objectives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "hearth.dev",
        version = "v1alpha1",
        kind = "InferenceDeployment",
        namespaced,
        shortname = "infd",
        category = "hearth",
        status = "InferenceDeploymentStatus",
        derive = "PartialEq",
        cel,
        doc = "A large language model served with an OpenAI-compatible endpoint on the nodes of this cluster.",
        validation = Rule::new("size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
            .message("write a metadata.name of at most 40 lower-case letters, digits and '-', beginning with a letter: Pods and Services are named after it"),
        scale(
            spec_replicas_path = ".spec.decode.replicas",
            status_replicas_path = ".status.replicas",
            label_selector_path = ".status.selector"
        ),
        printcolumn(name = "Model", type_ = "string", json_path = ".status.model.servedName"),
        printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
        printcolumn(name = "Fetch", type_ = "string", json_path = ".status.model.fetch"),
        printcolumn(name = "Plan", type_ = "integer", json_path = ".status.plan.generation"),
        printcolumn(name = "Prefill", type_ = "string", json_path = ".status.poolStatuses[?(@.name==\"prefill\")].summary"),
        printcolumn(name = "Decode", type_ = "string", json_path = ".status.poolStatuses[?(@.name==\"decode\")].summary"),
        printcolumn(name = "TTFT-ms", type_ = "number", json_path = ".status.measured.timeToFirstTokenMilliseconds"),
        printcolumn(name = "TPOT-ms", type_ = "number", json_path = ".status.measured.timePerOutputTokenMilliseconds"),
        printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
        printcolumn(name = "Strategy", type_ = "string", json_path = ".status.topology", priority = 1),
        printcolumn(name = "Members", type_ = "string", json_path = ".status.groups[0].summary", priority = 1),
        printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", priority = 1),
        printcolumn(name = "Message", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].message", priority = 1),
        printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpointUrl", priority = 1),
    )
)]
#[cfg_attr(
    feature = "kube",
    x_kube(
        validation = Rule::new("!has(self.placement) || !has(self.placement.runtimeClassName) || !has(self.podTemplate) || !has(self.podTemplate.runtimeClassName)")
            .message("write podTemplate.runtimeClassName alone: placement.runtimeClassName is its deprecated name")
            .field_path(".placement.runtimeClassName"),
        validation = Rule::new(rules::PREFILL_ZERO).message(rules::PREFILL_ZERO_SAYS).field_path(".prefill.scaling.minReplicas"),
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InferenceDeploymentSpec {
    /// The model and how it is offered.
    pub model: ModelSpec,
    /// Distribution of the model over devices and nodes. Auto lets the planner choose: prefill and decode workers where
    /// any node holds the model, else a ring of nodes. Hybrid has prefill and decode workers alone. With PipedRing the
    /// layers are on the nodes of a ring that each token passes; nodes that would make it slower are left out.
    /// Interleaved is refused: this engine does not have it yet.
    #[serde(default)]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NOT_INTERLEAVED).message(NOT_INTERLEAVED_SAYS)))]
    pub strategy: Strategy,
    /// Workers that read prompts (prefill).
    #[serde(default)]
    pub prefill: PrefillSpec,
    /// Workers that write answers (decode).
    #[serde(default)]
    pub decode: DecodeSpec,
    /// Placement of workers on nodes, and their binding to CPUs.
    #[serde(default)]
    pub placement: PlacementSpec,
    /// Latency objectives of the service. The plan warns if its prediction misses them.
    #[serde(default)]
    pub objectives: ObjectivesSpec,
    /// Settings of pools with scaling.mode Auto.
    #[serde(default)]
    pub autoscaling: AutoscalingSpec,
    /// Client access to the service.
    #[serde(default)]
    pub endpoint: EndpointSpec,
    /// Replacement of the running workers after a change.
    #[serde(default)]
    pub rollout: RolloutSpec,
    /// Gateways: the processes that take requests and pass them on to the workers.
    #[serde(default, skip_serializing_if = "GatewaySpec::is_default")]
    pub gateway: GatewaySpec,
    /// Additions to the Pods that Hearth creates for the deployment.
    #[serde(default, skip_serializing_if = "PodTemplateSpec::is_empty")]
    pub pod_template: PodTemplateSpec,
    /// Which deployment comes first where nodes hold the workers of one and not of both, from -1000 to 1000: workers that may all
    /// end for want of requests (decode.scaling {mode: Auto, minReplicas: 0}) give way to a higher priority as soon as they have been
    /// ready for a minute, and while they are idle to any other that may end its own so. By default 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new("self >= -1000 && self <= 1000").message("write a priority from -1000 to 1000; the default is 0")))]
    pub priority: i32,
    /// Whether the deployment is suspended: its Pods end as in a rollout, its nodes are free for others, and its plan,
    /// objects and fetched models stay. Changes made meanwhile are planned when it is false again. By default false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

/// Distribution of the model over devices and nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Strategy {
    /// The planner chooses.
    #[default]
    Auto,
    /// Prefill and decode workers over one shared copy of the weights.
    Hybrid,
    /// A ring of nodes, several rounds per token, weights prefetched from flash (prima.cpp).
    PipedRing,
    /// A ring of nodes with block-level offload and interleaved micro-batches (LIME).
    Interleaved,
}

/// Workers that read prompts (prefill).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(
        validation = Rule::new(rules::REPLICAS_XOR_RANGE).message(rules::REPLICAS_XOR_RANGE_SAYS),
        validation = Rule::new(rules::SCALING_XOR_RANGE).message(rules::SCALING_XOR_RANGE_SAYS),
        validation = Rule::new("!has(self.mode) || self.mode != 'Chunked' || !(has(self.replicas) || has(self.scaling) || has(self.minReplicas) || has(self.maxReplicas))")
            .message("remove replicas and scaling, or write another mode: with mode Chunked the decode workers read the prompts"),
        validation = Rule::new(rules::STREAMING_HAS_GPU).message(rules::STREAMING_HAS_GPU_SAYS),
        validation = Rule::new(rules::PEERS_NUMBER).message(rules::PEERS_NUMBER_SAYS).field_path(".gpusPerWorker"),
        validation = Rule::new(rules::PEERS_ONE_GROUP).message(rules::PEERS_ONE_GROUP_SAYS).field_path(".replicas"),
        validation = Rule::new(rules::PREFILL_NOT_EMPTIED).message(rules::PREFILL_NOT_EMPTIED_SAYS).field_path(".scaling.minReplicas"),
        validation = Rule::new(rules::PEERS_NOT_SCALED).message(rules::PEERS_NOT_SCALED_SAYS).field_path(".scaling"),
        validation = Rule::new(rules::QUIET_WINDOW_HAS_EFFECT).message(rules::QUIET_WINDOW_HAS_EFFECT_SAYS).field_path(".quietWindow"),
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrefillSpec {
    /// Number of workers. By default 1. With scaling.mode External it is the initial number: from then on the
    /// InferencePoolScaler NAME-prefill has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::REPLICAS).message(rules::REPLICAS_SAYS)))]
    pub replicas: Option<u32>,
    /// Who may change the number of workers, and within which bounds. By default only the deployment's author (mode
    /// Static).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingSpec>,
    /// Deprecated: write replicas, or scaling.minReplicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NO_RANGE).message(rules::NO_PREFILL_RANGE_SAYS)))]
    pub min_replicas: Option<u32>,
    /// Deprecated: write replicas, or scaling.maxReplicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NO_RANGE).message(rules::NO_PREFILL_RANGE_SAYS)))]
    pub max_replicas: Option<u32>,
    /// Auto lets the planner choose. Chunked has no prefill workers: decode workers read prompts in pieces.
    /// StreamLoading keeps all but the routed experts on each worker's GPU and streams these through a ring of slots
    /// there. DistributedStreamLoading does so on 2 to 8 GPUs that read each long prompt together, one worker on each: each
    /// streams its share of the experts and computes its share of the tokens.
    #[serde(default)]
    pub mode: PrefillMode,
    /// Where several GPUs can read a prompt together: time in which no answer may have been written for them to do so. Within it a
    /// prompt is read by one GPU, so that the others and the links stay free for answers. With 0s they read every long prompt
    /// together. At most 24h. By default 5m with mode Auto, and 0s with DistributedStreamLoading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::QUIET_WINDOW).message(rules::QUIET_WINDOW_SAYS)))]
    pub quiet_window: Option<DurationText>,
    /// Tokens of a prompt below which decode workers read it, in chunks between their steps. By default, where prefill
    /// workers stream experts, the length from which they are predicted to be faster; else a length below which handing
    /// over the KV cache costs more than it saves: one chunk where both kinds of workers are on GPUs, 32 tokens elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 0 && self <= 16777216").message("write 0 to 16777216 tokens; with 0 prefill workers read every prompt"))
    )]
    pub chunked_below_tokens: Option<u32>,
    /// GPUs requested for each prefill worker; it computes on one of them. With mode DistributedStreamLoading the number of GPUs
    /// that read a prompt together: 2 to 8. With 0 no worker uses a GPU. By default the planner's choice with strategy Auto
    /// or mode DistributedStreamLoading, and none with Hybrid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 0 && self <= 16").message("write 0 to 16 GPUs"))
    )]
    pub gpus_per_worker: Option<u32>,
}

/// Method of reading prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PrefillMode {
    /// The planner chooses.
    #[default]
    Auto,
    /// Decode workers read prompts in chunks between their steps; there are no prefill workers.
    Chunked,
    /// Experts stream from host memory through a ring of device buffers (SLP).
    StreamLoading,
    /// The same over 2 to 8 GPUs, which share the prompt and the experts (DSLP).
    DistributedStreamLoading,
}

impl PrefillMode {
    /// Whether it asks for experts that stream to GPUs.
    pub const fn streams(self) -> bool {
        match self {
            Self::Auto | Self::Chunked => false,
            Self::StreamLoading | Self::DistributedStreamLoading => true,
        }
    }
}

/// Placement of workers on nodes, and their binding to CPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlacementSpec {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "kube", schemars(extend("maxProperties" = 32)))]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that workers tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    pub tolerations: Vec<TolerationSpec>,
    /// Spread uses the CPUs and the memory bandwidth of all NUMA nodes; Compact uses the fewest NUMA nodes that hold
    /// the worker; Any leaves it to the kernel.
    #[serde(default)]
    pub numa: NumaPolicy,
    /// Exclusive gives each worker its own cores; Shared binds workers to sets of CPUs that may overlap; None binds
    /// nothing.
    #[serde(default)]
    pub pinning: Pinning,
    /// Deprecated: write podTemplate.runtimeClassName, which means the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("write the name of a RuntimeClass, such as nvidia: lower-case letters, digits, '-' and '.'"))
    )]
    pub runtime_class_name: Option<String>,
}

/// A taint that workers tolerate, as in a Pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TolerationSpec {
    /// The taint's key. Empty with operator Exists tolerates every taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 317)))]
    pub key: Option<String>,
    /// Equal (the default) or Exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 16)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self in ['Equal', 'Exists']").message("write Equal or Exists"))
    )]
    pub operator: Option<String>,
    /// The taint's value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 63)))]
    pub value: Option<String>,
    /// NoSchedule, PreferNoSchedule or NoExecute. By default all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self in ['NoSchedule', 'PreferNoSchedule', 'NoExecute']").message("write NoSchedule, PreferNoSchedule or NoExecute"))
    )]
    pub effect: Option<String>,
    /// Time for which a NoExecute taint is tolerated, in seconds. By default forever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub toleration_seconds: Option<i64>,
}

/// Use of a machine's NUMA nodes by a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum NumaPolicy {
    /// The fewest NUMA nodes that hold the worker.
    Compact,
    /// All NUMA nodes, evenly: the most memory bandwidth.
    #[default]
    Spread,
    /// Not bound to NUMA nodes.
    Any,
}

/// Binding of a worker to CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Pinning {
    /// Its own cores, shared with no other worker.
    Exclusive,
    /// A set of CPUs that other workers may use too.
    #[default]
    Shared,
    /// No binding.
    None,
}

/// Latency objectives of a service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ObjectivesSpec {
    /// Time from the request to its first token, such as 2s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_to_first_token: Option<DurationText>,
    /// Time from one token to the next, such as 50ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_per_output_token: Option<DurationText>,
}

/// See [`AutoscalingSpec::scale_to_zero_after`].
const SCALE_TO_ZERO_AFTER: Duration = Duration::from_secs(600);
/// See [`AutoscalingSpec::hold_timeout`].
const HOLD_TIMEOUT: Duration = Duration::from_secs(600);

/// Settings of pools that Hearth scales.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(validation = Rule::new(rules::STAYS_OR_ENDS).message(rules::STAYS_OR_ENDS_SAYS).field_path(".scaleToZeroAfter"))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AutoscalingSpec {
    /// Time without a request after which all workers end, where decode.scaling is {mode: Auto, minReplicas: 0}. The gateway stays,
    /// and the next request starts them again. From 10s to 30 days (720h). By default 10m. Not beside keep or preload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::IDLE_TIME).message(rules::IDLE_TIME_SAYS)))]
    pub scale_to_zero_after: Option<DurationText>,
    /// Longest time that a request waits that finds no ready worker, where decode.scaling.minReplicas is 0, with mode Auto or
    /// External. From 1s to 24h. By default 10m. Clients may give up earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::HOLD_TIME).message(rules::HOLD_TIME_SAYS)))]
    pub hold_timeout: Option<DurationText>,
    /// Whether the workers stay however long there is no request, and end for a higher priority only, where
    /// decode.scaling.minReplicas is 0. Not beside scaleToZeroAfter. By default false: they end for want of requests, and while they
    /// are idle for any deployment that needs their place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep: bool,
    /// Whether workers that have ended start again without a request, as soon as nodes have room for them, where
    /// decode.scaling.minReplicas is 0. They take nobody's place for that, stay until others need it, and end for these at once
    /// while nothing has been asked. Not beside scaleToZeroAfter. By default false: the next request starts them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preload: bool,
    /// Time for which a lower number of workers must suffice before the pool shrinks, such as 5m. Refused: it is
    /// the time that a worker takes to start, 1 to 5 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NEVER).message(rules::NO_STABILIZATION_SAYS)))]
    pub scale_down_stabilization: Option<DurationText>,
}

/// Replacement of the running workers after a change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RolloutSpec {
    /// Longest time that a new plan may go without progress before all its workers are ready; then the last plan that
    /// served comes back. Bytes of the model that arrive, Pods that are created, placed or ready, and workers that
    /// load their weights count as progress. By default 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress_deadline: Option<DurationText>,
}

fn default_gateways() -> u32 {
    1
}

/// Gateways: the processes that take requests and pass them on to the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GatewaySpec {
    /// Number of gateways, on different nodes if there is room. Each routes to all workers, so that the
    /// others answer new requests while one is down.
    #[serde(default = "default_gateways")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 1 && self <= 8").message("write 1 to 8 gateways; the default is 1"))
    )]
    pub replicas: u32,
}

impl Default for GatewaySpec {
    fn default() -> Self {
        Self {
            replicas: default_gateways(),
        }
    }
}

impl GatewaySpec {
    /// Whether all fields have their defaults.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Client access to the service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EndpointSpec {
    /// The type of the gateway's Service.
    #[serde(default, rename = "type")]
    pub type_: EndpointType,
    /// The Secret whose values are the accepted API keys. By default no key is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_keys_secret_ref: Option<SecretRef>,
    /// Time for which an idle client connection stays open, such as 10m. Make it longer than the idle timeout of proxies
    /// in front of the gateway. By default 2m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alive: Option<DurationText>,
    /// Time after which a client that reads nothing of its answer is disconnected, such as 1m. By default 30s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_stall: Option<DurationText>,
    /// Annotations of the gateway's Service, such as those of load balancers and of external-dns. Other existing
    /// annotations stay.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 4096}))
    )]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::QUALIFIED_KEYS).message(rules::ANNOTATION_KEYS_SAYS),
            validation = Rule::new(rules::KEYS_OF_HEARTH).message(rules::KEYS_OF_HEARTH_SAYS),
        )
    )]
    pub annotations: BTreeMap<String, String>,
    /// The Gateway (gateway.networking.k8s.io) that gets a route to the service. Refused: this engine attaches none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NEVER).message(rules::NO_ROUTES_SAYS)))]
    pub gateway: Option<GatewayRef>,
}

/// The type of the gateway's Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum EndpointType {
    /// A cluster address, reached from inside the cluster; on one machine from the machine itself.
    #[default]
    ClusterIP,
    /// A port on every node.
    NodePort,
    /// An address from the cluster's load balancer.
    LoadBalancer,
}

/// A Gateway of the Gateway API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GatewayRef {
    /// The Gateway's name.
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub name: String,
    /// Its namespace. By default the deployment's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub namespace: Option<String>,
}

impl InferenceDeploymentSpec {
    /// Whether all workers may end, for want of requests or for other deployments.
    pub fn may_rest(&self) -> bool {
        let scaling = self.decode.scaling.as_ref();
        scaling.is_some_and(ScalingSpec::may_rest)
    }

    /// Time without a request after which all workers end; `None` if they never do for want of requests.
    pub fn scale_to_zero_after(&self) -> Option<Duration> {
        let after = self.autoscaling.scale_to_zero_after;
        let stays = self.autoscaling.keep || self.autoscaling.preload;
        (self.may_rest() && !stays).then(|| after.map_or(SCALE_TO_ZERO_AFTER, DurationText::get))
    }

    /// Whether an autoscaler in the cluster may have all workers end, and start again.
    pub fn may_be_emptied(&self) -> bool {
        let scaling = self.decode.scaling.as_ref();
        scaling.is_some_and(ScalingSpec::may_be_emptied)
    }

    /// Whether it has had them end.
    pub fn is_emptied(&self) -> bool {
        self.may_be_emptied() && self.decode.replicas == Some(0)
    }

    /// Longest time that a request waits for workers that have ended; `None` if they never do.
    pub fn hold_timeout(&self) -> Option<Duration> {
        let hold = self.autoscaling.hold_timeout;
        (self.may_rest() || self.may_be_emptied())
            .then(|| hold.map_or(HOLD_TIMEOUT, DurationText::get))
    }

    /// Returns the model's name in the OpenAI API: `servedName`, or the source's default name.
    pub fn served_name(&self) -> String {
        if let Some(name) = &self.model.served_name {
            return name.clone();
        }
        self.model.source.default_name()
    }
}

impl PrefillSpec {
    /// Workers to plan for, within the bounds of scaling: 0 with mode Chunked.
    pub fn planned_replicas(&self) -> u32 {
        if self.mode == PrefillMode::Chunked {
            0
        } else {
            planned(self.replicas, self.scaling.as_ref())
        }
    }
}
