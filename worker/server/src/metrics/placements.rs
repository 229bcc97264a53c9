//! What workers got from their machines, as series with labels.

use std::collections::HashSet;
use std::fmt;

use hearth_transport::v1::Placement;
use prometheus_client::encoding::EncodeMetric;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;

use super::{Labels, Writer, labels_of};
use crate::router::WorkerView;

/// Writes what workers, and the members of groups that they lead, got from their machines: one series each with labels, and the
/// workers' memory by NUMA node.
pub(super) fn write(writer: &mut Writer<'_>, workers: &[WorkerView]) -> Result<(), fmt::Error> {
    let placed = || {
        workers.iter().filter_map(|worker| {
            let placement = worker.placement.as_ref()?;
            Some((worker, placement))
        })
    };
    let mut info = writer.encoder.encode_descriptor(
        "hearth_worker_placement",
        "CPUs, NUMA nodes and GPU that the worker got, what is less than planned, and what became of its group",
        None,
        MetricType::Info,
    )?;
    for (worker, placement) in placed() {
        let group = vec![
            ("group", worker.group.clone()),
            ("waits_for", worker.waits_for.clone()),
        ];
        let labels = [labels_of(worker), labels_of_placement(placement), group].concat();
        Info::new(labels).encode(info.encode_family(&Labels::new())?)?;
    }
    // Two heads may name one member, while a group takes the place of another.
    let mut named = HashSet::new();
    for member in workers.iter().flat_map(|worker| &worker.members) {
        let placement = member.placement.as_ref();
        let Some(placement) = placement.filter(|_| named.insert(&*member.endpoint)) else {
            continue;
        };
        let own = vec![
            ("worker", member.name.clone()),
            ("address", member.endpoint.clone()),
            ("role", "stage".to_owned()),
        ];
        let labels = [own, labels_of_placement(placement)].concat();
        Info::new(labels).encode(info.encode_family(&Labels::new())?)?;
    }
    let mut bytes = writer.encoder.encode_descriptor(
        "hearth_worker_numa_bytes",
        "Memory of the worker by NUMA node when the model had been loaded: mapped weights, and its own",
        None,
        MetricType::Gauge,
    )?;
    for (worker, placement) in placed() {
        for node in &placement.memory {
            for (kind, value) in [("weights", node.weight_bytes), ("own", node.own_bytes)] {
                let mut labels = labels_of(worker);
                labels.push(("numa_node", node.numa_node.to_string()));
                labels.push(("kind", kind.to_owned()));
                ConstGauge::new(value as f64).encode(bytes.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

fn labels_of_placement(placement: &Placement) -> Labels {
    vec![
        ("cpus", placement.cpus.clone()),
        ("numa_nodes", placement.numa_nodes.clone()),
        ("memory_numa_nodes", placement.memory_numa_nodes.clone()),
        ("gpu_uuid", placement.gpu_uuid.clone()),
        ("shortfalls", placement.shortfalls.join("; ")),
    ]
}
