//! Rings in a plan: ranks that run one model together.

use serde::{Deserialize, Serialize};

/// A rank's place in a ring: a pass goes from the head through the other places in their order, and around again until all
/// layers are computed (prima.cpp, section 3.1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanRing {
    /// Name of the head, the decode rank that has embedding and output head.
    pub head: String,
    /// Its place, from 0, which is the head's.
    pub place: u32,
    /// Its layers: a window a round, in the order of the layers.
    pub windows: Vec<PlanWindow>,
    /// Most rows of a flight: those of a longer pass follow each other through the ring, so that its ranks compute at the same
    /// time.
    #[serde(default = "usual_flight_tokens")]
    pub flight_tokens: u32,
}

impl PlanRing {
    /// Its layers in words: `0-3, 12`.
    pub fn layers(&self) -> String {
        let windows = self.windows.iter().map(|window| {
            let last = window.first_layer + window.layers.saturating_sub(1);
            match window.layers {
                0 | 1 => window.first_layer.to_string(),
                _ => format!("{}-{last}", window.first_layer),
            }
        });
        windows.collect::<Vec<_>>().join(", ")
    }
}

/// Rows of a flight where a plan does not say it.
pub const USUAL_FLIGHT_TOKENS: u32 = 64;

fn usual_flight_tokens() -> u32 {
    USUAL_FLIGHT_TOKENS
}

/// Layers that a rank computes without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PlanWindow {
    /// The first of them, from 0.
    pub first_layer: u32,
    /// Their number.
    pub layers: u32,
}
