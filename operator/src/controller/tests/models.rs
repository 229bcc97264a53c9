//! Models that must be looked for, or fetched.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use crate::controller::builtin;
use crate::controller::conditions::{MODEL_READY, PLANNED, READY};
use crate::controller::observed::{ContainerEnd, ContainerView, FetchView, PodView};
use crate::controller::testing::{GIB, node};

const HOST: &str = "model: {source: {hostPath: {path: /models/m}}, contextLength: 2048}\n";
const CLAIM: &str =
    "model: {source: {persistentVolumeClaim: {claimName: models}}, contextLength: 2048}\n";

fn http() -> String {
    let sha256 = "ab".repeat(32);
    format!(
        "model: {{source: {{http: {{url: 'https://nas.lan/m.tar', sha256: '{sha256}'}}}}, contextLength: 2048}}\n"
    )
}

fn end(world: &mut World, node: &str, exit_code: i32, message: &str) {
    let pods = &mut world.observed.pods;
    let pod = pods.iter_mut().find(|pod| {
        pod.role == "inspect" && (pod.wanted_node == node || pod.wanted_node.is_empty())
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

fn inspections(world: &World) -> usize {
    let pods = world.observed.pods.iter();
    pods.filter(|pod| pod.role == "inspect").count()
}

#[test]
fn a_directory_is_looked_for_on_every_node_and_used_where_it_is() {
    let mut world = World::new(HOST);
    let decision = world.visit();
    assert_eq!(decision.create_pods.len(), 2);
    assert!(decision.create_plan.is_none());
    assert_eq!(world.says(MODEL_READY), ("False", "Inspecting"));
    assert_eq!(world.says(PLANNED), ("False", "WaitingForModel"));
    end(&mut world, "office", 0, &facts());
    end(&mut world, "attic", 1, "error: /models/m is no directory\n");
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert_eq!(world.says(MODEL_READY), ("True", "Found"));
    assert!(world.condition(MODEL_READY).message.ends_with("on office"));
    assert_eq!(
        inspections(&world),
        0,
        "what a plan tells need not be looked for"
    );
    assert!(world.observed.pods.iter().all(|pod| pod.node == "office"));
}

#[test]
fn a_directory_that_is_nowhere_is_told_for_each_node_and_looked_for_again_in_silence() {
    let mut world = World::new(HOST);
    world.visit();
    end(&mut world, "office", 1, "error: config.json is missing\n");
    world.pass(Duration::from_secs(11));
    world.observed.pods.iter_mut().for_each(|pod| {
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
    let decision = world.visit();
    assert_eq!(world.says(MODEL_READY), ("False", "ModelNotFound"));
    let message = world.condition(MODEL_READY).message.clone();
    assert!(
        message.contains("attic: hostPath type check failed"),
        "{message}"
    );
    assert!(
        message.contains("office: config.json is missing"),
        "{message}"
    );
    assert!(decision.requeue_after.is_some());
    assert_eq!(world.told(), ["ModelNotFound"]);
    world.settle();
    // After a while it is looked for again, and the words stay until there are others.
    world.pass(Duration::from_secs(300));
    assert_eq!(world.visit().delete_pods.len(), 2);
    assert_eq!(world.visit().create_pods.len(), 2);
    world.visit();
    assert_eq!(world.condition(MODEL_READY).message, message);
    assert!(world.told().is_empty());
    end(&mut world, "office", 0, &facts());
    end(&mut world, "attic", 0, &facts());
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn different_models_in_one_place_are_not_mixed() {
    let mut world = World::new(HOST);
    let third = node("shed", 4, 4 * GIB);
    world
        .observed
        .nodes
        .insert("shed".to_owned(), Arc::new(third));
    world.visit();
    let mut other = builtin::facts("hearth-demo").unwrap();
    other.layers += 1;
    end(
        &mut world,
        "attic",
        0,
        &serde_json::to_string(&other).unwrap(),
    );
    end(&mut world, "office", 0, &facts());
    end(&mut world, "shed", 0, &facts());
    world.settle();
    assert!(
        world
            .condition(MODEL_READY)
            .message
            .ends_with("on office and shed")
    );
}

#[test]
fn a_node_without_the_model_is_asked_when_the_others_do_not_suffice() {
    let mut world = World::new(HOST);
    world.visit();
    end(&mut world, "office", 0, &facts());
    end(&mut world, "attic", 1, "error: no such directory\n");
    world.settle();
    world.told();
    // Someone copies the model to attic; then office dies.
    world.node("office", |node| node.is_ready = false);
    world.turn();
    world.visit();
    world.visit();
    assert_eq!(inspections(&world), 1);
    end(&mut world, "attic", 0, &facts());
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert!(world.observed.pods.iter().all(|pod| pod.node == "attic"));
}

#[test]
fn a_claim_is_looked_into_where_it_can_be_mounted() {
    let mut world = World::new(CLAIM);
    let decision = world.visit();
    assert_eq!(decision.create_pods.len(), 1);
    world.pod("demo-inspect", |pod| {
        pod.unschedulable =
            Some("Unschedulable: persistentvolumeclaim \"models\" not found".to_owned());
    });
    world.visit();
    assert_eq!(world.says(MODEL_READY), ("False", "Unschedulable"));
    assert!(
        world
            .condition(MODEL_READY)
            .message
            .contains("make the claim")
    );
    world.pod("demo-inspect", |pod| pod.unschedulable = None);
    end(&mut world, "attic", 0, &facts());
    world.settle();
    assert!(world.observed.pods.iter().all(|pod| pod.node == "attic"));
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn a_claim_of_many_nodes_pins_nothing() {
    for (mode, is_pinned) in [
        ("ReadWriteOnce", true),
        ("ReadOnlyMany", false),
        ("ReadWriteMany", false),
    ] {
        let mut world = World::new(CLAIM);
        world.observed.claim_modes = vec![mode.to_owned()];
        world.visit();
        end(&mut world, "attic", 0, &facts());
        world.settle();
        assert_eq!(world.says(READY), ("True", "Serving"), "{mode}");
        // Asked for no more once it is known.
        world.observed.claim_modes.clear();
        world.node("attic", |node| node.is_cordoned = true);
        world.settle();
        let is_on_attic = |pod: &Arc<PodView>| pod.node == "attic";
        assert_eq!(
            world.observed.pods.iter().any(is_on_attic),
            is_pinned,
            "{mode}"
        );
    }
}

#[test]
fn a_claim_for_one_pod_is_refused_with_what_to_write() {
    let mut world = World::new(CLAIM);
    world.observed.claim_modes = vec!["ReadWriteOncePod".to_owned()];
    assert!(world.visit().create_pods.is_empty());
    assert_eq!(world.says(MODEL_READY), ("False", "ClaimNotShared"));
    assert!(
        world
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
    let mut world = World::new(&http());
    let decision = world.visit();
    assert_eq!(decision.fetch_on, ["attic"], "one is enough to know it");
    assert_eq!(world.says(MODEL_READY), ("False", "WaitingForAgent"));
    let set = |world: &mut World, attic: FetchView, office: FetchView| {
        world.observed.fetches.insert("attic".to_owned(), attic);
        world.observed.fetches.insert("office".to_owned(), office);
        world.visit()
    };
    set(&mut world, fetching(314), fetching(20));
    assert_eq!(world.says(MODEL_READY), ("False", "Downloading"));
    let model = world.status().model.clone().unwrap();
    assert_eq!(
        (model.downloaded_bytes, model.percent),
        (Some(314), Some(31))
    );
    let before = world.status().clone();
    set(&mut world, fetching(317), fetching(25));
    assert_eq!(
        *world.status(),
        before,
        "told with each percent, not with each byte"
    );
    let decision = set(&mut world, ready(), fetching(600));
    assert!(decision.create_plan.is_some());
    world.settle();
    assert_eq!(world.says(MODEL_READY), ("True", "Downloaded"));
    let model = world.status().model.clone().unwrap();
    assert_eq!(
        (model.downloaded_bytes, model.percent),
        (Some(1000), Some(100))
    );
    let told = world.told();
    assert_eq!(
        told.iter()
            .filter(|reason| *reason == "ModelDownloaded")
            .count(),
        1
    );
    assert_eq!(
        world.visit().fetch_on,
        ["attic"],
        "the nodes that use it keep it"
    );
}

#[test]
fn a_node_that_cannot_fetch_leaves_it_to_the_next() {
    let mut world = World::new(&http());
    let mut set = |name: &str, view: FetchView| {
        world.observed.fetches.insert(name.to_owned(), view);
        world.visit().fetch_on
    };
    let full = FetchView::Failed("/var/lib/hearth has 1 MiB free".to_owned());
    assert_eq!(set("attic", full), ["attic", "office"]);
    assert_eq!(set("office", fetching(1)), ["office"]);
    assert_eq!(set("office", ready()), ["office"]);
}

#[test]
fn a_model_is_fetched_where_a_plan_wants_it_and_nowhere_else() {
    let mut world = World::new(&http());
    for name in ["shed", "study"] {
        let node = node(name, 4, 4 * GIB);
        world.observed.nodes.insert(name.to_owned(), Arc::new(node));
    }
    world.visit();
    world.observed.fetches.insert("attic".to_owned(), ready());
    world.settle();
    assert_eq!(world.visit().fetch_on, ["attic"]);
    // Its node is lost: the plan is drafted for others, which fetch it while nothing else changes.
    world.node("attic", |node| node.is_ready = false);
    world.turn();
    let decision = world.visit();
    assert!(decision.create_plan.is_none());
    let next = decision.fetch_on;
    assert!(!next.is_empty() && next.len() < 3, "{next:?}");
    assert!(!next.contains(&"attic".to_owned()));
    for name in &next {
        world.observed.fetches.insert(name.clone(), fetching(1));
    }
    assert!(world.visit().create_plan.is_none());
    for name in &next {
        world.observed.fetches.insert(name.clone(), ready());
    }
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    let used: BTreeSet<&String> = world.observed.pods.iter().map(|pod| &pod.node).collect();
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
    let mut world = World::new(&spec);
    let third = node("shed", 4, 4 * GIB);
    world
        .observed
        .nodes
        .insert("shed".to_owned(), Arc::new(third));
    world.observed.fetches.insert("attic".to_owned(), ready());
    let mut decision = world.visit();
    assert_eq!(decision.fetch_on.len(), 2, "{:?}", decision.fetch_on);
    assert!(decision.create_plan.is_none());
    let other = decision
        .fetch_on
        .iter()
        .find(|name| *name != "attic")
        .unwrap()
        .clone();
    world.observed.fetches.insert(other.clone(), ready());
    decision = world.visit();
    assert!(decision.create_plan.is_some());
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn a_download_that_fails_everywhere_says_why() {
    let mut world = World::new(&http());
    for name in ["attic", "office"] {
        let failed = FetchView::Failed("the server answered 404 Not Found".to_owned());
        world.observed.fetches.insert(name.to_owned(), failed);
    }
    world.settle();
    assert_eq!(world.says(MODEL_READY), ("False", "DownloadFailed"));
    assert!(
        world
            .condition(MODEL_READY)
            .message
            .contains("404 Not Found")
    );
    assert_eq!(world.told(), ["DownloadFailed"]);
}

#[test]
fn a_new_model_that_is_still_on_its_way_leaves_the_old_one_running() {
    let mut world = World::new("");
    world.settle();
    let pods = world.observed.pods.clone();
    world.change(&http());
    world
        .observed
        .fetches
        .insert("attic".to_owned(), fetching(10));
    world.settle();
    assert_eq!(world.observed.pods, pods);
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert_eq!(world.says(PLANNED), ("False", "WaitingForModel"));
    world.observed.fetches.insert("attic".to_owned(), ready());
    world.settle();
    assert_eq!(world.status().plan.as_ref().unwrap().generation, 2);
}
