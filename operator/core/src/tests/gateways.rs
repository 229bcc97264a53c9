//! Several gateways: their placement, their replacement, and their status.

use std::sync::Arc;

use super::fake_cluster::FakeCluster;
use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::conditions::{DEGRADED, GATEWAY_READY, READY};
use crate::rollout::{Mode, Want};

/// Two gateways, one beside the decode worker, in version `hash`.
fn plan(hash: &str, second: &str) -> Vec<Want> {
    vec![
        want("gateway-0", hash, "office", 50),
        want("gateway-1", hash, second, 50),
        want("decode-0", "a", "office", 400),
    ]
}

fn open(sim: &Sim) -> usize {
    sim.open_gateways().count()
}

/// Replaces the gateways; returns the modes, and the least number of gateways that were open at a time.
fn replaced(mib: &[(&str, u64)], second: &str) -> (Vec<Mode>, usize) {
    let (old, new) = (plan("a", second), plan("b", second));
    let mut sim = Sim::new(rooms(mib), PACE);
    sim.settle(&old, |_, _| {});
    sim.generation = 2;
    let mut least = open(&sim);
    let modes = sim.settle(&new, |sim, _| {
        sim.assert_capacity();
        least = least.min(open(sim));
    });
    assert!(sim.serves(&new));
    assert_eq!(open(&sim), 2);
    (modes, least)
}

#[test]
fn all_new_gateways_are_ready_before_an_old_one_goes() {
    let (modes, least) = replaced(&[("attic", 200), ("office", 1000)], "attic");
    assert_eq!(modes, [Mode::Surge, Mode::Alone]);
    assert_eq!(least, 2);
}

#[test]
fn without_room_for_both_gateways_make_room_one_after_the_other() {
    for (mib, second) in [
        ([("attic", 60), ("office", 460)], "attic"),
        ([("attic", 60), ("office", 510)], "office"),
    ] {
        let (modes, least) = replaced(&mib, second);
        assert_eq!(modes, [Mode::OldDownFirst, Mode::Alone], "{second}");
        assert_eq!(least, 1, "{second}");
    }
}

#[test]
fn more_or_fewer_gateways_leave_the_others_alone() {
    let one = vec![
        want("gateway-0", "a", "office", 50),
        want("decode-0", "a", "office", 400),
    ];
    let two = plan("a", "attic");
    let mut sim = Sim::new(rooms(&[("attic", 60), ("office", 460)]), PACE);
    sim.settle(&one, |_, _| {});
    let kept = sim.pods["demo-gateway-0-a"].view.uid.clone();
    sim.settle(&two, |sim, _| assert!(open(sim) >= 1));
    assert_eq!(open(&sim), 2);
    let routes = |sim: &Sim| -> Vec<String> {
        let gateways = sim.open_gateways();
        gateways.map(|gateway| gateway.routes.clone()).collect()
    };
    let told = routes(&sim);
    assert!(!told[0].is_empty() && told[0] == told[1], "{told:?}");
    sim.settle(&one, |sim, _| assert!(open(sim) >= 1));
    assert_eq!(open(&sim), 1);
    assert_eq!(sim.pods["demo-gateway-0-a"].view.uid, kept);
}

#[test]
fn the_other_gateway_stays_open_while_one_is_made_again() {
    let wants = plan("a", "attic");
    let mut sim = Sim::new(rooms(&[("attic", 200), ("office", 1000)]), PACE);
    sim.settle(&wants, |_, _| {});
    sim.fail("demo-gateway-0-a");
    assert_eq!(open(&sim), 1);
    assert!(sim.serves(&wants), "new requests reach every worker");
    for _ in 0..20 {
        let steps = sim.reconcile(&wants);
        assert!(steps.end.iter().all(|end| end.name == "demo-gateway-0-a"));
        assert!(sim.serves(&wants));
        sim.turn();
    }
    assert!(is_quiet(&sim.decide(&wants)));
    assert_eq!(open(&sim), 2);
}

#[test]
fn gateways_are_planned_apart_and_each_is_told_of() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = cluster.observed.pods.clone();
    cluster.change("gateway: {replicas: 2}");
    cluster.settle();
    let gateways = |cluster: &FakeCluster| -> Vec<(String, String)> {
        let mut ranks = cluster.ranks();
        ranks.retain(|(rank, _)| rank.starts_with("gateway"));
        ranks
    };
    let placed = gateways(&cluster);
    assert_eq!(placed.len(), 2);
    assert_ne!(placed[0].1, placed[1].1, "on two nodes");
    for pod in &before {
        assert!(
            cluster.observed.pods.iter().any(|it| it.uid == pod.uid),
            "{}",
            pod.name
        );
    }
    assert_eq!(cluster.says(GATEWAY_READY), ("True", "AllReady"));
    let pool = |cluster: &FakeCluster| {
        let pools = &cluster.status().pool_statuses;
        let pool = pools.iter().find(|pool| pool.name == "gateway").unwrap();
        (pool.desired, pool.ready, pool.summary.clone())
    };
    assert_eq!(pool(&cluster), (2, 2, "2/2".to_owned()));
    cluster.told();

    // One ends: requests to the other one are answered.
    let name = format!("demo-{}", placed[0].0);
    cluster.pod(&name, |pod| {
        pod.is_ready = false;
        pod.has_lost_readiness = true;
    });
    cluster.reconcile();
    assert_eq!(cluster.says(GATEWAY_READY).0, "False");
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(DEGRADED).0, "True");
    assert_eq!(pool(&cluster), (2, 1, "1/2".to_owned()));
    assert!(cluster.told().contains(&"GatewayLost".to_owned()));
    cluster.settle();
    assert_eq!(cluster.says(GATEWAY_READY), ("True", "AllReady"));

    // An eviction waits until the other is ready somewhere else.
    let decision = cluster.reconcile();
    let budget = decision.objects.iter().find(|object| {
        let types = object.types.as_ref();
        types.is_some_and(|types| types.kind == "PodDisruptionBudget")
            && object.metadata.name.as_deref() == Some("demo-gateway")
    });
    assert_eq!(budget.unwrap().data["spec"]["minAvailable"], 2);

    cluster.change("gateway: {replicas: 1}");
    cluster.settle();
    assert_eq!(gateways(&cluster).len(), 1);
    assert_eq!(cluster.observed.pods.len(), before.len());
    for pod in &before {
        assert!(
            cluster.observed.pods.iter().any(|it| it.uid == pod.uid),
            "{}",
            pod.name
        );
    }
}

/// A plan that does not mention gateways is the same plan as before their number could be set.
#[test]
fn one_gateway_is_the_default() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = cluster.observed.pods.clone();
    cluster.change("gateway: {replicas: 1}");
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    let uids = |pods: &[Arc<crate::observed::PodView>]| -> Vec<String> {
        pods.iter().map(|pod| pod.uid.clone()).collect()
    };
    assert_eq!(uids(&cluster.observed.pods), uids(&before));
}
