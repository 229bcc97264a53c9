//! Whole visits.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use crate::controller::conditions::{
    DECODE_READY, DEGRADED, EXACT_FAILOVER, MODEL_READY, PLACED, PLANNED, PREFILL_READY,
    PROGRESSING, READY,
};
use crate::controller::decide::decide;
use crate::controller::observed::{ContainerEnd, ContainerView, Measured, PodView};
use crate::controller::placements::Placement;
use crate::controller::testing::MIB;

const ALL: [&str; 8] = [
    READY,
    PLANNED,
    MODEL_READY,
    PREFILL_READY,
    DECODE_READY,
    PLACED,
    PROGRESSING,
    DEGRADED,
];

#[test]
fn the_demo_becomes_ready_and_is_then_left_alone() {
    let mut world = World::new("");
    let first = world.visit();
    assert!(first.create_plan.is_some());
    assert_eq!(first.create_pods.len(), 3);
    assert!(!first.objects.is_empty());
    for type_ in ALL {
        let condition = world.condition(type_);
        assert_eq!(condition.observed_generation, Some(1));
        assert!(!condition.reason.is_empty() && !condition.message.is_empty());
    }
    world.settle();
    for type_ in [READY, PLANNED, MODEL_READY, PREFILL_READY, DECODE_READY] {
        assert_eq!(world.condition(type_).status, "True", "{type_}");
    }
    assert_eq!(world.says(PROGRESSING), ("False", "Complete"));
    assert_eq!(world.says(DEGRADED), ("False", "AsPlanned"));
    let status = world.status().clone();
    let told = |type_| status.conditions.iter().any(|c| c.type_ == type_);
    assert!(!told(EXACT_FAILOVER), "said only where it does not hold");
    let pools = status.pools.unwrap();
    assert_eq!(
        (pools.prefill.summary, pools.decode.summary),
        ("1/1".to_owned(), "1/1".to_owned())
    );
    assert_eq!(status.plan.unwrap().name, "demo-1");
    assert_eq!(status.endpoint_url.unwrap(), "http://demo.default.svc/v1");
    assert_eq!(
        status.selector.unwrap(),
        "hearth.dev/deployment=demo,hearth.dev/role=decode"
    );
    assert!(status.predicted.unwrap().time_to_first_token.is_some());
    assert_eq!(
        world.told(),
        [
            "Planned",
            "ModelReady",
            "WorkerReady",
            "WorkerReady",
            "Ready"
        ]
    );
    let mut last = decide(&world.observed);
    world.pass(Duration::from_secs(100_000));
    let later = decide(&world.observed);
    assert_eq!(last.status, later.status, "no clock in the status");
    assert!(!later.writes_objects() && later.events.is_empty());
    assert_eq!(later.requeue_after, None);
    last.objects.clear();
}

#[test]
fn a_pool_of_mixed_instruction_sets_is_told() {
    let mut world =
        World::new("prefill: {mode: Chunked}\ndecode: {replicas: 2, kvCache: {memory: 2Gi}}\n");
    world.node("attic", |node| {
        if let Some(profile) = &mut node.profile {
            profile.isa.avx2 = true;
        }
    });
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
    assert_eq!(world.says(EXACT_FAILOVER), ("False", "MixedNumerics"));
    let message = &world.condition(EXACT_FAILOVER).message;
    assert!(
        message.contains("AVX2") && message.contains("later tokens may be others"),
        "{message}"
    );
}

#[test]
fn a_gateway_is_made_with_certificate_and_routes() {
    let mut world = World::new("");
    world.settle();
    let gateway = world
        .observed
        .pods
        .iter()
        .find(|pod| pod.role == "gateway")
        .unwrap();
    assert_eq!(gateway.certificate, "1");
    assert!(gateway.routes.contains("decode-0") && gateway.routes.contains("prefill-0"));
    world.observed.certificate = Some("2".to_owned());
    let decision = world.visit();
    assert_eq!(decision.mark_pods.len(), 3);
    assert!(world.observed.pods.iter().all(|pod| pod.certificate == "2"));
}

#[test]
fn a_wrong_spec_is_told_and_what_runs_goes_on() {
    let mut world = World::new("strategy: PipedRing\n");
    let decision = world.visit();
    assert!(!decision.writes_objects());
    assert_eq!(world.says(PLANNED), ("False", "InvalidSpec"));
    assert!(
        world
            .condition(PLANNED)
            .message
            .contains("spec.strategy is \"PipedRing\"")
    );
    assert_eq!(world.says(MODEL_READY), ("Unknown", "InvalidSpec"));
    world.change("");
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
    world.change("strategy: PipedRing\n");
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
    assert_eq!(world.says(PLANNED), ("False", "InvalidSpec"));
    assert!(
        world
            .condition(PLANNED)
            .message
            .contains("plan 1 goes on meanwhile")
    );
    assert!(world.told().contains(&"InvalidSpec".to_owned()));
    // A Pod of the plan in force is still looked after.
    world.observed.pods.retain(|pod| pod.rank != "decode-0");
    assert_eq!(world.visit().create_pods.len(), 1);
}

#[test]
fn a_namespace_that_is_not_served_is_not_touched() {
    let mut world = World::new("");
    let mut settings = (*world.observed.settings).clone();
    settings.namespaces = vec!["other".to_owned()];
    world.observed.settings = Arc::new(settings);
    let decision = world.visit();
    assert!(!decision.writes_objects() && decision.objects.is_empty());
    assert_eq!(world.says(PLANNED), ("False", "NamespaceNotServed"));
}

#[test]
fn a_deployment_that_is_being_deleted_is_left_alone() {
    let mut world = World::new("");
    world.settle();
    let mut deployment = (*world.observed.deployment).clone();
    deployment.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.observed.now),
    );
    world.observed.deployment = Arc::new(deployment);
    world.observed.pods.clear();
    let decision = decide(&world.observed);
    assert!(!decision.writes_objects() && decision.objects.is_empty());
    assert_eq!(
        Some(&decision.status),
        world.observed.deployment.status.as_ref()
    );
}

#[test]
fn scaling_keeps_what_runs_and_says_so() {
    let mut world = World::new("");
    world.settle();
    world.told();
    let before = world.observed.pods.clone();
    world.change("decode: {replicas: 2}\n");
    world.settle();
    let pools = world.status().pools.clone().unwrap();
    assert_eq!(pools.decode.summary, "2/2");
    let told = world.told();
    assert!(told.contains(&"PlanReplaced".to_owned()), "{told:?}");
    assert!(told.contains(&"ScaledDecode".to_owned()), "{told:?}");
    assert!(!told.contains(&"WorkerLost".to_owned()), "{told:?}");
    assert!(!told.contains(&"NotReady".to_owned()), "{told:?}");
    let uids = |pods: &[Arc<PodView>]| -> BTreeSet<String> {
        let workers = pods.iter().filter(|pod| pod.role != "gateway");
        workers.map(|pod| pod.uid.clone()).collect()
    };
    let (before, two) = (uids(&before), uids(&world.observed.pods));
    assert!(before.is_subset(&two), "workers that ran were replaced");
    let nodes: BTreeSet<String> = world.ranks().into_iter().map(|(_, node)| node).collect();
    assert_eq!(nodes.len(), 2);
    let generations: Vec<u64> = world
        .observed
        .pods
        .iter()
        .map(|pod| pod.plan_generation)
        .collect();
    assert_eq!(generations, vec![2; generations.len()]);
    world.change("decode: {replicas: 1}\n");
    world.settle();
    assert_eq!(uids(&world.observed.pods), before);
}

#[test]
fn a_spec_that_says_the_same_in_other_words_makes_no_plan() {
    let mut world = World::new("");
    world.settle();
    world.change("decode: {replicas: 1}\n");
    let decision = world.visit();
    assert!(decision.create_plan.is_none());
    assert_eq!(decision.mark_plans.len(), 1);
    world.settle();
    assert_eq!(world.status().observed_generation, Some(2));
    assert_eq!(world.observed.plans.len(), 1);
}

#[test]
fn keys_change_the_gateway_and_no_plan() {
    let mut world = World::new("");
    world.settle();
    let workers = |world: &World| -> Vec<String> {
        let pods = world.observed.pods.iter();
        pods.filter(|pod| pod.role != "gateway")
            .map(|pod| pod.uid.clone())
            .collect()
    };
    let before = workers(&world);
    let gateway = world
        .observed
        .pods
        .iter()
        .find(|pod| pod.role == "gateway")
        .unwrap()
        .uid
        .clone();
    world.change("endpoint: {apiKeysSecretRef: {name: keys}}\n");
    world.settle();
    assert_eq!(world.observed.plans.len(), 1);
    assert_eq!(workers(&world), before);
    assert!(world.observed.pods.iter().all(|pod| pod.uid != gateway));
}

#[test]
fn a_plan_that_never_comes_up_is_given_up_for_the_one_before() {
    let mut world = World::new("");
    world.settle();
    world.told();
    world.broken_from = 2;
    world.change("decode: {maxBatch: 4}\nrollout: {progressDeadline: 1m}\n");
    let decision = world.visit();
    assert!(decision.create_plan.is_some());
    assert_eq!(world.says(PROGRESSING).0, "True");
    for _ in 0..30 {
        world.turn();
        world.visit();
        assert_eq!(world.condition(READY).status, "True");
    }
    world.pass(Duration::from_secs(31));
    world.visit();
    world.settle();
    let status = world.status();
    assert_eq!(status.plan.as_ref().unwrap().generation, 1);
    assert_eq!(world.condition(READY).status, "True");
    assert_eq!(world.says(PLANNED), ("False", "RolledBack"));
    assert_eq!(world.says(DEGRADED), ("True", "RolledBack"));
    let message = &world.condition(DEGRADED).message;
    assert!(
        message.contains("plan 2 was given up") && message.contains("is loading the model"),
        "{message}"
    );
    assert!(message.contains("nothing went on for 1m"), "{message}");
    let told = world.told();
    assert_eq!(
        told.iter().filter(|reason| *reason == "RolledBack").count(),
        1,
        "{told:?}"
    );
    assert_eq!(world.observed.pods.len(), 3);
    // Another spec is tried.
    world.broken_from = u64::MAX;
    world.change("decode: {maxBatch: 5}\n");
    world.settle();
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 3);
    assert_eq!(world.says(DEGRADED), ("False", "AsPlanned"));
    // And back to the first.
    world.change("");
    world.settle();
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 4);
    let names: Vec<u64> = world
        .observed
        .plans
        .iter()
        .map(|plan| plan.spec.generation)
        .collect();
    assert_eq!(names, [3, 4], "the current plan and the one before");
}

#[test]
fn the_first_plan_is_tried_for_ever() {
    let mut world = World::new("rollout: {progressDeadline: 1m}\n");
    world.broken_from = 1;
    world.visit();
    world.turn();
    world.visit();
    world.turn();
    world.pass(Duration::from_secs(120));
    world.visit();
    assert_eq!(
        world.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
    assert!(
        world
            .told()
            .contains(&"ProgressDeadlineExceeded".to_owned())
    );
    assert_eq!(world.observed.plans.len(), 1);
    world.broken_from = u64::MAX;
    world.settle();
    assert_eq!(world.condition(READY).status, "True");
}

#[test]
fn a_worker_that_hangs_is_told_from_one_that_loads() {
    let mut world = World::new("decode: {replicas: 2}\n");
    world.settle();
    world.told();
    world.pod("demo-decode-1", |pod| {
        pod.ip = "10.9.0.1".to_owned();
        pod.is_ready = false;
        pod.has_lost_readiness = true;
    });
    world.visit();
    assert_eq!(world.says(DECODE_READY), ("False", "ReadinessLost"));
    let told = Placement {
        is_hung: true,
        ..Placement::default()
    };
    let ip = "10.9.0.1".parse().unwrap();
    world.observed.placements.insert(ip, told);
    world.visit();
    assert_eq!(world.says(DECODE_READY), ("False", "Hung"));
    assert_eq!(world.says(DEGRADED), ("True", "Hung"));
    assert!(world.condition(DEGRADED).message.contains("decode-1 hangs"));
    assert_eq!(world.says(READY).0, "True", "the other one answers");
    let told = world.told();
    assert!(told.iter().any(|reason| reason == "Hung"), "{told:?}");
    // It comes back by itself: nothing was made anew, and an old word of its gateway says nothing any more.
    world.pod("demo-decode-1", |pod| {
        pod.is_ready = true;
        pod.has_lost_readiness = false;
    });
    let decision = world.visit();
    assert!(decision.create_pods.is_empty());
    assert_eq!(world.says(DECODE_READY), ("True", "AllReady"));
    assert_eq!(world.says(DEGRADED), ("False", "AsPlanned"));
}

#[test]
fn loading_is_progress_as_long_as_the_worker_does_not_end() {
    let mut world = World::new("rollout: {progressDeadline: 10m}\n");
    world.visit();
    world.turn();
    world.turn();
    let loading = |restarts: u32| ContainerView {
        restarts,
        is_starting: true,
        ..ContainerView::default()
    };
    let hour = Duration::from_secs(3600);
    world.pod("demo-decode-0", |pod| {
        pod.is_ready = false;
        pod.container = Some(loading(0));
    });
    for _ in 0..3 {
        world.pass(hour);
        world.visit();
        assert_eq!(world.says(PROGRESSING), ("True", "Starting"));
    }
    // It has ended itself once: its second attempt is no progress.
    world.pod("demo-decode-0", |pod| pod.container = Some(loading(1)));
    world.visit();
    assert_eq!(
        world.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
    // Placed a moment ago.
    let now = world.observed.now;
    world.pod("demo-decode-0", |pod| {
        pod.container = None;
        pod.progressed = Some(now);
    });
    world.pass(Duration::from_secs(599));
    world.visit();
    assert_eq!(world.says(PROGRESSING), ("True", "Starting"));
    world.pass(Duration::from_secs(1));
    world.visit();
    assert_eq!(
        world.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
}

#[test]
fn too_little_memory_is_told_with_what_would_fit_and_old_work_goes_on() {
    let mut world = World::new("");
    world.settle();
    world.change("decode: {kvCache: {memory: 64Gi}}\n");
    world.settle();
    assert_eq!(world.says(PLANNED), ("False", "InsufficientMemory"));
    let message = &world.condition(PLANNED).message;
    assert!(
        message.contains("lower spec.decode.kvCache.memory"),
        "{message}"
    );
    assert_eq!(world.condition(READY).status, "True");
    assert_eq!(world.observed.plans.len(), 1);
}

#[test]
fn the_cause_of_a_crash_is_in_the_conditions() {
    let mut world = World::new("");
    world.visit();
    world.turn();
    world.pod("demo-decode-0", |pod| {
        pod.container = Some(ContainerView {
            restarts: 2,
            waiting: Some(("CrashLoopBackOff".to_owned(), "back-off 20s".to_owned())),
            last_end: Some(ContainerEnd {
                exit_code: 1,
                reason: "Error".to_owned(),
                message: "error: config.json is missing\n".to_owned(),
            }),
            ..ContainerView::default()
        });
    });
    world.turn();
    world.visit();
    assert_eq!(world.says(DECODE_READY), ("False", "Crashed"));
    assert_eq!(world.says(READY), ("False", "Crashed"));
    assert!(
        world
            .condition(READY)
            .message
            .ends_with("config.json is missing")
    );
}

#[test]
fn a_worker_that_goes_missing_is_told_once_and_made_again() {
    let mut world = World::new("decode: {replicas: 2}\n");
    world.settle();
    world.told();
    world.observed.pods.retain(|pod| pod.rank != "decode-1");
    world.settle();
    let told = world.told();
    assert_eq!(told, ["WorkerLost", "WorkerReady"]);
    assert_eq!(world.condition(READY).status, "True");
}

#[test]
fn old_down_first_says_that_requests_wait() {
    let mut world = World::new("decode: {kvCache: {memory: 1500Mi}}\n");
    world.observed.nodes.remove("attic");
    world.settle();
    world.told();
    world.change("decode: {kvCache: {memory: 2Gi}}\n");
    let mut reasons = Vec::new();
    for _ in 0..30 {
        world.visit();
        let holding: u64 = world.observed.pods.iter().map(|pod| pod.memory_bytes).sum();
        assert!(holding <= 4096 * MIB, "{holding}");
        reasons.push(world.says(PROGRESSING).1.to_owned());
        reasons.push(world.says(READY).1.to_owned());
        world.turn();
    }
    assert!(reasons.contains(&"OldDownFirst".to_owned()), "{reasons:?}");
    assert!(reasons.contains(&"Replacing".to_owned()), "{reasons:?}");
    assert_eq!(world.condition(READY).status, "True");
    assert!(!world.told().contains(&"NotReady".to_owned()));
}

#[test]
fn measurements_are_shown_and_do_not_flap() {
    let mut world = World::new("");
    world.settle();
    let measured = |ttft_ms: f64| {
        Some(Measured {
            ttft_ms: Some(ttft_ms),
            tpot_ms: Some(41.0),
        })
    };
    world.observed.measured = measured(100.0);
    world.visit();
    let first = world.status().clone();
    world.observed.measured = measured(104.0);
    world.visit();
    assert_eq!(*world.status(), first);
    world.observed.measured = None;
    world.visit();
    assert_eq!(*world.status(), first);
}

#[test]
fn a_worker_that_the_scheduler_refuses_is_planned_again_where_there_is_room() {
    let mut world = World::new("");
    world.visit();
    let home = world.observed.pods[0].wanted_node.clone();
    for pod in world
        .observed
        .pods
        .iter_mut()
        .filter(|pod| pod.wanted_node == home)
    {
        let words = "Unschedulable: 0/2 nodes: 1 Insufficient memory";
        Arc::make_mut(pod).unschedulable = Some(words.to_owned());
    }
    world.visit();
    assert_eq!(world.says(DECODE_READY), ("False", "Unschedulable"));
    // Others have taken the node meanwhile.
    let held = crate::controller::observed::Holding {
        memory_bytes: 4000 * MIB,
        ..Default::default()
    };
    world.observed.held_by_others.insert(home.clone(), held);
    world.pass(Duration::from_secs(31));
    world.settle();
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(world.condition(READY).status, "True");
}

#[test]
fn what_workers_got_stands_in_the_status_and_less_than_planned_is_a_condition() {
    let mut world = World::new("");
    world.settle();
    assert_eq!(world.says(PLACED), ("Unknown", "NotTold"));
    assert!(world.status().placement.is_empty());

    let mut address = 0;
    let mut got = |world: &mut World, rank: &str, shortfalls: &str| {
        address += 1;
        let ip = format!("10.9.0.{address}");
        world.pod(&format!("demo-{rank}"), |pod| pod.ip.clone_from(&ip));
        let placement = Placement {
            cpus: "4-5".to_owned(),
            numa_nodes: "1".to_owned(),
            shortfalls: shortfalls.to_owned(),
            ..Placement::default()
        };
        let ip = ip.parse().unwrap();
        world.observed.placements.insert(ip, placement);
        world.visit();
    };
    got(&mut world, "decode-0", "");
    assert_eq!(world.says(PLACED), ("Unknown", "NotTold"));
    got(&mut world, "prefill-0", "");
    assert_eq!(world.says(PLACED), ("True", "AsPlanned"));
    let placement = &world.status().placement;
    let ranks: Vec<&str> = placement.iter().map(|rank| rank.rank.as_str()).collect();
    assert_eq!(ranks, ["prefill-0", "decode-0"]);
    assert_eq!(
        (placement[1].cpus.as_str(), placement[1].numa_nodes.as_str()),
        ("4-5", "1")
    );
    assert_eq!(placement[1].shortfalls, None);

    got(&mut world, "decode-0", "1 of 2 threads compute");
    assert_eq!(world.says(PLACED), ("False", "LessThanPlanned"));
    let node = &world.status().placement[1].node;
    let message = &world.condition(PLACED).message;
    assert!(
        *message == format!("decode-0 on {node}: 1 of 2 threads compute"),
        "{message}"
    );

    // A new operator has asked nobody yet: what was told stays.
    world.observed.placements.clear();
    let before = world.status().clone();
    world.visit();
    assert_eq!(*world.status(), before);
}
