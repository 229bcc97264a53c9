//! Members of groups in the status: the state of each, and what is said and done when one is lost.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{GroupMember, GroupStatus, READER_VERSION};
use kube_core::ResourceExt;
use serde_json::Value;

use super::fake_cluster::FakeCluster;
use super::shared_gpus::of_spec;
use crate::conditions::{DECODE_READY, DEGRADED, PLACED, PREFILL_READY, READY};
use crate::decision::Decision;
use crate::model::builtin;
use crate::observed::forbidden::{Counted, Forbidden};
use crate::observed::{ContainerEnd, ContainerView, FetchView, Placement, Reach};
use crate::testing::{GIB, node};

/// More KV than one node of 4 GiB has room for.
const RING: &str = "strategy: PipedRing\ndecode: {kvCache: {memory: 5Gi}}\n";

const PEERS: &str = "prefill: {mode: DistributedStreamLoading, chunkedBelowTokens: 0}\ndecode: {maxBatch: 4, dualBatch: 'On'}\n";

/// A cluster of these nodes, in which a ring needs two.
fn planned(nodes: &[&str]) -> FakeCluster {
    let mut cluster = FakeCluster::new(RING);
    for name in nodes {
        add(&mut cluster, name, 4 * GIB);
    }
    cluster
}

fn add(cluster: &mut FakeCluster, name: &str, memory_bytes: u64) {
    let mut node = node(name, 4, memory_bytes);
    let profile = node.profile.as_mut().expect("a profile");
    profile.reader_version = Some(READER_VERSION);
    let nodes = &mut cluster.observed.nodes;
    nodes.insert(name.to_owned(), Arc::new(node));
}

/// A ring over two of these nodes that serves.
fn ring(nodes: &[&str]) -> FakeCluster {
    let mut cluster = planned(nodes);
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    cluster.told();
    cluster
}

fn group(cluster: &FakeCluster) -> &GroupStatus {
    cluster.status().groups.first().expect("a group")
}

fn member<'a>(cluster: &'a FakeCluster, rank: &str) -> &'a GroupMember {
    let mut members = group(cluster).members.iter();
    members.find(|it| it.rank == rank).expect("a member")
}

fn pool<'a>(cluster: &'a FakeCluster, name: &str) -> &'a str {
    &cluster.status().pool(name).expect("a pool").summary
}

#[test]
fn a_ring_lists_its_members_with_their_layers_and_is_placed() {
    let mut cluster = ring(&["attic", "office"]);
    let group = group(&cluster);
    assert_eq!(
        (group.plan, &*group.head, &*group.kind, &*group.summary),
        (1, "decode-0", "Ring", "2/2")
    );
    let ranks: Vec<&str> = group.members.iter().map(|it| &*it.rank).collect();
    assert_eq!(ranks, ["decode-0", "stage-0"]);
    for member in &group.members {
        assert!(
            member.layers.is_some() && member.pod.is_some(),
            "{member:?}"
        );
        assert_eq!((&*member.state, &member.message), ("Ready", &None));
    }
    assert_eq!(cluster.says(PLACED), ("Unknown", "NotTold"));
    report(&mut cluster, "decode-0", "");
    // As with a stage of an earlier version.
    assert_eq!(cluster.says(PLACED), ("True", "AsPlanned"));
    let words = &cluster.condition(PLACED).message;
    assert!(words.contains("1 stage reports nothing"), "{words}");
    report(&mut cluster, "stage-0", "");
    let words = &cluster.condition(PLACED).message;
    assert_eq!(words, "2 of 2 workers have what the plan gives them");
    report(&mut cluster, "stage-0", "1 CPU instead of 4");
    assert_eq!(cluster.says(PLACED), ("False", "LessThanPlanned"));
    let words = &cluster.condition(PLACED).message;
    assert!(
        words.starts_with("stage-0 on ") && words.contains("1 CPU"),
        "{words}"
    );
}

/// Has the gateway report what a rank got.
fn report(cluster: &mut FakeCluster, rank: &str, shortfalls: &str) {
    let placement = Placement {
        shortfalls: shortfalls.to_owned(),
        ..Placement::default()
    };
    told_of(cluster, rank, placement);
}

/// Has the gateway report this of a rank.
fn told_of(cluster: &mut FakeCluster, rank: &str, placement: Placement) {
    let mut pods = cluster.observed.pods.iter();
    let pod = pods.find(|pod| pod.rank == rank).expect("a Pod");
    let at: SocketAddr = format!("{}:9400", pod.ip).parse().expect("an address");
    cluster.observed.placements.insert(at, placement);
    cluster.reconcile();
}

#[test]
fn a_member_that_ends_is_named_at_once_and_told_of_once() {
    let mut cluster = ring(&["attic", "office"]);
    cluster.pod("demo-stage-0", |pod| {
        pod.is_ready = false;
        pod.container = Some(ContainerView {
            restarts: 1,
            running_since: None,
            last_end: Some(ContainerEnd {
                exit_code: 137,
                ..ContainerEnd::default()
            }),
            ..ContainerView::default()
        });
    });
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("False", "Crashed"));
    assert_eq!(cluster.says(DECODE_READY), ("False", "Crashed"));
    assert_eq!(cluster.says(DEGRADED), ("True", "Crashed"));
    let words = cluster.condition(READY).message.clone();
    for part in [
        "stage-0 was ended by signal 9 on ",
        "it is started again; answers wait until the ring is whole, and go on with the same tokens",
    ] {
        assert!(words.contains(part), "{words}");
    }
    assert_eq!(pool(&cluster, "decode"), "0/1");
    assert_eq!(group(&cluster).summary, "1/2");
    assert_eq!(member(&cluster, "decode-0").state, GroupMember::READY);
    let lost = member(&cluster, "stage-0");
    assert_eq!(lost.state, GroupMember::LOST);
    assert_eq!(lost.message.as_ref(), Some(&words));
    assert_eq!(cluster.told(), ["MemberLost", "NotReady"]);
    cluster.reconcile();
    assert!(cluster.told().is_empty());

    cluster.pod("demo-stage-0", |pod| pod.is_ready = true);
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(group(&cluster).summary, "2/2");
    assert_eq!(cluster.told(), ["WorkerReady", "Ready"]);
}

#[test]
fn a_member_whose_pod_is_gone_comes_again() {
    let mut cluster = ring(&["attic", "office"]);
    let pods = &mut cluster.observed.pods;
    pods.retain(|pod| pod.rank != "stage-0");
    cluster.reconcile();
    assert_eq!(cluster.says(READY).0, "False");
    let lost = member(&cluster, "stage-0");
    assert_eq!(lost.state, GroupMember::LOST);
    let words = lost.message.clone().unwrap_or_default();
    assert!(
        words.starts_with("stage-0 is gone, and is being created again on "),
        "{words}"
    );
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(group(&cluster).plan, 1);
}

/// As where its node is cut off from the head's alone, or has just hung: nothing of its Pod says so yet.
#[test]
fn a_member_that_its_head_waits_for_is_lost_although_its_pod_is_ready() {
    let mut cluster = ring(&["attic", "office"]);
    let words =
        "stage-0 on office (10.0.0.3:9400) is lost to its group: it has said nothing for 4s";
    let lost = || Placement {
        group: format!("not complete, its requests are computed again when it is: {words}"),
        waits_for: "stage-0".to_owned(),
        ..Placement::default()
    };
    told_of(&mut cluster, "decode-0", lost());
    assert_eq!(cluster.says(READY), ("False", "LostToGroup"));
    assert_eq!(cluster.says(DECODE_READY), ("False", "LostToGroup"));
    assert_eq!(cluster.says(DEGRADED), ("True", "LostToGroup"));
    let message = cluster.condition(READY).message.clone();
    let meanwhile = "answers wait until the ring is whole, and go on with the same tokens";
    assert_eq!(
        message,
        format!("decode-0 waits for stage-0, whose Pod is ready: {words}; {meanwhile}")
    );
    assert_eq!(pool(&cluster, "decode"), "0/1");
    assert_eq!(group(&cluster).summary, "1/2");
    let named = member(&cluster, "stage-0");
    assert_eq!(
        (&*named.state, named.message.as_ref()),
        (GroupMember::LOST, Some(&message))
    );
    assert_eq!(member(&cluster, "decode-0").state, GroupMember::READY);
    assert_eq!(cluster.told(), ["MemberLost", "NotReady"]);
    // A new operator has no report yet, and a new gateway has not reached the head.
    cluster.observed.placements.clear();
    cluster.reconcile();
    let not_yet = Placement {
        reach: Reach::NotYet,
        ..Placement::default()
    };
    told_of(&mut cluster, "decode-0", not_yet);
    assert_eq!(cluster.condition(READY).message, message);
    assert_eq!(member(&cluster, "stage-0").message, Some(message));
    assert!(cluster.told().is_empty());

    told_of(&mut cluster, "decode-0", Placement::default());
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(group(&cluster).summary, "2/2");
    assert_eq!(cluster.told(), ["WorkerReady", "Ready"]);
}

#[test]
fn a_lost_node_is_named_until_another_ring_without_it_serves() {
    let mut cluster = ring(&["attic", "cellar", "office"]);
    let lost = member(&cluster, "stage-0").node.clone();
    let now = cluster.observed.now;
    cluster.node(&lost, |node| {
        node.is_ready = false;
        node.not_ready_since = Some(now);
    });
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("False", "NodeLost"));
    let words = cluster.condition(READY).message.clone();
    assert!(
        words.contains(&format!(
            "stage-0 waits: node {lost} is not Ready; it is planned elsewhere"
        )),
        "{words}"
    );
    cluster.pass(Duration::from_secs(21));
    cluster.reconcile();
    let groups = &cluster.status().groups;
    let plans: Vec<u64> = groups.iter().map(|group| group.plan).collect();
    assert_eq!(plans, [2, 1], "the new ring, and the one that still runs");
    assert!(
        groups[0]
            .members
            .iter()
            .all(|it| it.state == GroupMember::STARTING)
    );
    let old = groups[1].members.iter().find(|it| it.rank == "stage-0");
    let old = old.expect("a member");
    assert_eq!(
        (&*old.state, old.reason.as_deref()),
        (GroupMember::LOST, Some("NodeLost"))
    );
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let group = group(&cluster);
    assert_eq!((group.plan, cluster.status().groups.len()), (2, 1));
    assert!(group.members.iter().all(|it| it.node != lost));
}

/// Of nodes that the ring could have, those with room on their disks are taken; where none has, the member is named with what to do.
#[test]
fn a_member_without_room_for_the_model_on_its_disk_is_named_or_left_out() {
    let source = format!(
        "model: {{source: {{http: {{url: 'https://nas.lan/m.tar', sha256: '{}'}}}}, contextLength: 2048}}\n",
        "ab".repeat(32)
    );
    let mut cluster = FakeCluster::new(&format!("{source}{RING}"));
    for name in ["attic", "cellar", "office"] {
        add(&mut cluster, name, 4 * GIB);
    }
    let ready = || FetchView::Ready {
        facts: Box::new(builtin::facts("hearth-demo").expect("facts")),
        bytes: 1000,
    };
    let full = || {
        let why = "/var/lib/hearth has 1 MiB free, and 9 MiB are needed: the 9 MiB to fetch of m.tar\n  free space on that disk, or keep models on another one";
        FetchView::Failed(why.to_owned())
    };
    let mut set = |name: &str, view: FetchView| {
        cluster.observed.fetches.insert(name.to_owned(), view);
        let decision = cluster.reconcile();
        (decision.fetch_on, decision.create_plan.is_some())
    };
    let (first, _) = set("attic", ready());
    let [second] = &*first
        .into_iter()
        .filter(|name| name != "attic")
        .collect::<Vec<_>>()
    else {
        panic!("two nodes hold it");
    };
    let (next, is_made) = set(second, full());
    let third = next
        .iter()
        .find(|name| *name != "attic" && *name != second)
        .expect("another node")
        .clone();
    assert!(!is_made, "{next:?}");
    let (_, is_made) = set(&third, full());
    assert!(!is_made);
    assert_eq!(cluster.says(READY), ("False", "DownloadFailed"));
    let words = cluster.condition(READY).message.clone();
    for part in [
        "/var/lib/hearth has 1 MiB free, and 9 MiB are needed: the 9 MiB to fetch of m.tar",
        "free space on that disk",
        "; the group waits for ",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    let is_named = |node: &String| words.contains(&format!(" on {node}"));
    assert!(is_named(second) || is_named(&third), "{words}");
    cluster.observed.fetches.insert(third.clone(), ready());
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let nodes: Vec<&str> = group(&cluster).members.iter().map(|it| &*it.node).collect();
    assert!(
        nodes.contains(&"attic") && nodes.contains(&&*third),
        "{nodes:?}"
    );
}

#[test]
fn a_peer_that_is_lost_is_named_while_answers_go_on() {
    let mut cluster = of_spec(PEERS, &["attic", "office"]);
    assert_eq!(
        (&*group(&cluster).kind, &*group(&cluster).summary),
        ("Peers", "2/2")
    );
    assert_eq!(member(&cluster, "stage-0").layers, None);
    cluster.told();
    let lost = member(&cluster, "prefill-0").node.clone();
    let host = cluster
        .observed
        .pods
        .iter()
        .find(|pod| pod.has_rank("stage-0"));
    assert_ne!(host.expect("a Pod").node, lost);
    // The head's own Pod is not ready, and nobody else's.
    cluster.pod("demo-prefill-0", |pod| {
        pod.is_ready = false;
        pod.has_lost_readiness = true;
    });
    cluster.reconcile();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(PREFILL_READY), ("False", "ReadinessLost"));
    assert_eq!(member(&cluster, "prefill-0").state, GroupMember::LOST);
    assert_eq!(cluster.told(), ["MemberLost"]);
}

#[test]
fn a_number_that_is_written_out_replaces_no_ring() {
    let mut cluster = ring(&["attic", "office"]);
    // A ring that is planned now is another one.
    add(&mut cluster, "barn", 64 * GIB);
    let pods = cluster.observed.pods.clone();
    cluster.change("strategy: PipedRing\ndecode: {replicas: 1, kvCache: {memory: 5Gi}}\n");
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_none() && decision.create_pods.is_empty());
    cluster.settle();
    assert_eq!(cluster.observed.pods, pods);
    cluster.change("strategy: PipedRing\ndecode: {maxBatch: 4, kvCache: {memory: 5Gi}}\n");
    let decision = cluster.reconcile();
    let plan = decision.create_plan.expect("another plan");
    assert!(plan.spec.ranks.iter().any(|rank| rank.node == "barn"));
}

/// The spec of a decision's object; `None` if there is none of that name.
fn spec_of(decision: &Decision, name: &str) -> Option<Value> {
    let mut objects = decision.objects.iter();
    let object = objects.find(|object| object.name_any() == name)?;
    Some(object.data["spec"].clone())
}

#[test]
fn an_eviction_waits_for_the_stages_of_both_rings_of_a_rollout() {
    let mut cluster = ring(&["attic", "office"]);
    let least = |decision: &Decision| {
        let budget = spec_of(decision, "demo-stage").expect("a budget");
        budget["minAvailable"].as_u64()
    };
    assert_eq!(least(&cluster.reconcile()), Some(1));
    cluster.change("strategy: PipedRing\ndecode: {maxBatch: 4, kvCache: {memory: 5Gi}}\n");
    assert_eq!(least(&cluster.reconcile()), Some(2));
    cluster.settle();
    assert_eq!(least(&cluster.reconcile()), Some(1));
}

#[test]
fn peers_reach_each_other_until_the_plan_after_theirs_serves() {
    let mut cluster = of_spec(PEERS, &["attic", "office"]);
    let head_calls = |decision: &Decision| {
        let policy = spec_of(decision, "demo-workers").expect("a policy");
        policy["ingress"].to_string().contains("prefill")
    };
    assert!(head_calls(&cluster.reconcile()));
    cluster.change("prefill: {mode: Chunked}\n");
    let mut reconciles = 0;
    while cluster
        .observed
        .pods
        .iter()
        .any(|pod| pod.has_rank("stage-0"))
    {
        assert!(head_calls(&cluster.reconcile()));
        cluster.turn();
        reconciles += 1;
        assert!(reconciles < 50);
    }
    cluster.settle();
    assert!(reconciles > 1 && !head_calls(&cluster.reconcile()));
}

/// Has the quota refuse what is not there, as the answer to an attempt to create it.
fn refuse(cluster: &mut FakeCluster, most: usize) {
    let pods = || cluster.observed.pods.iter().map(|pod| &**pod);
    let there = pods().count();
    let words = format!(
        "pods \"x\" is forbidden: exceeded quota: small, requested: pods=1, used: pods={there}, limited: pods={most}"
    );
    let own = Counted::of_pods(pods());
    let before = cluster.observed.forbidden.take();
    let now = cluster.observed.now;
    cluster.observed.forbidden = Some(Forbidden::after(before, 1, &words, false, own, now));
}

#[test]
fn a_ring_of_which_a_quota_admits_a_part_holds_nothing() {
    let mut cluster = planned(&["attic", "office"]);
    cluster.reconcile();
    cluster.reconcile();
    cluster.observed.pods.retain(|pod| pod.rank != "stage-0");
    let there = cluster.observed.pods.len();
    refuse(&mut cluster, there);
    let decision = cluster.reconcile();
    assert!(
        decision.delete_pods.is_empty(),
        "the first message may be early"
    );
    cluster.observed.pods.retain(|pod| pod.rank != "stage-0");
    cluster.pass(Duration::from_secs(31));
    refuse(&mut cluster, there);
    let decision = cluster.reconcile();
    let ended: Vec<&str> = decision.delete_pods.iter().map(|end| &*end.name).collect();
    assert!(
        ended.len() == 1 && ended[0].starts_with("demo-decode-0-"),
        "{ended:?}"
    );
    assert!(decision.create_pods.is_empty());
    // What has gone makes no room that would suffice.
    let now = cluster.observed.now;
    cluster
        .observed
        .forbidden
        .as_mut()
        .expect("a refusal")
        .goes(now);
    cluster.turn();
    let decision = cluster.reconcile();
    assert!(decision.create_pods.is_empty() && decision.delete_pods.is_empty());
    assert!(decision.requeue_after <= Some(Duration::from_secs(300)));
    assert_eq!(cluster.says(READY), ("False", "QuotaExceeded"));
    let words = &cluster.condition(READY).message;
    assert!(
        words.contains("exceeded quota: small")
            && words.contains("all ranks of a group run or none"),
        "{words}"
    );
    cluster.pass(Duration::from_secs(300));
    assert_eq!(
        cluster.reconcile().create_pods.len(),
        2,
        "all are tried again"
    );
}

#[test]
fn a_ring_that_has_served_keeps_its_members_whatever_a_quota_says() {
    let mut cluster = ring(&["attic", "office"]);
    cluster.observed.pods.retain(|pod| pod.rank != "stage-0");
    let there = cluster.observed.pods.len();
    for _ in 0..3 {
        refuse(&mut cluster, there);
        let decision = cluster.reconcile();
        assert!(decision.delete_pods.is_empty());
        assert!(!decision.create_pods.is_empty(), "it is tried again");
        cluster.observed.pods.retain(|pod| pod.rank != "stage-0");
        cluster.pass(Duration::from_secs(31));
    }
    let lost = member(&cluster, "stage-0");
    assert_eq!(
        (&*lost.state, lost.reason.as_deref()),
        ("Lost", Some("QuotaExceeded"))
    );
}
