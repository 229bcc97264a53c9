//! What the scheduler refuses is planned elsewhere, a bounded number of times.

use std::sync::Arc;
use std::time::Duration;

use super::world::World;
use crate::controller::conditions::{DECODE_READY, DEGRADED, PLANNED, READY};
use crate::controller::observed::Requests;
use crate::controller::testing::{GIB, MIB};

const VOLUME: &str = "Unschedulable: 0/2 nodes are available: 1 node(s) had volume node affinity conflict. preemption: none";
const CLAIM: &str =
    "Unschedulable: 0/2 nodes are available: persistentvolumeclaim \"weights\" not found.";

/// The scheduler refuses all that waits for a node of these.
fn refuse(world: &mut World, nodes: &[&str], words: &str) {
    for pod in &mut world.observed.pods {
        if pod.node.is_empty() && nodes.contains(&pod.wanted_node.as_str()) {
            Arc::make_mut(pod).unschedulable = Some(words.to_owned());
        }
    }
}

fn home(world: &World) -> String {
    world.observed.pods[0].wanted_node.clone()
}

#[test]
fn what_only_the_scheduler_knows_leads_to_another_node() {
    let mut world = World::new("");
    world.visit();
    let home = home(&world);
    refuse(&mut world, &[&home], VOLUME);
    let decision = world.visit();
    assert_eq!(world.says(DECODE_READY), ("False", "Unschedulable"));
    // It is looked at again in time, whatever else happens.
    assert_eq!(decision.requeue_after, Some(Duration::from_secs(30)));
    world.pass(Duration::from_secs(31));
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    let planned = world.condition(PLANNED).message.clone();
    assert!(
        planned.contains(&format!("{home} is left out: the scheduler refused"))
            && planned.contains("volume node affinity conflict")
            && !planned.contains("preemption"),
        "{planned}"
    );
    assert_eq!(world.observed.plans.last().unwrap().spec.generation, 2);
}

#[test]
fn where_every_node_refuses_the_tries_end_and_the_cause_is_told() {
    let mut world = World::new("");
    world.visit();
    for _ in 0..10 {
        refuse(&mut world, &["attic", "office"], VOLUME);
        world.pass(Duration::from_secs(31));
        world.visit();
    }
    let plans = world.observed.plans.last().unwrap().spec.generation;
    assert_eq!(plans, 2, "one for each node");
    assert_eq!(world.says(DEGRADED), ("True", "Unschedulable"));
    let told = &world.condition(DEGRADED).message;
    assert!(
        told.contains("volume node affinity conflict") && told.contains("fits nowhere else"),
        "{told}"
    );
}

#[test]
fn a_claim_that_is_missing_is_no_fault_of_the_node() {
    let mut world = World::new("");
    world.visit();
    let home = home(&world);
    refuse(&mut world, &[&home], CLAIM);
    world.pass(Duration::from_secs(60));
    world.visit();
    assert_eq!(world.observed.plans.len(), 1);
    assert_eq!(world.says(DECODE_READY), ("False", "Unschedulable"));
}

/// Between plan and Pod, somebody else's Pod takes the room.
#[test]
fn a_foreign_pod_that_comes_between_moves_the_plan() {
    let mut world = World::new("");
    world.visit();
    let home = home(&world);
    refuse(&mut world, &[&home], "Unschedulable: 1 Insufficient cpu");
    let foreign = Requests {
        cpu_millis: 3800,
        memory_bytes: 64 * MIB,
        gpus: 0,
    };
    let others = &mut world.observed.others.requests;
    others.insert(home.clone(), foreign);
    world.pass(Duration::from_secs(31));
    world.settle();
    assert_eq!(world.says(READY), ("True", "Serving"));
    assert!(world.observed.pods.iter().all(|pod| pod.node != home));
    // The plan follows from the numbers: no node is left out by name.
    assert!(!world.condition(PLANNED).message.contains("left out"));
}

/// What is taken is said in the numbers of the refusal, and what Pods may request of it.
#[test]
fn too_little_cpu_is_told_with_its_accounts() {
    let mut world = World::new("placement: {pinning: Exclusive}\n");
    let foreign = Requests {
        cpu_millis: 3000,
        memory_bytes: GIB,
        gpus: 0,
    };
    for node in ["attic", "office"] {
        let others = &mut world.observed.others.requests;
        others.insert(node.to_owned(), foreign);
    }
    world.visit();
    assert_eq!(world.says(PLANNED), ("False", "TooFewCores"));
    let told = &world.condition(PLANNED).message;
    for part in [
        "of its 4000m CPU other Pods request 3000m, 100m are kept free",
        "write spec.placement.pinning: Shared",
    ] {
        assert!(told.contains(part), "{told}");
    }
}
