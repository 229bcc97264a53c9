//! A rank's place in a group, as the plan has it.

use std::ops::Range;

use anyhow::{Context, bail};
use hearth_crds::{
    InferencePlanSpec, PlanExpertParallel, PlanPeers, PlanRank, PlanRing, PlanRole, ResidencyPolicy,
};
use hearth_model::{ExpertParallel, ExpertShare, Part};

use super::wrong;

/// What a rank is in a group. Of the others, a follower knows nothing: they may change while it stays.
#[derive(Clone, Debug)]
pub(in crate::roles) struct Place {
    /// Name of the rank.
    pub(super) name: String,
    /// Its place, from 0, which is the head's.
    pub(super) place: usize,
    pub(super) task: Task,
    /// Whether it is a head that can read prompts without its peers.
    pub(super) is_self_sufficient: bool,
    /// Whether it is a follower that can do its part among fewer peers than are planned.
    pub(super) stands_in: bool,
    /// Bytes of its cache.
    pub(super) kv_bytes: u64,
}

/// What a rank computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::roles) enum Task {
    /// Windows of the layers, of which the model has so many.
    Windows { part: Part, layers: usize },
    /// A share of the rows, and of the experts, of as many peers.
    Share {
        peers: usize,
        experts: ExpertParallel,
    },
}

/// Whether a rank can do without its peers, or some of them: one that streams experts, since those that it does not use take no room
/// on its device, and whose peers give the bits of one rank.
fn does_without(rank: &PlanRank, task: &Task) -> bool {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    let keeps_bits = match task {
        Task::Windows { .. } => false,
        Task::Share { peers, experts } => experts.keeps_bits(*peers),
    };
    keeps_bits && policy == Some(ResidencyPolicy::StreamLoading)
}

impl Place {
    /// A rank's place; `None` if it computes all of the model alone.
    ///
    /// # Errors
    /// An error if the plan's group is none: places or layers are missing, or a rank has the wrong role.
    pub(in crate::roles) fn of(
        plan: &InferencePlanSpec,
        rank: &PlanRank,
    ) -> anyhow::Result<Option<Self>> {
        let Some(group) = rank.group() else {
            return Ok(None);
        };
        let role = match (group.place, &rank.ring) {
            (0, Some(_)) => PlanRole::Decode,
            (0, None) => PlanRole::Prefill,
            _ => PlanRole::Stage,
        };
        if rank.role != role || (group.place == 0) != (rank.name == group.head) {
            bail!(
                "{}: place {} is {}'s, a {} rank",
                wrong(group.head),
                group.place,
                rank.name,
                rank.role.as_str()
            );
        }
        let task = match (&rank.ring, &rank.peers) {
            (Some(ring), None) => of_ring(plan, rank, ring)?,
            (None, Some(peers)) => of_peers(rank, peers)?,
            _ => bail!("{}: {} is in two groups", wrong(group.head), rank.name),
        };
        let does_without = does_without(rank, &task);
        let stands_in = rank.peers.as_ref().is_some_and(|peers| peers.stands_in);
        Ok(Some(Self {
            name: rank.name.clone(),
            place: group.place as usize,
            is_self_sufficient: does_without && rank.is_group_head(),
            stands_in: does_without && stands_in && !rank.is_group_head(),
            task,
            kv_bytes: rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes),
        }))
    }

    /// Whether it is the head.
    pub(in crate::roles) fn is_head(&self) -> bool {
        self.place == 0
    }

    /// The layers that it computes; `None`: all.
    pub(in crate::roles) fn part(&self) -> Option<&Part> {
        match &self.task {
            Task::Windows { part, .. } => Some(part),
            Task::Share { .. } => None,
        }
    }

    /// The experts of each layer that it may need.
    pub(in crate::roles) fn share(&self) -> ExpertShare {
        match self.stands_in {
            true => ExpertShare::ALL,
            false => self.usual_share(),
        }
    }

    /// The experts of each layer that it needs as long as nobody is lost.
    pub(in crate::roles) fn usual_share(&self) -> ExpertShare {
        match self.task {
            Task::Share { peers, .. } if !self.is_self_sufficient => {
                ExpertShare::of(self.place, peers)
            }
            Task::Windows { .. } | Task::Share { .. } => ExpertShare::ALL,
        }
    }
}

fn of_ring(plan: &InferencePlanSpec, rank: &PlanRank, ring: &PlanRing) -> anyhow::Result<Task> {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    if policy == Some(ResidencyPolicy::StreamLoading) {
        bail!(
            "{}: {} streams experts, in the order of whole passes",
            wrong(&ring.head),
            rank.name
        );
    }
    let layers = plan.model.layers as usize;
    let part = Part::new(windows(ring).collect(), ring.place == 0, layers);
    Ok(Task::Windows {
        part: part.with_context(|| wrong(&ring.head))?,
        layers,
    })
}

fn of_peers(rank: &PlanRank, peers: &PlanPeers) -> anyhow::Result<Task> {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    if policy == Some(ResidencyPolicy::HostExperts) {
        bail!(
            "{}: {} has experts on its CPUs, and peers run them on their own device",
            wrong(&peers.head),
            rank.name
        );
    }
    if peers.place >= peers.ranks {
        bail!(
            "{}: place {} of {} peers",
            wrong(&peers.head),
            peers.place,
            peers.ranks
        );
    }
    Ok(Task::Share {
        peers: peers.ranks as usize,
        experts: match peers.experts {
            PlanExpertParallel::SmallEp => ExpertParallel::SmallEp,
            PlanExpertParallel::Ep => ExpertParallel::Ep,
        },
    })
}

/// The windows of a place, as ranges of layers.
pub(super) fn windows(ring: &PlanRing) -> impl Iterator<Item = Range<usize>> {
    ring.windows.iter().map(|window| {
        let first = window.first_layer as usize;
        first..first + window.layers as usize
    })
}
