//! Deployments whose GPUs others have while they have no workers, in a simulated cluster.

use std::time::Duration;

use super::fake_cluster::FakeCluster;
use super::preload::{PRELOAD, give_way};
use super::shared_gpus::{give_gpu, of_spec, on_gpus};
use super::sharing::{empty, names, neighbour};
use super::zero::{YAML, asked, idle_for, workers};
use crate::conditions::{DECODE_READY, DEGRADED, NODES_TAKEN};
use crate::observed::{Holding, Neighbour};
use crate::testing::GIB;

/// One that would do without a GPU, has had one, and is at zero. Another has that GPU since: `other` returns it if it may end its workers.
fn taken(more: &str, other: impl FnOnce(Neighbour) -> Option<Neighbour>) -> FakeCluster {
    let mut cluster = of_spec(&format!("{YAML}{more}"), &["office"]);
    assert!(!on_gpus(&cluster).is_empty());
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster.observed.demand = idle_for(301.0);
    cluster.pass(Duration::from_secs(301));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    let low = has_the_gpu(&mut cluster);
    cluster.observed.neighbours = other(low).into_iter().collect();
    cluster
}

/// Gives the node's GPU to another.
fn has_the_gpu(cluster: &mut FakeCluster) -> Neighbour {
    let gpu = Holding {
        cpu_millis: 200,
        memory_bytes: GIB / 4,
        gpus: 1,
        ..Holding::default()
    };
    let holding = [("office".to_owned(), gpu)];
    cluster.observed.held_by_others = holding.clone().into();
    Neighbour {
        holding: holding.into(),
        ..neighbour("low", &[], 0, 0.0)
    }
}

#[test]
fn who_wakes_without_its_gpu_has_it_back_instead_of_computing_on_cpus() {
    let mut cluster = taken("priority: 1\n", Some);
    cluster.observed.demand = asked();
    for _ in 0..3 {
        let decision = cluster.reconcile();
        assert!(decision.create_plan.is_none());
        assert_eq!(names(&decision.asks), ["low"]);
        assert!(decision.awaits.contains("office"));
        assert_eq!(workers(&cluster), 0);
        cluster.turn();
    }
    assert_eq!(cluster.says(DEGRADED), ("True", NODES_TAKEN));
    let words = &cluster.condition(DEGRADED).message;
    assert!(words.contains("it waits until low can end"), "{words}");
    empty(&mut cluster);
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert!(!on_gpus(&cluster).is_empty());
    assert_eq!(cluster.says(DECODE_READY).0, "True");
}

#[test]
fn who_wakes_while_another_starts_on_its_gpu_waits_for_it_too() {
    let starts = |it: Neighbour| Neighbour {
        is_starting: true,
        ..it
    };
    let mut cluster = taken("", |it| Some(starts(it)));
    cluster.observed.demand = asked();
    for _ in 0..3 {
        let decision = cluster.reconcile();
        assert!(decision.create_plan.is_none());
        assert_eq!(names(&decision.asks), ["low"]);
        assert!(decision.awaits.contains("office"));
        assert_eq!(decision.requeue_after, Some(Duration::from_secs(10)));
        cluster.turn();
    }
    let words = &cluster.condition(DEGRADED).message;
    assert!(words.contains("it waits until low can end"), "{words}");
    empty(&mut cluster);
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert!(!on_gpus(&cluster).is_empty());
    // One that will keep its workers is not waited for.
    let keeps = true;
    let mut cluster = taken("", |it| Some(starts(Neighbour { keeps, ..it })));
    cluster.observed.demand = asked();
    assert!(cluster.reconcile().create_plan.is_some());
}

#[test]
fn who_would_wait_for_ever_for_its_gpu_computes_on_cpus() {
    let is_kept = |it: Neighbour| Some(Neighbour { keeps: true, ..it });
    let is_busy = |it: Neighbour| Some(Neighbour { priority: 9, ..it });
    let others: [fn(Neighbour) -> Option<Neighbour>; 3] = [|_| None, is_kept, is_busy];
    for other in others {
        let mut cluster = taken("", other);
        cluster.observed.demand = asked();
        let decision = cluster.reconcile();
        assert!(decision.create_plan.is_some());
        assert_eq!(names(&decision.asks), [""; 0]);
        cluster.settle();
        assert!(on_gpus(&cluster).is_empty());
        assert_eq!(cluster.says(DECODE_READY).0, "True");
    }
}

#[test]
fn who_starts_without_a_request_does_so_on_its_gpus_alone() {
    let mut cluster = give_way(of_spec(PRELOAD, &["office"]));
    assert!(!on_gpus(&cluster).is_empty());
    let low = has_the_gpu(&mut cluster);
    cluster.observed.neighbours = vec![low];
    cluster.observed.askers.clear();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(300.0);
    cluster.settle();
    assert_eq!((workers(&cluster), cluster.observed.plans.len()), (0, 1));
    empty(&mut cluster);
    cluster.pass(Duration::from_secs(30));
    cluster.settle();
    assert!(workers(&cluster) > 0);
    assert_eq!(cluster.observed.plans.len(), 1);
}

#[test]
fn a_new_one_asks_for_a_gpu_only_if_its_spec_does() {
    for (spec, asks) in [
        ("", &[][..]),
        ("prefill: {gpusPerWorker: 1}\n", &["low"]),
        ("prefill: {mode: StreamLoading}\n", &["low"]),
    ] {
        let mut cluster = FakeCluster::new(&format!("{YAML}{spec}"));
        give_gpu(&mut cluster, "office", 8 << 30);
        let low = has_the_gpu(&mut cluster);
        cluster.observed.neighbours = vec![low];
        let decision = cluster.reconcile();
        assert_eq!(names(&decision.asks), asks, "{spec}");
        assert_eq!(decision.create_plan.is_some(), asks.is_empty(), "{spec}");
    }
}
