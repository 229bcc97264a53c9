//! Peers in a plan: ranks that read prompts together.

use serde::{Deserialize, Serialize};

/// Most bytes of messages that may wait at a member of a group: what peers exchange in the longest prompt's pass must be within it.
pub const MOST_WAITING_BYTES: u64 = 8 << 30;

/// Bytes of messages that may wait at a member of a group beside those of its longest pass.
pub const SPARE_WAITING_BYTES: u64 = 64 << 20;

/// Bytes of messages that may wait at one of peers in a pass of `rows` rows: each has `hidden` numbers in float32, stores
/// `kv_layer_bytes` in a layer, and goes to other peers in so many `copies`. Those are rows that come and sums that come, of two
/// layers, with the keys and choices of the next.
pub const fn waiting_bytes(rows: u64, hidden: u64, kv_layer_bytes: u64, copies: u64) -> u64 {
    const CHOICE_BYTES: u64 = 8;
    let activations = 4 * 4 * hidden * copies;
    let rest = 2 * kv_layer_bytes + CHOICE_BYTES * copies;
    (activations + rest) * rows + SPARE_WAITING_BYTES
}

/// A rank's place among peers, which read prompts together: each computes a share of a prompt's rows, and has a share of each
/// layer's experts (OSDI '26, section 3.2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanPeers {
    /// Name of the head, the prefill rank that takes the prompts.
    pub head: String,
    /// Its place, from 0, which is the head's: its experts of `E` are `place * E / ranks` to `(place + 1) * E / ranks`.
    pub place: u32,
    /// Number of peers.
    pub ranks: u32,
    /// How rows come to the experts that they chose.
    pub experts: PlanExpertParallel,
    /// Whether it is a follower that maps the experts of all, which another rank of its node keeps in memory anyway: it can share
    /// prompts with fewer peers while others are lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stands_in: bool,
    /// How keys and values come to all peers; the head's counts.
    #[serde(default, skip_serializing_if = "PlanKvGather::is_direct")]
    pub kv: PlanKvGather,
}

/// How the keys and values of a peer's rows come to the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanKvGather {
    /// From each peer to each other.
    #[default]
    Direct,
    /// To one peer on each other node, which passes them on to those that are there.
    PassedOn,
}

impl PlanKvGather {
    /// Whether each peer sends to each other.
    pub fn is_direct(&self) -> bool {
        *self == Self::Direct
    }
}

/// How rows come to experts of other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum PlanExpertParallel {
    /// All rows go to all peers, and come back summed.
    #[default]
    SmallEp,
    /// Each row goes to the peers of the experts that it chose.
    Ep,
}
