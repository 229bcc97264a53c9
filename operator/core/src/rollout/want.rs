//! The Pods of the target as a rollout sees them.

use hearth_crds::PlanRole;

use crate::build::DesiredPod;
use crate::observed::SecondRank;
use crate::observed::forbidden::Counted;

/// A Pod that the target plan wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Want {
    pub(crate) name: String,
    pub(crate) rank: String,
    /// See [`DesiredPod::second`].
    pub(crate) second: Option<SecondRank>,
    /// See [`DesiredPod::group`].
    pub(crate) group: Vec<String>,
    /// See [`DesiredPod::form`].
    pub(crate) form: String,
    pub(crate) role: PlanRole,
    pub(crate) node: String,
    pub(crate) cpu_millis: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) gpus: u32,
    pub(crate) exclusive_cpus: Vec<u32>,
    pub(crate) claimed_gpus: Vec<String>,
}

impl Want {
    /// Properties of a built Pod that the rollout needs.
    pub(crate) fn of(pod: &DesiredPod) -> Self {
        Self {
            name: pod.name.clone(),
            rank: pod.rank.clone(),
            second: pod.second.clone(),
            group: pod.group.clone(),
            form: pod.form.clone(),
            role: pod.role,
            node: pod.node.clone(),
            cpu_millis: pod.cpu_millis,
            memory_bytes: pod.memory_bytes,
            gpus: pod.gpus,
            exclusive_cpus: pod.exclusive_cpus.clone(),
            claimed_gpus: pod.claimed_gpus.clone(),
        }
    }

    /// Names and roles of its ranks, the first one first.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = (&str, PlanRole)> {
        let second = self.second.as_ref();
        let second = second.map(|second| (second.rank.as_str(), second.role));
        std::iter::once((self.rank.as_str(), self.role)).chain(second)
    }

    /// Name of its rank of that role; `None` if it has none.
    pub(crate) fn rank_of(&self, role: PlanRole) -> Option<&str> {
        self.ranks()
            .find_map(|(rank, its)| (its == role).then_some(rank))
    }

    /// Amounts that such Pods count towards a ResourceQuota.
    pub(crate) fn counted(wants: &[Self]) -> Counted {
        wants.iter().fold(Counted::default(), |sum, want| {
            let gpus = want.gpus * u32::from(want.claimed_gpus.is_empty());
            sum.with(want.cpu_millis, want.memory_bytes, gpus)
        })
    }

    /// Whether one of its ranks is a member of the group that `head` leads.
    pub(crate) fn is_member_of(&self, head: &Self) -> bool {
        let mut ranks = self.ranks();
        ranks.any(|(rank, _)| head.group.iter().any(|member| member == rank))
    }

    pub(super) fn is_group_head(&self) -> bool {
        !self.group.is_empty()
    }

    pub(super) fn is_gateway(&self) -> bool {
        self.role == PlanRole::Gateway
    }
}
