//! Deployments whose autoscaler may ask for no workers at all, in a simulated cluster.

use std::time::Duration;

use hearth_crds::PlanRole;

use super::fake_cluster::FakeCluster;
use super::sharing::{asker, empty, fill, names as names_of, neighbour_everywhere};
use super::zero::{asked, workers};
use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, PROGRESSING, READY};
use crate::observed::PodRole;

fn spec(replicas: u32) -> String {
    format!(
        "decode: {{replicas: {replicas}, scaling: {{mode: External, minReplicas: 0, maxReplicas: 3}}}}\n\
         autoscaling: {{holdTimeout: 5m}}\n"
    )
}

fn names(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.name.clone()).collect()
}

fn count(cluster: &FakeCluster, role: PlanRole) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| pod.role == PodRole::Rank(role)).count()
}

/// One that has served with that many workers, and whose autoscaler asks for none.
fn emptied(replicas: u32) -> FakeCluster {
    let mut cluster = FakeCluster::new(&spec(replicas));
    cluster.settle();
    cluster.told();
    cluster.change(&spec(0));
    cluster.settle();
    assert!(cluster.status().is_at_zero());
    assert_eq!(workers(&cluster), 0);
    cluster
}

#[test]
fn workers_end_when_the_autoscaler_asks_for_none_and_start_again_when_it_asks_for_some() {
    let mut cluster = FakeCluster::new(&spec(1));
    cluster.settle();
    cluster.told();
    let before = names(&cluster);
    let routing = &cluster.observed.plans[0].spec.routing;
    assert_eq!(routing.hold_timeout_ms, Some(300_000));
    cluster.change(&spec(0));
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "ScaledToZero"));
    assert_eq!(cluster.says(PROGRESSING), ("True", "ScalingToZero"));
    cluster.settle();
    assert_eq!(cluster.observed.pods.len(), 1, "the gateway stays");
    assert_eq!(cluster.says(PROGRESSING), ("False", "ScaledToZero"));
    assert_eq!(cluster.says(DECODE_READY), ("False", "ScaledToZero"));
    assert_eq!(cluster.says(PLANNED).0, "True");
    assert_eq!(cluster.status().replicas, Some(0));
    let words = &cluster.condition(READY).message;
    assert!(
        words.ends_with(
            "its autoscaler asks for no workers, and requests wait until it asks for some"
        ),
        "{words}"
    );
    assert_eq!(cluster.told(), ["ScaledToZero"]);

    // Neither a request nor another deployment changes anything: the number is the autoscaler's.
    cluster.observed.demand = asked();
    cluster.observed.askers = vec![asker(&cluster, 0)];
    let told = cluster.status().clone();
    cluster.pass(Duration::from_secs(5000));
    cluster.settle();
    assert_eq!(*cluster.status(), told);
    cluster.change(&spec(1));
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "ScalingFromZero"));
    cluster.settle();
    assert_eq!(names(&cluster), before, "the same Pods of the same plan");
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let zero = cluster.status().scale_to_zero.clone().unwrap();
    let woken = (zero.at_zero, &*zero.reason);
    assert_eq!(woken, (false, "its autoscaler asks for a worker"));
    let told = cluster.told();
    assert!(told.contains(&"ScalingFromZero".to_owned()), "{told:?}");
    assert!(!told.contains(&"WorkerLost".to_owned()), "{told:?}");
}

#[test]
fn workers_come_back_with_another_number() {
    let mut cluster = emptied(1);
    for replicas in [2, 1, 3] {
        cluster.change(&spec(replicas));
        cluster.settle();
        assert_eq!(count(&cluster, PlanRole::Decode), replicas as usize);
        assert_eq!(cluster.says(READY), ("True", "Serving"));
        cluster.change(&spec(0));
        cluster.settle();
        assert_eq!(workers(&cluster), 0);
        let zero = cluster.status().scale_to_zero.clone().unwrap();
        assert_eq!(zero.reason, "its autoscaler asks for no workers");
    }
}

#[test]
fn prefill_workers_end_and_come_back_with_them() {
    let with_prefill = |replicas| {
        format!(
            "{}prefill: {{replicas: 2, scaling: {{mode: External}}}}\n",
            spec(replicas)
        )
    };
    let mut cluster = FakeCluster::new(&with_prefill(1));
    cluster.settle();
    let before = names(&cluster);
    assert_eq!(count(&cluster, PlanRole::Prefill), 2);
    cluster.change(&with_prefill(0));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    let scaler = cluster.observed.scaler.clone().expect("a scaler");
    let told = scaler.status.expect("a status");
    assert_eq!((scaler.replicas, told.replicas), (2, 0));
    // Their autoscaler starts nobody.
    cluster.observed.scaler.as_mut().expect("a scaler").replicas = 1;
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    assert!(cluster.status().is_at_zero());
    cluster.observed.scaler.as_mut().expect("a scaler").replicas = 2;
    cluster.change(&with_prefill(1));
    cluster.settle();
    assert_eq!(names(&cluster), before);
}

#[test]
fn a_plan_is_tried_before_its_workers_end() {
    // Nobody knows yet whether it can serve.
    let mut cluster = FakeCluster::new(&spec(0));
    cluster.broken_from = 1;
    for _ in 0..10 {
        cluster.reconcile();
        cluster.turn();
    }
    assert!(workers(&cluster) > 0);
    assert!(!cluster.status().is_at_zero());
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert!(cluster.status().is_at_zero());
    assert_eq!(workers(&cluster), 0);
    // Nor of another spec.
    let other = format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 256}}\n{}",
        spec(0)
    );
    cluster.change(&other);
    cluster.reconcile();
    assert!(!cluster.status().is_at_zero());
    cluster.settle();
    assert!(cluster.status().is_at_zero());
    assert_eq!(workers(&cluster), 0);
    let newest = cluster.observed.plans.last().unwrap();
    assert_eq!(newest.spec.model.context_length, 256);
}

#[test]
fn whoever_is_asked_for_and_has_no_place_waits_for_one_and_asks_whom_it_outranks() {
    let mut cluster = emptied(1);
    fill(&mut cluster, Vec::new());
    cluster.change(&spec(1));
    for (priority, who) in [(0, &[][..]), (-1, &["idle"][..])] {
        let idle = neighbour_everywhere(&cluster, "idle", priority, 900.0);
        cluster.observed.neighbours = vec![idle];
        let decision = cluster.reconcile();
        assert_eq!(names_of(&decision.asks), who);
        assert_eq!(workers(&cluster), 0);
        assert_eq!(cluster.says(DEGRADED), ("True", "NodesTaken"));
    }
    // It is no longer asked for.
    cluster.change(&spec(0));
    cluster.settle();
    assert!(cluster.status().is_at_zero());
    cluster.change(&spec(1));
    empty(&mut cluster);
    cluster.settle();
    assert!(workers(&cluster) > 0);
    // Nobody has its workers end while the autoscaler asks for them.
    cluster.observed.askers = vec![asker(&cluster, 9)];
    cluster.pass(Duration::from_secs(5000));
    cluster.settle();
    assert!(workers(&cluster) > 0);
}

#[test]
fn workers_that_nobody_may_end_any_more_come_back() {
    let mut cluster = emptied(2);
    cluster.change("decode: {replicas: 2}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    assert_eq!(cluster.status().scale_to_zero, None);
}
