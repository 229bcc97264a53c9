//! Deployments that end their workers for others, in a simulated cluster.

use std::time::Duration;

use super::fake_cluster::FakeCluster;
use super::zero::{YAML, asked, at_zero, call, idle_for, workers};
use crate::calls::ANNOTATION_LOAD;
use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, PROGRESSING, READY, holds_nothing};
use crate::key::Key;
use crate::observed::{Asker, Holding, Neighbour};
use crate::testing::GIB;

pub(super) const EVERYTHING: Holding = Holding {
    cpu_millis: 1_000_000,
    memory_bytes: 1024 * GIB,
    gpus: 0,
    exclusive_cpus: Vec::new(),
    claimed_gpus: std::collections::BTreeSet::new(),
    virtual_bytes: 0,
};

pub(super) fn asker(cluster: &FakeCluster, priority: i32) -> Asker {
    Asker {
        key: Key::new("default", "other"),
        priority,
        since: cluster.observed.now,
    }
}

/// A deployment that holds all of some nodes.
pub(super) fn neighbour(name: &str, nodes: &[&str], priority: i32, idle_s: f64) -> Neighbour {
    let holding = nodes.iter().map(|node| ((*node).to_owned(), EVERYTHING));
    Neighbour {
        key: Key::new("default", name),
        priority,
        keeps: false,
        idle_s: Some(idle_s),
        preloaded_since: None,
        is_leaving: false,
        is_starting: false,
        holding: holding.collect(),
    }
}

/// One that holds all of all nodes.
pub(super) fn neighbour_everywhere(
    cluster: &FakeCluster,
    name: &str,
    priority: i32,
    idle_s: f64,
) -> Neighbour {
    let nodes: Vec<&str> = cluster.observed.nodes.keys().map(String::as_str).collect();
    neighbour(name, &nodes, priority, idle_s)
}

/// Lets others hold all of all nodes.
pub(super) fn fill(cluster: &mut FakeCluster, neighbours: Vec<Neighbour>) {
    let nodes = cluster.observed.nodes.keys();
    let all = nodes.map(|node| (node.clone(), EVERYTHING));
    cluster.observed.held_by_others = all.collect();
    cluster.observed.neighbours = neighbours;
}

/// Lets others hold nothing.
pub(super) fn empty(cluster: &mut FakeCluster) {
    cluster.observed.held_by_others.clear();
    cluster.observed.neighbours.clear();
}

/// Seconds after the workers are ready at which they end for another that asks from then on.
fn seconds_until_way(priority: i32, demand: Option<crate::observed::Demand>) -> Option<u64> {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand.clone_from(&demand);
    cluster.settle();
    cluster.observed.askers = vec![asker(&cluster, priority)];
    (0..300).step_by(5).find(|_| {
        cluster.reconcile();
        let is_over = cluster.status().is_at_zero();
        cluster.pass(Duration::from_secs(5));
        is_over
    })
}

#[test]
fn idle_workers_end_for_whoever_asks_and_busy_ones_for_a_higher_priority_or_in_turn() {
    for priority in [-1, 0, 1] {
        assert_eq!(seconds_until_way(priority, idle_for(2000.0)), Some(60));
    }
    assert_eq!(seconds_until_way(1, asked()), Some(60));
    assert_eq!(seconds_until_way(0, asked()), Some(120));
    assert_eq!(seconds_until_way(-1, asked()), None);
    assert_eq!(
        seconds_until_way(1, None),
        None,
        "nobody knows of its requests"
    );
}

#[test]
fn what_arrives_waits_until_the_other_has_its_place() {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(50.0);
    cluster.observed.askers = vec![asker(&cluster, 0)];
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    let words = cluster.condition(READY).message.clone();
    assert!(words.contains("their place is for other"), "{words}");
    cluster.observed.demand = asked();
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    cluster.observed.askers.clear();
    cluster.settle();
    assert!(workers(&cluster) > 0);
}

#[test]
fn a_deployment_in_another_namespace_is_not_named() {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(50.0);
    let key = Key::new("secret", "project");
    cluster.observed.askers = vec![Asker {
        key,
        ..asker(&cluster, 0)
    }];
    cluster.settle();
    let words = cluster.condition(READY).message.clone();
    assert!(
        words.contains("another namespace") && !words.contains("project"),
        "{words}"
    );
}

/// A new deployment, on a cluster that others fill.
pub(super) fn crowded(neighbours: Vec<Neighbour>) -> FakeCluster {
    let mut cluster = FakeCluster::new(YAML);
    fill(&mut cluster, neighbours);
    cluster
}

pub(super) fn names(asks: &[Key]) -> Vec<&str> {
    asks.iter().map(|key| &*key.name).collect()
}

#[test]
fn who_finds_no_room_asks_the_one_that_was_used_least_recently() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let (first, others) = (nodes[0], &nodes[1..]);
    // Nobody gives anything up.
    let mut cluster = crowded(Vec::new());
    assert_eq!(names(&cluster.reconcile().asks), [""; 0]);
    let starting = Neighbour {
        is_starting: true,
        ..neighbour("starting", &nodes, -1, 0.0)
    };
    assert_eq!(names(&crowded(vec![starting]).reconcile().asks), [""; 0]);
    let asks = |neighbours: Vec<Neighbour>| {
        let mut cluster = crowded(neighbours);
        let decision = cluster.reconcile();
        assert!(decision.create_plan.is_none());
        let words = cluster.condition(PLANNED).message.clone();
        assert!(words.contains("it waits until"), "{words}");
        decision.asks
    };
    let busy = neighbour("busy", &[first], -5, 0.0);
    let newer = neighbour("newer", &[first], 0, 20.0);
    let older = neighbour("older", &[others[0]], 0, 900.0);
    let lower = neighbour("lower", &[first], -1, 20.0);
    let of = |all: &[&Neighbour]| {
        let asked = asks(all.iter().map(|it| (*it).clone()).collect());
        asked
            .iter()
            .map(|key| key.name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&[&busy, &newer, &older]), ["older"]);
    assert_eq!(of(&[&busy, &newer]), ["newer"]);
    assert_eq!(of(&[&busy, &newer, &older, &lower]), ["lower"]);
    assert_eq!(of(&[&busy]), ["busy"]);
    // What is ending already needs no other's end.
    let leaving = Neighbour {
        is_leaving: true,
        ..busy.clone()
    };
    assert_eq!(of(&[&leaving, &older]), ["busy"]);
}

#[test]
fn who_wakes_without_a_place_asks_and_rests_again_when_nobody_waits() {
    let mut cluster = at_zero();
    let busy = neighbour_everywhere(&cluster, "busy", 0, 0.0);
    fill(&mut cluster, vec![busy]);
    cluster.observed.demand = asked();
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), ["busy"]);
    assert_eq!(workers(&cluster), 0);
    cluster.settle();
    assert!(!cluster.status().is_at_zero());
    assert_eq!(cluster.says(PROGRESSING), ("True", "Resuming"));
    assert_eq!(cluster.condition(DECODE_READY).status, "False");
    let words = cluster.condition(DEGRADED).message.clone();
    assert!(
        words.contains("it waits until busy can end its workers"),
        "{words}"
    );
    // Whoever asked has given up.
    cluster.observed.demand = idle_for(1.0);
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), [""; 0]);
    assert!(cluster.status().is_at_zero());
    // Someone asks again, and the other has ended its workers.
    cluster.observed.demand = asked();
    cluster.reconcile();
    empty(&mut cluster);
    cluster.settle();
    assert!(workers(&cluster) > 0);
}

#[test]
fn a_load_waits_for_a_place_as_a_request_does() {
    let mut cluster = at_zero();
    let busy = neighbour_everywhere(&cluster, "busy", 0, 0.0);
    fill(&mut cluster, vec![busy.clone()]);
    call(&mut cluster, ANNOTATION_LOAD);
    for _ in 0..3 {
        cluster.pass(Duration::from_secs(100));
        let decision = cluster.reconcile();
        assert_eq!(names(&decision.asks), ["busy"]);
        assert!(!cluster.status().is_at_zero());
    }
    empty(&mut cluster);
    cluster.settle();
    assert!(workers(&cluster) > 0);

    // For no longer than a request would.
    let mut cluster = at_zero();
    fill(&mut cluster, vec![busy]);
    call(&mut cluster, ANNOTATION_LOAD);
    cluster.reconcile();
    cluster.pass(Duration::from_secs(601));
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), [""; 0]);
    assert!(cluster.status().is_at_zero());
}

#[test]
fn one_that_gives_nothing_back_asks_only_whom_it_outranks() {
    let idle = neighbour_everywhere(&FakeCluster::new(""), "idle", 0, 900.0);
    let asks = |priority: i32| {
        let mut cluster = crowded(vec![idle.clone()]);
        cluster.change(&format!("priority: {priority}"));
        cluster.reconcile().asks.len()
    };
    assert_eq!((asks(0), asks(1)), (0, 1));
}

/// Each node has room for one of its two workers.
#[test]
fn who_needs_two_nodes_awaits_the_one_that_is_free_already_too() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let (first, second) = (nodes[0], nodes[1]);
    let warm = neighbour("warm", &[first], 0, 900.0);
    let busy = neighbour("busy", &[second], 0, 0.0);
    let mut cluster = crowded(vec![warm, busy.clone()]);
    cluster.change("priority: 5\ndecode: {replicas: 2, kvCache: {memory: 2500Mi}}");
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), ["warm", "busy"]);
    assert!(decision.awaits.iter().eq(&nodes));
    // The workers of one have gone, and its room is not enough.
    cluster.observed.held_by_others.remove(first);
    cluster.observed.neighbours = vec![busy.clone()];
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), ["busy"]);
    assert!(decision.awaits.iter().eq(&nodes));
    // While the rest is kept, whoever can use it without asking anybody may have it.
    let kept = Neighbour {
        priority: 9,
        keeps: true,
        ..busy
    };
    cluster.observed.neighbours = vec![kept];
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), [""; 0]);
    assert!(decision.awaits.is_empty());
    empty(&mut cluster);
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_some());
    assert!(decision.awaits.is_empty());
}

/// Each node has room for one of its two workers.
#[test]
fn nobody_ends_workers_in_vain_while_another_stays_busy() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let (first, second) = (nodes[0], nodes[1]);
    let warm = neighbour("warm", &[first], 0, 900.0);
    let busy = |idle_s: f64| neighbour("busy", &[second], 5, idle_s);
    let mut cluster = crowded(vec![warm.clone(), busy(0.0)]);
    cluster.change(
        "decode: {scaling: {mode: Auto, minReplicas: 0}, replicas: 2, kvCache: {memory: 2500Mi}}",
    );
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), ["busy"]);
    assert!(decision.awaits.is_empty());
    let words = &cluster.condition(PLANNED).message;
    assert!(
        words.ends_with("; it waits until busy can end its workers"),
        "{words}"
    );
    cluster.observed.neighbours = vec![warm, busy(20.0)];
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), ["warm", "busy"]);
    assert!(decision.awaits.iter().eq(&nodes));
}

#[test]
fn whoever_matters_is_found_among_many_on_other_nodes() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let mut all: Vec<Neighbour> = (0..20)
        .map(|n| {
            neighbour(
                &format!("far-{n}"),
                &["elsewhere"],
                0,
                1000.0 + f64::from(n),
            )
        })
        .collect();
    all.push(neighbour("near", &nodes[..1], 0, 20.0));
    let mut cluster = crowded(all);
    assert_eq!(names(&cluster.reconcile().asks), ["near"]);
}

/// Others have its place and cannot end yet: it waits for them instead of for the scheduler.
#[test]
fn who_wakes_while_nobody_can_end_makes_no_pod_and_asks_once_somebody_can() {
    let mut cluster = at_zero();
    fill(&mut cluster, Vec::new());
    cluster.observed.demand = asked();
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), [""; 0]);
    assert_eq!(
        (workers(&cluster), decision.requeue_after),
        (0, Some(Duration::from_secs(10)))
    );
    let deployment = cluster.observed.deployment.clone();
    assert!(holds_nothing(deployment.status.as_ref()));
    cluster.observed.neighbours = vec![neighbour_everywhere(&cluster, "ready", 0, 0.0)];
    assert_eq!(names(&cluster.reconcile().asks), ["ready"]);
    empty(&mut cluster);
    cluster.settle();
    assert!(workers(&cluster) > 0);
    let deployment = cluster.observed.deployment.clone();
    assert!(!holds_nothing(deployment.status.as_ref()));
}
