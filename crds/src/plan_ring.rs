//! Rings in a plan: ranks that run one model together.

use serde::{Deserialize, Serialize};

use crate::plan::{InferencePlanSpec, PlanRank};

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

impl PlanRank {
    /// Whether this rank is the head of a ring: it finds the other members by routes, as a gateway finds workers.
    pub fn is_ring_head(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.place == 0)
    }
}

impl InferencePlanSpec {
    /// Returns the ranks of the ring whose head has that name, in the order of their places; empty if there is none.
    pub fn ring_of(&self, head: &str) -> Vec<(&PlanRank, &PlanRing)> {
        let ranks = self.ranks.iter();
        let rings = ranks.filter_map(|rank| Some((rank, rank.ring.as_ref()?)));
        let mut members: Vec<_> = rings.filter(|(_, ring)| ring.head == head).collect();
        members.sort_by_key(|(_, ring)| ring.place);
        members
    }
}
