//! Resources that workers actually got on their machines: reported by their gateway in the labels of one series each,
//! and written into the status.

use hearth_crds::{PlanRole, RankPlacement};

use crate::conditions::Verdict;
use crate::observed::{Observed, Placement, PodView, Reach};
use crate::rollout::Want;
use crate::routes::endpoints;

/// Maximum number of shortfalls that the condition names; the status has all.
const NAMED: usize = 3;

/// A gateway's report on whether requests reach a rank of a Pod; `None` without one.
pub(super) fn reach(observed: &Observed, pod: &PodView, rank: &str) -> Option<Reach> {
    Some(report(observed, pod, rank)?.reach)
}

/// A gateway's report on a rank of a Pod; `None` without one.
pub(super) fn report<'a>(
    observed: &'a Observed,
    pod: &PodView,
    rank: &str,
) -> Option<&'a Placement> {
    let mut ranks = pod.ranks().zip(endpoints(pod));
    let (_, endpoint) = ranks.find(|((name, _), _)| *name == rank)?;
    at(observed, &endpoint)
}

/// A gateway's report on the rank at `endpoint`.
fn at<'a>(observed: &'a Observed, endpoint: &str) -> Option<&'a Placement> {
    observed.placements.get(&endpoint.parse().ok()?)
}

/// Resources that the target's ranks actually got, in its order. If a gateway has not reported on a Pod (again), the
/// last report stays.
pub(crate) fn status(observed: &Observed, wants: &[Want]) -> Vec<RankPlacement> {
    let old = observed.deployment.status.as_ref();
    let old = old.map_or(&[][..], |status| &status.placement);
    let running = wants
        .iter()
        .filter_map(|want| Some((want, pod_of(observed, want)?)));
    let placed = running.flat_map(|(want, pod)| {
        let ranks = want.ranks().zip(endpoints(pod));
        ranks.filter_map(|((rank, _), endpoint)| match at(observed, &endpoint) {
            Some(placement) if placement.reach != Reach::NotYet => Some(of(rank, pod, placement)),
            _ => {
                let mut old = old.iter();
                old.find(|old| old.pod == pod.name && old.rank == rank)
                    .cloned()
            }
        })
    });
    placed.collect()
}

/// Whether the running workers have what the plan assigns to them.
pub(crate) fn verdict(observed: &Observed, wants: &[Want], placed: &[RankPlacement]) -> Verdict {
    let short: Vec<String> = placed
        .iter()
        .filter_map(|rank| {
            let shortfalls = rank.shortfalls.as_ref()?;
            Some(format!("{} on {}: {shortfalls}", rank.rank, rank.node))
        })
        .collect();
    if !short.is_empty() {
        let more = match short.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let named = &short[..short.len().min(NAMED)];
        return Verdict::no("LessThanPlanned", format!("{}{more}", named.join(", ")));
    }
    let running = wants.iter().filter(|want| pod_of(observed, want).is_some());
    let running: Vec<_> = running.flat_map(Want::ranks).collect();
    // A gateway has the report of a group's members from its head; workers of earlier versions send none.
    let silent = running.iter().filter(|(_, role)| *role == PlanRole::Stage);
    let silent = silent.filter(|(rank, _)| placed.iter().all(|it| it.rank != *rank));
    let silent = silent.count();
    let beside = match silent {
        0 => String::new(),
        1 => "; 1 stage reports nothing".to_owned(),
        silent => format!("; {silent} stages report nothing"),
    };
    match (running.len() - silent, placed.len()) {
        (0, _) => Verdict::unknown("NoWorkers", "no worker runs"),
        (workers, told) if told < workers => Verdict::unknown(
            "NotTold",
            format!("{told} of {workers} workers have told what they got"),
        ),
        (workers, _) => Verdict::yes(
            "AsPlanned",
            format!("{workers} of {workers} workers have what the plan gives them{beside}"),
        ),
    }
}

fn of(rank: &str, pod: &PodView, placement: &Placement) -> RankPlacement {
    let told = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    RankPlacement {
        rank: rank.to_owned(),
        pod: pod.name.clone(),
        node: pod.node.clone(),
        cpus: placement.cpus.clone(),
        numa_nodes: placement.numa_nodes.clone(),
        memory_numa_nodes: placement.memory_numa_nodes.clone(),
        gpu_uuid: told(&placement.gpu_uuid),
        shortfalls: told(&placement.shortfalls),
        group: told(&placement.group),
    }
}

/// The running worker of that rank; `None` for the gateway, which reports nothing about itself.
fn pod_of<'a>(observed: &'a Observed, want: &Want) -> Option<&'a PodView> {
    let is_worker = want.role != PlanRole::Gateway;
    let pods = observed.pods.iter().filter(|_| is_worker);
    let mut found = pods.filter(|pod| pod.name == want.name).map(|pod| &**pod);
    found.rfind(|pod| pod.is_ready && !pod.is_deleting)
}
