//! Nodes that are lost, away for a moment, cordoned or tainted, or not there at all.

use std::time::Duration;

use super::world::World;
use crate::controller::conditions::{DEGRADED, PLANNED, READY};
use crate::controller::decide::decide;
use crate::controller::observed::{NodeView, Taint};
use crate::controller::testing::node;

#[test]
fn a_lost_node_has_its_work_done_elsewhere() {
    let mut world = World::new("");
    world.settle();
    world.told();
    let home = world.observed.pods[0].node.clone();
    world.node(&home, |node| node.is_ready = false);
    world.turn();
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 2);
    // The node comes back: nothing moves.
    world.node(&home, |node| node.is_ready = true);
    world.settle();
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 2);
}

#[test]
fn a_lost_node_that_cannot_be_replaced_is_waited_for() {
    let mut world = World::new("");
    world.observed.nodes.remove("attic");
    world.settle();
    world.told();
    world.node("office", |node| node.is_ready = false);
    world.turn();
    world.settle();
    assert_eq!(world.says(DEGRADED), ("True", "NodeLost"));
    assert_eq!(world.says(READY).0, "False");
    assert!(
        world
            .condition(DEGRADED)
            .message
            .contains("node office is not Ready")
    );
    let told = world.told();
    assert_eq!(
        told.iter().filter(|reason| *reason == "NodeLost").count(),
        1,
        "{told:?}"
    );
    assert_eq!(world.observed.pods.len(), 3, "its containers may go on");
    world.node("office", |node| node.is_ready = true);
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 1);
}

#[test]
fn a_cordoned_node_is_left_without_a_gap() {
    let mut world = World::new("");
    world.settle();
    let home = world.observed.pods[0].node.clone();
    world.node(&home, |node| node.is_cordoned = true);
    for _ in 0..20 {
        world.visit();
        assert_eq!(world.condition(READY).status, "True");
        world.turn();
    }
    assert!(
        world.ranks().iter().all(|(_, node)| *node != home),
        "{:?}",
        world.ranks()
    );
    // Both cordoned: it stays, and says so.
    let home = world.observed.pods[0].node.clone();
    world.node(&home, |node| node.is_cordoned = true);
    world.settle();
    assert_eq!(world.says(DEGRADED), ("True", "NodeCordoned"));
    assert_eq!(world.condition(READY).status, "True");
}

#[test]
fn a_taint_that_evicts_moves_work_and_others_do_not() {
    let mut world = World::new("");
    world.settle();
    let home = world.observed.pods[0].node.clone();
    let since = Some(world.observed.now);
    let taint = |key: &str, effect: &str| Taint {
        key: key.to_owned(),
        value: String::new(),
        effect: effect.to_owned(),
        since,
    };
    for stays in [
        taint("node.kubernetes.io/memory-pressure", "NoSchedule"),
        taint("maintenance", "NoSchedule"),
        taint("example.net/agent-not-ready", "NoExecute"),
    ] {
        world.node(&home, |node| node.taints = vec![stays.clone()]);
        world.settle();
        assert_eq!(world.observed.plans.len(), 1, "{stays:?}");
        assert_eq!(world.says(DEGRADED), ("False", "AsPlanned"));
    }
    assert!(
        decide(&world.observed).requeue_after.is_some(),
        "it may last too long"
    );
    world.pass(Duration::from_secs(300));
    world.settle();
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    let home = world.observed.pods[0].node.clone();
    world.node(&home, |node| {
        node.taints = vec![taint("maintenance", "NoExecute")]
    });
    for name in ["attic", "office"] {
        if name != home {
            world.node(name, |node| node.taints.clear());
        }
    }
    world.settle();
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(world.condition(READY).status, "True");
}

/// Names and uids of all Pods.
fn identities(world: &World) -> Vec<(String, String)> {
    let pods = world.observed.pods.iter();
    pods.map(|pod| (pod.name.clone(), pod.uid.clone()))
        .collect()
}

fn goes_away(world: &mut World, name: &str) {
    let now = world.observed.now;
    world.node(name, |node| {
        node.is_ready = false;
        node.ready_since = None;
        node.not_ready_since = Some(now);
    });
}

fn comes_back(world: &mut World, name: &str) {
    let now = world.observed.now;
    world.node(name, |node| {
        node.is_ready = true;
        node.ready_since = Some(now);
        node.not_ready_since = None;
    });
}

#[test]
fn a_node_that_is_away_for_a_moment_keeps_its_pods() {
    let mut world = World::new("");
    world.settle();
    let (before, home) = (identities(&world), world.observed.pods[0].node.clone());
    goes_away(&mut world, &home);
    for _ in 0..15 {
        world.turn();
        let decision = world.visit();
        assert!(decision.create_plan.is_none() && decision.delete_pods.is_empty());
        assert!(
            decision
                .requeue_after
                .is_some_and(|wait| wait <= Duration::from_secs(20))
        );
    }
    assert_eq!(world.says(READY), ("False", "NodeLost"));
    comes_back(&mut world, &home);
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert_eq!(identities(&world), before);
    // When it stays away, its work is done elsewhere, and ends there when it is.
    goes_away(&mut world, &home);
    world.pass(Duration::from_secs(20));
    let decision = world.visit();
    assert!(decision.create_plan.is_some() && decision.delete_pods.is_empty());
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn all_nodes_away_at_once_move_nothing() {
    let mut world = World::new("");
    world.settle();
    let before = identities(&world);
    goes_away(&mut world, "attic");
    world.pass(Duration::from_secs(12));
    world.visit();
    goes_away(&mut world, "office");
    for _ in 0..100 {
        world.pass(Duration::from_secs(10));
        let decision = world.visit();
        assert!(!decision.writes_objects(), "{decision:?}");
        world.turn();
    }
    comes_back(&mut world, "office");
    comes_back(&mut world, "attic");
    world.settle();
    assert_eq!(identities(&world), before);
    assert_eq!(world.observed.plans.len(), 1);
}

/// As after a power cut: kubelets come back one by one.
#[test]
fn the_first_node_that_is_back_waits_for_the_others_before_it_takes_their_work() {
    for comes in [true, false] {
        let mut world = World::new("");
        world.settle();
        let (before, home) = (identities(&world), world.observed.pods[0].node.clone());
        let other = if home == "attic" { "office" } else { "attic" };
        goes_away(&mut world, &home);
        goes_away(&mut world, other);
        world.pass(Duration::from_secs(600));
        world.visit();
        comes_back(&mut world, other);
        for _ in 0..15 {
            let decision = world.visit();
            assert!(decision.create_plan.is_none(), "{:?}", decision.create_plan);
            let wait = decision.requeue_after.expect("a look when it is over");
            assert!(wait <= Duration::from_secs(20), "{wait:?}");
            world.turn();
        }
        if comes {
            comes_back(&mut world, &home);
            world.settle();
            assert_eq!(identities(&world), before);
            assert_eq!(world.observed.plans.len(), 1);
        } else {
            world.pass(Duration::from_secs(20));
            assert!(world.visit().create_plan.is_some());
        }
    }
}

/// Nodes that take nothing of it, such as a control plane, may have been there all the time.
#[test]
fn a_node_that_is_closed_to_the_deployment_does_not_tell_that_the_others_are_lost() {
    type Change = fn(&mut NodeView);
    fn label(node: &mut NodeView) {
        node.labels.insert("disk".to_owned(), "ssd".to_owned());
    }
    let cases: [(&str, bool, Change); 4] = [
        ("open", true, label),
        ("without the label", false, |_| ()),
        ("cordoned", false, |node| {
            label(node);
            node.is_cordoned = true;
        }),
        ("tainted", false, |node| {
            label(node);
            node.taints = vec![Taint {
                key: "node-role.kubernetes.io/control-plane".to_owned(),
                value: String::new(),
                effect: "NoSchedule".to_owned(),
                since: None,
            }];
        }),
    ];
    for (name, moves, change) in cases {
        let mut world = World::new("placement: {nodeSelector: {disk: ssd}}\n");
        world.node("attic", label);
        world.node("office", label);
        let mut third = node("shed", 1, 64 << 20);
        change(&mut third);
        world.observed.nodes.insert("shed".to_owned(), third.into());
        world.settle();
        let home = world.observed.pods[0].node.clone();
        let other = if home == "attic" { "office" } else { "attic" };
        goes_away(&mut world, &home);
        goes_away(&mut world, other);
        world.pass(Duration::from_secs(600));
        world.visit();
        comes_back(&mut world, other);
        let plan = world.visit().create_plan;
        assert_eq!(plan.is_some(), moves, "{name}: {plan:?}");
    }
}

#[test]
fn no_node_is_told_by_name() {
    let mut world = World::new("");
    world.node("attic", |node| node.is_cordoned = true);
    world.node("office", |node| node.profile = None);
    world.settle();
    assert_eq!(world.says(PLANNED), ("False", "NoNodes"));
    let message = &world.condition(PLANNED).message;
    assert!(message.contains("attic is cordoned"), "{message}");
    assert!(
        message.contains("office has not been measured yet"),
        "{message}"
    );
    assert_eq!(world.says(READY), ("False", "NoNodes"));
    assert_eq!(world.status().pools.as_ref().unwrap().decode.summary, "0/1");
}
