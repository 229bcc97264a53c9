//! Another version of the operator, and another image of the workers.

use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use crate::controller::choose::note;
use crate::controller::conditions::{PLANNED, PROGRESSING, READY};
use crate::controller::decide::decide;
use crate::controller::names::{NOTE_INPUTS, NOTE_OUTCOME, NOTE_TURN, OUTCOME_FAILED};
use crate::controller::observed::{ContainerEnd, ContainerView, PodView};
use crate::controller::queue::Key;
use crate::controller::turns::Turn;

/// Names and uids of all Pods.
fn identities(world: &World) -> Vec<(String, String)> {
    let pods = world.observed.pods.iter();
    pods.map(|pod| (pod.name.clone(), pod.uid.clone()))
        .collect()
}

fn image(world: &mut World, image: &str) {
    let mut settings = (*world.observed.settings).clone();
    settings.worker_image = image.to_owned();
    world.observed.settings = Arc::new(settings);
}

/// The image of the plan that the status names.
fn image_in_force(world: &World) -> String {
    let name = world.status().plan.clone().expect("a plan").name;
    let plans = &world.observed.plans;
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
    let mut world = World::new("");
    world.settle();
    let before = identities(&world);
    let mut settings = (*world.observed.settings).clone();
    settings.pull_policy = "Always".to_owned();
    settings.pull_secrets = vec!["registry".to_owned()];
    settings
        .nodes
        .passing_taints
        .push("example.com/starting".to_owned());
    settings.model_cache = "/srv/models".to_owned();
    world.observed.settings = Arc::new(settings);
    // It counts what a plan follows from in another way, and keeps more of it.
    let plan = Arc::make_mut(&mut world.observed.plans[0]);
    let notes = plan.metadata.annotations.get_or_insert_default();
    notes.insert(NOTE_INPUTS.to_owned(), "v2:0123".to_owned());
    let mut json = serde_json::to_value(&*plan).unwrap();
    json["spec"]["fairness"] = serde_json::json!({"by": "user"});
    json["spec"]["ranks"][1]["window"] = serde_json::json!([0, 5]);
    *plan = serde_json::from_value(json).unwrap();
    // What is free has changed since, so that a plan made now would be another one.
    for name in ["attic", "office"] {
        world.node(name, |node| {
            let profile = node.profile.as_mut().unwrap();
            profile.memory.available_bytes /= 2;
            profile.memory.read_all_threads_gbps *= 3.0;
        });
    }
    let decision = decide(&world.observed);
    assert!(decision.create_plan.is_none() && !decision.writes_objects());
    world.settle();
    assert_eq!(identities(&world), before);
    assert_eq!(world.observed.plans.len(), 1);
}

#[test]
fn a_new_image_rolls_like_any_other_plan_and_keeps_the_places() {
    let mut world = World::new("");
    world.settle();
    let (before, ranks) = (identities(&world), world.ranks());
    image(&mut world, "hearth/worker:2");
    world.settle();
    assert_eq!(image_in_force(&world), "hearth/worker:2");
    assert_eq!(world.ranks(), ranks);
    assert!(identities(&world).iter().all(|pod| !before.contains(pod)));
    assert_eq!(world.says(READY), ("True", "Serving"));
}

/// The new image does not start: everything is as it was, or is made so again.
fn fails_and_comes_back(mut world: World, is_kept: bool) {
    world.settle();
    let before = identities(&world);
    world.broken_from = 2;
    image(&mut world, "hearth/worker:2");
    for _ in 0..30 {
        world.visit();
        world.turn();
    }
    assert_eq!(world.observed.plans.len(), 2);
    world.pass(Duration::from_secs(3600));
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert_eq!(world.says(PLANNED), ("False", "RolledBack"));
    assert!(
        world
            .condition(PLANNED)
            .message
            .contains("Set another worker image")
    );
    assert_eq!(image_in_force(&world), "hearth/worker:1");
    let names = |pods: &[(String, String)]| -> Vec<String> {
        pods.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&identities(&world)), names(&before));
    assert_eq!(identities(&world) == before, is_kept);
    // Not again with the same image, and with another one at once.
    world.pass(Duration::from_secs(3600));
    assert!(decide(&world.observed).create_plan.is_none());
    world.broken_from = u64::MAX;
    image(&mut world, "hearth/worker:3");
    world.settle();
    assert_eq!(image_in_force(&world), "hearth/worker:3");
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn an_image_that_does_not_start_leaves_what_ran() {
    fails_and_comes_back(World::new(""), true);
}

#[test]
fn an_image_that_does_not_start_where_one_has_room_brings_the_old_one_back() {
    let mut world = World::new("decode: {kvCache: {memory: 2Gi}}\n");
    world.observed.nodes.remove("attic");
    fails_and_comes_back(world, false);
}

#[test]
fn an_image_comes_in_turn() {
    let mut world = World::new("");
    world.settle();
    let before = identities(&world);
    image(&mut world, "hearth/worker:2");
    world.observed.turn = Turn::After(other("first"));
    world.settle();
    assert_eq!(identities(&world), before);
    assert_eq!(world.says(PROGRESSING), ("True", "WaitingForTurn"));
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert!(decide(&world.observed).waits_for_turn);
    // Another spec does not wait, and takes the image that is known to serve.
    world.change("decode: {maxBatch: 3}\n");
    world.settle();
    assert_eq!(world.observed.plans.len(), 2);
    assert_eq!(image_in_force(&world), "hearth/worker:1");
    world.observed.turn = Turn::HeldBack(other("first"));
    world.settle();
    assert_eq!(world.says(PROGRESSING), ("False", "ImageHeldBack"));
    assert!(
        world
            .condition(PROGRESSING)
            .message
            .contains("default/first did not get ready")
    );
    world.observed.turn = Turn::Free;
    world.settle();
    assert_eq!(image_in_force(&world), "hearth/worker:2");
}

#[test]
fn what_never_served_waits_for_nobody() {
    let mut world = World::new("");
    world.broken_from = 1;
    for _ in 0..5 {
        world.visit();
        world.turn();
    }
    world.broken_from = u64::MAX;
    world.observed.turn = Turn::HeldBack(other("first"));
    image(&mut world, "hearth/worker:2");
    world.settle();
    assert_eq!(image_in_force(&world), "hearth/worker:2");
    assert_eq!(world.says(READY), ("True", "Serving"));
}

#[test]
fn no_image_is_changed_while_a_node_is_away() {
    let mut world = World::new("");
    world.settle();
    let (now, home) = (world.observed.now, world.observed.pods[0].node.clone());
    world.node(&home, |node| {
        node.is_ready = false;
        node.not_ready_since = Some(now);
    });
    image(&mut world, "hearth/worker:2");
    assert!(world.visit().create_plan.is_none());
}

/// A volume that cannot be mounted says nothing of the image.
#[test]
fn trouble_that_is_no_images_fault_passes_the_turn_on() {
    let mut world = World::new("");
    world.settle();
    image(&mut world, "hearth/worker:2");
    world.visit();
    world.turn();
    world.visit();
    world.pod("demo-decode-0", |pod| pod.is_ready = false);
    let newest = |world: &World| {
        let plan = world.observed.plans.last().expect("a plan");
        (plan.spec.generation, note(plan, NOTE_TURN).to_owned())
    };
    let generation = newest(&world).0;
    let trouble = |world: &mut World, restarts: u32| {
        for pod in &mut world.observed.pods {
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
        world.visit();
    };
    trouble(&mut world, 0);
    assert_eq!(newest(&world), (generation, String::new()), "not at once");
    world.pass(Duration::from_secs(60));
    trouble(&mut world, 0);
    assert_eq!(newest(&world), (generation, "MountFailed".to_owned()));
    trouble(&mut world, 1);
    assert_eq!(newest(&world), (generation, String::new()), "it crashes");
    trouble(&mut world, 0);
    assert_eq!(newest(&world), (generation, "MountFailed".to_owned()));
    for pod in &mut world.observed.pods {
        let pod = Arc::make_mut(pod);
        (pod.is_setting_up, pod.setup_warning) = (false, None);
    }
    world.visit();
    assert_eq!(newest(&world), (generation, String::new()), "it has gone");
}

/// How long its owner waits is no measure for others.
#[test]
fn a_plan_that_is_given_up_early_holds_others_only_where_its_image_is_to_blame() {
    let given_up = |deadline: &str, seconds: u64, change: fn(&mut PodView)| {
        let mut world = World::new(&format!("rollout: {{progressDeadline: {deadline}}}\n"));
        world.settle();
        world.broken_from = 2;
        image(&mut world, "hearth/worker:2");
        world.visit();
        world.turn();
        for pod in &mut world.observed.pods {
            if pod.plan_generation == 2 {
                change(Arc::make_mut(pod));
            }
        }
        world.pass(Duration::from_secs(seconds));
        world.visit();
        let mut plans = world.observed.plans.iter();
        let plan = plans.find(|plan| plan.spec.generation == 2);
        let plan = plan.expect("the plan with the new image");
        assert_eq!(note(plan, NOTE_OUTCOME), OUTCOME_FAILED);
        note(plan, NOTE_TURN).to_owned()
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
