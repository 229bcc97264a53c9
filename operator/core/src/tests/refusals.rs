//! Workers that the scheduler refuses are planned elsewhere, a bounded number of times.

use std::sync::Arc;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, PROGRESSING, READY};
use crate::observed::forbidden::{Counted, Forbidden};
use crate::observed::{ContainerView, Requests};
use crate::testing::{GIB, MIB};

const VOLUME: &str = "Unschedulable: 0/2 nodes are available: 1 node(s) had volume node affinity conflict. preemption: none";
const CLAIM: &str =
    "Unschedulable: 0/2 nodes are available: persistentvolumeclaim \"weights\" not found.";

/// Makes the scheduler refuse everything that waits for one of these nodes.
fn refuse(cluster: &mut FakeCluster, nodes: &[&str], words: &str) {
    for pod in &mut cluster.observed.pods {
        if pod.node.is_empty() && nodes.contains(&pod.wanted_node.as_str()) {
            Arc::make_mut(pod).unschedulable = Some(words.to_owned());
        }
    }
}

fn home(cluster: &FakeCluster) -> String {
    cluster.observed.pods[0].wanted_node.clone()
}

#[test]
fn what_only_the_scheduler_knows_leads_to_another_node() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    let home = home(&cluster);
    refuse(&mut cluster, &[&home], VOLUME);
    let decision = cluster.reconcile();
    assert_eq!(cluster.says(DECODE_READY), ("False", "Unschedulable"));
    // It is looked at again in time, whatever else happens.
    assert_eq!(decision.requeue_after, Some(Duration::from_secs(30)));
    cluster.pass(Duration::from_secs(31));
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    let planned = cluster.condition(PLANNED).message.clone();
    assert!(
        planned.contains(&format!("{home} is left out: the scheduler refused"))
            && planned.contains("volume node affinity conflict")
            && !planned.contains("preemption"),
        "{planned}"
    );
    assert_eq!(cluster.observed.plans.last().unwrap().spec.generation, 2);
}

#[test]
fn where_every_node_refuses_the_tries_end_and_the_cause_is_told() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    for _ in 0..10 {
        refuse(&mut cluster, &["attic", "office"], VOLUME);
        cluster.pass(Duration::from_secs(31));
        cluster.reconcile();
    }
    let plans = cluster.observed.plans.last().unwrap().spec.generation;
    assert_eq!(plans, 2, "one for each node");
    assert_eq!(cluster.says(DEGRADED), ("True", "Unschedulable"));
    let told = &cluster.condition(DEGRADED).message;
    assert!(
        told.contains("volume node affinity conflict") && told.contains("fits nowhere else"),
        "{told}"
    );
}

#[test]
fn a_claim_that_is_missing_is_no_fault_of_the_node() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    let home = home(&cluster);
    refuse(&mut cluster, &[&home], CLAIM);
    cluster.pass(Duration::from_secs(60));
    cluster.reconcile();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.says(DECODE_READY), ("False", "Unschedulable"));
}

/// Between plan and Pod, a foreign Pod takes the room.
#[test]
fn a_foreign_pod_that_comes_between_moves_the_plan() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    let home = home(&cluster);
    refuse(&mut cluster, &[&home], "Unschedulable: 1 Insufficient cpu");
    let foreign = Requests {
        cpu_millis: 3800,
        memory_bytes: 64 * MIB,
        gpus: 0,
    };
    let others = &mut cluster.observed.others.requests;
    others.insert(home.clone(), foreign);
    cluster.pass(Duration::from_secs(31));
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    // The plan follows from the numbers: no node is left out by name.
    assert!(!cluster.condition(PLANNED).message.contains("left out"));
}

/// The message has the numbers of the refusal: what others have taken, and what Pods may request.
#[test]
fn too_little_cpu_is_told_with_its_accounts() {
    let mut cluster = FakeCluster::new("placement: {pinning: Exclusive}\n");
    let foreign = Requests {
        cpu_millis: 3000,
        memory_bytes: GIB,
        gpus: 0,
    };
    for node in ["attic", "office"] {
        let others = &mut cluster.observed.others.requests;
        others.insert(node.to_owned(), foreign);
    }
    cluster.reconcile();
    assert_eq!(cluster.says(PLANNED), ("False", "TooFewCores"));
    let told = &cluster.condition(PLANNED).message;
    for part in [
        "of its 4000m CPU other Pods request 3000m, 100m are kept free",
        "write spec.placement.pinning: Shared",
    ] {
        assert!(told.contains(part), "{told}");
    }
}

const REJECTION: &str = "SMT Alignment Error: requested 1 cpus not multiple cpus per core = 2";

/// Makes the kubelets of these nodes reject everything that is not running. Returns how many Pods they rejected.
fn reject(cluster: &mut FakeCluster, nodes: &[&str]) -> usize {
    let mut rejected = 0;
    for pod in &mut cluster.observed.pods {
        if pod.phase == "Pending" && nodes.contains(&pod.wanted_node.as_str()) {
            let pod = Arc::make_mut(pod);
            pod.node.clone_from(&pod.wanted_node);
            pod.phase = "Failed".to_owned();
            pod.reason = "SMTAlignmentError".to_owned();
            pod.message = REJECTION.to_owned();
            rejected += 1;
        }
    }
    rejected
}

/// A Pod that is created again because a kubelet rejected it is not progress, and is created ever more rarely.
#[test]
fn a_plan_whose_pods_every_kubelet_rejects_is_late() {
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 10m}\n");
    cluster.reconcile();
    let mut rejected = 0;
    let mut late_after = None;
    for second in 0..2 * 3600 {
        rejected += reject(&mut cluster, &["attic", "office"]);
        cluster.pass(Duration::from_secs(1));
        cluster.reconcile();
        if cluster.says(PROGRESSING) == ("False", "ProgressDeadlineExceeded") {
            late_after.get_or_insert(second);
        }
    }
    let late_after = late_after.expect("no deadline ends while Pods are rejected");
    assert!((600..1500).contains(&late_after), "{late_after} s");
    assert_eq!(cluster.observed.plans.len(), 2, "one for each node");
    // Three Pods for each plan, each created again after 10 s at first, and after 5 minutes in the end.
    assert!((20..200).contains(&rejected), "{rejected} Pods");
    assert_eq!(cluster.says(DECODE_READY), ("False", "Rejected"));
}

#[test]
fn what_a_kubelet_rejects_is_planned_on_another_node() {
    let mut cluster = FakeCluster::new("");
    cluster.reconcile();
    let home = home(&cluster);
    for _ in 0..120 {
        reject(&mut cluster, &[&home]);
        cluster.pass(Duration::from_secs(1));
        cluster.reconcile();
    }
    // Rejected Pods that are no longer wanted are deleted.
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.observed.pods.iter().all(|pod| pod.node != home));
    let planned = &cluster.condition(PLANNED).message;
    assert!(
        planned.contains(&format!("{home} is left out: its kubelet refused"))
            && planned.contains(REJECTION),
        "{planned}"
    );
}

/// The kubelet had not released the CPUs of the previous Pod: the next one is accepted, and may load for as long as it
/// needs.
#[test]
fn a_pod_that_was_rejected_once_goes_on_as_if_nothing_had_been() {
    let mut cluster = FakeCluster::new("rollout: {progressDeadline: 1m}\n");
    cluster.reconcile();
    let home = home(&cluster);
    reject(&mut cluster, &[&home]);
    cluster.pass(Duration::from_secs(11));
    cluster.reconcile();
    cluster.reconcile();
    cluster.turn();
    let began = cluster.observed.now;
    for pod in &mut cluster.observed.pods {
        let pod = Arc::make_mut(pod);
        pod.is_ready = false;
        pod.container = Some(ContainerView {
            running_since: Some(began),
            is_starting: true,
            ..ContainerView::default()
        });
    }
    for _ in 0..10 {
        cluster.pass(Duration::from_secs(60));
        cluster.reconcile();
        assert_eq!(cluster.says(PROGRESSING), ("True", "Starting"));
    }
    assert_eq!(cluster.observed.plans.len(), 1);
}

/// There is no Pod that could report it.
#[test]
fn what_the_api_server_forbids_is_told_in_its_words() {
    let quota = "pods \"demo-decode-0\" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3";
    let security =
        "pods \"demo-decode-0\" is forbidden: violates PodSecurity \"restricted:latest\": hostPath";
    for (words, reason) in [(quota, "QuotaExceeded"), (security, "NotAllowed")] {
        let mut cluster = FakeCluster::new("");
        cluster.reconcile();
        cluster.observed.pods.clear();
        cluster.observed.forbidden = Some(Forbidden::after(
            None,
            1,
            words,
            true,
            Counted::default(),
            cluster.observed.now,
        ));
        let decision = cluster.reconcile();
        assert!(!decision.create_pods.is_empty(), "it is tried again");
        for condition in [DECODE_READY, READY] {
            assert_eq!(cluster.says(condition), ("False", reason));
            let told = &cluster.condition(condition).message;
            assert!(told.contains(words), "{told}");
        }
        assert!(cluster.condition(PROGRESSING).message.contains(words));
    }
}

/// A quota that the new plan would not fit even alone ends nothing that serves.
#[test]
fn what_serves_goes_on_where_the_quota_would_not_have_the_new_plan_alone() {
    let told = |most: usize| {
        let mut cluster = FakeCluster::new("");
        cluster.settle();
        let before = cluster.observed.pods.clone();
        let own = || before.iter().map(|pod| &**pod);
        let there = before.len();
        cluster.change("decode: {replicas: 2, maxBatch: 3}\n");
        let decision = cluster.reconcile();
        cluster.observed.pods.clone_from(&before);
        assert!(!decision.create_pods.is_empty());
        let words = format!(
            "pods \"x\" is forbidden: exceeded quota: small, requested: pods=1, used: pods={there}, limited: pods={most}"
        );
        let forbidden = Forbidden::after(
            None,
            2,
            &words,
            true,
            Counted::of_pods(own()),
            cluster.observed.now,
        );
        cluster.observed.forbidden = Some(forbidden);
        let mut ended = cluster.reconcile().delete_pods.len();
        let message = cluster.condition(PROGRESSING).message.clone();
        // Routes change before those that they lead to end.
        for _ in 0..3 {
            let is_there = |name: &str| before.iter().any(|pod| pod.name == name);
            cluster.observed.pods.retain(|pod| is_there(&pod.name));
            ended += cluster.reconcile().delete_pods.len();
        }
        (ended, there, message)
    };
    let (ended, there, message) = told(3);
    assert_eq!((ended, there), (0, 3));
    assert!(message.contains("what is running continues"), "{message}");
    let (ended, _, message) = told(4);
    assert!(ended > 0, "four Pods fit: the workers before make room");
    assert!(!message.contains("what is running continues"), "{message}");
}

/// A quota names what one Pod is too much for, so it may be short of more than was known when the old Pods ended.
#[test]
fn a_plan_that_the_quota_has_no_room_for_either_is_given_up_when_what_served_has_ended_for_it() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = cluster.observed.pods.clone();
    cluster.change("decode: {replicas: 2, maxBatch: 3}\n");
    cluster.reconcile();
    cluster.observed.pods.clone_from(&before);
    let words = |used: &str, most: &str| {
        format!(
            "pods \"x\" is forbidden: exceeded quota: small, requested: {used}, used: {used}, limited: {most}"
        )
    };
    let own = || Counted::of_pods(before.iter().map(|pod| &**pod));
    let full = words("pods=3", "pods=9");
    let mut forbidden = Forbidden::after(None, 2, &full, true, own(), cluster.observed.now);
    cluster.observed.forbidden = Some(forbidden.clone());
    cluster.reconcile();
    // The workers that served have ended.
    cluster.observed.pods.clear();
    forbidden.goes(cluster.observed.now);
    let short = words("limits.memory=1Gi", "limits.memory=1Gi");
    let mut forbidden = Forbidden::after(
        Some(forbidden),
        2,
        &short,
        true,
        Counted::default(),
        cluster.observed.now,
    );
    cluster.observed.forbidden = Some(forbidden.clone());
    cluster.reconcile();
    assert_ne!(
        cluster.says(PROGRESSING).1,
        "RollingBack",
        "its counts are old"
    );
    cluster.observed.pods.clear();
    let later = forbidden.last.expect("now") + Duration::from_secs(31);
    forbidden.last = Some(later);
    cluster.observed.forbidden = Some(forbidden);
    cluster.reconcile();
    assert_eq!(cluster.says(PROGRESSING), ("True", "RollingBack"));
    let told = &cluster.condition(PROGRESSING).message;
    assert!(
        told.contains("no room for it alone either") && told.contains("limits.memory"),
        "{told}"
    );
    cluster.observed.pods.clear();
    cluster.settle();
    assert_eq!(cluster.says(READY).0, "True");
    let serving = cluster.observed.pods.iter().map(|pod| pod.plan_generation);
    assert!(serving.into_iter().all(|generation| generation == 1));
}

/// One of its Pods is created again, while others have the room for the moment.
#[test]
fn a_plan_that_has_served_is_not_given_up_for_a_quota() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    cluster.change("decode: {replicas: 3, maxBatch: 3}\n");
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let served = cluster.observed.plans.last().unwrap().spec.generation;
    assert_eq!(served, 2);
    let words = |resource: &str| {
        format!(
            "pods \"x\" is forbidden: exceeded quota: small, requested: {resource}=1, used: {resource}=4, limited: {resource}=9"
        )
    };
    let own = || Counted::of_pods(cluster.observed.pods.iter().map(|pod| &**pod));
    let mut forbidden =
        Forbidden::after(None, 2, &words("pods"), false, own(), cluster.observed.now);
    forbidden.goes(cluster.observed.now);
    let short = words("limits.memory");
    let mut forbidden = Forbidden::after(
        Some(forbidden),
        2,
        &short,
        false,
        own(),
        cluster.observed.now,
    );
    forbidden.last = forbidden.last.map(|last| last + Duration::from_secs(31));
    cluster.observed.forbidden = Some(forbidden);
    let evicted = cluster.observed.pods[0].name.clone();
    for _ in 0..3 {
        // It is created at every reconcile, and refused.
        cluster.observed.pods.retain(|pod| pod.name != evicted);
        let decision = cluster.reconcile();
        let again = decision.create_pods.iter();
        assert!(
            again
                .into_iter()
                .any(|pod| pod.metadata.name.as_ref() == Some(&evicted))
        );
        assert!(
            decision.plan_statuses.is_empty(),
            "{:?}",
            decision.plan_statuses
        );
        assert_ne!(cluster.says(PROGRESSING).1, "RollingBack");
    }
}
