//! Nodes that are lost, briefly away, cordoned, tainted, or missing.

use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{DEGRADED, PLANNED, READY};
use crate::decide::decide;
use crate::observed::{NodeView, Taint};
use crate::testing::node;

#[test]
fn a_lost_node_has_its_work_done_elsewhere() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.told();
    let home = cluster.observed.pods[0].node.clone();
    cluster.node(&home, |node| node.is_ready = false);
    cluster.turn();
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 2);
    // The node comes back: nothing moves.
    cluster.node(&home, |node| node.is_ready = true);
    cluster.settle();
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 2);
}

#[test]
fn a_lost_node_that_cannot_be_replaced_is_waited_for() {
    let mut cluster = FakeCluster::new("");
    cluster.observed.nodes.remove("attic");
    cluster.settle();
    cluster.told();
    cluster.node("office", |node| node.is_ready = false);
    cluster.turn();
    cluster.settle();
    assert_eq!(cluster.says(DEGRADED), ("True", "NodeLost"));
    assert_eq!(cluster.says(READY).0, "False");
    assert!(
        cluster
            .condition(DEGRADED)
            .message
            .contains("node office is not Ready")
    );
    let told = cluster.told();
    assert_eq!(
        told.iter().filter(|reason| *reason == "NodeLost").count(),
        1,
        "{told:?}"
    );
    assert_eq!(cluster.observed.pods.len(), 3, "its containers may go on");
    cluster.node("office", |node| node.is_ready = true);
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 1);
}

#[test]
fn a_cordoned_node_is_left_without_a_gap() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let home = cluster.observed.pods[0].node.clone();
    cluster.node(&home, |node| node.is_cordoned = true);
    for _ in 0..20 {
        cluster.reconcile();
        assert_eq!(cluster.condition(READY).status, "True");
        cluster.turn();
    }
    assert!(
        cluster.ranks().iter().all(|(_, node)| *node != home),
        "{:?}",
        cluster.ranks()
    );
    // Both cordoned: it stays, and says so.
    let home = cluster.observed.pods[0].node.clone();
    cluster.node(&home, |node| node.is_cordoned = true);
    cluster.settle();
    assert_eq!(cluster.says(DEGRADED), ("True", "NodeCordoned"));
    assert_eq!(cluster.condition(READY).status, "True");
}

#[test]
fn a_taint_that_evicts_moves_work_and_others_do_not() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let home = cluster.observed.pods[0].node.clone();
    let since = Some(cluster.observed.now);
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
        cluster.node(&home, |node| node.taints = vec![stays.clone()]);
        cluster.settle();
        assert_eq!(cluster.observed.plans.len(), 1, "{stays:?}");
        assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    }
    assert!(
        decide(&cluster.observed).requeue_after.is_some(),
        "it may last too long"
    );
    cluster.pass(Duration::from_secs(300));
    cluster.settle();
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    let home = cluster.observed.pods[0].node.clone();
    cluster.node(&home, |node| {
        node.taints = vec![taint("maintenance", "NoExecute")]
    });
    for name in ["attic", "office"] {
        if name != home {
            cluster.node(name, |node| node.taints.clear());
        }
    }
    cluster.settle();
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(cluster.condition(READY).status, "True");
}

/// Names and uids of all Pods.
fn identities(cluster: &FakeCluster) -> Vec<(String, String)> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| (pod.name.clone(), pod.uid.clone()))
        .collect()
}

fn goes_away(cluster: &mut FakeCluster, name: &str) {
    let now = cluster.observed.now;
    cluster.node(name, |node| {
        node.is_ready = false;
        node.ready_since = None;
        node.not_ready_since = Some(now);
    });
}

fn comes_back(cluster: &mut FakeCluster, name: &str) {
    let now = cluster.observed.now;
    cluster.node(name, |node| {
        node.is_ready = true;
        node.ready_since = Some(now);
        node.not_ready_since = None;
    });
}

#[test]
fn a_node_that_is_away_for_a_moment_keeps_its_pods() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let (before, home) = (identities(&cluster), cluster.observed.pods[0].node.clone());
    goes_away(&mut cluster, &home);
    for _ in 0..15 {
        cluster.turn();
        let decision = cluster.reconcile();
        assert!(decision.create_plan.is_none() && decision.delete_pods.is_empty());
        assert!(
            decision
                .requeue_after
                .is_some_and(|wait| wait <= Duration::from_secs(20))
        );
    }
    assert_eq!(cluster.says(READY), ("False", "NodeLost"));
    comes_back(&mut cluster, &home);
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(identities(&cluster), before);
    // When it stays away, its work moves elsewhere, and ends on the old node after that.
    goes_away(&mut cluster, &home);
    cluster.pass(Duration::from_secs(20));
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_some() && decision.delete_pods.is_empty());
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn all_nodes_away_at_once_move_nothing() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = identities(&cluster);
    goes_away(&mut cluster, "attic");
    cluster.pass(Duration::from_secs(12));
    cluster.reconcile();
    goes_away(&mut cluster, "office");
    for _ in 0..100 {
        cluster.pass(Duration::from_secs(10));
        let decision = cluster.reconcile();
        assert!(!decision.writes_objects(), "{decision:?}");
        cluster.turn();
    }
    comes_back(&mut cluster, "office");
    comes_back(&mut cluster, "attic");
    cluster.settle();
    assert_eq!(identities(&cluster), before);
    assert_eq!(cluster.observed.plans.len(), 1);
}

/// Models a power cut: kubelets come back one by one.
#[test]
fn the_first_node_that_is_back_waits_for_the_others_before_it_takes_their_work() {
    for comes in [true, false] {
        let mut cluster = FakeCluster::new("");
        cluster.settle();
        let (before, home) = (identities(&cluster), cluster.observed.pods[0].node.clone());
        let other = if home == "attic" { "office" } else { "attic" };
        goes_away(&mut cluster, &home);
        goes_away(&mut cluster, other);
        cluster.pass(Duration::from_secs(600));
        cluster.reconcile();
        comes_back(&mut cluster, other);
        for _ in 0..15 {
            let decision = cluster.reconcile();
            assert!(decision.create_plan.is_none(), "{:?}", decision.create_plan);
            let wait = decision.requeue_after.expect("a look when it is over");
            assert!(wait <= Duration::from_secs(20), "{wait:?}");
            cluster.turn();
        }
        if comes {
            comes_back(&mut cluster, &home);
            cluster.settle();
            assert_eq!(identities(&cluster), before);
            assert_eq!(cluster.observed.plans.len(), 1);
        } else {
            cluster.pass(Duration::from_secs(20));
            assert!(cluster.reconcile().create_plan.is_some());
        }
    }
}

/// Nodes that take none of its Pods, such as a control plane, may have been there all the time.
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
        let mut cluster = FakeCluster::new("placement: {nodeSelector: {disk: ssd}}\n");
        cluster.node("attic", label);
        cluster.node("office", label);
        let mut third = node("shed", 1, 64 << 20);
        change(&mut third);
        cluster
            .observed
            .nodes
            .insert("shed".to_owned(), third.into());
        cluster.settle();
        let home = cluster.observed.pods[0].node.clone();
        let other = if home == "attic" { "office" } else { "attic" };
        goes_away(&mut cluster, &home);
        goes_away(&mut cluster, other);
        cluster.pass(Duration::from_secs(600));
        cluster.reconcile();
        comes_back(&mut cluster, other);
        let plan = cluster.reconcile().create_plan;
        assert_eq!(plan.is_some(), moves, "{name}: {plan:?}");
    }
}

#[test]
fn no_node_is_told_by_name() {
    let mut cluster = FakeCluster::new("");
    cluster.node("attic", |node| node.is_cordoned = true);
    cluster.node("office", |node| node.profile = None);
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "NoNodes"));
    let message = &cluster.condition(PLANNED).message;
    assert!(message.contains("attic is cordoned"), "{message}");
    assert!(
        message.contains("office has not been measured yet"),
        "{message}"
    );
    assert_eq!(cluster.says(READY), ("False", "NoNodes"));
    assert_eq!(cluster.status().pool("decode").unwrap().summary, "0/1");
}
