//! Ranks that are up, and what keeps the others from it.

use hearth_crds::PlanRole;

use super::placements::reach;
use crate::candidates::is_down;
use crate::cause::{Cause, cause, lost_readiness, node_of, not_allowed};
use crate::choose::lost_words;
use crate::observed::forbidden::is_quota;
use crate::observed::{Observed, PodView, Reach};
use crate::rollout::{Mode, Want};

/// Whether a rank of a Pod is up.
pub(super) fn is_up(observed: &Observed, pod: &PodView, rank: &str) -> bool {
    !pod.is_deleting && !is_down(observed, &pod.node) && serves(observed, pod, rank)
}

/// The cause to report for a target that is not ready: trouble comes before what only takes time.
pub(crate) fn first_cause(observed: &Observed, wants: &[Want], mode: Mode) -> Option<Cause> {
    let causes = wants.iter();
    first(causes.filter_map(|want| cause_of(observed, want, mode, want.ranks())))
}

/// The same for the ranks of one role.
pub(super) fn pool_cause(
    observed: &Observed,
    wants: &[Want],
    mode: Mode,
    role: PlanRole,
) -> Option<Cause> {
    let wants = wants.iter().filter(|want| want.rank_of(role).is_some());
    first(wants.filter_map(|want| {
        let ranks = want.ranks().filter(|(_, its)| *its == role);
        cause_of(observed, want, mode, ranks)
    }))
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

/// Cause that keeps one of `ranks` of a Pod from being up.
fn cause_of<'a>(
    observed: &Observed,
    want: &Want,
    mode: Mode,
    mut ranks: impl Iterator<Item = (&'a str, PlanRole)>,
) -> Option<Cause> {
    let what = &want.rank;
    let pod = observed.pods.iter().find(|pod| pod.name == want.name);
    match pod {
        _ if is_down(observed, &want.node) => Some(Cause::trouble(
            "NodeLost",
            format!("{what} waits: {}", lost_words(observed, &want.node)),
        )),
        Some(pod) if (pod.is_ready || pod.has_lost_readiness) && !pod.is_deleting => {
            ranks.find_map(|(rank, _)| rank_cause(observed, pod, rank))
        }
        Some(pod) => Some(cause(what, pod)),
        None => Some(missing(observed, want, mode)),
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
fn missing(observed: &Observed, want: &Want, mode: Mode) -> Cause {
    let what = &want.rank;
    if mode == Mode::OldDownFirst && want.role != PlanRole::Gateway {
        return Cause::waiting(
            "WaitingForRoom",
            format!(
                "{what} starts when the workers before it have left {}",
                want.node
            ),
        );
    }
    if let Some(words) = forbidden(observed) {
        let mut cause = not_allowed(what, words);
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
    Cause::waiting(
        "Creating",
        format!("{what} is being created on {}", want.node),
    )
}

/// The API server's message about Pods of the newest plan that it forbids.
fn forbidden(observed: &Observed) -> Option<&str> {
    let forbidden = observed.forbidden.as_ref()?;
    let newest = observed.plans.last()?;
    let is_now = forbidden.last.is_some() && forbidden.generation == newest.spec.generation;
    is_now.then_some(&*forbidden.words)
}
