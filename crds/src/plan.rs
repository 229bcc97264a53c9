//! `InferencePlan`: every decision, made before anything runs. Workers read it as JSON and decide nothing themselves.
//!
//! A worker may be older or newer than the writer of its plan: it ignores fields that it does not know, and refuses a
//! plan whose `minVersion` is above [`READER_VERSION`]. The API server validates stored plans against the schema.

use serde::{Deserialize, Serialize};

use crate::deployment::{ObjectivesSpec, Pinning};
use crate::plan_peers::PlanPeers;
#[cfg(feature = "kube")]
use crate::plan_record::InferencePlanStatus;
use crate::plan_record::PlanInputs;
use crate::plan_ring::PlanRing;
use crate::plan_weights::{PlanDeviceMemory, PlanResidency, ResidencyPolicy};

/// All decisions for one generation of a deployment. Immutable: a new decision is a new plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "hearth.dev",
        version = "v1alpha1",
        kind = "InferencePlan",
        namespaced,
        shortname = "infp",
        category = "hearth",
        status = "InferencePlanStatus",
        derive = "PartialEq",
        doc = "Every choice for one generation of an InferenceDeployment: ranks, devices, memory and predictions. Immutable.",
        printcolumn(
            name = "Deployment",
            type_ = "string",
            json_path = ".spec.deployment.name"
        ),
        printcolumn(name = "Generation", type_ = "integer", json_path = ".spec.generation"),
        printcolumn(name = "Strategy", type_ = "string", json_path = ".spec.strategy"),
        printcolumn(name = "Outcome", type_ = "string", json_path = ".status.outcome"),
        printcolumn(
            name = "TTFT-ms",
            type_ = "number",
            json_path = ".spec.predicted.ttftMs"
        ),
        printcolumn(
            name = "TPOT-ms",
            type_ = "number",
            json_path = ".spec.predicted.tpotMs"
        ),
        printcolumn(
            name = "Age",
            type_ = "date",
            json_path = ".metadata.creationTimestamp"
        ),
    )
)]
#[cfg_attr(
    feature = "kube",
    x_kube(validation = Rule::new("self == oldSelf").message("a plan never changes: make a new InferencePlan with the next generation"))
)]
#[serde(rename_all = "camelCase")]
pub struct InferencePlanSpec {
    /// Number of the plan, ascending among a deployment's plans; a worker refuses one that is older than its own.
    pub generation: u64,
    /// Lowest version of plans that a reader must know to carry this one out; 0: any.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_version: u32,
    /// Image of all ranks' Pods; unset outside a cluster, where the ranks are processes of one program. A new image is
    /// a new plan, so that a worker that does not start with it is given up for the plan with the previous image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_image: Option<String>,
    /// The planned deployment.
    pub deployment: DeploymentRef,
    /// The topology.
    pub strategy: PlanStrategy,
    /// Facts of the model, shared by all ranks.
    pub model: PlanModel,
    /// One entry per process, gateway first, then prefill, decode and stage, each by ascending index.
    pub ranks: Vec<PlanRank>,
    /// Request routing of the gateway.
    pub routing: PlanRouting,
    /// Predicted performance of the service.
    pub predicted: PlanPrediction,
    /// Objectives of the deployment.
    #[serde(default)]
    pub objectives: ObjectivesSpec,
    /// One line per pool whose workers compute different bits, so that a stream that moves between them may continue
    /// with other tokens; empty: failover keeps every token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed_numerics: Vec<String>,
    /// Inputs of the plan; unset outside a cluster, and in plans of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<PlanInputs>,
    /// One line per decision.
    pub why: Vec<String>,
    /// One line per alternative, with the number that decided against it.
    pub not_chosen: Vec<String>,
}

/// The planned deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct DeploymentRef {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
}

/// The topology of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanStrategy {
    /// Prefill and decode workers over one shared copy of the weights.
    Hybrid,
    /// A ring of nodes with prefetched weights.
    PipedRing,
    /// A ring of nodes with block-level offload.
    Interleaved,
}

/// Facts of the model, shared by all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanModel {
    /// Its name in the OpenAI API.
    pub served_name: String,
    /// The directory with config.json and the weights, on each node.
    pub path: String,
    /// Source of the model in words, such as `builtin hearth-demo`.
    pub source: String,
    /// The architecture's name in config.json, such as `deepseek_v3`.
    pub architecture: String,
    /// Number of parameters.
    pub parameter_count: u64,
    /// Bytes of all weights as stored.
    pub weight_bytes: u64,
    /// Maximum number of tokens of prompt and answer together.
    pub context_length: u32,
    /// Number of layers.
    pub layers: u32,
    /// KV cache bytes of one token over all layers, with the plan's key and value types.
    pub kv_bytes_per_token: u64,
    /// Storage format of most of the weights, such as `FP8` or `BF16`.
    pub dtype: String,
}

/// One process of the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanRank {
    /// Role and index, such as `prefill-0`: unique in the plan.
    pub name: String,
    /// Its role.
    pub role: PlanRole,
    /// Its index among the ranks of its role, from 0.
    pub index: u32,
    /// The node that it runs on.
    pub node: String,
    /// Logical CPUs that its threads may use, ascending.
    pub cpus: Vec<u32>,
    /// NUMA nodes that its memory comes from, ascending; empty: any.
    pub numa_nodes: Vec<u32>,
    /// Compute threads (for the gateway: threads of the async runtime).
    pub threads: u32,
    /// Binding to `cpus`.
    pub pinning: Pinning,
    /// `cpu`, or the UUID of a GPU.
    #[serde(rename = "device")]
    pub device_name: String,
    /// GPUs that it holds; its Pod requests them from the cluster's device plugin.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// Name of the rank in whose Pod it runs, as another process of the same container: that Pod holds the GPU that both
    /// compute on, which is given to one container alone. Unset: it has a Pod to itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_pod_of: Option<String>,
    /// Whether its Pod claims the GPUs that it computes on by their UUIDs (dynamic resource allocation) instead of
    /// requesting any from a device plugin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub claims_gpus: bool,
    /// UUIDs of the GPUs that it computes on; empty: it computes on CPUs. If a device plugin hands out another GPU of
    /// the node, that one is meant: the plan holds for each of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_uuids: Vec<String>,
    /// Bytes of memory that it may use of each of these GPUs: weights, KV, working room, and what the driver takes for
    /// the process.
    #[serde(default, skip_serializing_if = "is_none_of_bytes")]
    pub gpu_memory_bytes: u64,
    /// What that memory is for; unset on CPUs, and in plans of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<PlanDeviceMemory>,
    /// The virtual device that stands for the GPU, as the worker's `--device` takes it; its memory is `gpuMemoryBytes`
    /// instead of what the text says. Unset for a real GPU and for CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_device: Option<String>,
    /// Precision of activations in its products with weights; unset: F32, as in plans of earlier versions.
    #[serde(default, skip_serializing_if = "PlanActivations::is_exact")]
    pub activations: PlanActivations,
    /// Form in which it computes latent attention; unset: Absorbed, as in plans of earlier versions.
    #[serde(default, skip_serializing_if = "PlanMlaForm::is_absorbed")]
    pub mla_form: PlanMlaForm,
    /// Its place in a ring of ranks that run one model together; unset for one that runs all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<PlanRing>,
    /// Its place among ranks that read prompts together; unset for one that reads them alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<PlanPeers>,
    /// Residency of its weights in memory; unset for the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<PlanResidency>,
    /// Its KV cache; unset for the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<PlanKv>,
    /// Concurrent streams (decode), or prompts in progress (prefill); 0 for the gateway.
    pub max_batch: u32,
    /// Whether it decodes in two half batches, one in attention on its GPU while the other is in its experts on the CPUs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dual_batch: bool,
    /// Prompt tokens per step; 0 for the gateway.
    pub chunk_tokens: u32,
    /// The same while no stream waits for its next token, if that is more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 1 && self <= 8192").message("write 1 to 8192 tokens: the members of a ring have memory for no longer pass"))
    )]
    pub idle_chunk_tokens: Option<u32>,
    /// Bytes of the node's memory for activations and logits in addition to weights and KV; includes the process
    /// itself.
    pub scratch_bytes: u64,
    /// `host:port` that it serves on. The planner leaves it unset unless told: the executor of the plan sets it before
    /// publishing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Predicted performance; unset for the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<RankPrediction>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

pub(crate) fn is_none_of_bytes(bytes: &u64) -> bool {
    *bytes == 0
}

/// Most tokens of `idleChunkTokens`: longer passes gain nothing, and each member has memory for the rows of one.
pub const MOST_IDLE_CHUNK_TOKENS: u32 = 8192;

/// CPU request of a rank's Pod in millicores. With `Exclusive` it is all of its logical CPUs, since the kubelet's
/// static policy assigns only whole ones; otherwise a tenth of a CPU per thread, since idle CPUs are for any process
/// with work.
pub fn cpu_request_millis(pinning: Pinning, cpus: usize, threads: u32) -> u64 {
    match pinning {
        Pinning::Exclusive if cpus > 0 => cpus as u64 * 1000,
        Pinning::Exclusive | Pinning::Shared | Pinning::None => u64::from(threads.max(1)) * 100,
    }
}

/// Threads of a rank that computes on a GPU alone: one launches work, the others load the weights.
pub const GPU_RANK_THREADS: u32 = 4;

/// Resource as which device plugins offer GPUs.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// UUID of the first virtual device in a profile, which stands for a GPU.
pub const VIRTUAL_UUID: &str = "VIRTUAL-0";

/// UUID of a virtual device of a node, counted from 0.
pub fn virtual_uuid(index: u32) -> String {
    format!("VIRTUAL-{index}")
}

/// Exit code of a worker whose device no longer answers, or that cannot open it for that reason (`EX_UNAVAILABLE` of
/// sysexits.h).
pub const DEVICE_LOST_EXIT_CODE: u8 = 69;

/// GPU memory that the driver takes per process in addition to what the process allocates: its context and the
/// compiled kernels.
pub const GPU_CONTEXT_BYTES: u64 = 512 << 20;

/// Device that a rank computes on. A plan writes it twice, as [`PlanRank::device_name`] and [`PlanRank::gpu_uuids`],
/// since workers of another version read it; code uses [`PlanRank::device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankDevice<'a> {
    /// The CPUs of its node.
    Cpus,
    /// The GPU with this UUID. If a device plugin hands out another GPU of the node, that one is meant.
    Gpu(&'a str),
}

impl<'a> RankDevice<'a> {
    /// `cpu`, or the UUID of the GPU.
    pub const fn name(self) -> &'a str {
        match self {
            Self::Cpus => "cpu",
            Self::Gpu(uuid) => uuid,
        }
    }

    /// The UUID of the GPU; `None` on CPUs.
    pub const fn gpu_uuid(self) -> Option<&'a str> {
        match self {
            Self::Cpus => None,
            Self::Gpu(uuid) => Some(uuid),
        }
    }
}

impl PlanRank {
    /// Returns the device that holds this rank's weights and KV cache and does its arithmetic.
    pub fn device(&self) -> RankDevice<'_> {
        match self.gpu_uuids.first() {
            Some(uuid) => RankDevice::Gpu(uuid),
            None => RankDevice::Cpus,
        }
    }

    /// Whether this rank's weights, KV cache and arithmetic are on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        matches!(self.device(), RankDevice::Gpu(_))
    }

    /// Bytes of GPU memory that it may allocate: its share minus what the driver takes for the process.
    pub fn gpu_budget_bytes(&self) -> u64 {
        let context_bytes = match self.virtual_device {
            Some(_) => 0,
            None => GPU_CONTEXT_BYTES,
        };
        self.gpu_memory_bytes.saturating_sub(context_bytes)
    }

    /// Bytes of the node's memory that are its share of a virtual device; 0 without one.
    pub fn virtual_memory_bytes(&self) -> u64 {
        match self.virtual_device {
            Some(_) => self.gpu_memory_bytes,
            None => 0,
        }
    }

    /// CPU request of its Pod, in millicores.
    pub fn cpu_millis(&self) -> u64 {
        cpu_request_millis(self.pinning, self.cpus.len(), self.threads)
    }

    /// CPUs that it has to itself, by the kernel's numbers.
    pub fn exclusive_cpus(&self) -> &[u32] {
        match self.pinning {
            Pinning::Exclusive => &self.cpus,
            Pinning::Shared | Pinning::None => &[],
        }
    }

    /// Bytes of weights that it keeps in its node's memory; ranks on one node map one copy.
    pub fn host_weight_bytes(&self) -> u64 {
        match &self.residency {
            Some(residency) if self.is_on_gpu() => {
                let at_a_time = residency.host_budget_bytes;
                at_a_time.map_or(residency.host_bytes, |bytes| {
                    bytes.min(residency.host_bytes)
                })
            }
            Some(residency) => residency.budget_bytes,
            None => 0,
        }
    }

    /// Bytes of weights that its node grants to it alone: its window over weights that it reads repeatedly, if its
    /// memory limit equals its request, and experts within a budget, in buffers of its own. The window cannot be in another's
    /// memory: what it reads is charged to it.
    pub fn own_weight_bytes(&self) -> u64 {
        let residency = self.residency.as_ref();
        let has_window = residency.is_some_and(|r| r.policy == ResidencyPolicy::MmapPrefetch);
        let is_own = has_window && !self.exclusive_cpus().is_empty();
        match is_own || self.has_expert_budget() {
            true => self.host_weight_bytes(),
            false => 0,
        }
    }

    /// Whether only some of the routed experts that its CPUs compute are in memory at a time.
    pub fn has_expert_budget(&self) -> bool {
        let residency = self.residency.as_ref();
        residency.is_some_and(|residency| residency.host_budget_bytes.is_some())
    }

    /// Bytes of its weights that have no room in its node's memory, so that they are read from the disk again and again.
    pub fn disk_weight_bytes(&self) -> u64 {
        let residency = self.residency.as_ref();
        residency.map_or(0, PlanResidency::disk_bytes)
    }

    /// Bytes of KV cache that it keeps in its node's memory.
    pub fn host_kv_bytes(&self) -> u64 {
        match &self.kv {
            Some(kv) if !self.is_on_gpu() => kv.memory_bytes,
            Some(_) | None => 0,
        }
    }
}

/// Precision of activations in a rank's products with weights; those of routers are F32 with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanActivations {
    /// Not rounded.
    #[default]
    F32,
    /// Rounded to bfloat16.
    BF16,
}

impl PlanActivations {
    /// Whether nothing is rounded.
    pub fn is_exact(&self) -> bool {
        *self == Self::F32
    }
}

/// Form of multi-head latent attention. Their bits differ: one form holds for all that a rank computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanMlaForm {
    /// Queries meet the cached latents: nothing but those is read, as suits answers.
    #[default]
    Absorbed,
    /// Keys and values of all heads are computed from the latents once a pass: fewer operations where a pass has many
    /// tokens. Prefill ranks alone.
    Expanded,
}

impl PlanMlaForm {
    /// Whether queries meet the latents.
    pub fn is_absorbed(&self) -> bool {
        *self == Self::Absorbed
    }
}

/// Role of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanRole {
    /// The OpenAI endpoint: tokenises, routes, streams.
    Gateway,
    /// Reads prompts and hands their KV to a decode rank.
    Prefill,
    /// Writes tokens.
    Decode,
    /// Computes its part of what the head of its group begins: some layers of a ring, or a share of peers' passes.
    Stage,
}

impl PlanRole {
    /// All roles, in the order of a plan's ranks.
    pub const ALL: [Self; 4] = [Self::Gateway, Self::Prefill, Self::Decode, Self::Stage];

    /// Whether it runs the model: all roles but the gateway.
    pub const fn is_worker(self) -> bool {
        match self {
            Self::Gateway => false,
            Self::Prefill | Self::Decode | Self::Stage => true,
        }
    }

    /// Returns the role with that name; `None` if no role has it.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == name)
    }

    /// The role in lower case, as in rank names.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Stage => "stage",
        }
    }
}

/// The KV cache of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanKv {
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Number format of keys (for MLA: of the latent and the rotary part).
    pub key_type: PlanKvType,
    /// Number format of values; equal to `key_type` for MLA.
    pub value_type: PlanKvType,
    /// Tokens of one block.
    pub block_tokens: u32,
}

/// A number format of the KV cache that this engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanKvType {
    /// bfloat16, 2 bytes per element.
    BF16,
    /// float32, 4 bytes per element.
    F32,
}

impl PlanKvType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::BF16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Predicted performance of a rank, from the profile's rates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct RankPrediction {
    /// Milliseconds to the first token of a prompt of `prompt_tokens`, with nothing else running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// The prompt length that `ttft_ms` refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u32>,
    /// Milliseconds per token at batch 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Tokens per second: prompt tokens for a prefill rank, output tokens at `max_batch` for a decode rank.
    pub tokens_per_second: f64,
}

/// Request routing of the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanRouting {
    /// Prompts with fewer tokens are read by the decode rank itself, in chunks between its steps;
    /// 4294967295: all of them, as there is no prefill rank.
    pub chunked_below_tokens: u32,
    /// Milliseconds in which nothing may have been decoded for a prompt to be read by all peers of its prefill rank, instead of by
    /// that rank alone (OSDI '26, section 3.3.2); 0: all peers read every prompt. Unset where there are no peers, and in plans of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub together_after_quiet_ms: Option<u64>,
    /// Requests that may wait, however few workers there are; further ones get 429. With more workers more may.
    pub max_queue: u32,
    /// Milliseconds that a request may wait before it gets 503.
    pub queue_timeout_ms: u64,
    /// The same for one that arrives while no decode worker is ready, where these end for want of requests; unset where they do
    /// not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_timeout_ms: Option<u64>,
}

impl PlanRouting {
    /// `chunked_below_tokens` of a plan without prefill ranks.
    pub const ALWAYS_CHUNKED: u32 = u32::MAX;
    /// Requests that may wait for each one that decode workers compute at a time.
    pub const QUEUED_PER_SLOT: u32 = 32;
}

/// Predicted performance of the service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanPrediction {
    /// Milliseconds to the first token of a prompt of `ttft_prompt_tokens`, with nothing else running.
    pub ttft_ms: f64,
    /// The prompt length that `ttft_ms` refers to.
    pub ttft_prompt_tokens: u32,
    /// Milliseconds per token at batch 1.
    pub tpot_ms: f64,
    /// Output tokens per second with all decode ranks at their full batch.
    pub tokens_per_second: f64,
}

impl InferencePlanSpec {
    /// Returns the rank with that name.
    pub fn rank(&self, name: &str) -> Option<&PlanRank> {
        self.ranks.iter().find(|rank| rank.name == name)
    }

    /// Returns the second rank of the Pod of the rank with that name; `None` if it has the Pod to itself.
    pub fn second_in_pod_of(&self, name: &str) -> Option<&PlanRank> {
        let mut ranks = self.ranks.iter();
        ranks.find(|rank| rank.in_pod_of.as_deref() == Some(name))
    }

    /// Returns all ranks of a role, by ascending index.
    pub fn ranks_of(&self, role: PlanRole) -> impl Iterator<Item = &PlanRank> {
        self.ranks.iter().filter(move |rank| rank.role == role)
    }
}
