//! Models that must be looked for, or fetched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{MODEL_READY, PLANNED, READY};
use crate::model::builtin;
use crate::observed::{ContainerEnd, ContainerView, FetchView, PodRole, PodView, StoredCopy};
use crate::testing::{GIB, node};

const HOST: &str = "model: {source: {hostPath: {path: /models/m}}, contextLength: 2048}\n";
const CLAIM: &str =
    "model: {source: {persistentVolumeClaim: {claimName: models}}, contextLength: 2048}\n";

fn http() -> String {
    let sha256 = "ab".repeat(32);
    format!(
        "model: {{source: {{http: {{url: 'https://nas.lan/m.tar', sha256: '{sha256}'}}}}, contextLength: 2048}}\n"
    )
}

fn end(cluster: &mut FakeCluster, node: &str, exit_code: i32, message: &str) {
    let pods = &mut cluster.observed.pods;
    let pod = pods.iter_mut().find(|pod| {
        pod.role == PodRole::Inspect && (pod.wanted_node == node || pod.wanted_node.is_empty())
    });
    let pod = Arc::make_mut(pod.expect("an inspect Pod"));
    pod.node = node.to_owned();
    pod.phase = if exit_code == 0 {
        "Succeeded"
    } else {
        "Failed"
    }
    .to_owned();
    pod.container = Some(ContainerView {
        last_end: Some(ContainerEnd {
            exit_code,
            reason: String::new(),
            message: message.to_owned(),
        }),
        ..ContainerView::default()
    });
}

fn facts() -> String {
    serde_json::to_string(&builtin::facts("hearth-demo").unwrap()).unwrap()
}

fn inspections(cluster: &FakeCluster) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| pod.role == PodRole::Inspect).count()
}

#[test]
fn a_directory_is_looked_for_on_every_node_and_used_where_it_is() {
    let mut cluster = FakeCluster::new(HOST);
    let decision = cluster.reconcile();
    assert_eq!(decision.create_pods.len(), 2);
    assert!(decision.create_plan.is_none());
    assert_eq!(cluster.says(MODEL_READY), ("False", "Inspecting"));
    assert_eq!(cluster.says(PLANNED), ("False", "WaitingForModel"));
    end(&mut cluster, "office", 0, &facts());
    end(
        &mut cluster,
        "attic",
        1,
        "error: /models/m is no directory\n",
    );
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(MODEL_READY), ("True", "Found"));
    assert!(
        cluster
            .condition(MODEL_READY)
            .message
            .ends_with("on office")
    );
    assert_eq!(
        inspections(&cluster),
        0,
        "what a plan tells need not be looked for"
    );
    assert!(cluster.observed.pods.iter().all(|pod| pod.node == "office"));
}

#[test]
fn a_directory_that_is_nowhere_is_told_for_each_node_and_looked_for_again_in_silence() {
    let mut cluster = FakeCluster::new(HOST);
    cluster.reconcile();
    end(&mut cluster, "office", 1, "error: config.json is missing\n");
    cluster.pass(Duration::from_secs(11));
    cluster.observed.pods.iter_mut().for_each(|pod| {
        let pod = Arc::make_mut(pod);
        if pod.wanted_node == "attic" {
            pod.node = "attic".to_owned();
            pod.is_setting_up = true;
            pod.setup_warning = Some(
                "FailedMount: MountVolume.SetUp failed for volume \"model\" : hostPath type check failed: /models/m \
                 is not a directory"
                    .to_owned(),
            );
        }
    });
    let decision = cluster.reconcile();
    assert_eq!(cluster.says(MODEL_READY), ("False", "ModelNotFound"));
    let message = cluster.condition(MODEL_READY).message.clone();
    assert!(
        message.contains("attic: hostPath type check failed"),
        "{message}"
    );
    assert!(
        message.contains("office: config.json is missing"),
        "{message}"
    );
    assert!(decision.requeue_after.is_some());
    assert_eq!(cluster.told(), ["ModelNotFound"]);
    cluster.settle();
    // After a while it is looked for again, and the message stays until there is a new one.
    cluster.pass(Duration::from_secs(300));
    assert_eq!(cluster.reconcile().delete_pods.len(), 2);
    assert_eq!(cluster.reconcile().create_pods.len(), 2);
    cluster.reconcile();
    assert_eq!(cluster.condition(MODEL_READY).message, message);
    assert!(cluster.told().is_empty());
    end(&mut cluster, "office", 0, &facts());
    end(&mut cluster, "attic", 0, &facts());
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn different_models_in_one_place_are_not_mixed() {
    let mut cluster = FakeCluster::new(HOST);
    let third = node("shed", 4, 4 * GIB);
    cluster
        .observed
        .nodes
        .insert("shed".to_owned(), Arc::new(third));
    cluster.reconcile();
    let mut other = builtin::facts("hearth-demo").unwrap();
    other.layers += 1;
    end(
        &mut cluster,
        "attic",
        0,
        &serde_json::to_string(&other).unwrap(),
    );
    end(&mut cluster, "office", 0, &facts());
    end(&mut cluster, "shed", 0, &facts());
    cluster.settle();
    assert!(
        cluster
            .condition(MODEL_READY)
            .message
            .ends_with("on office and shed")
    );
}

#[test]
fn a_node_without_the_model_is_asked_when_the_others_do_not_suffice() {
    let mut cluster = FakeCluster::new(HOST);
    cluster.reconcile();
    end(&mut cluster, "office", 0, &facts());
    end(&mut cluster, "attic", 1, "error: no such directory\n");
    cluster.settle();
    cluster.told();
    // Someone copies the model to attic; then office dies.
    cluster.node("office", |node| node.is_ready = false);
    cluster.turn();
    cluster.reconcile();
    cluster.reconcile();
    assert_eq!(inspections(&cluster), 1);
    end(&mut cluster, "attic", 0, &facts());
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert!(cluster.observed.pods.iter().all(|pod| pod.node == "attic"));
}

#[test]
fn a_claim_is_looked_into_where_it_can_be_mounted() {
    let mut cluster = FakeCluster::new(CLAIM);
    let decision = cluster.reconcile();
    assert_eq!(decision.create_pods.len(), 1);
    cluster.pod("demo-inspect", |pod| {
        pod.unschedulable =
            Some("Unschedulable: persistentvolumeclaim \"models\" not found".to_owned());
    });
    cluster.reconcile();
    assert_eq!(cluster.says(MODEL_READY), ("False", "Unschedulable"));
    assert!(
        cluster
            .condition(MODEL_READY)
            .message
            .contains("create the claim")
    );
    cluster.pod("demo-inspect", |pod| pod.unschedulable = None);
    end(&mut cluster, "attic", 0, &facts());
    cluster.settle();
    assert!(cluster.observed.pods.iter().all(|pod| pod.node == "attic"));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn a_claim_of_many_nodes_pins_nothing() {
    for (mode, is_pinned) in [
        ("ReadWriteOnce", true),
        ("ReadOnlyMany", false),
        ("ReadWriteMany", false),
    ] {
        let mut cluster = FakeCluster::new(CLAIM);
        cluster.observed.claim_modes = vec![mode.to_owned()];
        cluster.reconcile();
        end(&mut cluster, "attic", 0, &facts());
        cluster.settle();
        assert_eq!(cluster.says(READY), ("True", "Serving"), "{mode}");
        // No longer queried once it is known.
        cluster.observed.claim_modes.clear();
        cluster.node("attic", |node| node.is_cordoned = true);
        cluster.settle();
        let is_on_attic = |pod: &Arc<PodView>| pod.node == "attic";
        assert_eq!(
            cluster.observed.pods.iter().any(is_on_attic),
            is_pinned,
            "{mode}"
        );
    }
}

#[test]
fn a_claim_for_one_pod_is_refused_with_what_to_write() {
    let mut cluster = FakeCluster::new(CLAIM);
    cluster.observed.claim_modes = vec!["ReadWriteOncePod".to_owned()];
    assert!(cluster.reconcile().create_pods.is_empty());
    assert_eq!(cluster.says(MODEL_READY), ("False", "ClaimNotShared"));
    assert!(
        cluster
            .condition(MODEL_READY)
            .message
            .contains("ReadWriteMany")
    );
}

fn fetching(bytes: u64) -> FetchView {
    FetchView::Fetching {
        bytes,
        total_bytes: 1000,
        bytes_per_second: 10,
        from_node: None,
    }
}

fn ready() -> FetchView {
    FetchView::Ready {
        facts: Box::new(builtin::facts("hearth-demo").unwrap()),
        bytes: 1000,
    }
}

#[test]
fn a_download_shows_its_percent() {
    let mut cluster = FakeCluster::new(&http());
    let decision = cluster.reconcile();
    assert_eq!(decision.fetch_on, ["attic"], "one is enough to know it");
    assert_eq!(cluster.says(MODEL_READY), ("False", "WaitingForAgent"));
    let set = |cluster: &mut FakeCluster, attic: FetchView, office: FetchView| {
        cluster.observed.fetches.insert("attic".to_owned(), attic);
        cluster.observed.fetches.insert("office".to_owned(), office);
        cluster.reconcile()
    };
    set(&mut cluster, fetching(314), fetching(20));
    assert_eq!(cluster.says(MODEL_READY), ("False", "Downloading"));
    let model = cluster.status().model.clone().unwrap();
    assert_eq!(
        (model.downloaded_bytes, model.percent),
        (Some(314), Some(31))
    );
    // 686 bytes at 10 bytes a second.
    let words = "31 %, 10 B/s, 69 s left";
    assert_eq!(model.fetch.as_deref(), Some(words));
    let message = &cluster.condition(MODEL_READY).message;
    assert!(
        message.contains("31 % of 1000 B on attic, 10 B/s, 69 s left"),
        "{message}"
    );
    let before = cluster.status().clone();
    set(&mut cluster, fetching(317), fetching(25));
    assert_eq!(
        *cluster.status(),
        before,
        "told with each percent, not with each byte"
    );
    let from_office = FetchView::Fetching {
        bytes: 420,
        total_bytes: 1000,
        bytes_per_second: 0,
        from_node: Some("office".to_owned()),
    };
    set(&mut cluster, from_office, fetching(30));
    let message = &cluster.condition(MODEL_READY).message;
    assert!(
        message.contains("42 % of 1000 B on attic from office over the LAN"),
        "{message}"
    );
    let model = cluster.status().model.clone().unwrap();
    assert_eq!(model.fetch.as_deref(), Some("42 % from office"));
    let decision = set(&mut cluster, ready(), fetching(600));
    assert!(decision.create_plan.is_some());
    cluster.settle();
    assert_eq!(cluster.says(MODEL_READY), ("True", "Downloaded"));
    let model = cluster.status().model.clone().unwrap();
    assert_eq!(
        (model.downloaded_bytes, model.percent, model.fetch),
        (Some(1000), Some(100), None)
    );
    let told = cluster.told();
    assert_eq!(
        told.iter()
            .filter(|reason| *reason == "ModelDownloaded")
            .count(),
        1
    );
    assert_eq!(
        cluster.reconcile().fetch_on,
        ["attic"],
        "the nodes that use it keep it"
    );
}

#[test]
fn a_model_of_a_hub_is_fetched_as_an_archive_is() {
    let spec = "model: {source: {huggingFace: {repo: acme/poems}}, contextLength: 2048}\n";
    let mut cluster = FakeCluster::new(spec);
    assert_eq!(cluster.reconcile().fetch_on, ["attic"]);
    cluster.observed.fetches.insert("attic".to_owned(), ready());
    cluster.settle();
    assert_eq!(cluster.says(MODEL_READY), ("True", "Downloaded"));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let message = &cluster.condition(MODEL_READY).message;
    assert!(message.contains("huggingFace acme/poems@main"), "{message}");
    assert_eq!(cluster.reconcile().fetch_on, ["attic"]);
}

/// An operator that was restarted knows what plans record, and nothing that nodes told.
#[test]
fn nodes_that_are_added_after_a_restart_fetch_the_commit_that_the_plan_records() {
    let spec = |repo: &str, replicas: u32| {
        format!(
            "model: {{source: {{huggingFace: {{repo: {repo}}}}}, contextLength: 2048}}\n\
             decode: {{replicas: {replicas}, kvCache: {{memory: 2500Mi}}}}\nprefill: {{mode: Chunked}}\n"
        )
    };
    let mut cluster = FakeCluster::new(&spec("acme/poems", 1));
    assert_eq!(cluster.reconcile().fetch_commit, None);
    cluster.observed.fetches.insert("attic".to_owned(), ready());
    cluster.observed.fetched_commit = Some("c1".to_owned());
    cluster.settle();
    cluster.observed.fetches.clear();
    cluster.observed.fetched_commit = None;
    cluster.change(&spec("acme/poems", 2));
    let decision = cluster.reconcile();
    assert_eq!(decision.fetch_on.len(), 2, "{:?}", decision.fetch_on);
    assert_eq!(decision.fetch_commit.as_deref(), Some("c1"));
    // A new plan goes on from the one before, whatever a node has told first.
    cluster.observed.fetched_commit = Some("c2".to_owned());
    for name in ["attic", "office"] {
        cluster.observed.fetches.insert(name.to_owned(), ready());
    }
    cluster.settle();
    let newest = cluster.observed.plans.last().expect("a plan");
    let inputs = newest.spec.inputs.as_ref().expect("inputs");
    assert_eq!(
        (newest.spec.generation, inputs.model_commit.as_deref()),
        (2, Some("c1"))
    );
    // Another model has another one.
    cluster.observed.fetches.clear();
    cluster.observed.fetched_commit = None;
    cluster.change(&spec("acme/prose", 1));
    assert_eq!(cluster.reconcile().fetch_commit, None);
}

#[test]
fn a_node_that_cannot_fetch_leaves_it_to_the_next() {
    let mut cluster = FakeCluster::new(&http());
    let mut set = |name: &str, view: FetchView| {
        cluster.observed.fetches.insert(name.to_owned(), view);
        cluster.reconcile().fetch_on
    };
    let full = FetchView::Failed("/var/lib/hearth has 1 MiB free".to_owned());
    assert_eq!(set("attic", full), ["attic", "office"]);
    assert_eq!(set("office", fetching(1)), ["office"]);
    assert_eq!(set("office", ready()), ["office"]);
}

/// An operator that has just started has asked no agent yet.
#[test]
fn a_node_that_has_it_or_fetches_it_is_asked_before_the_one_with_the_most_memory() {
    for copy in [StoredCopy::Coming, StoredCopy::Whole] {
        let mut cluster = FakeCluster::new(&http());
        assert_eq!(cluster.reconcile().fetch_on, ["attic"]);
        cluster.observed.stored = BTreeMap::from([("office".to_owned(), copy)]);
        assert_eq!(cluster.reconcile().fetch_on, ["office"], "{copy:?}");
        let mut answer = |name: &str, view: FetchView| {
            cluster.observed.fetches.insert(name.to_owned(), view);
            cluster.reconcile().fetch_on
        };
        assert_eq!(answer("office", fetching(500)), ["office"]);
        // What its agent says counts.
        let failed = FetchView::Failed("the disk is full".to_owned());
        assert_eq!(answer("office", failed), ["attic"]);
    }
    // One that has all of it comes before one that has some.
    let mut cluster = FakeCluster::new(&http());
    let both = [("attic", StoredCopy::Coming), ("office", StoredCopy::Whole)];
    let both = both.map(|(name, copy)| (name.to_owned(), copy));
    cluster.observed.stored = BTreeMap::from(both);
    assert_eq!(cluster.reconcile().fetch_on, ["office"]);
}

#[test]
fn a_model_is_fetched_where_a_plan_wants_it_and_nowhere_else() {
    let mut cluster = FakeCluster::new(&http());
    for name in ["shed", "study"] {
        let node = node(name, 4, 4 * GIB);
        cluster
            .observed
            .nodes
            .insert(name.to_owned(), Arc::new(node));
    }
    cluster.reconcile();
    cluster.observed.fetches.insert("attic".to_owned(), ready());
    cluster.settle();
    assert_eq!(cluster.reconcile().fetch_on, ["attic"]);
    // Its node is lost: the plan is drafted for others, which fetch it while nothing else changes.
    cluster.node("attic", |node| node.is_ready = false);
    cluster.turn();
    let decision = cluster.reconcile();
    assert!(decision.create_plan.is_none());
    let next = decision.fetch_on;
    assert!(!next.is_empty() && next.len() < 3, "{next:?}");
    assert!(!next.contains(&"attic".to_owned()));
    for name in &next {
        cluster.observed.fetches.insert(name.clone(), fetching(1));
    }
    assert!(cluster.reconcile().create_plan.is_none());
    for name in &next {
        cluster.observed.fetches.insert(name.clone(), ready());
    }
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let used: BTreeSet<&String> = cluster.observed.pods.iter().map(|pod| &pod.node).collect();
    assert_eq!(
        used,
        next.iter().collect(),
        "fetched where it is used, and nowhere else"
    );
}

#[test]
fn a_plan_for_two_nodes_waits_until_both_have_the_model() {
    let spec =
        http() + "decode: {replicas: 2, kvCache: {memory: 2500Mi}}\nprefill: {mode: Chunked}\n";
    let mut cluster = FakeCluster::new(&spec);
    let third = node("shed", 4, 4 * GIB);
    cluster
        .observed
        .nodes
        .insert("shed".to_owned(), Arc::new(third));
    cluster.observed.fetches.insert("attic".to_owned(), ready());
    let mut decision = cluster.reconcile();
    assert_eq!(decision.fetch_on.len(), 2, "{:?}", decision.fetch_on);
    assert!(decision.create_plan.is_none());
    let other = decision
        .fetch_on
        .iter()
        .find(|name| *name != "attic")
        .unwrap()
        .clone();
    // The second node takes it from the first: that is what is told, while the first has all of it.
    let from_attic = FetchView::Fetching {
        bytes: 420,
        total_bytes: 1000,
        bytes_per_second: 10,
        from_node: Some("attic".to_owned()),
    };
    cluster.observed.fetches.insert(other.clone(), from_attic);
    assert!(cluster.reconcile().create_plan.is_none());
    let model = cluster.status().model.clone().unwrap();
    let words = "42 % from attic, 10 B/s, 58 s left";
    assert_eq!(
        (model.percent, model.fetch.as_deref()),
        (Some(100), Some(words))
    );
    cluster.observed.fetches.insert(other.clone(), ready());
    decision = cluster.reconcile();
    assert!(decision.create_plan.is_some());
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn a_download_that_fails_everywhere_says_why() {
    let mut cluster = FakeCluster::new(&http());
    for name in ["attic", "office"] {
        let failed = FetchView::Failed("the server answered 404 Not Found".to_owned());
        cluster.observed.fetches.insert(name.to_owned(), failed);
    }
    cluster.settle();
    assert_eq!(cluster.says(MODEL_READY), ("False", "DownloadFailed"));
    assert!(
        cluster
            .condition(MODEL_READY)
            .message
            .contains("404 Not Found")
    );
    assert_eq!(cluster.told(), ["DownloadFailed"]);
}

#[test]
fn a_new_model_that_is_still_on_its_way_leaves_the_old_one_running() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let pods = cluster.observed.pods.clone();
    cluster.change(&http());
    cluster
        .observed
        .fetches
        .insert("attic".to_owned(), fetching(10));
    cluster.settle();
    assert_eq!(cluster.observed.pods, pods);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(PLANNED), ("False", "WaitingForModel"));
    cluster.observed.fetches.insert("attic".to_owned(), ready());
    cluster.settle();
    assert_eq!(cluster.status().plan.as_ref().unwrap().generation, 2);
}
