//! Ranks that run one model together as a ring: what the plan says of it, and the processes' side of a group.

mod addresses;
mod former;
mod head;
mod link;
mod membership;
mod net;
mod stage;
mod terms;

use std::ops::Range;
use std::path::PathBuf;

use hearth_crds::{InferencePlanSpec, PlanRank, PlanRing};
use hearth_kernels::KvLayout;
use hearth_model::Part;

pub(super) use head::Head;
pub(super) use membership::Membership;
pub(super) use stage::{Place, StageWorker};

/// What the plan says of a rank of a ring.
pub(super) enum Ring {
    /// It is the head.
    Head(Head),
    /// It is one of the others.
    Stage(Place),
}

impl Ring {
    /// The ring that a rank belongs to; `None` if it computes all of the model. `routes`: the file that tells its head where the
    /// members are, if the plan does not.
    ///
    /// # Errors
    /// An error if the plan's ring is none: places or layers are missing.
    pub(super) fn of(
        plan: &InferencePlanSpec,
        rank: &PlanRank,
        routes: Option<PathBuf>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(own) = &rank.ring else {
            return Ok(None);
        };
        let ring = match own.place {
            0 => Self::Head(Head::of(plan, rank, routes)?),
            _ => Self::Stage(Place::of(plan, rank, own)?),
        };
        Ok(Some(ring))
    }

    /// The layers that this rank computes.
    pub(super) fn part(&self) -> &Part {
        match self {
            Self::Head(head) => head.part(),
            Self::Stage(place) => place.part(),
        }
    }
}

/// The windows of a place, as ranges of layers.
fn windows(ring: &PlanRing) -> impl Iterator<Item = Range<usize>> {
    ring.windows.iter().map(|window| {
        let first = window.first_layer as usize;
        first..first + window.layers as usize
    })
}

/// What is said of a ring that cannot be.
fn wrong(head: &str) -> String {
    format!("the plan's ring of {head} cannot be\n  plan again with this version of hearth")
}

/// Blocks of a cache of `bytes` for `layers` layers.
fn kv_blocks(bytes: u64, layers: usize, layout: &KvLayout) -> u32 {
    let block_bytes = (layers * layout.block_layer_bytes()).max(1) as u64;
    u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX)
}

/// What each layer of a cache is, whichever layers there are.
fn of_one_layer(layout: &KvLayout) -> String {
    KvLayout {
        layers: 1,
        ..*layout
    }
    .fingerprint()
}
