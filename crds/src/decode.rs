//! Decode workers in an `InferenceDeployment`: their number, batches, caches.

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::capability::KV_TYPES_SAYS;
use crate::quantity::MemoryQuantity;
#[cfg(feature = "kube")]
use crate::rules;
use crate::scaling::{ScalingSpec, planned};

fn default_max_batch() -> u32 {
    6
}

/// Workers that write answers (decode).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(
        validation = Rule::new(rules::REPLICAS_XOR_RANGE).message(rules::REPLICAS_XOR_RANGE_SAYS),
        validation = Rule::new(rules::SCALING_XOR_RANGE).message(rules::SCALING_XOR_RANGE_SAYS),
        validation = Rule::new(rules::NONE_IS_EXTERNAL).message(rules::NONE_IS_EXTERNAL_SAYS).field_path(".replicas"),
        validation = Rule::new(rules::DUAL_BATCH_HAS_TWO).message(rules::DUAL_BATCH_HAS_TWO_SAYS),
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DecodeSpec {
    /// Number of workers. By default 1. The scale subresource reads and writes it, and an autoscaler requires it to be
    /// set. 0, where scaling is {mode: External, minReplicas: 0}, ends all workers until it is higher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::REPLICAS_OR_NONE).message(rules::REPLICAS_SAYS)))]
    pub replicas: Option<u32>,
    /// Who may change the number of workers, and within which bounds. By default only the deployment's author (mode
    /// Static).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingSpec>,
    /// Deprecated: write replicas, or scaling.minReplicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NO_RANGE).message(rules::NO_DECODE_RANGE_SAYS)))]
    pub min_replicas: Option<u32>,
    /// Deprecated: write replicas, or scaling.maxReplicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NO_RANGE).message(rules::NO_DECODE_RANGE_SAYS)))]
    pub max_replicas: Option<u32>,
    /// Maximum number of streams that one worker decodes at a time.
    #[serde(default = "default_max_batch")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 1 && self <= 512").message("at least 1 stream must be able to decode, at most 512; the default is 6"))
    )]
    pub max_batch: u32,
    /// Two half batches, one in attention on a GPU while the other is in its experts on the CPUs. Auto does so where it is
    /// predicted to be faster. Quote the value: kubectl reads a bare On or Off as a boolean.
    #[serde(default)]
    pub dual_batch: DualBatch,
    /// Experts of a worker whose experts are on CPUs, in the memory that is left on its GPU: those that are used most. Auto
    /// does so where it is predicted to be faster and changes no bit; On also on a GPU whose arithmetic is not the CPUs',
    /// where the same request may then end with other tokens, since which of the two computes an expert depends on what is
    /// cached. Unset: Auto. Quote the value: kubectl reads a bare On or Off as a boolean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_cache: Option<ExpertCache>,
    /// The KV cache of each worker.
    #[serde(default)]
    pub kv_cache: KvCacheSpec,
}

impl Default for DecodeSpec {
    fn default() -> Self {
        Self {
            replicas: None,
            scaling: None,
            min_replicas: None,
            max_replicas: None,
            max_batch: default_max_batch(),
            dual_batch: DualBatch::default(),
            expert_cache: None,
            kv_cache: KvCacheSpec::default(),
        }
    }
}

/// Whether attention of one half batch overlaps the experts of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum DualBatch {
    /// The planner chooses.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Whether memory that is left on a GPU holds experts that CPUs compute else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ExpertCache {
    /// Where it is faster and changes no bit.
    #[default]
    Auto,
    /// Where it is faster.
    On,
    /// Never.
    Off,
}

/// The KV cache of each worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KvCacheSpec {
    /// Number format of keys: BF16 or F32. Int8 and FP8 are refused: this engine has neither yet.
    #[serde(default)]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::KV_TYPES).message(KV_TYPES_SAYS)))]
    pub key_type: KvType,
    /// Number format of values: BF16 or F32. Int8 and FP8 are refused: this engine has neither yet.
    #[serde(default)]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::KV_TYPES).message(KV_TYPES_SAYS)))]
    pub value_type: KvType,
    /// Memory of the cache of each decode worker. By default enough for maxBatch streams of contextLength tokens, as
    /// far as memory permits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryQuantity>,
    /// Storage for blocks that no longer fit. Refused: this engine keeps the KV cache in memory, and requests wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NEVER).message(rules::NO_SPILL_SAYS)))]
    pub spill: Option<SpillSpec>,
}

/// A number format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum KvType {
    /// bfloat16, 2 bytes per element.
    #[default]
    BF16,
    /// float32, 4 bytes per element.
    F32,
    /// 8-bit integers with a scale per row.
    Int8,
    /// FP8 E4M3.
    FP8,
}

impl KvType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::BF16 => 2,
            Self::F32 => 4,
            Self::Int8 | Self::FP8 => 1,
        }
    }
}

/// Storage for cold KV blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SpillSpec {
    /// A directory of the node's flash storage.
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::ABSOLUTE).message("write the absolute path of a directory on flash, such as /var/lib/hearth/kv, without .."))
    )]
    pub path: String,
    /// Maximum amount kept there.
    pub size: MemoryQuantity,
}

impl DecodeSpec {
    /// Workers to plan for, within the bounds of scaling.
    pub fn planned_replicas(&self) -> u32 {
        planned(self.replicas, self.scaling.as_ref())
    }
}
