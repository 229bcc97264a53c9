//! Resources that workers actually got on their machines: reported by their gateway in the labels of one series each,
//! and written into the status.

use std::net::IpAddr;

use hearth_crds::RankPlacement;

use crate::conditions::Verdict;
use crate::observed::{Observed, Placement, PodView};
use crate::rollout::Want;

/// Maximum number of shortfalls that the condition names; the status has all.
const NAMED: usize = 3;

/// A gateway's report on a Pod.
pub(crate) fn of_pod<'a>(observed: &'a Observed, pod: &PodView) -> Option<&'a Placement> {
    let ip: IpAddr = pod.ip.parse().ok()?;
    observed.placements.get(&ip)
}

/// Resources that the target's ranks actually got, in its order. If a gateway has not reported on a Pod (again), the
/// last report stays.
pub(crate) fn status(observed: &Observed, wants: &[Want]) -> Vec<RankPlacement> {
    let old = observed.deployment.status.as_ref();
    let old = old.map_or(&[][..], |status| &status.placement);
    let placed = wants.iter().filter_map(|want| {
        let pod = pod_of(observed, want)?;
        match of_pod(observed, pod) {
            Some(placement) => Some(of(pod, placement)),
            None => old.iter().find(|old| old.pod == pod.name).cloned(),
        }
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
    let workers = wants.iter().filter(|want| pod_of(observed, want).is_some());
    match (workers.count(), placed.len()) {
        (0, _) => Verdict::unknown("NoWorkers", "no worker runs"),
        (workers, told) if told < workers => Verdict::unknown(
            "NotTold",
            format!("{told} of {workers} workers have told what they got"),
        ),
        (workers, _) => Verdict::yes(
            "AsPlanned",
            format!("{workers} of {workers} workers have what the plan gives them"),
        ),
    }
}

fn of(pod: &PodView, placement: &Placement) -> RankPlacement {
    let told = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    RankPlacement {
        rank: pod.rank.clone(),
        pod: pod.name.clone(),
        node: pod.node.clone(),
        cpus: placement.cpus.clone(),
        numa_nodes: placement.numa_nodes.clone(),
        memory_numa_nodes: placement.memory_numa_nodes.clone(),
        gpu_uuid: told(&placement.gpu_uuid),
        shortfalls: told(&placement.shortfalls),
    }
}

/// The running worker of that rank; `None` for the gateway, which reports nothing about itself.
fn pod_of<'a>(observed: &'a Observed, want: &Want) -> Option<&'a PodView> {
    let is_worker = want.role != hearth_crds::PlanRole::Gateway;
    let pods = observed.pods.iter().filter(|_| is_worker);
    let mut found = pods.filter(|pod| pod.name == want.name).map(|pod| &**pod);
    found.rfind(|pod| pod.is_ready && !pod.is_deleting)
}
