//! Plans that do not come up: what counts as progress, when one is given up, and what is reported.

use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, PROGRESSING, READY};
use crate::observed::{ContainerView, Placement, Reach};

#[test]
fn a_plan_that_never_comes_up_is_given_up_for_the_one_before() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.told();
    cluster.broken_from = 2;
    cluster.change("decode: {maxBatch: 4}\nrollout: {progressDeadline: 1m}\n");
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_some());
    assert_eq!(cluster.says(PROGRESSING).0, "True");
    for _ in 0..30 {
        cluster.turn();
        cluster.reconcile();
        assert_eq!(cluster.condition(READY).status, "True");
    }
    cluster.pass(Duration::from_secs(31));
    cluster.reconcile();
    cluster.settle();
    let status = cluster.status();
    assert_eq!(status.plan.as_ref().unwrap().generation, 1);
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    assert_eq!(cluster.says(DEGRADED), ("True", "RolledBack"));
    let message = &cluster.condition(DEGRADED).message;
    assert!(
        message.contains("plan 2 was given up") && message.contains("is loading the model"),
        "{message}"
    );
    assert!(message.contains("no progress for 1m"), "{message}");
    let told = cluster.told();
    assert_eq!(
        told.iter().filter(|reason| *reason == "RolledBack").count(),
        1,
        "{told:?}"
    );
    assert_eq!(cluster.observed.pods.len(), 3);
    // Another spec is tried.
    cluster.broken_from = u64::MAX;
    cluster.change("decode: {maxBatch: 5}\n");
    cluster.settle();
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 3);
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    // And back to the first.
    cluster.change("");
    cluster.settle();
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 4);
    let names: Vec<u64> = cluster
        .observed
        .plans
        .iter()
        .map(|plan| plan.spec.generation)
        .collect();
    assert_eq!(names, [3, 4], "the current plan and the one before");
}

#[test]
fn the_first_plan_is_tried_for_ever() {
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 1m}\n");
    cluster.broken_from = 1;
    cluster.reconcile();
    cluster.turn();
    cluster.reconcile();
    cluster.turn();
    cluster.pass(Duration::from_secs(120));
    cluster.reconcile();
    assert_eq!(
        cluster.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
    assert!(
        cluster
            .told()
            .contains(&"ProgressDeadlineExceeded".to_owned())
    );
    assert_eq!(cluster.observed.plans.len(), 1);
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
}

#[test]
fn a_worker_that_hangs_is_told_from_one_that_loads() {
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    cluster.told();
    cluster.pod("demo-decode-1", |pod| {
        pod.ip = "10.9.0.1".to_owned();
        pod.is_ready = false;
        pod.has_lost_readiness = true;
    });
    cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "ReadinessLost"));
    let told = Placement {
        reach: Reach::Hung,
        ..Placement::default()
    };
    let address = "10.9.0.1:9400".parse().unwrap();
    cluster.observed.placements.insert(address, told);
    cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "Hung"));
    assert_eq!(cluster.says(DEGRADED), ("True", "Hung"));
    assert!(
        cluster
            .condition(DEGRADED)
            .message
            .contains("decode-1 hangs")
    );
    assert_eq!(cluster.says(READY).0, "True", "the other one answers");
    let told = cluster.told();
    assert!(told.iter().any(|reason| reason == "Hung"), "{told:?}");
    // It comes back by itself: nothing was created anew, and an old report of its gateway no longer counts.
    cluster.pod("demo-decode-1", |pod| {
        pod.is_ready = true;
        pod.has_lost_readiness = false;
    });
    let decision = cluster.reconcile();
    assert!(decision.create_pods.is_empty());
    assert_eq!(cluster.says(DECODE_READY), ("True", "AllReady"));
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
}

#[test]
fn loading_is_progress_as_long_as_the_worker_does_not_end() {
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 10m}\n");
    cluster.reconcile();
    cluster.turn();
    cluster.turn();
    let loading = |restarts: u32| ContainerView {
        restarts,
        is_starting: true,
        ..ContainerView::default()
    };
    let hour = Duration::from_secs(3600);
    cluster.pod("demo-decode-0", |pod| {
        pod.is_ready = false;
        pod.container = Some(loading(0));
    });
    for _ in 0..3 {
        cluster.pass(hour);
        cluster.reconcile();
        assert_eq!(cluster.says(PROGRESSING), ("True", "Starting"));
    }
    // It has exited once: its second attempt is not progress.
    cluster.pod("demo-decode-0", |pod| pod.container = Some(loading(1)));
    cluster.reconcile();
    assert_eq!(
        cluster.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
    // Placed a moment ago.
    let now = cluster.observed.now;
    cluster.pod("demo-decode-0", |pod| {
        pod.container = None;
        pod.progressed = Some(now);
    });
    cluster.pass(Duration::from_secs(599));
    cluster.reconcile();
    assert_eq!(cluster.says(PROGRESSING), ("True", "Starting"));
    cluster.pass(Duration::from_secs(1));
    cluster.reconcile();
    assert_eq!(
        cluster.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
}
