//! Places of plans that come back after another was given up: what has no Pod may have been given to others.

use std::collections::BTreeSet;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use super::sharing::{EVERYTHING, neighbour};
use super::zero::{asked, at_zero, idle_for};
use crate::conditions::{DEGRADED, NODES_TAKEN, PLANNED, READY, ROLLED_BACK, holds_nothing};
use crate::observed::{Demand, Holding};
use crate::plan_record::ahead;
use crate::testing::GIB;

/// A deployment whose second plan never becomes ready, at the end of its deadline; of the first, all but one worker run.
fn late() -> (FakeCluster, String) {
    let spec = |more: &str| format!("rollout: {{progressDeadline: 1m}}\n{more}");
    let mut cluster = FakeCluster::new(&spec(""));
    cluster.settle();
    cluster.broken_from = 2;
    cluster.change(&spec("decode: {maxBatch: 4}"));
    for _ in 0..3 {
        cluster.reconcile();
        cluster.turn();
    }
    assert_eq!(cluster.observed.plans.len(), 2);
    let ranks = &cluster.observed.plans[0].spec.ranks;
    let decode = ranks.iter().find(|rank| rank.name == "decode-0").unwrap();
    let node = decode.node.clone();
    let pods = &mut cluster.observed.pods;
    pods.retain(|pod| !(pod.plan_generation == 1 && pod.rank == "decode-0"));
    assert!(pods.iter().any(|pod| pod.plan_generation == 1));
    cluster.pass(Duration::from_secs(120));
    (cluster, node)
}

fn worker_nodes(cluster: &FakeCluster) -> BTreeSet<String> {
    let ranks = cluster.ranks().into_iter();
    let workers = ranks.filter(|(rank, _)| rank.starts_with("decode"));
    workers.map(|(_, node)| node).collect()
}

#[test]
fn what_was_given_to_others_is_not_held_from_the_moment_that_a_plan_is_given_up() {
    let (mut cluster, node) = late();
    let taken = Holding {
        memory_bytes: 4 * GIB - 64,
        ..Holding::default()
    };
    cluster.observed.held_by_others.insert(node.clone(), taken);
    cluster.reconcile();
    assert_eq!(cluster.says(PLANNED), ("False", ROLLED_BACK));
    assert_eq!(cluster.says(DEGRADED), ("True", NODES_TAKEN));
    let deployment = cluster.observed.deployment.clone();
    assert!(holds_nothing(deployment.status.as_ref()));
    // The plan that came back is made again where there is room.
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert_eq!(cluster.says(READY).0, "True");
    // The gateway of the other one has read where its requests go on.
    cluster.pass(Duration::from_secs(15));
    cluster.settle();
    assert!(!worker_nodes(&cluster).contains(&node));
}

#[test]
fn a_place_that_nobody_took_is_taken_again() {
    let (mut cluster, node) = late();
    cluster.reconcile();
    assert_eq!(cluster.says(DEGRADED), ("True", ROLLED_BACK));
    let deployment = cluster.observed.deployment.clone();
    assert!(!holds_nothing(deployment.status.as_ref()));
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 2, "nothing new is planned");
    assert_eq!(worker_nodes(&cluster), BTreeSet::from([node]));
}

#[test]
fn one_that_was_replaced_before_it_served_never_comes_back() {
    let (mut cluster, _) = late();
    let generation = |cluster: &FakeCluster| {
        let ahead = ahead(&cluster.observed.plans, None).expect("a plan");
        ahead.spec.generation
    };
    assert_eq!(generation(&cluster), 2);
    cluster.change("rollout: {progressDeadline: 1m}\ndecode: {maxBatch: 2}");
    cluster.reconcile();
    assert_eq!(generation(&cluster), 3);
    cluster.pass(Duration::from_secs(120));
    cluster.reconcile();
    assert_eq!(cluster.says(PLANNED), ("False", ROLLED_BACK));
    assert_eq!(generation(&cluster), 1, "the one that served");
}

/// At zero, others were given its place; a spec that changes nothing but whether it rests is planned anew.
#[test]
fn a_place_that_was_taken_at_zero_is_not_kept_by_a_plan_with_the_same_numbers() {
    let mut cluster = at_zero();
    let ranks = cluster.observed.plans[0].spec.ranks.iter();
    let workers = ranks.filter(|rank| rank.name.starts_with("decode"));
    let before: BTreeSet<String> = workers.map(|rank| rank.node.clone()).collect();
    assert!(cluster.status().is_at_zero());
    let taken = Holding {
        memory_bytes: 4 * GIB - 64,
        ..Holding::default()
    };
    let held = before.iter().map(|node| (node.clone(), taken.clone()));
    cluster.observed.held_by_others = held.collect();
    cluster.observed.demand = None;
    cluster.change("");
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(worker_nodes(&cluster).is_disjoint(&before));
}

/// A deployment that is resumed: others have what its workers had.
fn taken() -> (FakeCluster, BTreeSet<String>) {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = worker_nodes(&cluster);
    cluster.change("suspend: true");
    cluster.settle();
    let taken = Holding {
        memory_bytes: 64 * GIB,
        ..Holding::default()
    };
    let nodes = cluster.observed.nodes.keys();
    let held = nodes.map(|node| (node.clone(), taken.clone()));
    cluster.observed.held_by_others = held.collect();
    (cluster, before)
}

fn workers(cluster: &FakeCluster) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| !pod.role.is_gateway()).count()
}

#[test]
fn nothing_starts_where_others_are_whatever_is_wrong_besides() {
    let (mut cluster, _) = taken();
    // A spec that is refused.
    cluster.change("decode: {replicas: 0}");
    for _ in 0..3 {
        cluster.reconcile();
        cluster.turn();
    }
    assert_eq!(cluster.says(DEGRADED), ("True", NODES_TAKEN));
    assert_eq!(workers(&cluster), 0);

    // A node of its that is cordoned.
    let (mut cluster, before) = taken();
    let node = before.first().expect("a node").clone();
    cluster.node(&node, |node| node.is_cordoned = true);
    cluster.change("");
    for _ in 0..3 {
        cluster.reconcile();
        cluster.turn();
    }
    assert_eq!(cluster.says(DEGRADED), ("True", NODES_TAKEN));
    assert!(cluster.condition(DEGRADED).message.contains("is cordoned"));
    assert_eq!(workers(&cluster), 0);
}

/// Its Pods have ended there, as in a shutdown of the node.
#[test]
fn a_node_that_is_not_ready_for_a_moment_is_given_to_nobody() {
    let (mut cluster, node) = late();
    cluster.reconcile();
    cluster.settle();
    assert_eq!(cluster.says(READY).0, "True");
    let plans = cluster.observed.plans.len();
    let now = cluster.observed.now;
    cluster.node(&node, |node| {
        node.is_ready = false;
        node.not_ready_since = Some(now);
    });
    for pod in &mut cluster.observed.pods {
        if pod.node == node {
            let pod = std::sync::Arc::make_mut(pod);
            (pod.is_ready, pod.phase) = (false, "Failed".to_owned());
        }
    }
    for _ in 0..5 {
        cluster.reconcile();
        cluster.turn();
        assert_ne!(cluster.says(DEGRADED).1, NODES_TAKEN);
        let deployment = cluster.observed.deployment.clone();
        assert!(!holds_nothing(deployment.status.as_ref()));
    }
    assert_eq!(cluster.observed.plans.len(), plans);
    cluster.node(&node, |node| {
        node.is_ready = true;
        node.not_ready_since = None;
        node.ready_since = Some(now);
    });
    cluster.settle();
    assert_eq!(worker_nodes(&cluster), BTreeSet::from([node]));
}

/// The rest of a spec of workers of which a node has room for one.
const LARGE: &str = "kvCache: {memory: 2500Mi}}\nprefill: {mode: Chunked}\n";

/// A deployment whose two workers had a node each until they ended; a busy one of that priority has the office.
fn half_taken(priority: i32) -> FakeCluster {
    let mut cluster = FakeCluster::new(&format!(
        "autoscaling: {{scaleToZeroAfter: 5m}}\n\
         decode: {{replicas: 2, scaling: {{mode: Auto, minReplicas: 0, maxReplicas: 2}}, {LARGE}"
    ));
    // Seen for too short for the number to fall first.
    let idle_for = |idle_s: f64| {
        let demand = idle_for(idle_s)?;
        Some(Demand {
            span_s: 20.0,
            ..demand
        })
    };
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    assert_eq!(worker_nodes(&cluster).len(), 2);
    cluster.told();
    cluster.observed.demand = idle_for(301.0);
    cluster.pass(Duration::from_secs(301));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    let held = [("office".to_owned(), EVERYTHING)];
    cluster.observed.held_by_others = held.into();
    cluster.observed.neighbours = vec![neighbour("busy", &["office"], priority, 0.0)];
    cluster.observed.demand = asked();
    cluster
}

#[test]
fn a_pool_that_follows_the_load_starts_on_the_nodes_that_nobody_took() {
    let mut cluster = half_taken(1);
    cluster.told();
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "ScalingFromZero"));
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(worker_nodes(&cluster), BTreeSet::from(["attic".to_owned()]));
    let pool = cluster.status().pool("decode").expect("a pool").clone();
    let told = pool.autoscaling.expect("a decision");
    let words = "others were given room of its plan";
    assert!(
        told.replicas == 1 && told.reason.starts_with(&format!("2 to 1: {words}")),
        "{told:?}"
    );
    let limit = told.limited_by.expect("a limit");
    assert!(
        limit.starts_with(&format!("2 decode workers: {words}")),
        "{limit}"
    );
    let events = std::mem::take(&mut cluster.events);
    let mut scaled = events
        .iter()
        .filter(|it| it.reason.starts_with("Scal") || it.reason == "PlanReplaced");
    let event = scaled.next().expect("an event");
    assert_eq!(event.reason, "ScaledDecode");
    assert!(
        event
            .message
            .starts_with(&format!("2 to 1 decode workers: {words}")),
        "{events:?}"
    );
    // And that it starts at all.
    assert_eq!(
        scaled.next().map(|it| &*it.reason),
        Some("ScalingFromZero"),
        "{events:?}"
    );
    // Once it has room again, it grows with its load.
    cluster.observed.held_by_others.clear();
    cluster.observed.neighbours.clear();
    cluster.observed.demand = Some(Demand {
        arrivals: 600.0,
        long_arrivals: 3000.0,
        recent_arrivals: 150.0,
        prompt_tokens: Some(250.0),
        output_tokens: Some(100.0),
        step_ms: Some(50.0),
        step_tokens: Some(1.0),
        ..idle_for(0.0).expect("a demand")
    });
    cluster.settle();
    assert_eq!(worker_nodes(&cluster).len(), 2);
}

#[test]
fn a_pool_waits_for_all_of_its_place_where_others_end_for_it_or_its_number_is_not_its_own() {
    // One of the same priority gives way in its turn.
    let mut equal = half_taken(0);
    let decision = equal.reconcile();
    assert_eq!((decision.asks.len(), workers(&equal)), (1, 0));
    assert_eq!(equal.says(DEGRADED), ("True", NODES_TAKEN));
    // The number of the spec is all or nothing, as it is for a new deployment.
    let mut fixed = half_taken(1);
    fixed.change(&format!("decode: {{replicas: 2, {LARGE}"));
    for _ in 0..3 {
        fixed.reconcile();
        fixed.turn();
    }
    assert_eq!(fixed.says(DEGRADED), ("True", NODES_TAKEN));
    assert_eq!(workers(&fixed), 0);
}
