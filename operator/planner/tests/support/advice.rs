//! What advice says to do, done.

use hearth_crds::{
    DiskProfile, DualBatch, InferenceDeploymentSpec, MemoryQuantity, NodeProfileStatus, Pinning,
    PrefillMode, Strategy,
};
use hearth_planner::{Advice, AskedBy};

/// The spec and the nodes once what advice for a ring says is done; `None` where that is another node or model.
pub fn followed(
    advice: &Advice,
    (spec, nodes): (&InferenceDeploymentSpec, &[NodeProfileStatus]),
) -> Option<(InferenceDeploymentSpec, Vec<NodeProfileStatus>)> {
    let (mut spec, mut nodes) = (spec.clone(), nodes.to_vec());
    match advice {
        Advice::SmallerModel => return None,
        Advice::MeasureDisks(names) => {
            for name in names.split(", ") {
                named(&mut nodes, name).disks = vec![DiskProfile {
                    path: "/models".into(),
                    // Of which 0.2 are left through the page cache.
                    read_gbps: 0.24,
                    ..DiskProfile::default()
                }];
            }
        }
        Advice::FreeMemoryOf(name, bytes) => free(&mut nodes, name, *bytes),
        Advice::FreeMemoryOfNodes(more) => {
            for (name, bytes) in more {
                free(&mut nodes, name, *bytes);
            }
        }
        Advice::MoreMemoryOf(name, bytes) => {
            let memory = &mut named(&mut nodes, name).memory;
            memory.available_bytes += bytes;
            memory.total_bytes += bytes;
        }
        of_spec => write(&mut spec, of_spec),
    }
    Some((spec, nodes))
}

/// Frees so much of a node's memory.
fn free(nodes: &mut [NodeProfileStatus], name: &str, bytes: u64) {
    let memory = &mut named(nodes, name).memory;
    memory.available_bytes += bytes;
    assert!(
        memory.available_bytes <= memory.total_bytes,
        "{bytes} of {name}"
    );
}

fn named<'a>(nodes: &'a mut [NodeProfileStatus], name: &str) -> &'a mut NodeProfileStatus {
    nodes.iter_mut().find(|node| node.node == name).unwrap()
}

/// Writes what advice about the spec says.
pub fn write(changed: &mut InferenceDeploymentSpec, advice: &Advice) {
    match advice {
        Advice::ContextLength(tokens) => changed.model.context_length = Some(*tokens),
        Advice::RemoveKvMemory => changed.decode.kv_cache.memory = None,
        Advice::KvMemory(bytes) => {
            changed.decode.kv_cache.memory = Some(MemoryQuantity::from_bytes(*bytes));
        }
        Advice::DecodeReplicas(replicas) => changed.decode.replicas = Some(*replicas),
        Advice::GatewayReplicas(replicas) => changed.gateway.replicas = *replicas,
        Advice::Chunked => {
            changed.prefill.replicas = None;
            changed.prefill.mode = PrefillMode::Chunked;
        }
        Advice::ReadAlone(has_gpus) => {
            assert_eq!(*has_gpus, changed.prefill.gpus_per_worker.is_some());
            changed.prefill.mode = PrefillMode::StreamLoading;
            changed.prefill.gpus_per_worker = None;
        }
        Advice::FewerPeers(peers) => changed.prefill.gpus_per_worker = Some(*peers),
        Advice::Share => changed.placement.pinning = Pinning::Shared,
        Advice::RunOnCpus(asked_by) => run_on_cpus(changed, *asked_by),
        Advice::Ring(why) => {
            allow_ring(changed);
            if why.contains("write PipedRing") {
                changed.strategy = Strategy::PipedRing;
                (changed.prefill.replicas, changed.prefill.scaling) = (None, None);
            }
        }
        Advice::FreeCpu(_)
        | Advice::MoreCores(_)
        | Advice::FreeGpuMemory(_)
        | Advice::FreeMemoryOf(..)
        | Advice::FreeMemoryOfNodes(_)
        | Advice::MoreMemoryOf(..)
        | Advice::Argument(_)
        | Advice::MeasureDisks(_)
        | Advice::SmallerModel
        | Advice::FreeMemory(_) => panic!("{advice} is nothing to write"),
    }
}

/// Takes back all that asks for a GPU.
fn run_on_cpus(deployment: &mut InferenceDeploymentSpec, asked_by: AskedBy) {
    let AskedBy {
        gpus_per_worker,
        stream_loading,
        peers,
        dual_batch,
    } = asked_by;
    if gpus_per_worker || !(stream_loading || peers || dual_batch) {
        deployment.prefill.gpus_per_worker = Some(0);
    }
    if stream_loading || peers {
        deployment.prefill.mode = PrefillMode::Auto;
    }
    if dual_batch {
        deployment.decode.dual_batch = DualBatch::Auto;
    }
}

/// Takes back all that rules out a ring.
fn allow_ring(deployment: &mut InferenceDeploymentSpec) {
    let (prefill, decode) = (&mut deployment.prefill, &mut deployment.decode);
    prefill.gpus_per_worker = prefill.gpus_per_worker.filter(|gpus| *gpus == 0);
    prefill.chunked_below_tokens = None;
    prefill.quiet_window = None;
    if prefill.mode.streams() {
        prefill.mode = PrefillMode::Auto;
    }
    decode.dual_batch = DualBatch::Auto;
    decode.expert_cache = None;
    decode.replicas = Some(1);
    decode.scaling = None;
}
