//! Pods that the API server forbids: a full ResourceQuota, a LimitRange, Pod Security, or somebody's webhook.
//!
//! No Pod tells of it, since there is none. It is remembered here from the answers to the writes, and after a start the next
//! write tells again.

use std::time::{Duration, Instant};

/// For how long after it was met a full quota is taken to be full still, if nothing of the deployment has gone since.
const FULL_FOR: Duration = Duration::from_secs(20);

/// What came of making the Pods of one plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forbidden {
    /// The plan's.
    pub(crate) generation: u64,
    /// The API server's words.
    pub(crate) words: String,
    /// Whether a gateway was among the Pods.
    pub(crate) has_gateway: bool,
    /// When it was first forbidden since one was made.
    pub(super) since: Instant,
    /// When it was forbidden last; none since then something of the deployment has gone, or a Pod was made.
    pub(super) last: Option<Instant>,
    /// The plan has lost its place on the nodes.
    pub(super) is_dropped: bool,
}

/// How a rollout finds the namespace's ResourceQuota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Quota {
    /// It was not in the way.
    #[default]
    Free,
    /// It has no room for the plan beside the one before.
    Tight,
    /// It has none for a gateway, a moment ago.
    Full,
}

impl Forbidden {
    /// A Pod of that plan is forbidden now, after what was known `before`.
    pub(super) fn after(
        before: Option<Self>,
        generation: u64,
        words: &str,
        has_gateway: bool,
    ) -> Self {
        let now = Instant::now();
        let before = before.filter(|before| before.generation == generation);
        Self {
            generation,
            words: words.to_owned(),
            has_gateway,
            since: before.as_ref().map_or(now, |before| before.since),
            last: Some(now),
            is_dropped: before.is_some_and(|before| before.is_dropped),
        }
    }

    /// How the rollout of that plan finds the quota.
    pub(super) fn quota(&self, generation: u64) -> Quota {
        if self.generation != generation || !is_quota(&self.words) {
            return Quota::Free;
        }
        let is_full = self.last.is_some_and(|last| last.elapsed() < FULL_FOR);
        match is_full && self.has_gateway {
            true => Quota::Full,
            false => Quota::Tight,
        }
    }
}

/// Whether a Pod is forbidden for want of room in a ResourceQuota, which others may make.
pub(super) fn is_quota(words: &str) -> bool {
    words.contains("exceeded quota")
}
