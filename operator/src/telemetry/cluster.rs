//! What is exported of the nodes and of what deployments have on them, as it is found at a scrape.

use std::fmt;

use hearth_controller_core::key::Key;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::series::{Family, Kind, Sink};

/// The nodes at one moment.
#[derive(Debug, Default)]
pub(crate) struct ClusterFigures {
    pub(crate) nodes: Vec<NodeRoom>,
    pub(crate) shares: Vec<Share>,
    pub(crate) fetches: Vec<Fetch>,
    /// End of the validity of the certificate authority, in seconds since 1970.
    pub(crate) authority_s: Option<i64>,
}

/// The ledger of one node.
#[derive(Debug)]
pub(crate) struct NodeRoom {
    pub(crate) node: String,
    pub(crate) memory_bytes: Amounts,
    pub(crate) gpus: Amounts,
    /// Time of the measurements of its profile, in seconds since 1970.
    pub(crate) measured_s: Option<i64>,
}

/// How an amount of a node's resources is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// What Pods may request in total.
    pub(crate) allocatable: u64,
    /// What Hearth's deployments hold.
    pub(crate) hearth: u64,
    /// What all other Pods request.
    pub(crate) others: u64,
    /// What a plan could still take.
    pub(crate) free: u64,
}

/// What a deployment holds on a node.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) deployment: Key,
    pub(crate) node: String,
    pub(crate) memory_bytes: u64,
    pub(crate) gpus: u64,
}

/// How far a node's copy of a deployment's model is.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) deployment: Key,
    pub(crate) node: String,
    pub(crate) bytes: u64,
    pub(crate) size_bytes: u64,
    /// Whether it was given up for now.
    pub(crate) has_failed: bool,
}

impl Collector for ClusterFigures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in OF_NODES {
            let nodes = self.nodes.iter();
            let items = nodes.map(|it| ([("node", &*it.node)], it));
            family.encode(&mut encoder, items)?;
        }
        for family in OF_SHARES {
            let shares = self.shares.iter();
            let items = shares.map(|it| (labels_of(&it.deployment, &it.node), it));
            family.encode(&mut encoder, items)?;
        }
        for family in OF_FETCHES {
            let fetches = self.fetches.iter();
            let items = fetches.map(|it| (labels_of(&it.deployment, &it.node), it));
            family.encode(&mut encoder, items)?;
        }
        AUTHORITY.encode(&mut encoder, self.authority_s.iter().map(|it| ([], it)))
    }
}

fn labels_of<'a>(deployment: &'a Key, node: &'a str) -> [(&'static str, &'a str); 3] {
    [
        ("namespace", &deployment.namespace),
        ("name", &deployment.name),
        ("node", node),
    ]
}

const OF_NODES: &[Family<NodeRoom>] = &[
    Family {
        name: "hearth_node_memory_bytes",
        help: "Memory of the node for Pods: allocatable, held by Hearth's deployments, requested by others, free for a plan",
        kind: Kind::Gauge,
        series: |it, sink| put_amounts(it.memory_bytes, sink),
    },
    Family {
        name: "hearth_node_gpus",
        help: "GPUs of the node, divided in the same way",
        kind: Kind::Gauge,
        series: |it, sink| put_amounts(it.gpus, sink),
    },
    Family {
        name: "hearth_node_measured_timestamp_seconds",
        help: "Time at which the node's profile was measured, in seconds since 1970",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_some(it.measured_s.map(|seconds| seconds as f64)),
    },
];

const OF_SHARES: &[Family<Share>] = &[
    Family {
        name: "hearth_deployment_held_memory_bytes",
        help: "Memory of the node that the deployment's Pods and its plan hold",
        kind: Kind::Gauge,
        series: |it, sink| sink.put(&[], it.memory_bytes as f64),
    },
    Family {
        name: "hearth_deployment_held_gpus",
        help: "GPUs of the node that the deployment's Pods and its plan hold",
        kind: Kind::Gauge,
        series: |it, sink| sink.put(&[], it.gpus as f64),
    },
];

const OF_FETCHES: &[Family<Fetch>] = &[
    Family {
        name: "hearth_deployment_fetched_bytes",
        help: "Bytes of the deployment's model that the node has fetched",
        kind: Kind::Gauge,
        series: |it, sink| sink.put(&[], it.bytes as f64),
    },
    Family {
        name: "hearth_deployment_fetch_size_bytes",
        help: "Bytes of the whole model",
        kind: Kind::Gauge,
        series: |it, sink| sink.put(&[], it.size_bytes as f64),
    },
    Family {
        name: "hearth_deployment_fetch_failed",
        help: "1 while the node has given up the fetch, before it tries again",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_flag(&[], it.has_failed),
    },
];

const AUTHORITY: Family<i64> = Family {
    name: "hearth_operator_certificate_authority_expiry_timestamp_seconds",
    help: "End of the validity of the certificate authority that signs, in seconds since 1970",
    kind: Kind::Gauge,
    series: |it, sink| sink.put(&[], *it as f64),
};

fn put_amounts(amounts: Amounts, sink: &mut Sink<'_, '_>) -> fmt::Result {
    let Amounts {
        allocatable,
        hearth,
        others,
        free,
    } = amounts;
    let states = [
        ("allocatable", allocatable),
        ("hearth", hearth),
        ("others", others),
        ("free", free),
    ];
    let mut states = states.into_iter();
    states.try_for_each(|(state, amount)| sink.put(&[("state", state)], amount as f64))
}
