//! A GPU of a device plugin that a prefill and a decode rank share, in one Pod.

use std::net::SocketAddr;

use hearth_crds::{
    ComputeCapability, DEVICE_LOST_EXIT_CODE, GpuProfile, PlanRank, READER_VERSION, Routes,
};

use super::fake_cluster::FakeCluster;
use crate::conditions::{DECODE_READY, DEGRADED, PLACED, PREFILL_READY, READY};
use crate::observed::{ContainerEnd, ContainerView, Placement, Reach};

const SPEC: &str = "prefill: {mode: StreamLoading, chunkedBelowTokens: 0}\ndecode: {maxBatch: 4, dualBatch: 'On'}\n";

/// Nodes with one GPU each, which a device plugin gives to one container.
fn with_gpus(nodes: &[&str]) -> FakeCluster {
    of_spec(SPEC, nodes)
}

/// The same for a deployment of this spec.
pub(super) fn of_spec(yaml: &str, nodes: &[&str]) -> FakeCluster {
    of_spec_with(yaml, nodes, 8 << 30)
}

/// The same with so many bytes of memory on each GPU.
pub(super) fn of_spec_with(yaml: &str, nodes: &[&str], gpu_bytes: u64) -> FakeCluster {
    let mut cluster = FakeCluster::new(yaml);
    for name in nodes {
        give_gpu(&mut cluster, name, gpu_bytes);
    }
    cluster.settle();
    cluster
}

/// Gives a node a GPU with so many bytes of memory.
pub(super) fn give_gpu(cluster: &mut FakeCluster, node: &str, gpu_bytes: u64) {
    let gpu = gpu(&format!("GPU-{node}"), gpu_bytes);
    cluster.node(node, |node| {
        node.gpus = 1;
        let profile = node.profile.as_mut().expect("a profile");
        profile.gpus = vec![gpu];
        profile.reader_version = Some(READER_VERSION);
    });
}

/// A GPU with so many bytes of memory.
pub(super) fn gpu(uuid: &str, memory_bytes: u64) -> GpuProfile {
    GpuProfile {
        uuid: uuid.to_owned(),
        name: "RTX".to_owned(),
        memory_bytes,
        free_bytes: memory_bytes,
        compute_capability: Some(ComputeCapability { major: 8, minor: 9 }),
        pcie_gbps: 31.5,
        read_gbps: 300.0,
        bf16_gflops: 100_000.0,
        ..GpuProfile::default()
    }
}

/// The plan's ranks on GPUs, with the Pod that each is in.
pub(super) fn on_gpus(cluster: &FakeCluster) -> Vec<(String, String, Option<String>)> {
    let plan = cluster.observed.plans.last().expect("a plan");
    let ranks = plan.spec.ranks.iter().filter(|rank| rank.is_on_gpu());
    let place = |rank: &PlanRank| (rank.name.clone(), rank.node.clone(), rank.in_pod_of.clone());
    ranks.map(place).collect()
}

fn both_on(node: &str) -> Vec<(String, String, Option<String>)> {
    let place = |name: &str, host: Option<&str>| {
        (name.to_owned(), node.to_owned(), host.map(str::to_owned))
    };
    vec![
        place("prefill-0", Some("decode-0")),
        place("decode-0", None),
    ]
}

/// The gateway's routes as `rank at port`.
fn routes(cluster: &FakeCluster) -> Vec<String> {
    let mut pods = cluster.observed.pods.iter();
    let gateway = pods.find(|pod| pod.role.is_gateway()).expect("a gateway");
    let routes: Routes = serde_json::from_str(&gateway.routes).expect("routes");
    let words = routes.workers.iter().map(|route| {
        let (_, port) = route.endpoint.rsplit_once(':').expect("a port");
        format!("{} at {port}", route.name)
    });
    words.collect()
}

fn pools(cluster: &FakeCluster) -> Vec<(&str, &str)> {
    let pools = cluster.status().pool_statuses.iter();
    pools
        .map(|pool| (pool.name.as_str(), pool.summary.as_str()))
        .collect()
}

/// The addresses of the two ranks of the Pod.
fn addresses(cluster: &FakeCluster) -> [SocketAddr; 2] {
    let mut pods = cluster.observed.pods.iter();
    let pod = pods.find(|pod| pod.rank == "decode-0").expect("a Pod");
    [9400, 9403].map(|port| {
        let address = format!("{}:{port}", pod.ip);
        address.parse().expect("an address")
    })
}

/// Has the gateway report what it reaches, and reconciles.
fn reports(cluster: &mut FakeCluster, reach: [Reach; 2]) {
    for (address, reach) in addresses(cluster).into_iter().zip(reach) {
        let placement = Placement {
            reach,
            ..Placement::default()
        };
        cluster.observed.placements.insert(address, placement);
    }
    cluster.reconcile();
}

#[test]
fn two_ranks_in_one_pod_are_two_workers_of_the_gateway_and_of_the_status() {
    let mut cluster = with_gpus(&["office"]);
    assert_eq!(on_gpus(&cluster), both_on("office"));
    let ranks = cluster.ranks();
    let ranks: Vec<&str> = ranks.iter().map(|(rank, _)| rank.as_str()).collect();
    assert_eq!(ranks, ["decode-0", "gateway-0"]);
    assert_eq!(routes(&cluster), ["decode-0 at 9400", "prefill-0 at 9403"]);
    let ready = [("gateway", "1/1"), ("prefill", "1/1"), ("decode", "1/1")];
    assert_eq!(pools(&cluster), ready);
    assert_eq!(cluster.says(READY), ("True", "Serving"));

    for (address, cpus) in addresses(&cluster).into_iter().zip(["0-1", "2-3"]) {
        let placement = Placement {
            cpus: cpus.to_owned(),
            ..Placement::default()
        };
        cluster.observed.placements.insert(address, placement);
    }
    cluster.reconcile();
    assert_eq!(cluster.says(PLACED), ("True", "AsPlanned"));
    let placed = cluster.status().placement.iter();
    let placed: Vec<_> = placed
        .map(|it| (it.rank.as_str(), it.cpus.as_str()))
        .collect();
    assert_eq!(placed, [("decode-0", "0-1"), ("prefill-0", "2-3")]);

    cluster.pod("demo-decode-0", |pod| pod.is_ready = false);
    cluster.reconcile();
    for kind in [PREFILL_READY, DECODE_READY, READY] {
        assert_eq!(cluster.condition(kind).status, "False", "{kind}");
    }
}

/// The Pod's readiness is that of its first rank: what is known of the second one is what the gateway reports.
#[test]
fn a_second_rank_that_is_away_is_not_ready_although_its_pod_is() {
    let mut cluster = with_gpus(&["office"]);
    cluster.told();
    for (reach, reason, words) in [
        (
            Reach::Lost,
            "ReadinessLost",
            "prefill-0 on office was ready and is not",
        ),
        (Reach::Hung, "Hung", "prefill-0 hangs on office"),
        (
            Reach::NotYet,
            "Starting",
            "prefill-0 on office has not answered",
        ),
    ] {
        reports(&mut cluster, [Reach::Ready, reach]);
        assert_eq!(cluster.says(PREFILL_READY), ("False", reason));
        let told = &cluster.condition(PREFILL_READY).message;
        assert!(told.contains(words) && !told.contains("kubelet"), "{told}");
        assert_eq!(cluster.says(DEGRADED), ("True", reason));
        assert_eq!(cluster.says(DECODE_READY), ("True", "AllReady"));
        assert_eq!(cluster.says(READY), ("True", "Serving"));
        let ready = [("gateway", "1/1"), ("prefill", "0/1"), ("decode", "1/1")];
        assert_eq!(pools(&cluster), ready);
    }
    reports(&mut cluster, [Reach::Ready; 2]);
    assert_eq!(cluster.says(PREFILL_READY), ("True", "AllReady"));
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
}

/// The supervisor starts the first rank again; the kubelet has nothing to do with that.
#[test]
fn a_first_rank_that_is_away_takes_the_second_one_from_no_pool() {
    let mut cluster = with_gpus(&["office"]);
    let running_since = Some(cluster.observed.now);
    cluster.pod("demo-decode-0", |pod| {
        pod.is_ready = false;
        pod.has_lost_readiness = true;
        pod.container = Some(ContainerView {
            running_since,
            ..ContainerView::default()
        });
    });
    reports(&mut cluster, [Reach::Lost, Reach::Ready]);
    assert_eq!(cluster.says(PREFILL_READY), ("True", "AllReady"));
    assert_eq!(cluster.says(DECODE_READY), ("False", "ReadinessLost"));
    assert_eq!(
        cluster.condition(DECODE_READY).message,
        "decode-0 on office was ready and is not: its process has ended or cannot compute; its supervisor starts it again, \
         and the other rank of its Pod goes on"
    );
    assert_eq!(cluster.condition(READY).status, "False");
    // What the gateway reported before the container ended counts no longer.
    cluster.pod("demo-decode-0", |pod| {
        pod.has_lost_readiness = false;
        pod.container = Some(ContainerView::default());
    });
    cluster.reconcile();
    assert_eq!(cluster.condition(PREFILL_READY).status, "False");
}

/// There is one GPU, so that the old Pod must make room; afterwards both ranks are routed to again.
#[test]
fn a_rollout_of_a_pod_of_two_ranks_waits_for_the_gpu() {
    let mut cluster = with_gpus(&["office"]);
    let spec = SPEC.replace("maxBatch: 4", "maxBatch: 2");
    cluster.change(&spec);
    // A step at a time: the new Pod is made when the old one is gone, not before.
    for _ in 0..20 {
        cluster.reconcile();
        let holders = cluster.observed.pods.iter();
        let holders = holders.filter(|pod| pod.rank == "decode-0").count();
        assert!(holders <= 1, "two Pods for one GPU");
        cluster.turn();
    }
    cluster.settle();
    let plan = cluster.observed.plans.last().expect("a plan");
    assert_eq!(plan.spec.generation, 2);
    assert_eq!(on_gpus(&cluster), both_on("office"));
    assert_eq!(routes(&cluster), ["decode-0 at 9400", "prefill-0 at 9403"]);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.observed.pods.len(), 2);
}

#[test]
fn a_gpu_that_is_lost_is_lost_for_both() {
    let mut cluster = with_gpus(&["attic", "office"]);
    let [(_, node, _), _] = &on_gpus(&cluster)[..] else {
        panic!("not both on GPUs: {:?}", on_gpus(&cluster));
    };
    let other = match node.as_str() {
        "attic" => "office",
        _ => "attic",
    };
    let node = node.clone();
    cluster.pod("demo-decode-0", |pod| {
        pod.is_ready = false;
        pod.container = Some(ContainerView {
            restarts: 1,
            last_end: Some(ContainerEnd {
                exit_code: DEVICE_LOST_EXIT_CODE.into(),
                reason: "Error".to_owned(),
                message: "error: prefill-0: cuda does not answer: Xid 79\n".to_owned(),
            }),
            ..ContainerView::default()
        });
    });
    cluster.settle();
    assert_eq!(on_gpus(&cluster), both_on(other));
    assert_eq!(cluster.says(DEGRADED), ("True", "GpuLost"));
    let told = &cluster.condition(DEGRADED).message;
    assert!(
        told.contains(&format!(
            "GPU GPU-{node} of {node} is lost: prefill-0: cuda does not answer: Xid 79"
        )),
        "{told}"
    );
}
