//! Simulated clusters, for the tests of this crate and of those above it.

pub(crate) mod carry_out;
pub mod churn;
mod random;
pub mod samples;
pub mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    ComputeProfile, CpuProfile, InferenceDeployment, InferenceDeploymentSpec, MemoryProfile,
    NodeProfileStatus, NumaNodeProfile,
};
use jiff::Timestamp;

use crate::host_paths::HostPath;
use crate::observed::Turn;
use crate::observed::{
    LedgerSettings, NodeSettings, NodeView, Observed, Others, Requests, Settings, Sight,
};

/// Bytes in a GiB.
pub const GIB: u64 = 1 << 30;
/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;

/// Time at `second` seconds of the tests' clock.
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).expect("a time")
}

/// Settings of an operator with the default chart.
pub fn settings() -> Settings {
    Settings {
        worker_image: "hearth/worker:1".to_owned(),
        pull_policy: "IfNotPresent".to_owned(),
        pull_secrets: Vec::new(),
        operator_namespace: "hearth".to_owned(),
        namespaces: Vec::new(),
        gpu_runtime_class: None,
        claims: true,
        ledger: LedgerSettings {
            all_pods: true,
            reserve_cpu_millis: 100,
            unseen: Requests {
                cpu_millis: 500,
                memory_bytes: 512 * MIB,
                gpus: 0,
            },
        },
        model_cache: "/var/lib/hearth/models".to_owned(),
        host_paths: vec![HostPath::parse("/models").expect("a path")],
        cluster_ranges: Vec::new(),
        hub_endpoint: "http://hub.lan".to_owned(),
        network_policies: true,
        tracing: None,
        keeps_authority: false,
        certificate_lifetime: Duration::from_secs(86_400),
        nodes: NodeSettings {
            move_after: Duration::from_secs(20),
            forget_after: Duration::from_secs(300),
            min_residence: Duration::from_secs(60),
            passing_taints: vec!["example.net/agent-not-ready".to_owned()],
        },
    }
}

/// The deployment `demo` in `default`: the built-in model, and what `yaml` adds to its spec.
pub fn deployment(yaml: &str) -> InferenceDeployment {
    let source = if yaml.contains("model:") {
        ""
    } else {
        "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\n"
    };
    let spec: InferenceDeploymentSpec =
        serde_norway::from_str(&format!("{source}{yaml}")).expect("a spec");
    let mut deployment = InferenceDeployment::new("demo", spec);
    deployment.metadata.namespace = Some("default".to_owned());
    deployment.metadata.uid = Some("0b1c".to_owned());
    deployment.metadata.generation = Some(1);
    deployment
}

/// A measured node with `cpus` cores and `memory_bytes`, all of it available.
pub fn node(name: &str, cpus: u32, memory_bytes: u64) -> NodeView {
    let profile = NodeProfileStatus {
        node: name.to_owned(),
        cpus: (0..cpus)
            .map(|id| CpuProfile {
                id,
                core: id,
                ..CpuProfile::default()
            })
            .collect(),
        numa_nodes: vec![NumaNodeProfile {
            id: 0,
            cpus: (0..cpus).collect(),
            memory_bytes,
            free_bytes: memory_bytes,
            read_gbps: 20.0,
        }],
        memory: MemoryProfile {
            total_bytes: memory_bytes,
            available_bytes: memory_bytes,
            read_one_thread_gbps: 10.0,
            read_all_threads_gbps: 20.0,
            ..MemoryProfile::default()
        },
        compute: ComputeProfile {
            bf16_one_thread_gflops: 20.0,
            bf16_all_threads_gflops: 80.0,
            f32_one_thread_gflops: 20.0,
            f32_all_threads_gflops: 80.0,
            ..ComputeProfile::default()
        },
        measured_at: "2026-01-01T00:00:00Z".to_owned(),
        ..NodeProfileStatus::default()
    };
    NodeView {
        name: name.to_owned(),
        labels: BTreeMap::from([("kubernetes.io/hostname".to_owned(), name.to_owned())]),
        is_ready: true,
        cpu_millis: u64::from(cpus) * 1000,
        memory_bytes,
        profile: Some(profile),
        ..NodeView::default()
    }
}

/// The deployment in a cluster of two nodes, `attic` and `office`, with 4 cores and 4 GiB each.
pub fn observed(deployment: InferenceDeployment) -> Observed {
    let nodes = ["attic", "office"].map(|name| (name.to_owned(), Arc::new(node(name, 4, 4 * GIB))));
    Observed {
        now: at(0),
        settings: Arc::new(settings()),
        deployment: Arc::new(deployment),
        plans: Vec::new(),
        pods: Vec::new(),
        scaler: None,
        nodes: BTreeMap::from(nodes),
        held_by_others: BTreeMap::new(),
        neighbours: Vec::new(),
        askers: Vec::new(),
        awaited_nodes: BTreeSet::new(),
        claimable: BTreeMap::new(),
        has_device_claims: true,
        others: Others {
            sight: Sight::All,
            requests: BTreeMap::new(),
        },
        claim_modes: Vec::new(),
        turn: Turn::Free,
        turn_comes_at: None,
        forbidden: None,
        fetches: BTreeMap::new(),
        stored: BTreeMap::new(),
        fetched_commit: None,
        measured: None,
        demand: None,
        placements: BTreeMap::new(),
        certificate: Some("1".to_owned()),
        external: None,
    }
}
