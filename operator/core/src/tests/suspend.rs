//! `spec.suspend`: suspending and resuming.

use std::sync::Arc;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{
    DECODE_READY, DEGRADED, MODEL_READY, PLANNED, PREFILL_READY, PROGRESSING, READY,
};
use crate::decision::{Decision, Grace};
use crate::observed::Holding;
use crate::plan_record::{has_failed, has_served};
use crate::testing::GIB;

fn names(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.name.clone()).collect()
}

fn routes(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    let gateways = pods.filter(|pod| pod.role.is_gateway());
    gateways.map(|pod| pod.routes.clone()).collect()
}

/// Kinds and names of the objects of a decision, and of what it removes.
fn objects(decision: &Decision) -> (Vec<String>, usize) {
    let name = |object: &kube_core::DynamicObject| {
        let kind = object.types.as_ref().map(|types| types.kind.clone());
        format!("{} {:?}", kind.unwrap_or_default(), object.metadata.name)
    };
    let names = decision.objects.iter().map(name).collect();
    (names, decision.remove_objects.len())
}

fn suspended(yaml: &str) -> FakeCluster {
    let mut cluster = FakeCluster::new(yaml);
    cluster.settle();
    cluster.told();
    cluster.change(&format!("suspend: true\n{yaml}"));
    cluster
}

#[test]
fn it_drains_like_a_rollout_and_comes_back_with_the_same_plan() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.told();
    let before = names(&cluster);
    let kept = objects(&cluster.reconcile());
    let told = routes(&cluster);
    cluster.change("suspend: true");
    let first = cluster.reconcile();
    assert_eq!(routes(&cluster), told, "workers answer to the end");
    let ended = |decision: &Decision| -> Vec<String> {
        let ends = decision.delete_pods.iter();
        ends.map(|end| format!("{} {:?}", end.name, end.grace))
            .collect()
    };
    // The gateway first: its streams end on workers that are still there.
    let gateway = before.iter().find(|name| name.contains("gateway")).unwrap();
    assert_eq!(ended(&first), [format!("{gateway} {:?}", Grace::Exit)]);
    assert_eq!(cluster.says(READY), ("False", "Suspended"));
    assert_eq!(cluster.says(PROGRESSING), ("True", "Suspending"));
    assert_eq!(objects(&first), kept, "objects stay");
    cluster.turn();
    let second = cluster.reconcile();
    assert_eq!(second.delete_pods.len(), before.len() - 1);
    cluster.settle();
    assert_eq!(names(&cluster), [""; 0]);
    for (condition, status) in [
        (READY, "False"),
        (PREFILL_READY, "False"),
        (DECODE_READY, "False"),
        (PROGRESSING, "False"),
        (DEGRADED, "False"),
    ] {
        assert_eq!(
            cluster.says(condition),
            (status, "Suspended"),
            "{condition}"
        );
    }
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    assert_eq!(cluster.says(MODEL_READY).0, "True");
    for pool in &cluster.status().pool_statuses {
        assert_eq!(
            (pool.desired, pool.replicas, pool.ready),
            (0, 0, 0),
            "{}",
            pool.name
        );
        assert_eq!(pool.summary, "0/0");
    }
    assert!(cluster.status().selector.is_some(), "for /scale");
    assert_eq!(cluster.told(), ["Suspended"]);
    assert_eq!(cluster.observed.plans.len(), 1);

    cluster.change("");
    cluster.reconcile();
    assert_eq!(cluster.says(PROGRESSING), ("True", "Resuming"));
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    cluster.settle();
    assert_eq!(names(&cluster), before, "the same Pods of the same plan");
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(PROGRESSING), ("False", "Complete"));
    let told = cluster.told();
    assert!(told.contains(&"Resumed".to_owned()), "{told:?}");
    assert!(
        !told
            .iter()
            .any(|it| it.contains("Lost") || it.contains("Scaled")),
        "{told:?}"
    );
}

#[test]
fn nothing_is_planned_nor_looked_for_while_it_is_suspended() {
    let mut cluster = FakeCluster::new("suspend: true");
    cluster.settle();
    assert!(cluster.observed.plans.is_empty());
    assert_eq!(cluster.says(PLANNED), ("False", "Suspended"));
    assert_eq!(cluster.says(READY), ("False", "Suspended"));
    assert_eq!(cluster.status().pool_statuses[1].desired, 0);
    cluster.change("");
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));

    let model = "model: {source: {hostPath: {path: /models/m}}}";
    let mut cluster = FakeCluster::new(&format!("suspend: true\n{model}"));
    cluster.settle();
    assert!(
        cluster.observed.pods.is_empty(),
        "no Pod looks for the model"
    );
    assert_eq!(cluster.says(MODEL_READY), ("False", "Suspended"));
    cluster.change(model);
    cluster.reconcile();
    assert!(!cluster.observed.pods.is_empty());
    // The inspections end with the rest.
    cluster.change(&format!("suspend: true\n{model}"));
    cluster.settle();
    assert!(cluster.observed.pods.is_empty());
}

#[test]
fn what_is_changed_meanwhile_is_planned_at_the_end() {
    let mut cluster = suspended("");
    cluster.settle();
    cluster.change("suspend: true\ndecode: {replicas: 2}");
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(PLANNED), ("False", "Suspended"));
    cluster.change("suspend: true");
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"), "as it was");
    cluster.change("decode: {replicas: 2}");
    cluster.settle();
    assert_eq!(cluster.observed.plans.last().unwrap().spec.generation, 2);
    assert_eq!(cluster.ranks().len(), 4);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn neither_lost_nodes_nor_another_image_move_it_at_rest() {
    let mut cluster = suspended("");
    cluster.settle();
    let node = cluster.observed.plans[0].spec.ranks[0].node.clone();
    cluster.node(&node, |node| node.is_cordoned = true);
    let mut settings = (*cluster.observed.settings).clone();
    settings.worker_image = "hearth/worker:2".to_owned();
    cluster.observed.settings = Arc::new(settings);
    cluster.pass(Duration::from_secs(3600));
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(DEGRADED), ("False", "Suspended"));
    cluster.change("");
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.ranks().iter().all(|(_, other)| *other != node));
}

#[test]
fn a_place_that_others_took_is_not_fought_for() {
    let mut cluster = suspended("");
    cluster.settle();
    let node = cluster.observed.plans[0].spec.ranks[0].node.clone();
    let taken = Holding {
        memory_bytes: 4 * GIB - 64,
        ..Holding::default()
    };
    cluster.observed.held_by_others.insert(node.clone(), taken);
    cluster.change("");
    let first = cluster.reconcile();
    assert!(
        first.create_plan.is_some(),
        "it is planned where there is room"
    );
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.ranks().iter().all(|(_, other)| *other != node));
}

/// Time spent suspended does not count as time without progress.
#[test]
fn a_plan_that_had_not_served_has_its_whole_deadline_again() {
    let yaml = "rollout: {progressDeadline: 1m}\ndecode: {replicas: 2}";
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 1m}");
    cluster.settle();
    cluster.broken_from = 2;
    cluster.change(yaml);
    cluster.reconcile();
    cluster.turn();
    cluster.change(&format!("suspend: true\n{yaml}"));
    cluster.settle();
    cluster.pass(Duration::from_secs(3600));
    cluster.settle();
    assert!(
        !has_failed(&cluster.observed.plans[1]),
        "at rest nothing is late"
    );
    cluster.change(yaml);
    cluster.reconcile();
    cluster.turn();
    cluster.pass(Duration::from_secs(30));
    cluster.reconcile();
    assert!(!has_failed(&cluster.observed.plans[1]));
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert!(has_served(&cluster.observed.plans[1]));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn budgets_ask_for_nothing_of_a_deployment_at_rest() {
    let mut cluster = suspended("");
    let least = |decision: &Decision| -> Vec<serde_json::Value> {
        let is_budget = |object: &&kube_core::DynamicObject| {
            let types = object.types.as_ref();
            types.is_some_and(|types| types.kind == "PodDisruptionBudget")
        };
        let budgets = decision.objects.iter().filter(is_budget);
        budgets
            .map(|it| it.data["spec"]["minAvailable"].clone())
            .collect()
    };
    assert_eq!(least(&cluster.reconcile()), [0, 0, 0]);
    cluster.change("");
    assert_eq!(least(&cluster.reconcile()), [1, 1, 1]);
}
