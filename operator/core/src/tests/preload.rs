//! Deployments whose workers start without a request where there is room, in a simulated cluster.

use std::time::Duration;

use hearth_crds::PlanRole;

use super::fake_cluster::FakeCluster;
use super::sharing::{EVERYTHING, asker, empty, fill, names, neighbour, neighbour_everywhere};
use super::zero::{asked, call, idle_for, workers};
use crate::calls::{ANNOTATION_LOAD, ANNOTATION_UNLOAD, UNLOADED};
use crate::conditions::{DECODE_READY, READY};
use crate::preload::PLACE_LOST;

pub(super) const PRELOAD: &str = "decode: {scaling: {mode: Auto, minReplicas: 0, maxReplicas: 2}}\n\
                       autoscaling: {preload: true}\n";

fn ready() -> FakeCluster {
    served(FakeCluster::new(PRELOAD))
}

fn served(mut cluster: FakeCluster) -> FakeCluster {
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    assert!(workers(&cluster) > 0);
    cluster
}

/// One whose workers have ended for another just now.
fn gave_way() -> FakeCluster {
    give_way(FakeCluster::new(PRELOAD))
}

/// The same in such a cluster.
pub(super) fn give_way(cluster: FakeCluster) -> FakeCluster {
    let mut cluster = served(cluster);
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(50.0);
    cluster.observed.askers = vec![asker(&cluster, 0)];
    cluster.settle();
    assert!(cluster.status().is_at_zero());
    assert_eq!(workers(&cluster), 0);
    cluster
}

/// One whose workers have started again without a request.
fn preloaded() -> FakeCluster {
    let mut cluster = gave_way();
    cluster.observed.askers.clear();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(300.0);
    cluster.settle();
    assert!(workers(&cluster) > 0);
    cluster
}

/// The node of the first worker of the newest plan.
fn home(cluster: &FakeCluster) -> String {
    let newest = cluster.observed.plans.last().unwrap();
    let mut ranks = newest.spec.ranks.iter();
    let first = ranks.find(|rank| rank.role != PlanRole::Gateway).unwrap();
    first.node.clone()
}

#[test]
fn workers_come_back_when_there_is_room_and_take_nobodys_place() {
    let mut cluster = gave_way();
    let idle = neighbour_everywhere(&cluster, "idle", -9, 900.0);
    fill(&mut cluster, vec![idle]);
    cluster.observed.askers.clear();
    cluster.observed.demand = idle_for(5000.0);
    cluster.pass(Duration::from_secs(5000));
    let decision = cluster.reconcile();
    assert_eq!(names(&decision.asks), [""; 0]);
    let next = |cluster: &mut FakeCluster| cluster.reconcile().requeue_after.unwrap();
    let first = next(&mut cluster);
    assert!(first <= Duration::from_secs(30), "{first:?}");
    cluster.pass(first);
    assert_eq!(next(&mut cluster), Duration::from_secs(30));
    let mut other = (*cluster.observed.deployment).clone();
    other.metadata.uid = other.metadata.uid.map(|uid| uid + "7");
    let this = std::mem::replace(&mut cluster.observed.deployment, other.into());
    assert_ne!(next(&mut cluster), Duration::from_secs(30), "another");
    cluster.observed.deployment = this;
    assert!(cluster.status().is_at_zero());
    for (type_, words) in [
        (READY, "or room for them on nodes, starts the workers again"),
        (DECODE_READY, "or nodes have room for them"),
    ] {
        let told = &cluster.condition(type_).message;
        assert!(told.contains(words), "{told}");
    }
    empty(&mut cluster);
    cluster.told();
    cluster.settle();
    assert!(workers(&cluster) > 0);
    let told = cluster.told();
    assert!(told.contains(&"ScalingFromZero".to_owned()), "{told:?}");
    // Nobody asks anything, and they stay.
    cluster.observed.demand = idle_for(2_000_000.0);
    cluster.pass(Duration::from_secs(2_000_000));
    cluster.settle();
    assert!(workers(&cluster) > 0);
}

#[test]
fn they_do_not_come_back_while_another_waits_nor_at_once() {
    let mut cluster = gave_way();
    cluster.pass(Duration::from_secs(1000));
    cluster.settle();
    assert_eq!(workers(&cluster), 0, "the other has yet to take its place");
    cluster.observed.askers.clear();
    let nodes = cluster.observed.nodes.keys().cloned();
    cluster.observed.awaited_nodes = nodes.collect();
    cluster.settle();
    assert_eq!(workers(&cluster), 0, "yet another waits for that room");
    let mut elsewhere = gave_way();
    elsewhere.observed.askers.clear();
    elsewhere.pass(Duration::from_secs(100));
    let home = home(&elsewhere);
    elsewhere.observed.awaited_nodes = [home.clone()].into();
    elsewhere.settle();
    assert!(workers(&elsewhere) > 0);
    assert_ne!(self::home(&elsewhere), home, "another node has room");
    cluster.observed.awaited_nodes.clear();
    cluster.settle();
    assert!(workers(&cluster) > 0);

    // A minute lies between an end and the next start, unless somebody asks.
    for (asks, seconds) in [(false, 60), (true, 0)] {
        let mut cluster = gave_way();
        cluster.observed.askers.clear();
        if asks {
            cluster.observed.demand = asked();
        }
        let ended = cluster.status().scale_to_zero.clone().unwrap().since;
        cluster.observed.now = ended.parse().unwrap();
        let after = (0..100).find(|_| {
            cluster.reconcile();
            let is_back = !cluster.status().is_at_zero();
            cluster.pass(Duration::from_secs(1));
            is_back
        });
        assert_eq!(after, Some(seconds));
    }
}

#[test]
fn they_end_at_once_for_others_before_they_have_been_asked_anything() {
    // Ready.
    let mut cluster = preloaded();
    cluster.observed.askers = vec![asker(&cluster, -5)];
    cluster.reconcile();
    assert!(cluster.status().is_at_zero());

    // Starting.
    let mut cluster = gave_way();
    cluster.observed.askers.clear();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(300.0);
    cluster.reconcile();
    assert!(!cluster.status().is_at_zero());
    assert_eq!(cluster.says(DECODE_READY).0, "False");
    cluster.observed.askers = vec![asker(&cluster, 0)];
    let starting = cluster.observed.clone();
    cluster.reconcile();
    assert!(cluster.status().is_at_zero());
    cluster.settle();
    assert_eq!(workers(&cluster), 0);

    // Somebody waits for these, or may: they stay as others do.
    for demand in [asked(), None] {
        let mut cluster = preloaded();
        cluster.observed = starting.clone();
        cluster.observed.demand = demand;
        cluster.settle();
        assert!(workers(&cluster) > 0);
    }
    let mut cluster = preloaded();
    cluster.observed.demand = idle_for(1.0);
    cluster.observed.askers = vec![asker(&cluster, -5)];
    cluster.reconcile();
    assert!(!cluster.status().is_at_zero(), "something has been asked");
}

#[test]
fn workers_that_do_not_become_ready_end_for_others_once_whoever_asked_has_gone() {
    let mut cluster = gave_way();
    cluster.observed.askers.clear();
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = idle_for(300.0);
    cluster.reconcile();
    cluster.observed.askers = vec![asker(&cluster, 0)];
    for (demand, ends) in [
        (asked(), false),
        (idle_for(9.0), false),
        (idle_for(10.0), true),
    ] {
        cluster.pass(Duration::from_secs(500));
        cluster.observed.demand = demand;
        assert_eq!(cluster.says(DECODE_READY).0, "False");
        cluster.reconcile();
        assert_eq!(cluster.status().is_at_zero(), ends);
    }
}

#[test]
fn workers_that_lose_their_node_end_rather_than_ask_others_for_another() {
    type Loss = fn(&mut crate::observed::NodeView);
    let cordoned: Loss = |node| node.is_cordoned = true;
    let lost: Loss = |node| {
        node.is_ready = false;
        node.not_ready_since = Some(crate::testing::at(0));
    };
    for loss in [cordoned, lost] {
        let mut cluster = preloaded();
        let home = home(&cluster);
        let mut names_of = cluster.observed.nodes.keys();
        let other = names_of.rfind(|name| **name != home).unwrap();
        let other = other.clone();
        let held = [(other.clone(), EVERYTHING)];
        cluster.observed.held_by_others = held.into();
        cluster.observed.neighbours = vec![neighbour("idle", &[&other], 0, 900.0)];
        cluster.node(&home, loss);
        let mut busy = FakeCluster::new(PRELOAD);
        busy.observed = cluster.observed.clone();
        busy.observed.demand = asked();
        assert_eq!(names(&busy.reconcile().asks), ["idle"]);

        let decision = cluster.reconcile();
        assert_eq!(names(&decision.asks), [""; 0]);
        assert!(decision.awaits.is_empty());
        let zero = cluster.status().scale_to_zero.clone().unwrap();
        assert_eq!((zero.at_zero, &*zero.reason), (true, PLACE_LOST));
        for _ in 0..5 {
            cluster.pass(Duration::from_secs(100));
            let decision = cluster.reconcile();
            assert_eq!(names(&decision.asks), [""; 0]);
            assert!(cluster.status().is_at_zero());
        }
        empty(&mut cluster);
        cluster.settle();
        assert_eq!(self::home(&cluster), other);
        assert!(workers(&cluster) > 0);
    }
}

#[test]
fn workers_that_somebody_unloads_stay_away_until_they_are_needed() {
    for is_load in [true, false] {
        let mut cluster = ready();
        call(&mut cluster, ANNOTATION_UNLOAD);
        cluster.settle();
        cluster.pass(Duration::from_secs(5000));
        cluster.observed.demand = idle_for(5000.0);
        cluster.settle();
        assert_eq!(workers(&cluster), 0);
        match is_load {
            true => call(&mut cluster, ANNOTATION_LOAD),
            false => cluster.observed.demand = asked(),
        }
        cluster.settle();
        assert!(workers(&cluster) > 0);
    }
}

#[test]
fn workers_that_somebody_unloads_do_not_start_or_end_while_they_start() {
    // At zero.
    let mut cluster = gave_way();
    cluster.observed.askers.clear();
    call(&mut cluster, ANNOTATION_UNLOAD);
    cluster.reconcile();
    let unloaded = |cluster: &FakeCluster| {
        let zero = cluster.status().scale_to_zero.clone().unwrap();
        zero.at_zero && zero.reason == UNLOADED
    };
    assert!(unloaded(&cluster));
    cluster.pass(Duration::from_secs(5000));
    cluster.observed.demand = idle_for(5000.0);
    cluster.settle();
    assert!(unloaded(&cluster));
    assert_eq!(workers(&cluster), 0);
    cluster.observed.demand = asked();
    cluster.settle();
    assert!(workers(&cluster) > 0);

    // Starting, with a request that is answered first.
    for has_request in [true, false] {
        let mut cluster = gave_way();
        cluster.observed.askers.clear();
        cluster.pass(Duration::from_secs(100));
        cluster.observed.demand = idle_for(300.0);
        cluster.reconcile();
        assert_eq!(cluster.says(DECODE_READY).0, "False");
        assert!(!cluster.status().is_at_zero());
        call(&mut cluster, ANNOTATION_UNLOAD);
        if has_request {
            cluster.observed.demand = asked();
            cluster.settle();
            assert!(workers(&cluster) > 0);
            cluster.observed.demand = idle_for(1.0);
        }
        cluster.settle();
        assert!(unloaded(&cluster));
        assert_eq!(workers(&cluster), 0);
        // The call was for once.
        call(&mut cluster, ANNOTATION_LOAD);
        cluster.settle();
        assert!(workers(&cluster) > 0);
    }
}

#[test]
fn the_status_says_why_workers_do_not_start_without_a_request() {
    let mut cluster = gave_way();
    let nodes: Vec<String> = cluster.observed.nodes.keys().cloned().collect();
    let says = |cluster: &mut FakeCluster, words: &str| {
        cluster.reconcile();
        assert!(cluster.status().is_at_zero());
        let told = &cluster.condition(DECODE_READY).message;
        let why = "or nodes have room for them; they do not start without one yet: ";
        assert!(told.contains(&format!("{why}{words}")), "{words}: {told}");
    };
    says(&mut cluster, "other comes first");
    cluster.observed.askers.clear();
    cluster.observed.now = ended(&cluster);
    says(&mut cluster, "they ended less than 1m ago");
    cluster.pass(Duration::from_secs(100));
    cluster.observed.demand = None;
    says(&mut cluster, "no gateway has said lately that nobody waits");
    cluster.observed.demand = idle_for(500.0);
    cluster.observed.awaited_nodes = nodes.iter().cloned().collect();
    says(
        &mut cluster,
        &format!("others are about to start on {}", nodes.join(" and ")),
    );
    cluster.observed.awaited_nodes.clear();
    fill(&mut cluster, Vec::new());
    says(&mut cluster, "others were given room of its plan");
    empty(&mut cluster);
    cluster.settle();
    assert!(workers(&cluster) > 0);
}

/// Time at which the workers ended.
fn ended(cluster: &FakeCluster) -> jiff::Timestamp {
    let zero = cluster.status().scale_to_zero.clone().unwrap();
    zero.since.parse().unwrap()
}

#[test]
fn nothing_starts_while_nobody_knows_of_requests() {
    let mut cluster = gave_way();
    cluster.observed.askers.clear();
    cluster.observed.demand = None;
    cluster.pass(Duration::from_secs(5000));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
}
