//! Resources that workers actually got on their machines, as their gateway reports them in the labels of one series
//! each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// The gateway's series with one sample for each worker.
const SERIES: &str = "hearth_worker_placement_info{";
/// The gateway's series of workers that send nothing.
const HUNG_SERIES: &str = "hearth_worker_hung{";

/// A gateway's report on a worker, before its Pod is identified: what it got, and whether it hangs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// IDs of its CPUs, such as `0-3,8`.
    pub cpus: String,
    /// NUMA nodes of its threads.
    pub numa_nodes: String,
    /// NUMA nodes of its weights.
    pub memory_numa_nodes: String,
    /// UUID of its GPU; empty: none.
    pub gpu_uuid: String,
    /// Planned resources that it did not get; empty: all is as planned.
    pub shortfalls: String,
    /// Whether it sends nothing.
    pub is_hung: bool,
}

/// Reads a gateway's reports, by the workers' addresses.
pub fn read(metrics: &str) -> BTreeMap<SocketAddr, Placement> {
    let hung = metrics.lines().filter_map(|line| {
        let labels_and_value = line.strip_prefix(HUNG_SERIES)?;
        let (text, value) = labels_and_value.rsplit_once(' ')?;
        let is_hung = value.parse::<f64>().is_ok_and(|value| value > 0.0);
        labels(text)
            .filter(|_| is_hung)?
            .get("address")?
            .parse()
            .ok()
    });
    let hung: BTreeSet<SocketAddr> = hung.collect();
    let series = metrics.lines().filter_map(|line| line.strip_prefix(SERIES));
    series
        .filter_map(|line| {
            let mut labels = labels(line)?;
            let mut take = |name: &str| labels.remove(name).unwrap_or_default();
            let address = take("address").parse().ok()?;
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

/// Parses the labels of a series after its opening brace: `a="b",c="d \"e\""} 1`.
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
        let expected = [("10.0.0.1:9000", first), ("[fd00::1]:9000", second)];
        let expected = expected.map(|(at, placement)| (at.parse().expect("address"), placement));
        assert_eq!(placements, BTreeMap::from(expected));
    }
}
