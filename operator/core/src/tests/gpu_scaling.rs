//! Numbers of workers on GPUs: another number moves nobody, and changes nobody's device.

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_crds::{ComputeCapability, InferencePlanSpec, PlanRank, PlanRole, READER_VERSION};

use super::shared_gpus::gpu;
use crate::conditions::PLANNED;
use crate::observed::{Demand, Holding};
use crate::testing::samples::steady;
use crate::tests::fake_cluster::FakeCluster;

/// A deployment whose decode workers read their prompts themselves.
fn decoders(replicas: u32) -> String {
    format!("prefill: {{mode: Chunked}}\ndecode: {{replicas: {replicas}}}\n")
}

/// Shows this many equal GPUs on a node, which a device plugin hands out.
fn show_gpus(cluster: &mut FakeCluster, name: &str, count: u32) {
    cluster.node(name, |node| {
        node.gpus = count;
        let profile = node.profile.as_mut().expect("a profile");
        let uuids = (0..count).map(|n| format!("GPU-{name}-{n}"));
        profile.gpus = uuids.map(|uuid| gpu(&uuid, 8 << 30)).collect();
        profile.reader_version = Some(READER_VERSION);
    });
}

/// A settled deployment of this spec on nodes with so many GPUs.
fn with_gpus(yaml: &str, nodes: &[(&str, u32)]) -> FakeCluster {
    let mut cluster = FakeCluster::new(yaml);
    for (name, count) in nodes {
        show_gpus(&mut cluster, name, *count);
    }
    cluster.settle();
    cluster
}

fn plan(cluster: &FakeCluster) -> &InferencePlanSpec {
    &cluster.observed.plans.last().expect("a plan").spec
}

/// Nodes and GPUs of the plan's workers of a role, by the workers' order.
fn places(cluster: &FakeCluster, role: PlanRole) -> Vec<(&str, &str)> {
    let ranks = plan(cluster).ranks_of(role);
    ranks
        .map(|rank| (rank.node.as_str(), rank.device_name.as_str()))
        .collect()
}

/// Ranks and uids of all Pods, the gateway's among them.
fn pods(cluster: &FakeCluster) -> BTreeSet<(String, String)> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| (pod.rank.clone(), pod.uid.clone()))
        .collect()
}

#[test]
fn a_worker_more_takes_a_free_gpu_and_the_others_stay_on_theirs() {
    // The planner numbers workers by node: of two, that on attic would be the first.
    let mut cluster = with_gpus(&decoders(1), &[("office", 1)]);
    show_gpus(&mut cluster, "attic", 1);
    let first = pods(&cluster);
    cluster.change(&decoders(2));
    cluster.settle();
    let both = pods(&cluster);
    assert!(both.is_superset(&first), "{first:?} {both:?}");
    let expected = [("office", "GPU-office-0"), ("attic", "GPU-attic-0")];
    assert_eq!(places(&cluster, PlanRole::Decode), expected);
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    cluster.change(&decoders(1));
    cluster.settle();
    assert_eq!(pods(&cluster), first);
}

#[test]
fn prefill_workers_come_beside_decode_workers_whose_gpus_come_next_on_the_node() {
    let spec = |prefill: u32, decode: u32| {
        format!("prefill: {{replicas: {prefill}}}\ndecode: {{replicas: {decode}}}\n")
    };
    for is_claimed in [false, true] {
        let mut cluster = FakeCluster::new(&spec(1, 1));
        show_gpus(&mut cluster, "office", 5);
        if is_claimed {
            let uuids = (0..5).map(|n| format!("GPU-office-{n}")).collect();
            cluster
                .observed
                .claimable
                .insert("office".to_owned(), uuids);
        }
        cluster.settle();
        let mut before = pods(&cluster);
        for (prefill, decode) in [(2, 1), (2, 2), (3, 2)] {
            cluster.change(&spec(prefill, decode));
            cluster.settle();
            let now = pods(&cluster);
            assert!(now.is_superset(&before), "{before:?} {now:?}");
            assert_eq!(now.len(), before.len() + 1);
            before = now;
        }
        let gpus: BTreeSet<&str> = [PlanRole::Prefill, PlanRole::Decode]
            .into_iter()
            .flat_map(|role| places(&cluster, role))
            .map(|(_, gpu)| gpu)
            .collect();
        assert_eq!(gpus.len(), 5, "each has its own: {gpus:?}");
        let mut workers = plan(&cluster).ranks.iter().filter(|rank| rank.is_on_gpu());
        assert!(workers.all(|rank| rank.claims_gpus == is_claimed));
    }
}

#[test]
fn two_ranks_of_one_pod_stay_in_it_with_another_number_of_decode_workers() {
    let spec = |replicas: u32| {
        format!(
            "prefill: {{mode: StreamLoading, chunkedBelowTokens: 0}}\n\
             decode: {{replicas: {replicas}, maxBatch: 4, dualBatch: 'On'}}\n"
        )
    };
    let mut cluster = with_gpus(&spec(1), &[("office", 1)]);
    let host = |cluster: &FakeCluster| plan(cluster).rank("prefill-0").cloned();
    let before = host(&cluster).expect("a rank");
    assert_eq!(before.in_pod_of.as_deref(), Some("decode-0"));
    let first = pods(&cluster);
    show_gpus(&mut cluster, "attic", 1);
    cluster.change(&spec(2));
    cluster.settle();
    let both = pods(&cluster);
    assert!(both.is_superset(&first), "{first:?} {both:?}");
    assert_eq!(host(&cluster).as_ref(), Some(&before));
    let expected = [("office", "GPU-office-0"), ("attic", "GPU-attic-0")];
    assert_eq!(places(&cluster, PlanRole::Decode), expected);
    cluster.change(&spec(1));
    cluster.settle();
    assert_eq!(pods(&cluster), first);
}

#[test]
fn a_worker_more_takes_what_others_leave_of_virtual_devices() {
    let mut cluster = FakeCluster::new(&decoders(1));
    for name in ["attic", "office"] {
        show_gpus(&mut cluster, name, 1);
        cluster.node(name, |node| {
            node.gpus = 0;
            let profile = node.profile.as_mut().expect("a profile");
            profile.gpus[0].virtual_device = Some("virtual:memory=1Gi".to_owned());
            profile.gpus[0].memory_bytes = 1 << 30;
        });
    }
    cluster.settle();
    let mut before = pods(&cluster);
    for replicas in [2, 3] {
        cluster.change(&decoders(replicas));
        cluster.settle();
        let now = pods(&cluster);
        assert!(now.is_superset(&before), "{before:?} {now:?}");
        before = now;
    }
    let mut workers = plan(&cluster).ranks_of(PlanRole::Decode);
    assert!(workers.all(|rank| rank.virtual_device.is_some()));
    for name in ["attic", "office"] {
        let there = plan(&cluster).ranks.iter().filter(|rank| rank.node == name);
        let bytes: u64 = there.map(PlanRank::virtual_memory_bytes).sum();
        assert!((1..=1 << 30).contains(&bytes), "{name}: {bytes}");
    }
}

#[test]
fn without_a_free_gpu_the_number_is_refused_until_there_is_one_and_nobody_moves() {
    let mut cluster = with_gpus(&decoders(1), &[("office", 1), ("attic", 1)]);
    let (home, _) = places(&cluster, PlanRole::Decode)[0];
    let (home, other) = match home {
        "office" => ("office", "attic"),
        _ => ("attic", "office"),
    };
    let first = pods(&cluster);
    // Another deployment's worker has the second GPU.
    let theirs = Holding {
        gpus: 1,
        ..Holding::default()
    };
    cluster
        .observed
        .held_by_others
        .insert(other.to_owned(), theirs);
    cluster.change(&decoders(2));
    cluster.settle();
    assert_eq!(pods(&cluster), first);
    assert_eq!(cluster.says(PLANNED), ("False", "TooFewGpus"));
    let message = &cluster.condition(PLANNED).message;
    for words in [
        "with 0 prefill and 2 decode workers there is no place like that of decode-0, on a GPU",
        "spec.prefill.gpusPerWorker: 0",
    ] {
        assert!(message.contains(words), "{message}");
    }
    // It is free now.
    cluster.observed.held_by_others.clear();
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    let now = pods(&cluster);
    assert!(now.is_superset(&first), "{first:?} {now:?}");
    let nodes: Vec<&str> = places(&cluster, PlanRole::Decode)
        .into_iter()
        .map(|(node, _)| node)
        .collect();
    assert_eq!(nodes, [home, other]);

    // A third is refused again, until the remedy is written.
    cluster.change(&decoders(3));
    cluster.settle();
    assert_eq!(pods(&cluster), now);
    let on_cpus = "prefill: {mode: Chunked, gpusPerWorker: 0}\ndecode: {replicas: 3}\n";
    cluster.change(on_cpus);
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    let devices = places(&cluster, PlanRole::Decode).into_iter();
    assert_eq!(
        devices.map(|(_, device)| device).collect::<Vec<_>>(),
        ["cpu"; 3]
    );
}

#[test]
fn workers_on_cpus_stay_there_with_another_number_although_there_are_gpus_now() {
    let mut cluster = with_gpus(&decoders(2), &[]);
    let first = pods(&cluster);
    for name in ["attic", "office"] {
        show_gpus(&mut cluster, name, 4);
    }
    let steps = [3, 2, 1].map(decoders);
    for spec in &steps {
        cluster.change(spec);
        cluster.settle();
        let mut devices = places(&cluster, PlanRole::Decode).into_iter();
        assert!(devices.all(|(_, device)| device == "cpu"));
    }
    assert!(pods(&cluster).is_subset(&first));
    // Any other change has them planned anew.
    cluster.change("prefill: {mode: Chunked}\ndecode: {replicas: 1, maxBatch: 4}\n");
    cluster.settle();
    assert!(
        plan(&cluster)
            .ranks_of(PlanRole::Decode)
            .all(PlanRank::is_on_gpu)
    );
}

#[test]
fn workers_on_cpus_stay_there_with_another_number_after_a_rollback() {
    let spec = |replicas: u32, max_batch: u32| {
        format!(
            "prefill: {{mode: Chunked}}\ndecode: {{replicas: {replicas}, maxBatch: {max_batch}}}\n\
             rollout: {{progressDeadline: 1m}}\n"
        )
    };
    let mut cluster = with_gpus(&spec(1, 6), &[]);
    let first = pods(&cluster);
    for name in ["attic", "office"] {
        show_gpus(&mut cluster, name, 4);
    }
    cluster.broken_from = 2;
    cluster.change(&spec(1, 3));
    for _ in 0..65 {
        cluster.turn();
        cluster.reconcile();
    }
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    assert!(plan(&cluster).ranks.iter().any(PlanRank::is_on_gpu));
    cluster.broken_from = u64::MAX;
    cluster.change(&spec(2, 3));
    cluster.settle();
    let devices = places(&cluster, PlanRole::Decode).into_iter();
    assert_eq!(
        devices.map(|(_, device)| device).collect::<Vec<_>>(),
        ["cpu"; 2]
    );
    let now = pods(&cluster);
    assert!(now.is_superset(&first), "{first:?} {now:?}");
}

#[test]
fn a_pool_on_gpus_follows_its_load_and_is_limited_by_the_gpus_that_there_are() {
    let spec = "prefill: {mode: Chunked}\n\
                decode: {scaling: {mode: Auto, minReplicas: 1, maxReplicas: 2}}\n\
                objectives: {timeToFirstToken: 3s, timePerOutputToken: 500ms}\n";
    let mut cluster = FakeCluster::new(spec);
    show_gpus(&mut cluster, "office", 1);
    let load = |arrivals_per_s| {
        Some(Demand {
            prefill_ms_per_token: Some(4.0),
            step_ms: Some(50.0),
            step_tokens: Some(1.0),
            ..steady(arrivals_per_s)
        })
    };
    cluster.observed.demand = load(0.1);
    cluster.settle();
    let first = pods(&cluster);
    cluster.observed.demand = load(4.0);
    let go_on = |cluster: &mut FakeCluster| {
        for _ in 0..12 {
            cluster.reconcile();
            cluster.turn();
            cluster.pass(Duration::from_secs(4));
        }
    };
    let limit = |cluster: &FakeCluster| {
        let pool = cluster.status().pool("decode").expect("a pool");
        let told = pool.autoscaling.clone().expect("it follows");
        (told.replicas, told.limited_by)
    };
    go_on(&mut cluster);
    assert_eq!(pods(&cluster), first);
    let (replicas, limited_by) = limit(&cluster);
    let limited_by = limited_by.expect("a limit");
    assert_eq!(replicas, 1);
    assert!(
        limited_by.contains("no place like that of decode-0"),
        "{limited_by}"
    );
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    // Another node with a GPU joins.
    show_gpus(&mut cluster, "attic", 1);
    go_on(&mut cluster);
    assert_eq!(limit(&cluster), (2, None));
    let now = pods(&cluster);
    assert!(now.is_superset(&first), "{first:?} {now:?}");
    assert_eq!(now.len(), first.len() + 1);
}

#[test]
fn a_gpu_of_another_kind_is_told_when_it_joins() {
    let mut cluster = with_gpus(&decoders(1), &[("office", 1)]);
    assert!(plan(&cluster).mixed_numerics.is_empty());
    show_gpus(&mut cluster, "attic", 1);
    cluster.node("attic", |node| {
        let profile = node.profile.as_mut().expect("a profile");
        profile.gpus[0].compute_capability = Some(ComputeCapability { major: 9, minor: 0 });
    });
    cluster.change(&decoders(2));
    cluster.settle();
    let mixed = plan(&cluster).mixed_numerics.join(" ");
    assert!(
        mixed.contains("decode-0 with a GPU of compute capability 8.9"),
        "{mixed}"
    );
    assert!(
        mixed.contains("decode-1 with a GPU of compute capability 9.0"),
        "{mixed}"
    );
}
