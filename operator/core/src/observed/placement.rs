//! Resources that workers actually got on their machines, as their gateway reports them in the labels of one series
//! each.

use std::collections::BTreeMap;
use std::net::SocketAddr;

/// The gateway's series with one sample for each worker.
const SERIES: &str = "hearth_worker_placement_info{";
/// The gateway's series of workers that take requests, with one sample for each worker.
const READY_SERIES: &str = "hearth_worker_ready{";
/// The gateway's series of workers that send nothing, with one sample for each worker.
const HUNG_SERIES: &str = "hearth_worker_hung{";

/// Whether requests of a gateway reach a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// It takes requests.
    #[default]
    Ready,
    /// It has not answered this gateway yet.
    NotYet,
    /// It has answered before, and takes no requests now.
    Lost,
    /// Its process runs and sends nothing.
    Hung,
}

/// A gateway's report on a worker, before its Pod is identified: what it got, and whether requests reach it.
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
    /// What became of the group that it leads; empty: it has lost no member, or leads none.
    pub group: String,
    /// Name of the member of that group that its requests wait for, its own where that is not known; empty: they wait for none.
    pub waits_for: String,
    /// Whether requests reach it. All else is empty before it has answered.
    pub reach: Reach,
}

/// The most workers whose reports are read: more than deployments have.
const MOST: usize = 512;

/// Reads a gateway's reports, by the workers' addresses.
pub fn read(metrics: &str) -> BTreeMap<SocketAddr, Placement> {
    let placed = metrics.lines().filter_map(|line| {
        let mut labels = labels(line.strip_prefix(SERIES)?)?;
        let mut take = |name: &str| labels.remove(name).unwrap_or_default();
        let address = take("address").parse().ok()?;
        let placement = Placement {
            cpus: take("cpus"),
            numa_nodes: take("numa_nodes"),
            memory_numa_nodes: take("memory_numa_nodes"),
            gpu_uuid: take("gpu_uuid"),
            shortfalls: take("shortfalls"),
            group: take("group"),
            waits_for: take("waits_for"),
            reach: Reach::Ready,
        };
        Some((address, placement))
    });
    let mut told: BTreeMap<SocketAddr, Placement> = placed.take(MOST).collect();
    for (address, is_ready) in gauges(metrics, READY_SERIES).take(MOST) {
        if !is_ready {
            let has_answered = told.contains_key(&address);
            told.entry(address).or_default().reach = match has_answered {
                true => Reach::Lost,
                false => Reach::NotYet,
            };
        }
    }
    for (address, is_hung) in gauges(metrics, HUNG_SERIES).take(MOST) {
        if is_hung {
            told.entry(address).or_default().reach = Reach::Hung;
        }
    }
    told
}

/// The samples of a series by address: whether each is above zero.
fn gauges<'a>(metrics: &'a str, series: &'a str) -> impl Iterator<Item = (SocketAddr, bool)> + 'a {
    metrics.lines().filter_map(move |line| {
        let labels_and_value = line.strip_prefix(series)?;
        let (text, value) = labels_and_value.rsplit_once(' ')?;
        let is_positive = value.parse::<f64>().ok()? > 0.0;
        let address = labels(text)?.get("address")?.parse().ok()?;
        Some((address, is_positive))
    })
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
    fn a_gateway_that_tells_of_too_many_is_read_in_part() {
        let line =
            |port| format!("hearth_worker_placement_info{{address=\"10.0.0.1:{port}\"}} 1\n");
        let text: String = (1..=2 * MOST).map(line).collect();
        assert_eq!(read(&text).len(), MOST);
    }

    #[test]
    fn series_are_read_by_address() {
        let text = "# TYPE hearth_worker_placement info\n\
            hearth_worker_placement_info{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\",cpus=\"0-1\",numa_nodes=\"0\",memory_numa_nodes=\"\",gpu_uuid=\"\",shortfalls=\"a \\\"b\\\", c=\\\\d}\"} 1\n\
            hearth_worker_placement_info{worker=\"x\",address=\"[fd00::1]:9000\",gpu_uuid=\"GPU-1\",group=\"not complete\",waits_for=\"stage-0\"} 1\n\
            hearth_worker_placement_info{worker=\"cut off\",address=\"10.0.0.2:9\n\
            hearth_worker_placement_info{worker=\"a name\",address=\"host:9000\"} 1\n\
            hearth_worker_ready{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"} 1.0\n\
            hearth_worker_ready{worker=\"x\",address=\"[fd00::1]:9000\",role=\"decode\"} 0.0\n\
            hearth_worker_ready{worker=\"ended\",address=\"10.0.0.3:9000\",role=\"decode\"} 0.0\n\
            hearth_worker_ready{worker=\"new\",address=\"10.0.0.4:9000\",role=\"decode\"} 0.0\n\
            hearth_worker_placement_info{worker=\"ended\",address=\"10.0.0.3:9000\",cpus=\"2\"} 1\n\
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
            group: "not complete".to_owned(),
            waits_for: "stage-0".to_owned(),
            reach: Reach::Hung,
            ..Placement::default()
        };
        let ended = Placement {
            cpus: "2".to_owned(),
            reach: Reach::Lost,
            ..Placement::default()
        };
        let new = Placement {
            reach: Reach::NotYet,
            ..Placement::default()
        };
        let expected = [
            ("10.0.0.1:9000", first),
            ("[fd00::1]:9000", second),
            ("10.0.0.3:9000", ended),
            ("10.0.0.4:9000", new),
        ];
        let expected = expected.map(|(at, placement)| (at.parse().expect("address"), placement));
        assert_eq!(placements, BTreeMap::from(expected));
    }
}
