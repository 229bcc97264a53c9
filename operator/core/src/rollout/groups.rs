//! Groups that a quota admits in part: all members or none hold resources.

use super::{Sorted, Want, end_of, grace_of};
use crate::decision::PodEnd;
use crate::observed::PodView;

impl Sorted<'_> {
    /// Whether a Pod is not created for now, since its group could not be whole.
    pub(super) fn is_held_back(&self, want: &Want) -> bool {
        let mut heads = self.input.wants.iter();
        self.input.short_for.is_some() && heads.any(|head| want.is_member_of(head))
    }

    /// Deletions of members of groups of which a quota has admitted a part. A group that was whole before, by this plan or the one
    /// before, keeps them.
    pub(super) fn taken_back(&self) -> Vec<PodEnd> {
        let heads = self.wants().map(|(_, want)| want);
        let is_part = |head: &&Want| {
            let members = self.wants().filter(|(_, want)| want.is_member_of(head));
            let made: Vec<_> = members.map(|(index, _)| self.made[index]).collect();
            let was_ready = |pod: &PodView| pod.is_ready || pod.has_lost_readiness;
            self.input.short_for.is_some()
                && made.iter().any(Option::is_none)
                && !made.iter().flatten().any(|pod| was_ready(pod))
        };
        let parts: Vec<&Want> = heads.filter(is_part).collect();
        let members = self.wants().filter(|(_, want)| {
            let mut parts = parts.iter();
            parts.any(|head| want.is_member_of(head))
        });
        let made = members.filter_map(|(index, _)| self.made[index]);
        made.map(|pod| end_of(pod, grace_of(pod))).collect()
    }
}
