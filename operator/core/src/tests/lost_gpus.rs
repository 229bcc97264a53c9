//! GPUs that no longer answer while their nodes are Ready.

use std::time::Duration;

use hearth_crds::{DEVICE_LOST_EXIT_CODE, GpuProfile, VIRTUAL_UUID};

use super::fake_cluster::FakeCluster;
use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, READY};
use crate::observed::{ContainerEnd, ContainerView};
use crate::testing::MIB;

/// Gives a node a virtual device that holds the demo model.
fn give_device(cluster: &mut FakeCluster, node: &str) {
    let device = GpuProfile {
        uuid: VIRTUAL_UUID.to_owned(),
        name: "virtual".to_owned(),
        memory_bytes: 256 * MIB,
        free_bytes: 256 * MIB,
        read_gbps: 500.0,
        bf16_gflops: 50_000.0,
        copy_gbps: 20.0,
        copy_beside_reads_gbps: 15.0,
        operation_us: 5.0,
        virtual_device: Some("virtual:memory=256Mi".to_owned()),
        ..GpuProfile::default()
    };
    cluster.node(node, |node| {
        node.profile.as_mut().expect("a profile").gpus = vec![device];
    });
}

/// The workers of the newest plan that compute on a GPU, as `rank on node`.
fn on_gpus(cluster: &FakeCluster) -> Vec<String> {
    let plan = cluster.observed.plans.last().expect("a plan");
    let ranks = plan.spec.ranks.iter().filter(|rank| rank.is_on_gpu());
    ranks
        .map(|rank| format!("{} on {}", rank.name, rank.node))
        .collect()
}

fn generation(cluster: &FakeCluster) -> u64 {
    cluster
        .observed
        .plans
        .last()
        .expect("a plan")
        .spec
        .generation
}

/// A worker ends because its device is lost, for the `ends`th time in a row.
fn loses(cluster: &mut FakeCluster, pod: &str, ends: u32) {
    cluster.pod(pod, |pod| {
        pod.is_ready = false;
        pod.container = Some(ContainerView {
            restarts: ends - 1,
            last_end: Some(ContainerEnd {
                exit_code: DEVICE_LOST_EXIT_CODE.into(),
                reason: "Error".to_owned(),
                message: "error: virtual does not answer: Xid 79\n".to_owned(),
            }),
            ..ContainerView::default()
        });
    });
}

#[test]
fn a_lost_gpu_leads_to_a_plan_without_it_and_is_told() {
    let mut cluster = FakeCluster::new("");
    give_device(&mut cluster, "office");
    cluster.settle();
    assert_eq!(
        on_gpus(&cluster),
        ["prefill-0 on office", "decode-0 on office"]
    );
    cluster.told();

    // It may be back for the next process.
    loses(&mut cluster, "demo-decode-0", 1);
    cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "GpuLost"));
    assert_eq!(generation(&cluster), 1);

    loses(&mut cluster, "demo-decode-0", 2);
    cluster.settle();
    assert_eq!(generation(&cluster), 2);
    assert!(on_gpus(&cluster).is_empty(), "{:?}", on_gpus(&cluster));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(DEGRADED), ("True", "GpuLost"));
    for kind in [DEGRADED, PLANNED] {
        let told = &cluster.condition(kind).message;
        let cause = "GPU VIRTUAL-0 of office is lost: decode-0: virtual does not answer: Xid 79";
        assert!(told.contains(cause), "{kind}: {told}");
    }
    assert!(cluster.told().contains(&"GpuLost".to_owned()));
}

#[test]
fn a_lost_gpu_stays_left_out_until_it_was_measured_anew() {
    let mut cluster = FakeCluster::new("");
    give_device(&mut cluster, "office");
    cluster.settle();
    loses(&mut cluster, "demo-decode-0", 2);
    cluster.settle();
    let plans_after = |cluster: &mut FakeCluster, max_batch: u32| {
        cluster.change(&format!("decode: {{maxBatch: {max_batch}}}\n"));
        cluster.settle();
        on_gpus(cluster).len()
    };
    // What showed it is gone with the Pods of the plan before.
    assert_eq!(plans_after(&mut cluster, 2), 0);
    assert_eq!(cluster.says(DEGRADED), ("True", "GpuLost"));
    cluster.pass(Duration::from_secs(60));
    let now = cluster.observed.now.to_string();
    cluster.node("office", |node| {
        node.profile.as_mut().expect("a profile").measured_at = now;
    });
    cluster.settle();
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    assert_eq!(
        on_gpus(&cluster).len(),
        0,
        "a repaired GPU moves nothing by itself"
    );
    assert_eq!(plans_after(&mut cluster, 3), 2);
}

#[test]
fn a_node_that_was_away_since_has_its_gpu_back() {
    let mut cluster = FakeCluster::new("");
    give_device(&mut cluster, "office");
    cluster.settle();
    loses(&mut cluster, "demo-prefill-0", 2);
    cluster.settle();
    assert_eq!(cluster.says(DEGRADED), ("True", "GpuLost"));
    cluster.pass(Duration::from_secs(5));
    let now = cluster.observed.now;
    cluster.node("office", |node| node.ready_since = Some(now));
    cluster.settle();
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
}

#[test]
fn another_gpu_takes_over_and_where_none_is_left_that_is_told() {
    let mut cluster = FakeCluster::new("strategy: Hybrid\nprefill: {gpusPerWorker: 1}\n");
    for node in ["attic", "office"] {
        give_device(&mut cluster, node);
    }
    cluster.settle();
    let first = on_gpus(&cluster);
    assert_eq!(first.len(), 1, "{first:?}");
    loses(&mut cluster, "demo-prefill-0", 2);
    cluster.settle();
    let second = on_gpus(&cluster);
    assert!(
        second.len() == 1 && second != first,
        "{first:?}, then {second:?}"
    );
    assert_eq!(cluster.condition(READY).status, "True");

    loses(&mut cluster, "demo-prefill-0", 2);
    cluster.settle();
    assert_eq!(generation(&cluster), 2, "there is no other plan");
    let told = &cluster.condition(DEGRADED).message;
    assert_eq!(cluster.says(DEGRADED), ("True", "GpuLost"));
    for words in [
        "is lost: prefill-0",
        "fits nowhere else",
        "cannot be used: it is lost",
    ] {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
}
