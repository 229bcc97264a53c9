//! What workers got of their machines: told by their gateway in the labels of one series each, and written into the status.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use hearth_crds::RankPlacement;

use super::conditions::Verdict;
use super::observed::{Observed, PodView};
use super::rollout::Want;

/// The gateway's series: one a worker.
const SERIES: &str = "hearth_worker_placement_info{";
/// The gateway's series of those from which nothing comes.
const HUNG_SERIES: &str = "hearth_worker_hung{";
/// Shortfalls that the condition names; the status has all.
const NAMED: usize = 3;

/// What a gateway tells of a worker, before it is known which Pod it is: what it got, and whether it hangs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) cpus: String,
    pub(crate) numa_nodes: String,
    pub(crate) memory_numa_nodes: String,
    pub(crate) gpu_uuid: String,
    pub(crate) shortfalls: String,
    pub(crate) is_hung: bool,
}

/// Reads what a gateway tells, by the workers' addresses.
pub(crate) fn read(metrics: &str) -> BTreeMap<IpAddr, Placement> {
    let hung = metrics.lines().filter_map(|line| {
        let labels_and_value = line.strip_prefix(HUNG_SERIES)?;
        let (text, value) = labels_and_value.rsplit_once(' ')?;
        let is_hung = value.parse::<f64>().is_ok_and(|value| value > 0.0);
        host(labels(text).filter(|_| is_hung)?.get("address")?)
    });
    let hung: BTreeSet<IpAddr> = hung.collect();
    let series = metrics.lines().filter_map(|line| line.strip_prefix(SERIES));
    series
        .filter_map(|line| {
            let mut labels = labels(line)?;
            let mut take = |name: &str| labels.remove(name).unwrap_or_default();
            let address = host(&take("address"))?;
            let placement = Placement {
                cpus: take("cpus"),
                numa_nodes: take("numa_nodes"),
                memory_numa_nodes: take("memory_numa_nodes"),
                gpu_uuid: take("gpu_uuid"),
                shortfalls: take("shortfalls"),
                is_hung: hung.contains(&address),
            };
            Some((address, placement))
        })
        .collect()
}

/// What a gateway told of a Pod.
pub(crate) fn of_pod<'a>(observed: &'a Observed, pod: &PodView) -> Option<&'a Placement> {
    let ip: IpAddr = pod.ip.parse().ok()?;
    observed.placements.get(&ip)
}

/// What the ranks of the target got, in its order. Where a gateway has not told of a Pod (again), the last words stay.
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

/// Whether the workers that run have what the plan gives them.
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

/// The running worker of that rank; none of the gateway, which tells nothing of itself.
fn pod_of<'a>(observed: &'a Observed, want: &Want) -> Option<&'a PodView> {
    let is_worker = want.role != hearth_crds::PlanRole::Gateway;
    let pods = observed.pods.iter().filter(|_| is_worker);
    let mut found = pods.filter(|pod| pod.name == want.name).map(|pod| &**pod);
    found.rfind(|pod| pod.is_ready && !pod.is_deleting)
}

/// The address of `host:port`.
fn host(endpoint: &str) -> Option<IpAddr> {
    let (host, _port) = endpoint.rsplit_once(':')?;
    host.trim_matches(['[', ']']).parse().ok()
}

/// The labels of a series behind its opening brace: `a="b",c="d \"e\""} 1`.
fn labels(text: &str) -> Option<BTreeMap<&str, String>> {
    let mut labels = BTreeMap::new();
    let mut rest = text;
    loop {
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = after.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => match letters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(name, value);
        rest = &after[end + 1..];
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return rest.starts_with('}').then_some(labels),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_read_by_address() {
        let text = "# TYPE hearth_worker_placement info\n\
            hearth_worker_placement_info{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\",cpus=\"0-1\",numa_nodes=\"0\",memory_numa_nodes=\"\",gpu_uuid=\"\",shortfalls=\"a \\\"b\\\", c=\\\\d}\"} 1\n\
            hearth_worker_placement_info{worker=\"x\",address=\"[fd00::1]:9000\",gpu_uuid=\"GPU-1\"} 1\n\
            hearth_worker_placement_info{worker=\"cut off\",address=\"10.0.0.2:9\n\
            hearth_worker_placement_info{worker=\"a name\",address=\"host:9000\"} 1\n\
            hearth_worker_hung{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"} 0.0\n\
            hearth_worker_hung{worker=\"x\",address=\"[fd00::1]:9000\",role=\"decode\"} 1.0\n";
        let placements = read(text);
        let first = Placement {
            cpus: "0-1".to_owned(),
            numa_nodes: "0".to_owned(),
            shortfalls: "a \"b\", c=\\d}".to_owned(),
            ..Placement::default()
        };
        let second = Placement {
            gpu_uuid: "GPU-1".to_owned(),
            is_hung: true,
            ..Placement::default()
        };
        let expected = [("10.0.0.1", first), ("fd00::1", second)];
        let expected = expected.map(|(ip, placement)| (ip.parse().expect("address"), placement));
        assert_eq!(placements, BTreeMap::from(expected));
    }
}
