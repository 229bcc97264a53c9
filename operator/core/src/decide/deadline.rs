//! Time that a plan has left before it is given up.

use std::time::Duration;

use hearth_crds::InferencePlan;
use jiff::Timestamp;

use super::Reconcile;
use crate::candidates::is_down;
use crate::cause::node_of;
use crate::choose::scale::{differ_in_numbers_alone, rollout_of};
use crate::choose::way_back;
use crate::conditions;
use crate::observed::{FetchView, PodView};
use crate::plan_record::has_served;
use crate::rollout::Steps;
use crate::rollout::ends::{Ended, Ends};
use crate::routes::leads;
use crate::scaling::follows_load;
use crate::validate::progress_deadline;

impl Reconcile<'_> {
    /// Whether the target gives way to the plan before if it does not serve in time. Where only a number that follows the load is new,
    /// it does not: nothing that serves was replaced, nobody would change the spec for it, and the number follows the load on.
    pub(super) fn may_be_given_up(&self, plan: &InferencePlan) -> bool {
        let before = way_back(self.observed, plan);
        let follows = follows_load(&self.observed.deployment.spec);
        before.is_some_and(|before| !(follows && differ_in_numbers_alone(before, plan)))
    }

    /// Time left for the target; `None` if it has served, serves now, or is suspended.
    pub(super) fn time_left(
        &self,
        plan: &InferencePlan,
        steps: Option<&Steps>,
    ) -> Option<Duration> {
        if has_served(plan)
            || steps.is_some_and(|steps| steps.progress.is_serving)
            || self.observed.deployment.spec.suspend
        {
            return None;
        }
        let deadline = progress_deadline(&self.observed.deployment);
        // Another number of workers is not progress for what has not served with the previous number.
        let rollout = rollout_of(self.observed, plan);
        let first = rollout.first().unwrap_or(&plan);
        let Some(made) = first.metadata.creation_timestamp.as_ref() else {
            return Some(deadline);
        };
        let resumed = conditions::last_suspended(self.observed);
        let went_on = self.progressed(&rollout).into_iter().chain(resumed);
        let last = went_on.fold(made.0, Timestamp::max);
        let age_ms = self.observed.now.as_millisecond() - last.as_millisecond();
        let age = Duration::from_millis(u64::try_from(age_ms).unwrap_or(0));
        Some(deadline.saturating_sub(age))
    }

    /// Time of the last progress of a rollout's plans: bytes of their model arrived on one of their nodes, or one of
    /// their Pods was created, placed, set up, started or became ready. A worker that loads its model counts as making
    /// progress until it exits: it exits by itself when loading stalls, and its next start is not progress. The head of a
    /// group, which then waits for the others, makes no progress beside theirs. Neither is
    /// a Pod that is created again because the previous one was rejected or evicted, until it runs for the first time,
    /// nor one that another number of workers adds while those that the rollout began with are not ready.
    fn progressed(&self, rollout: &[&InferencePlan]) -> Option<Timestamp> {
        let observed = self.observed;
        let is_coming = |rank: &hearth_crds::PlanRank| {
            let fetch = observed.fetches.get(&rank.node);
            matches!(fetch, Some(FetchView::Fetching { bytes_per_second, .. }) if *bytes_per_second > 0)
        };
        let newest = rollout.last()?;
        if newest.spec.ranks.iter().any(is_coming) {
            return Some(observed.now);
        }
        let first = rollout.first()?.spec.generation;
        let awaits_first = self
            .workers()
            .any(|pod| pod.plan_generation == first && !pod.is_ready && !pod.is_deleting);
        let counts = |generation: u64| match awaits_first {
            true => generation == first,
            false => rollout
                .iter()
                .any(|plan| plan.spec.generation == generation),
        };
        // A node that is down reports nothing new.
        let pods = self
            .workers()
            .filter(|pod| counts(pod.plan_generation) && !is_down(observed, node_of(pod)));
        let ends: Vec<Ends> = rollout.iter().map(|plan| Ends::of(plan)).collect();
        let of_pod = |pod: &PodView| {
            let is_running = |pod: &PodView| {
                let container = pod.container.as_ref();
                container.is_some_and(|container| container.running_since.is_some())
            };
            let mut ended = ends.iter().filter_map(|ends| ends.get(&pod.name));
            if let Some(ended) = ended.next_back()
                && (ended.has_run || !is_running(pod))
            {
                return None;
            }
            let first = pod
                .container
                .as_ref()
                .filter(|container| container.restarts == 0);
            let waits = || {
                let mut others = self.workers().filter(|other| leads(pod, other));
                others.any(|other| !other.is_ready)
            };
            if first.is_some_and(|container| container.is_starting) && !waits() {
                return Some(observed.now);
            }
            let started = first.and_then(|container| container.running_since);
            let conditions = pod
                .progressed
                .filter(|_| first.is_some() || pod.container.is_none());
            [pod.created, conditions, started]
                .into_iter()
                .flatten()
                .max()
        };
        let ended = ends.iter().flat_map(Ends::all).map(Ended::first);
        pods.filter_map(of_pod).chain(ended).max()
    }
}
