//! Another version of the operator, and another worker image.

use std::sync::Arc;
use std::time::Duration;

use super::fake_cluster::FakeCluster;
use crate::conditions::{PLANNED, PROGRESSING, READY};
use crate::decide::decide;
use crate::key::Key;
use crate::observed::Turn;
use crate::observed::{ContainerEnd, ContainerView, PodView};
use crate::plan_record::{has_failed, passes_turn};

/// Names and uids of all Pods.
fn identities(cluster: &FakeCluster) -> Vec<(String, String)> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| (pod.name.clone(), pod.uid.clone()))
        .collect()
}

fn image(cluster: &mut FakeCluster, image: &str) {
    let mut settings = (*cluster.observed.settings).clone();
    settings.worker_image = image.to_owned();
    cluster.observed.settings = Arc::new(settings);
}

/// The image of the plan that the status names.
fn image_in_force(cluster: &FakeCluster) -> String {
    let name = cluster.status().plan.clone().expect("a plan").name;
    let plans = &cluster.observed.plans;
    let plan = plans
        .iter()
        .find(|plan| plan.metadata.name.as_ref() == Some(&name));
    plan.expect("the plan")
        .spec
        .worker_image
        .clone()
        .expect("an image")
}

fn other(name: &str) -> Key {
    Key::new("default", name)
}

#[test]
fn another_operator_restarts_no_worker() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = identities(&cluster);
    let mut settings = (*cluster.observed.settings).clone();
    settings.pull_policy = "Always".to_owned();
    settings.pull_secrets = vec!["registry".to_owned()];
    settings
        .nodes
        .passing_taints
        .push("example.com/starting".to_owned());
    settings.model_cache = "/srv/models".to_owned();
    cluster.observed.settings = Arc::new(settings);
    // It computes the digest of a plan's inputs differently, and records more of them.
    let plan = Arc::make_mut(&mut cluster.observed.plans[0]);
    let inputs = plan.spec.inputs.as_mut().unwrap();
    inputs.digest = "v2:0123".to_owned();
    inputs.model_facts["quirks"] = serde_json::json!(["none"]);
    let mut json = serde_json::to_value(&*plan).unwrap();
    json["spec"]["fairness"] = serde_json::json!({"by": "user"});
    json["spec"]["ranks"][1]["window"] = serde_json::json!([0, 5]);
    *plan = serde_json::from_value(json).unwrap();
    // What is free has changed since, so that a plan made now would be another one.
    for name in ["attic", "office"] {
        cluster.node(name, |node| {
            let profile = node.profile.as_mut().unwrap();
            profile.memory.available_bytes /= 2;
            profile.memory.read_all_threads_gbps *= 3.0;
        });
    }
    let decision = decide(&cluster.observed);
    assert!(decision.create_plan.is_none() && !decision.writes_objects());
    cluster.settle();
    assert_eq!(identities(&cluster), before);
    assert_eq!(cluster.observed.plans.len(), 1);
}

#[test]
fn a_new_image_rolls_like_any_other_plan_and_keeps_the_places() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let (before, ranks) = (identities(&cluster), cluster.ranks());
    image(&mut cluster, "hearth/worker:2");
    cluster.settle();
    assert_eq!(image_in_force(&cluster), "hearth/worker:2");
    assert_eq!(cluster.ranks(), ranks);
    assert!(identities(&cluster).iter().all(|pod| !before.contains(pod)));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

/// The new image does not start: everything stays as it was, or becomes so again.
fn fails_and_comes_back(mut cluster: FakeCluster, is_kept: bool) {
    cluster.settle();
    let before = identities(&cluster);
    cluster.broken_from = 2;
    image(&mut cluster, "hearth/worker:2");
    for _ in 0..30 {
        cluster.reconcile();
        cluster.turn();
    }
    assert_eq!(cluster.observed.plans.len(), 2);
    cluster.pass(Duration::from_secs(3600));
    cluster.settle();
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    assert!(
        cluster
            .condition(PLANNED)
            .message
            .contains("Set another worker image")
    );
    assert_eq!(image_in_force(&cluster), "hearth/worker:1");
    let names = |pods: &[(String, String)]| -> Vec<String> {
        pods.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&identities(&cluster)), names(&before));
    assert_eq!(identities(&cluster) == before, is_kept);
    // Not retried with the same image, but at once with another one.
    cluster.pass(Duration::from_secs(3600));
    assert!(decide(&cluster.observed).create_plan.is_none());
    cluster.broken_from = u64::MAX;
    image(&mut cluster, "hearth/worker:3");
    cluster.settle();
    assert_eq!(image_in_force(&cluster), "hearth/worker:3");
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn an_image_that_does_not_start_leaves_what_ran() {
    fails_and_comes_back(FakeCluster::new(""), true);
}

#[test]
fn an_image_that_does_not_start_where_one_has_room_brings_the_old_one_back() {
    let mut cluster = FakeCluster::new("decode: {kvCache: {memory: 2Gi}}\n");
    cluster.observed.nodes.remove("attic");
    fails_and_comes_back(cluster, false);
}

#[test]
fn an_image_comes_in_turn() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let before = identities(&cluster);
    image(&mut cluster, "hearth/worker:2");
    cluster.observed.turn = Turn::After(other("first"));
    cluster.settle();
    assert_eq!(identities(&cluster), before);
    assert_eq!(cluster.says(PROGRESSING), ("True", "WaitingForTurn"));
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let half_an_hour = Duration::from_secs(1800);
    cluster.observed.turn_comes_at = Some(cluster.observed.now + half_an_hour);
    let decision = decide(&cluster.observed);
    assert!(decision.waits_for_turn);
    assert_eq!(decision.requeue_after, Some(half_an_hour));
    // Another spec does not wait, and takes the image that is known to serve.
    cluster.change("decode: {maxBatch: 3}\n");
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 2);
    assert_eq!(image_in_force(&cluster), "hearth/worker:1");
    cluster.observed.turn = Turn::HeldBack(other("first"));
    cluster.settle();
    assert_eq!(cluster.says(PROGRESSING), ("False", "ImageHeldBack"));
    assert!(
        cluster
            .condition(PROGRESSING)
            .message
            .contains("default/first did not get ready")
    );
    // What others are called is not for every namespace.
    cluster.observed.turn = Turn::HeldBack(Key::new("elsewhere", "secret"));
    cluster.settle();
    assert_eq!(cluster.says(PROGRESSING), ("False", "ImageHeldBack"));
    let message = cluster.condition(PROGRESSING).message.clone();
    assert!(message.contains("another deployment did not get ready"));
    assert!(!message.contains("elsewhere") && !message.contains("secret"));
    cluster.observed.turn = Turn::Free;
    cluster.settle();
    assert_eq!(image_in_force(&cluster), "hearth/worker:2");
}

#[test]
fn what_never_served_waits_for_nobody() {
    let mut cluster = FakeCluster::new("");
    cluster.broken_from = 1;
    for _ in 0..5 {
        cluster.reconcile();
        cluster.turn();
    }
    cluster.broken_from = u64::MAX;
    cluster.observed.turn = Turn::HeldBack(other("first"));
    image(&mut cluster, "hearth/worker:2");
    cluster.settle();
    assert_eq!(image_in_force(&cluster), "hearth/worker:2");
    assert_eq!(cluster.says(READY), ("True", "Serving"));
}

#[test]
fn no_image_is_changed_while_a_node_is_away() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let (now, home) = (cluster.observed.now, cluster.observed.pods[0].node.clone());
    cluster.node(&home, |node| {
        node.is_ready = false;
        node.not_ready_since = Some(now);
    });
    image(&mut cluster, "hearth/worker:2");
    assert!(cluster.reconcile().create_plan.is_none());
}

/// A volume that cannot be mounted says nothing of the image.
#[test]
fn trouble_that_is_no_images_fault_passes_the_turn_on() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    image(&mut cluster, "hearth/worker:2");
    cluster.reconcile();
    cluster.turn();
    cluster.reconcile();
    cluster.pod("demo-decode-0", |pod| pod.is_ready = false);
    let newest = |cluster: &FakeCluster| {
        let plan = cluster.observed.plans.last().expect("a plan");
        (plan.spec.generation, passes_turn(plan).to_owned())
    };
    let generation = newest(&cluster).0;
    let trouble = |cluster: &mut FakeCluster, restarts: u32| {
        for pod in &mut cluster.observed.pods {
            if pod.plan_generation == generation {
                let pod = Arc::make_mut(pod);
                pod.is_ready = false;
                pod.is_setting_up = restarts == 0;
                pod.setup_warning = Some("FailedMount: no such volume".to_owned());
                pod.container = (restarts > 0).then(|| ContainerView {
                    restarts,
                    last_end: Some(ContainerEnd {
                        exit_code: 1,
                        ..ContainerEnd::default()
                    }),
                    ..ContainerView::default()
                });
            }
        }
        cluster.reconcile();
    };
    trouble(&mut cluster, 0);
    assert_eq!(newest(&cluster), (generation, String::new()), "not at once");
    cluster.pass(Duration::from_secs(60));
    trouble(&mut cluster, 0);
    assert_eq!(newest(&cluster), (generation, "MountFailed".to_owned()));
    trouble(&mut cluster, 1);
    assert_eq!(newest(&cluster), (generation, String::new()), "it crashes");
    trouble(&mut cluster, 0);
    assert_eq!(newest(&cluster), (generation, "MountFailed".to_owned()));
    for pod in &mut cluster.observed.pods {
        let pod = Arc::make_mut(pod);
        (pod.is_setting_up, pod.setup_warning) = (false, None);
    }
    cluster.reconcile();
    assert_eq!(newest(&cluster), (generation, String::new()), "it has gone");
}

/// Its owner's patience is no measure for others.
#[test]
fn a_plan_that_is_given_up_early_holds_others_only_where_its_image_is_to_blame() {
    let given_up = |deadline: &str, seconds: u64, change: fn(&mut PodView)| {
        let mut cluster = FakeCluster::new(&format!("rollout: {{progressDeadline: {deadline}}}\n"));
        cluster.settle();
        cluster.broken_from = 2;
        image(&mut cluster, "hearth/worker:2");
        cluster.reconcile();
        cluster.turn();
        for pod in &mut cluster.observed.pods {
            if pod.plan_generation == 2 {
                change(Arc::make_mut(pod));
            }
        }
        cluster.pass(Duration::from_secs(seconds));
        cluster.reconcile();
        let mut plans = cluster.observed.plans.iter();
        let plan = plans.find(|plan| plan.spec.generation == 2);
        let plan = plan.expect("the plan with the new image");
        assert!(has_failed(plan));
        passes_turn(plan).to_owned()
    };
    let nothing: fn(&mut PodView) = |_| ();
    assert_eq!(given_up("1s", 2, nothing), "ProgressDeadlineExceeded");
    assert_eq!(given_up("20m", 1201, nothing), "ProgressDeadlineExceeded");
    assert_eq!(given_up("40m", 2401, nothing), "", "longer than a turn");
    let mount: fn(&mut PodView) = |pod| {
        pod.is_setting_up = true;
        pod.setup_warning = Some("FailedMount: no such volume".to_owned());
    };
    assert_eq!(given_up("10s", 11, mount), "MountFailed");
    let pull: fn(&mut PodView) = |pod| {
        pod.container = Some(ContainerView {
            waiting: Some(("ImagePullBackOff".to_owned(), "no such tag".to_owned())),
            ..ContainerView::default()
        });
    };
    assert_eq!(given_up("10s", 11, pull), "");
    let crash: fn(&mut PodView) = |pod| {
        pod.container = Some(ContainerView {
            restarts: 1,
            last_end: Some(ContainerEnd {
                exit_code: 1,
                ..ContainerEnd::default()
            }),
            ..ContainerView::default()
        });
    };
    assert_eq!(given_up("10s", 11, crash), "");
}
