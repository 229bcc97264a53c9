//! Changes of `spec.podTemplate`, each of which is a plan of its own.

use super::fake_cluster::FakeCluster;
use crate::conditions::{PLANNED, PROGRESSING, READY, ROLLED_BACK};
use crate::names::OUTCOME_FAILED;
use crate::plan_record::{has_failed, has_served};
use std::time::Duration;

fn names(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.name.clone()).collect()
}

#[test]
fn a_template_is_a_new_plan_with_the_same_ranks() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let (ranks, before) = (cluster.ranks(), names(&cluster));
    cluster.change("podTemplate: {labels: {team: search}}");
    cluster.settle();
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 2);
    assert_eq!(cluster.ranks(), ranks);
    let after = names(&cluster);
    assert!(before.iter().all(|name| !after.contains(name)), "{after:?}");
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    // Written differently, it means the same.
    cluster.change("podTemplate: {labels: {team: search}, annotations: {}, env: []}");
    cluster.settle();
    assert_eq!(names(&cluster), after);
}

#[test]
fn a_template_that_does_not_get_ready_is_rolled_back() {
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 1m}");
    cluster.settle();
    let before = names(&cluster);
    cluster.broken_from = 2;
    cluster.change("rollout: {progressDeadline: 1m}\npodTemplate: {env: [{name: A, value: b}]}");
    for _ in 0..5 {
        cluster.reconcile();
        cluster.turn();
    }
    assert_eq!(cluster.says(READY).0, "True", "the old workers go on");
    cluster.pass(Duration::from_secs(61));
    cluster.settle();
    assert!(
        has_failed(cluster.observed.plans.last().unwrap()),
        "{OUTCOME_FAILED}"
    );
    assert!(has_served(&cluster.observed.plans[0]));
    assert_eq!(cluster.says(PLANNED), ("False", ROLLED_BACK));
    assert_eq!(cluster.says(PROGRESSING), ("False", ROLLED_BACK));
    assert_eq!(names(&cluster), before);
}

/// A plan that was made while the runtime class was in its old field is not replanned because it moves to the new one.
#[test]
fn a_runtime_class_may_move_to_its_new_field() {
    let mut cluster = FakeCluster::new("placement: {runtimeClassName: nvidia}");
    cluster.settle();
    let before = names(&cluster);
    cluster.change("podTemplate: {runtimeClassName: nvidia}");
    cluster.settle();
    assert_eq!(names(&cluster), before);
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 1);
}

#[test]
fn claims_of_devices_are_refused_where_the_cluster_has_none() {
    let claims = "podTemplate: {resourceClaims: [{name: nic, resourceClaimName: rdma}]}";
    let mut cluster = FakeCluster::new(claims);
    cluster.observed.has_device_claims = false;
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "InvalidSpec"));
    let message = &cluster.condition(PLANNED).message;
    assert!(
        message.contains("spec.podTemplate.resourceClaims"),
        "{message}"
    );
    assert!(message.contains("resource.k8s.io/v1"), "{message}");
    cluster.observed.has_device_claims = true;
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}
