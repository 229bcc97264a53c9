//! Deployments whose workers end for want of requests, and start again with the next one, in a simulated cluster.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::PlanRole;

use super::fake_cluster::FakeCluster;
use crate::calls::{ANNOTATION_LOAD, ANNOTATION_UNLOAD, ended_since, loaded_since};
use crate::conditions::{DECODE_READY, DEGRADED, GATEWAY_READY, PREFILL_READY, PROGRESSING, READY};
use crate::observed::{Demand, Holding, PodRole, PodView};
use crate::plan_record::has_failed;
use crate::testing::GIB;

pub(super) const YAML: &str = "decode: {scaling: {mode: Auto, minReplicas: 0, maxReplicas: 2}}\n\
                    autoscaling: {scaleToZeroAfter: 5m}\n";

pub(super) fn idle_for(idle_s: f64) -> Option<Demand> {
    Some(Demand {
        age_s: 1.0,
        span_s: 60.0,
        long_span_s: 300.0,
        recent_span_s: 15.0,
        idle_s: Some(idle_s),
        ..Demand::default()
    })
}

/// One request waits.
pub(super) fn asked() -> Option<Demand> {
    Some(Demand {
        arrivals: 1.0,
        unanswered: 1.0,
        queued: 1.0,
        held: 1.0,
        ..idle_for(0.0).unwrap()
    })
}

fn names(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.name.clone()).collect()
}

pub(super) fn workers(cluster: &FakeCluster) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| pod.role != PodRole::Rank(PlanRole::Gateway))
        .count()
}

/// A deployment that served and has had no request for so long that its workers have ended.
pub(super) fn at_zero() -> FakeCluster {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster.told();
    cluster.observed.demand = idle_for(301.0);
    cluster.pass(Duration::from_secs(301));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    cluster
}

#[test]
pub(super) fn workers_end_for_want_of_requests_and_start_again_with_the_next_one() {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster.told();
    let before = names(&cluster);
    cluster.pass(Duration::from_secs(1000));
    cluster.observed.demand = idle_for(240.0);
    let decision = cluster.reconcile();
    assert_eq!(decision.requeue_after, Some(Duration::from_secs(60)));
    assert_eq!(names(&cluster), before);

    cluster.observed.demand = idle_for(301.0);
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "ScaledToZero"));
    assert_eq!(cluster.says(PROGRESSING), ("True", "ScalingToZero"));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    assert_eq!(cluster.observed.pods.len(), 1, "the gateway stays");
    assert!(cluster.observed.pods[0].routes.contains("\"workers\":[]"));
    assert_eq!(cluster.says(READY), ("True", "ScaledToZero"));
    assert!(
        cluster
            .condition(READY)
            .message
            .contains("there was no request for 5m")
    );
    assert_eq!(cluster.says(GATEWAY_READY).0, "True");
    assert_eq!(cluster.says(DECODE_READY), ("False", "ScaledToZero"));
    assert_eq!(cluster.says(PROGRESSING), ("False", "ScaledToZero"));
    assert_eq!(cluster.says(DEGRADED).0, "False");
    assert!(cluster.status().is_at_zero());
    assert_eq!(cluster.told(), ["ScaledToZero"]);
    // Nothing more is written, however long it lasts, and whether or not the operator sees the gateway.
    for demand in [idle_for(9000.0), None] {
        cluster.observed.demand = demand;
        let told = cluster.status().clone();
        cluster.pass(Duration::from_secs(3600));
        cluster.reconcile();
        assert_eq!(*cluster.status(), told);
    }

    cluster.observed.demand = asked();
    let decision = cluster.reconcile();
    assert_eq!(decision.create_pods.len(), before.len() - 1);
    assert_eq!(cluster.says(READY), ("True", "ScalingFromZero"));
    assert_eq!(cluster.says(PROGRESSING), ("True", "Resuming"));
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    cluster.settle();
    assert_eq!(names(&cluster), before, "the same Pods of the same plan");
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(!cluster.status().is_at_zero());
    let told = cluster.told();
    assert!(told.contains(&"ScalingFromZero".to_owned()), "{told:?}");
    assert!(
        !told
            .iter()
            .any(|it| it.contains("Lost") || it.contains("Scaled") || it.contains("NotReady")),
        "{told:?}"
    );
}

/// Both pools follow the load; neither outlasts the other.
#[test]
fn prefill_and_decode_workers_that_follow_the_load_end_and_start_together() {
    let both = "prefill: {scaling: {mode: Auto, minReplicas: 0, maxReplicas: 2}}\n";
    let mut cluster = FakeCluster::new(&format!("{both}{YAML}"));
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    let before = names(&cluster);
    for role in [PlanRole::Prefill, PlanRole::Decode] {
        let is_there = |pod: &Arc<PodView>| pod.role == PodRole::Rank(role);
        assert!(cluster.observed.pods.iter().any(is_there), "{before:?}");
    }
    for round in ["once", "again"] {
        cluster.told();
        cluster.observed.demand = idle_for(301.0);
        cluster.pass(Duration::from_secs(301));
        cluster.settle();
        assert_eq!(workers(&cluster), 0, "{round}");
        for pool in [PREFILL_READY, DECODE_READY] {
            assert_eq!(cluster.says(pool), ("False", "ScaledToZero"));
        }
        assert_eq!(cluster.told(), ["ScaledToZero"]);

        cluster.observed.demand = asked();
        let decision = cluster.reconcile();
        assert_eq!(decision.create_pods.len(), before.len() - 1);
        cluster.settle();
        assert_eq!(names(&cluster), before, "{round}");
        assert_eq!(cluster.observed.plans.len(), 1);
        for pool in [PREFILL_READY, DECODE_READY] {
            assert_eq!(cluster.says(pool), ("True", "AllReady"));
        }
        let told = cluster.told();
        let numbers = |it: &&String| it.contains("Lost") || it.starts_with("Scaled");
        assert_eq!(told.iter().find(numbers), None, "{told:?}");
        assert!(told.contains(&"ScalingFromZero".to_owned()), "{told:?}");
    }
}

/// Somebody calls for the end of the present state.
pub(super) fn call(cluster: &mut FakeCluster, annotation: &str) {
    let status = Some(cluster.status());
    let since = match annotation {
        ANNOTATION_LOAD => ended_since(status),
        _ => loaded_since(status),
    };
    let since = since.expect("that state").to_owned();
    let deployment = Arc::make_mut(&mut cluster.observed.deployment);
    let annotations = &mut deployment.metadata.annotations;
    annotations
        .get_or_insert_default()
        .insert(annotation.to_owned(), since);
}

#[test]
fn workers_start_and_end_when_somebody_calls_for_it_and_once_a_call() {
    let mut cluster = FakeCluster::new(YAML);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    let count = workers(&cluster);
    assert!(count > 0);
    call(&mut cluster, ANNOTATION_UNLOAD);
    // What waits for workers is answered first, and something may while no gateway can be read.
    for demand in [asked(), None] {
        cluster.observed.demand = demand;
        cluster.settle();
        assert_eq!(workers(&cluster), count);
    }
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    let why = &cluster.condition(READY).message;
    assert!(why.contains("an unload was asked for"), "{why}");

    for time in ["once", "again"] {
        cluster.pass(Duration::from_secs(7));
        call(&mut cluster, ANNOTATION_LOAD);
        cluster.settle();
        assert_eq!(workers(&cluster), count, "{time}");
        // Nobody has asked anything; they stay for as long as if somebody had.
        cluster.observed.demand = idle_for(9000.0);
        cluster.pass(Duration::from_secs(240));
        cluster.settle();
        assert_eq!(workers(&cluster), count, "{time}");
        cluster.pass(Duration::from_secs(61));
        cluster.settle();
        assert_eq!(workers(&cluster), 0, "the call was for once");
    }
}

#[test]
fn whoever_was_woken_stays_awake_for_as_long_as_one_that_was_asked() {
    let mut cluster = at_zero();
    cluster.observed.demand = asked();
    cluster.settle();
    let count = workers(&cluster);
    // The client has gone, and its gateway counts from the last answer, long ago.
    cluster.observed.demand = idle_for(4000.0);
    cluster.pass(Duration::from_secs(240));
    cluster.settle();
    assert_eq!(workers(&cluster), count);
    cluster.pass(Duration::from_secs(61));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
}

#[test]
fn a_start_that_takes_longer_than_the_idle_time_survives() {
    let mut cluster = at_zero();
    cluster.observed.demand = asked();
    cluster.reconcile();
    // Whoever asked has given up since.
    cluster.observed.demand = idle_for(9000.0);
    for _ in 0..10 {
        cluster.pass(Duration::from_secs(100));
        cluster.reconcile();
        assert!(!cluster.status().is_at_zero());
    }
    cluster.settle();
    assert!(workers(&cluster) > 0);
    cluster.pass(Duration::from_secs(250));
    cluster.settle();
    assert!(workers(&cluster) > 0, "they have just become ready");
    cluster.pass(Duration::from_secs(51));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
}

#[test]
fn a_stream_that_has_lost_its_worker_and_one_gateway_that_can_be_read_start_workers() {
    let cut_off = Demand {
        held: 1.0,
        ..idle_for(0.0).unwrap()
    };
    let half_blind = Demand {
        age_s: 9000.0,
        ..asked().unwrap()
    };
    for demand in [cut_off, half_blind] {
        let mut cluster = at_zero();
        cluster.observed.demand = Some(demand);
        cluster.settle();
        assert!(workers(&cluster) > 0);
    }
}

#[test]
fn a_gateway_whose_node_is_cordoned_or_lost_goes_elsewhere() {
    for is_lost in [true, false] {
        let mut cluster = at_zero();
        let home = cluster.observed.pods[0].node.clone();
        cluster.node(&home, |node| match is_lost {
            true => node.is_ready = false,
            false => node.is_cordoned = true,
        });
        cluster.pass(Duration::from_secs(60));
        cluster.settle();
        let pods = cluster.observed.pods.iter();
        let mut gateways = pods.filter(|pod| pod.role.is_gateway() && !pod.is_deleting);
        assert!(gateways.any(|pod| pod.node != home), "{is_lost}");
        assert_eq!(cluster.condition(READY).status, "True");
        // The new plan has been tried; from then on it rests like the one before.
        cluster.observed.demand = idle_for(9000.0);
        cluster.pass(Duration::from_secs(301));
        cluster.settle();
        assert!(cluster.status().is_at_zero(), "{is_lost}");
    }
}

#[test]
fn a_spec_that_is_refused_starts_nothing() {
    let mut cluster = at_zero();
    cluster.change(&format!("strategy: Interleaved\n{YAML}"));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    assert!(cluster.status().is_at_zero());
}

#[test]
fn a_deployment_that_may_rest_from_now_on_has_its_gateway_hold_requests() {
    let mut cluster = FakeCluster::new("decode: {scaling: {mode: Auto, maxReplicas: 2}}");
    cluster.settle();
    let hold = |cluster: &FakeCluster| {
        let plan = cluster.observed.plans.last().unwrap();
        plan.spec.routing.hold_timeout_ms
    };
    assert_eq!(hold(&cluster), None);
    cluster.change(YAML);
    cluster.settle();
    assert_eq!(hold(&cluster), Some(600_000));
    cluster.change("decode: {scaling: {mode: Auto, maxReplicas: 2}}");
    cluster.settle();
    assert_eq!(hold(&cluster), None);
}

#[test]
fn its_room_is_others_meanwhile_and_it_goes_elsewhere_if_they_keep_it() {
    let mut cluster = at_zero();
    let home = cluster.observed.plans[0].spec.ranks[0].node.clone();
    let taken = Holding {
        memory_bytes: 1024 * GIB,
        cpu_millis: 1_000_000,
        ..Holding::default()
    };
    let others = &mut cluster.observed.held_by_others;
    others.insert(home.clone(), taken);
    cluster.observed.demand = asked();
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let pods = cluster.observed.pods.iter();
    let nodes: Vec<&str> = pods
        .filter(|pod| !pod.role.is_gateway())
        .map(|pod| &*pod.node)
        .collect();
    assert!(!nodes.is_empty() && !nodes.contains(&&*home), "{nodes:?}");
}

#[test]
fn another_spec_is_tried_before_its_workers_end() {
    let mut cluster = at_zero();
    cluster.change(&format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 256}}\n{YAML}"
    ));
    cluster.settle();
    assert!(!cluster.observed.plans.iter().any(|plan| has_failed(plan)));
    let newest = cluster.observed.plans.last().unwrap();
    assert_eq!(newest.spec.model.context_length, 256);
    // It has served, and nothing has been asked for since; the time counts from when it woke.
    assert!(workers(&cluster) > 0);
    cluster.pass(Duration::from_secs(301));
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    // A deployment that may no longer be without workers gets them.
    cluster.change("decode: {scaling: {mode: Auto, maxReplicas: 2}}");
    cluster.settle();
    assert!(workers(&cluster) > 0);
    assert_eq!(cluster.status().scale_to_zero, None);
}

#[test]
fn nobody_ends_workers_without_seeing_the_load() {
    let mut cluster = FakeCluster::new(YAML);
    cluster.settle();
    let count = workers(&cluster);
    let old = Demand {
        age_s: 11.0,
        ..idle_for(9000.0).unwrap()
    };
    let mute = Demand {
        idle_s: None,
        ..idle_for(9000.0).unwrap()
    };
    for demand in [None, Some(old), Some(mute)] {
        cluster.observed.demand = demand;
        cluster.pass(Duration::from_secs(9000));
        cluster.settle();
        assert_eq!(workers(&cluster), count);
    }
}
