//! Groups in a plan: ranks that run one model together, as a ring or as peers.

use crate::plan::{InferencePlanSpec, PlanRank, PlanStrategy};

/// A rank's place in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPlace<'a> {
    /// Name of the head.
    pub head: &'a str,
    /// The place, from 0, which is the head's.
    pub place: u32,
}

impl PlanRank {
    /// Its place in the group that it runs the model with; `None` if it runs all of it.
    pub fn group(&self) -> Option<GroupPlace<'_>> {
        let ring = self.ring.as_ref().map(|ring| (&ring.head, ring.place));
        let peers = self.peers.as_ref().map(|peers| (&peers.head, peers.place));
        let (head, place) = ring.or(peers)?;
        Some(GroupPlace { head, place })
    }

    /// Whether this rank is the head of a group: it finds the other members by routes, as a gateway finds workers.
    pub fn is_group_head(&self) -> bool {
        self.group().is_some_and(|group| group.place == 0)
    }
}

impl InferencePlanSpec {
    /// The topology in words. A ring that would be slower than one of its members is that member alone.
    pub fn topology(&self) -> &'static str {
        let is_ring = self.ranks.iter().any(|rank| rank.ring.is_some());
        match self.strategy {
            PlanStrategy::Hybrid => "hybrid",
            PlanStrategy::PipedRing if is_ring => "piped ring",
            PlanStrategy::PipedRing => "one worker",
            PlanStrategy::Interleaved => "interleaved",
        }
    }

    /// Returns the ranks of the group whose head has that name, in the order of their places; empty if there is none.
    pub fn group_of(&self, head: &str) -> Vec<&PlanRank> {
        let ranks = self.ranks.iter();
        let placed = ranks.filter_map(|rank| Some((rank, rank.group()?)));
        let mut members: Vec<_> = placed.filter(|(_, group)| group.head == head).collect();
        members.sort_by_key(|(_, group)| group.place);
        members.into_iter().map(|(rank, _)| rank).collect()
    }

    /// Names of the nodes with ranks: of a ring in its order, the head's first, and others by name.
    pub fn nodes(&self) -> Vec<&str> {
        let place = |rank: &PlanRank| rank.ring.as_ref().map_or(u32::MAX, |ring| ring.place);
        let mut ranks: Vec<&PlanRank> = self.ranks.iter().collect();
        ranks.sort_by_key(|rank| (place(rank), &rank.node));
        let mut nodes = Vec::new();
        for rank in ranks {
            if !nodes.contains(&&*rank.node) {
                nodes.push(&*rank.node);
            }
        }
        nodes
    }
}
