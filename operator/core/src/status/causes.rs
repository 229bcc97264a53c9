//! Ranks that are up, and what keeps the others from it.

use hearth_crds::{DurationText, PlanRole};

use super::groups;
use super::placements::reach;
use crate::candidates::is_down;
use crate::cause::{Cause, cause, lost_readiness, node_of, not_allowed};
use crate::choose::lost_words;
use crate::observed::forbidden::{TRIED_AGAIN_AFTER, is_quota};
use crate::observed::{Observed, PodView, Reach};
use crate::plan_record::has_served;
use crate::rollout::{Mode, Want};

/// Whether a rank of a Pod is up.
pub(super) fn is_up(observed: &Observed, pod: &PodView, rank: &str) -> bool {
    !pod.is_deleting && !is_down(observed, &pod.node) && serves(observed, pod, rank)
}

/// What causes are looked for in.
#[derive(Clone, Copy)]
pub(super) struct Scene<'a> {
    pub(super) observed: &'a Observed,
    /// The target's Pods.
    pub(super) wants: &'a [Want],
    pub(super) mode: Mode,
    /// Whether all of the target was ready before and nothing replaces it: what is not ready was lost.
    pub(super) has_been_whole: bool,
}

/// The cause to report for a target that has yet to serve: trouble comes before what only takes time.
pub(crate) fn first_cause(observed: &Observed, wants: &[Want], mode: Mode) -> Option<Cause> {
    let scene = Scene {
        observed,
        wants,
        mode,
        has_been_whole: false,
    };
    scene.first_cause()
}

impl Scene<'_> {
    /// The cause to report for a target that is not ready: trouble comes before what only takes time.
    pub(super) fn first_cause(&self) -> Option<Cause> {
        let wants = self.wants.iter();
        first(wants.filter_map(|want| cause_of(self, want, want.ranks())))
    }

    /// The same for the ranks of one role, and for the groups that they lead.
    pub(super) fn pool_cause(&self, role: PlanRole) -> Option<Cause> {
        let own = self.wants.iter().filter_map(|want| {
            let ranks = want.ranks().filter(|(_, its)| *its == role);
            cause_of(self, want, ranks)
        });
        let heads = self.wants.iter().filter(|want| want.role == role);
        let members = heads.flat_map(|head| &head.group);
        first(own.chain(members.filter_map(|member| self.member_cause(member))))
    }

    /// Cause that keeps a member of a group from being up.
    pub(super) fn member_cause(&self, member: &str) -> Option<Cause> {
        let is_it = |rank: &str| rank == member;
        let mut wants = self.wants.iter();
        let want = wants.find(|want| want.ranks().any(|(rank, _)| is_it(rank)))?;
        cause_of(self, want, want.ranks().filter(|(rank, _)| is_it(rank)))
    }
}

fn first(mut causes: impl Iterator<Item = Cause>) -> Option<Cause> {
    let first = causes.next()?;
    if first.is_trouble {
        return Some(first);
    }
    Some(causes.find(|cause| cause.is_trouble).unwrap_or(first))
}

/// Whether a rank takes requests. The readiness of a Pod is that of its first rank once all have been ready; a second
/// one's is what a gateway reports, and the report is void once the container has ended.
fn serves(observed: &Observed, pod: &PodView, rank: &str) -> bool {
    let runs = |pod: &PodView| {
        let container = pod.container.as_ref();
        container.is_some_and(|container| container.running_since.is_some())
    };
    match reach(observed, pod, rank).filter(|_| is_second(pod, rank)) {
        Some(reach) => reach == Reach::Ready && (pod.is_ready || runs(pod)),
        None => pod.is_ready,
    }
}

fn is_second(pod: &PodView, rank: &str) -> bool {
    let second = pod.second.as_ref();
    second.is_some_and(|second| second.rank == rank)
}

/// Cause that keeps one of `ranks` of a Pod from being up; `None` if there is none of them.
fn cause_of<'a>(
    scene: &Scene<'_>,
    want: &Want,
    ranks: impl Iterator<Item = (&'a str, PlanRole)>,
) -> Option<Cause> {
    let mut ranks = ranks.peekable();
    let (first, _) = *ranks.peek()?;
    let cause = cause_of_pod(scene, want, ranks)?;
    Some(match scene.has_been_whole {
        true => groups::with_way_back(scene.wants, first, cause),
        false => cause,
    })
}

fn cause_of_pod<'a>(
    scene: &Scene<'_>,
    want: &Want,
    mut ranks: impl Iterator<Item = (&'a str, PlanRole)>,
) -> Option<Cause> {
    let (observed, what) = (scene.observed, &want.rank);
    let pod = observed.pods.iter().find(|pod| pod.name == want.name);
    match pod {
        _ if is_down(observed, &want.node) => Some(Cause::trouble(
            "NodeLost",
            format!("{what} waits: {}", lost_words(observed, &want.node)),
        )),
        Some(pod) if (pod.is_ready || pod.has_lost_readiness) && !pod.is_deleting => ranks
            .find_map(|(rank, _)| {
                rank_cause(observed, pod, rank).or_else(|| groups::missed(scene, rank))
            }),
        Some(pod) => Some(cause(what, pod)),
        None => Some(missing(scene, want)),
    }
}

/// Cause that keeps a rank from taking requests whose container has been ready.
fn rank_cause(observed: &Observed, pod: &PodView, rank: &str) -> Option<Cause> {
    if serves(observed, pod, rank) {
        return None;
    }
    let reach = reach(observed, pod, rank);
    if is_second(pod, rank) && reach == Some(Reach::NotYet) {
        let node = node_of(pod);
        return Some(Cause::waiting(
            "Starting",
            format!("{rank} on {node} has not answered the gateway yet"),
        ));
    }
    Some(lost_readiness(rank, pod, reach == Some(Reach::Hung)))
}

/// Cause of a Pod not being there.
fn missing(scene: &Scene<'_>, want: &Want) -> Cause {
    let (observed, mode, what) = (scene.observed, scene.mode, &want.rank);
    if mode == Mode::OldDownFirst && want.role != PlanRole::Gateway {
        return Cause::waiting(
            "WaitingForRoom",
            format!(
                "{what} starts when the workers before it have left {}",
                want.node
            ),
        );
    }
    let is_short = is_short(scene);
    if let Some(words) = forbidden(observed, is_short) {
        let mut cause = not_allowed(what, words);
        let mut heads = scene.wants.iter();
        if is_short && heads.any(|head| want.is_member_of(head)) {
            let again = DurationText::new(TRIED_AGAIN_AFTER);
            let more = "all ranks of a group run or none: those that were admitted end";
            cause.message = format!("{}; {more}, and all are tried every {again}", cause.message);
        }
        if mode == Mode::Surge && is_quota(words) {
            let more = "; what is running continues, since stopping it might not free enough quota";
            cause.message.push_str(more);
        }
        return cause;
    }
    if mode == Mode::Surge && want.role == PlanRole::Gateway {
        return Cause::waiting(
            "WaitingForWorkers",
            format!("{what} starts when the new workers are ready"),
        );
    }
    let how = match scene.has_been_whole {
        true => "is gone, and is being created again",
        false => "is being created",
    };
    Cause::waiting("Creating", format!("{what} {how} on {}", want.node))
}

/// The API server's message about Pods of the newest plan that it forbids.
fn forbidden(observed: &Observed, is_short: bool) -> Option<&str> {
    let forbidden = observed.forbidden.as_ref()?;
    let newest = observed.plans.last()?;
    let is_now = is_short || forbidden.last.is_some();
    let is_of_newest = forbidden.generation == newest.spec.generation;
    (is_now && is_of_newest).then_some(&*forbidden.words)
}

/// Whether a quota is known not to admit all of the newest plan, which has never served.
fn is_short(scene: &Scene<'_>) -> bool {
    let (observed, needs) = (scene.observed, Want::counted(scene.wants));
    let newest = observed.plans.last().filter(|newest| !has_served(newest));
    let Some((newest, forbidden)) = newest.zip(observed.forbidden.as_ref()) else {
        return false;
    };
    let wait = forbidden.is_short_for(newest.spec.generation, needs, observed.now);
    wait.is_some()
}
