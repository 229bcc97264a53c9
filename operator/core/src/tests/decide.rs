//! Whole reconciles.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{
    DECODE_READY, DEGRADED, EXACT_FAILOVER, MODEL_READY, PLACED, PLANNED, PREFILL_READY,
    PROGRESSING, READY,
};
use crate::decide::decide;
use crate::observed::Placement;
use crate::observed::{ContainerEnd, ContainerView, Measured, PodView};
use crate::routes::reachable;
use crate::testing::MIB;

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
    let mut cluster = FakeCluster::new("");
    let first = cluster.reconcile();
    assert!(first.create_plan.is_some());
    assert_eq!(first.create_pods.len(), 3);
    assert!(!first.objects.is_empty());
    for type_ in ALL {
        let condition = cluster.condition(type_);
        assert_eq!(condition.observed_generation, Some(1));
        assert!(!condition.reason.is_empty() && !condition.message.is_empty());
    }
    cluster.settle();
    for type_ in [READY, PLANNED, MODEL_READY, PREFILL_READY, DECODE_READY] {
        assert_eq!(cluster.condition(type_).status, "True", "{type_}");
    }
    assert_eq!(cluster.says(PROGRESSING), ("False", "Complete"));
    assert_eq!(cluster.says(DEGRADED), ("False", "AsPlanned"));
    let status = cluster.status().clone();
    let told = |type_| status.conditions.iter().any(|c| c.type_ == type_);
    assert!(!told(EXACT_FAILOVER), "said only where it does not hold");
    for (name, role) in [
        ("gateway", "Gateway"),
        ("prefill", "Prefill"),
        ("decode", "Decode"),
    ] {
        let pool = status.pool(name).unwrap();
        assert_eq!((&*pool.role, &*pool.summary), (role, "1/1"));
        assert_eq!((pool.replicas, pool.ready, pool.updated), (1, 1, 1));
    }
    assert_eq!(status.plan.unwrap().name, "demo-1");
    assert_eq!(status.endpoint_url.unwrap(), "http://demo.default.svc/v1");
    assert_eq!(
        status.selector.unwrap(),
        "hearth.dev/deployment=demo,hearth.dev/role=decode"
    );
    assert!(
        status
            .predicted
            .unwrap()
            .time_to_first_token_milliseconds
            .is_some()
    );
    assert_eq!(
        cluster.told(),
        [
            "Planned",
            "ModelReady",
            "WorkerReady",
            "WorkerReady",
            "Ready"
        ]
    );
    let mut last = decide(&cluster.observed);
    cluster.pass(Duration::from_secs(100_000));
    let later = decide(&cluster.observed);
    assert_eq!(last.status, later.status, "no clock in the status");
    assert!(!later.writes_objects() && later.events.is_empty());
    assert_eq!(later.requeue_after, None);
    last.objects.clear();
}

#[test]
fn a_pool_of_mixed_instruction_sets_is_told() {
    let mut cluster = FakeCluster::new(
        "prefill: {mode: Chunked}\ndecode: {replicas: 2, kvCache: {memory: 2Gi}}\n",
    );
    cluster.node("attic", |node| {
        if let Some(profile) = &mut node.profile {
            profile.isa.avx2 = true;
        }
    });
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(cluster.says(EXACT_FAILOVER), ("False", "MixedNumerics"));
    let message = &cluster.condition(EXACT_FAILOVER).message;
    assert!(
        message.contains("AVX2") && message.contains("later tokens may be others"),
        "{message}"
    );
}

#[test]
fn a_gateway_is_made_with_certificate_and_routes() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let gateway = cluster
        .observed
        .pods
        .iter()
        .find(|pod| pod.role.is_gateway())
        .unwrap();
    assert_eq!(gateway.certificate, "1");
    assert!(gateway.routes.contains("decode-0") && gateway.routes.contains("prefill-0"));
    cluster.observed.certificate = Some("2".to_owned());
    let decision = cluster.reconcile();
    assert_eq!(decision.mark_pods.len(), 3);
    assert!(
        cluster
            .observed
            .pods
            .iter()
            .all(|pod| pod.certificate == "2")
    );
}

#[test]
fn a_wrong_spec_is_told_and_what_runs_goes_on() {
    let mut cluster = FakeCluster::new("strategy: Interleaved\n");
    let decision = cluster.reconcile();
    assert!(!decision.writes_objects());
    assert_eq!(cluster.says(PLANNED), ("False", "InvalidSpec"));
    assert!(
        cluster
            .condition(PLANNED)
            .message
            .contains("spec.strategy is \"Interleaved\"")
    );
    assert_eq!(cluster.says(MODEL_READY), ("Unknown", "InvalidSpec"));
    cluster.change("");
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
    cluster.change("strategy: Interleaved\n");
    cluster.settle();
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(cluster.says(PLANNED), ("False", "InvalidSpec"));
    assert!(
        cluster
            .condition(PLANNED)
            .message
            .contains("plan 1 keeps running")
    );
    assert!(cluster.told().contains(&"InvalidSpec".to_owned()));
    // A Pod of the plan in force is still looked after.
    cluster.observed.pods.retain(|pod| pod.rank != "decode-0");
    assert_eq!(cluster.reconcile().create_pods.len(), 1);
}

#[test]
fn a_namespace_that_is_not_served_is_not_touched() {
    let mut cluster = FakeCluster::new("");
    let mut settings = (*cluster.observed.settings).clone();
    settings.namespaces = vec!["other".to_owned()];
    cluster.observed.settings = Arc::new(settings);
    let decision = cluster.reconcile();
    assert!(!decision.writes_objects() && decision.objects.is_empty());
    assert_eq!(cluster.says(PLANNED), ("False", "NamespaceNotServed"));
}

#[test]
fn a_deployment_that_is_being_deleted_is_left_alone() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let mut deployment = (*cluster.observed.deployment).clone();
    deployment.metadata.deletion_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(cluster.observed.now),
    );
    cluster.observed.deployment = Arc::new(deployment);
    cluster.observed.pods.clear();
    let decision = decide(&cluster.observed);
    assert!(!decision.writes_objects() && decision.objects.is_empty());
    assert_eq!(
        Some(&decision.status),
        cluster.observed.deployment.status.as_ref()
    );
}

#[test]
fn scaling_keeps_what_runs_and_says_so() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.told();
    let before = cluster.observed.pods.clone();
    cluster.change("decode: {replicas: 2}\n");
    cluster.settle();
    assert_eq!(cluster.status().pool("decode").unwrap().summary, "2/2");
    let told = cluster.told();
    // One event of the decision, and the workers that come.
    assert_eq!(told, ["ScaledDecode", "WorkerReady"]);
    let uids = |pods: &[Arc<PodView>]| -> BTreeSet<String> {
        let workers = pods.iter().filter(|pod| !pod.role.is_gateway());
        workers.map(|pod| pod.uid.clone()).collect()
    };
    let (before, two) = (uids(&before), uids(&cluster.observed.pods));
    assert!(before.is_subset(&two), "workers that ran were replaced");
    let nodes: BTreeSet<String> = cluster.ranks().into_iter().map(|(_, node)| node).collect();
    assert_eq!(nodes.len(), 2);
    let generations: Vec<u64> = cluster
        .observed
        .pods
        .iter()
        .map(|pod| pod.plan_generation)
        .collect();
    assert_eq!(generations, vec![2; generations.len()]);
    cluster.change("decode: {replicas: 1}\n");
    cluster.settle();
    assert_eq!(uids(&cluster.observed.pods), before);
}

#[test]
fn a_spec_that_says_the_same_in_other_words_makes_no_plan() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.change("decode: {replicas: 1}\n");
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_none());
    assert_eq!(decision.plan_statuses.len(), 1);
    cluster.settle();
    assert_eq!(cluster.status().observed_generation, Some(2));
    assert_eq!(cluster.observed.plans.len(), 1);
}

#[test]
fn keys_change_the_gateway_and_no_plan() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let workers = |cluster: &FakeCluster| -> Vec<String> {
        let pods = cluster.observed.pods.iter();
        pods.filter(|pod| !pod.role.is_gateway())
            .map(|pod| pod.uid.clone())
            .collect()
    };
    let before = workers(&cluster);
    let gateway = cluster
        .observed
        .pods
        .iter()
        .find(|pod| pod.role.is_gateway())
        .unwrap()
        .uid
        .clone();
    cluster.change("endpoint: {apiKeysSecretRef: {name: keys}}\n");
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(workers(&cluster), before);
    assert!(cluster.observed.pods.iter().all(|pod| pod.uid != gateway));
}

#[test]
fn too_little_memory_is_told_with_what_would_fit_and_old_work_goes_on() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.change("decode: {kvCache: {memory: 64Gi}}\n");
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "InsufficientMemory"));
    let message = &cluster.condition(PLANNED).message;
    assert!(
        message.contains("lower spec.decode.kvCache.memory"),
        "{message}"
    );
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(cluster.observed.plans.len(), 1);
}

#[test]
fn the_cause_of_a_crash_is_in_the_conditions() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    cluster.turn();
    cluster.pod("demo-decode-0", |pod| {
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
    cluster.turn();
    cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "Crashed"));
    assert_eq!(cluster.says(READY), ("False", "Crashed"));
    assert!(
        cluster
            .condition(READY)
            .message
            .ends_with("config.json is missing")
    );
}

#[test]
fn a_worker_that_goes_missing_is_told_once_and_made_again() {
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    cluster.told();
    cluster.observed.pods.retain(|pod| pod.rank != "decode-1");
    cluster.settle();
    let told = cluster.told();
    assert_eq!(told, ["WorkerLost", "WorkerReady"]);
    assert_eq!(cluster.condition(READY).status, "True");
}

#[test]
fn old_down_first_says_that_requests_wait() {
    let mut cluster = FakeCluster::new("decode: {kvCache: {memory: 1500Mi}}\n");
    cluster.observed.nodes.remove("attic");
    cluster.settle();
    cluster.told();
    cluster.change(OTHER_GATEWAY);
    let mut reasons = Vec::new();
    for _ in 0..30 {
        cluster.reconcile();
        let holding: u64 = cluster
            .observed
            .pods
            .iter()
            .map(|pod| pod.memory_bytes)
            .sum();
        assert!(holding <= 4096 * MIB, "{holding}");
        reasons.push(cluster.says(PROGRESSING).1.to_owned());
        reasons.push(cluster.says(READY).1.to_owned());
        assert_ready_whoever_takes_a_request(&cluster);
        // Before what was created has a node.
        cluster.reconcile();
        cluster.turn();
        // If the operator ends now, what it said last still holds.
        assert_ready_whoever_takes_a_request(&cluster);
    }
    assert!(reasons.contains(&"OldDownFirst".to_owned()), "{reasons:?}");
    assert!(reasons.contains(&"Replacing".to_owned()), "{reasons:?}");
    assert_eq!(cluster.condition(READY).status, "True");
    assert!(!cluster.told().contains(&"NotReady".to_owned()));
}

/// A spec that changes the gateway, too.
pub(super) const OTHER_GATEWAY: &str = "decode: {kvCache: {memory: 2Gi}}\nmodel: {source: {builtin: {name: hearth-demo}}, contextLength: 256}\n";

fn gateways(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    let gateways = pods.filter(|pod| pod.role.is_gateway());
    gateways.map(|pod| pod.name.clone()).collect()
}

/// Asserts that every gateway that takes requests has them answered if the deployment reports Ready.
fn assert_ready_whoever_takes_a_request(cluster: &FakeCluster) {
    let pods: Vec<&PodView> = cluster.observed.pods.iter().map(|pod| &**pod).collect();
    let mut gateways = pods.iter().filter(|pod| pod.role.is_gateway());
    let is_held =
        |pod: &&&PodView| pod.is_ready && !pod.is_deleting && reachable(&pod.routes, &pods).0 == 0;
    let held = gateways.find(is_held);
    let is_ready = cluster.condition(READY).status == "True";
    assert!(!is_ready || held.is_none(), "{held:?}");
}

/// One that needs the room of what runs, and whose image is not found: if that comes, it holds what it takes.
#[test]
fn a_gateway_without_workers_makes_it_unready_before_it_starts() {
    let mut cluster = FakeCluster::new("decode: {kvCache: {memory: 1500Mi}}\n");
    cluster.observed.nodes.remove("attic");
    cluster.settle();
    let old = gateways(&cluster);
    cluster.change(OTHER_GATEWAY);
    let is_new = |pod: &Arc<PodView>| pod.role.is_gateway() && !old.contains(&pod.name);
    for _ in 0..30 {
        cluster.reconcile();
        if cluster.observed.pods.iter().any(is_new) {
            break;
        }
        cluster.turn();
    }
    let message = "once its gateway has started, requests will wait until plan 2 has started";
    let is_announced = |cluster: &FakeCluster| {
        assert_eq!(cluster.says(READY), ("False", "Replacing"));
        assert_eq!(cluster.condition(READY).message, message);
    };
    is_announced(&cluster);
    // Before it has a node and after.
    cluster.reconcile();
    is_announced(&cluster);
    cluster.turn();
    cluster.reconcile();
    is_announced(&cluster);
    let new = cluster.observed.pods.iter().find(|pod| is_new(pod));
    let name = new.expect("the new gateway").name.clone();
    cluster.pod(&name, |pod| {
        pod.container = Some(ContainerView {
            waiting: Some(("ImagePullBackOff".to_owned(), "no such tag".to_owned())),
            ..ContainerView::default()
        });
    });
    cluster.reconcile();
    assert_eq!(cluster.says(READY).0, "False");
    assert!(cluster.condition(READY).message.contains("no such tag"));
}

#[test]
fn measurements_are_shown_and_do_not_flap() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let measured = |ttft_ms: f64| {
        Some(Measured {
            ttft_ms: Some(ttft_ms),
            tpot_ms: Some(41.0),
        })
    };
    cluster.observed.measured = measured(100.0);
    cluster.reconcile();
    let first = cluster.status().clone();
    cluster.observed.measured = measured(104.0);
    cluster.reconcile();
    assert_eq!(*cluster.status(), first);
    cluster.observed.measured = None;
    cluster.reconcile();
    assert_eq!(*cluster.status(), first);
}

#[test]
fn a_worker_that_the_scheduler_refuses_is_planned_again_where_there_is_room() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    let home = cluster.observed.pods[0].wanted_node.clone();
    for pod in cluster
        .observed
        .pods
        .iter_mut()
        .filter(|pod| pod.wanted_node == home)
    {
        let words = "Unschedulable: 0/2 nodes: 1 Insufficient memory";
        Arc::make_mut(pod).unschedulable = Some(words.to_owned());
    }
    cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "Unschedulable"));
    // Others have taken the node in the meantime.
    let held = crate::observed::Holding {
        memory_bytes: 4000 * MIB,
        ..Default::default()
    };
    cluster.observed.held_by_others.insert(home.clone(), held);
    cluster.pass(Duration::from_secs(31));
    cluster.settle();
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    assert_eq!(cluster.condition(READY).status, "True");
}

#[test]
fn what_workers_got_stands_in_the_status_and_less_than_planned_is_a_condition() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    assert_eq!(cluster.says(PLACED), ("Unknown", "NotTold"));
    assert!(cluster.status().placement.is_empty());

    let mut address = 0;
    let mut got = |cluster: &mut FakeCluster, rank: &str, shortfalls: &str| {
        address += 1;
        let ip = format!("10.9.0.{address}");
        cluster.pod(&format!("demo-{rank}"), |pod| pod.ip.clone_from(&ip));
        let placement = Placement {
            cpus: "4-5".to_owned(),
            numa_nodes: "1".to_owned(),
            shortfalls: shortfalls.to_owned(),
            group: format!("complete: {rank}"),
            ..Placement::default()
        };
        let address = format!("{ip}:9400").parse().unwrap();
        cluster.observed.placements.insert(address, placement);
        cluster.reconcile();
    };
    got(&mut cluster, "decode-0", "");
    assert_eq!(cluster.says(PLACED), ("Unknown", "NotTold"));
    got(&mut cluster, "prefill-0", "");
    assert_eq!(cluster.says(PLACED), ("True", "AsPlanned"));
    let placement = &cluster.status().placement;
    let ranks: Vec<&str> = placement.iter().map(|rank| rank.rank.as_str()).collect();
    assert_eq!(ranks, ["prefill-0", "decode-0"]);
    assert_eq!(
        (placement[1].cpus.as_str(), placement[1].numa_nodes.as_str()),
        ("4-5", "1")
    );
    assert_eq!(placement[1].shortfalls, None);
    let group = placement[1].group.as_deref();
    assert_eq!(group, Some("complete: decode-0"));

    got(&mut cluster, "decode-0", "1 of 2 threads compute");
    assert_eq!(cluster.says(PLACED), ("False", "LessThanPlanned"));
    let node = &cluster.status().placement[1].node;
    let message = &cluster.condition(PLACED).message;
    assert!(
        *message == format!("decode-0 on {node}: 1 of 2 threads compute"),
        "{message}"
    );

    // A new operator has not asked any gateway yet: the last report stays.
    cluster.observed.placements.clear();
    let before = cluster.status().clone();
    cluster.reconcile();
    assert_eq!(*cluster.status(), before);
}
