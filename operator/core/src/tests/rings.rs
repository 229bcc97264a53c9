//! Rings: the head is told where the others are, and a ring is replaced as a whole.

use hearth_crds::Routes;

use super::rollout::watch;
use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::rollout::{Mode, Want};
use crate::testing::MIB;

/// A gateway and a ring over three nodes.
fn ring(hash: &str) -> Vec<Want> {
    let mut head = want("decode-0", hash, "attic", 300);
    head.group = ["decode-0", "stage-0", "stage-1"]
        .map(str::to_owned)
        .to_vec();
    vec![
        want("gateway-0", "a", "attic", 50),
        head,
        want("stage-0", hash, "office", 300),
        want("stage-1", hash, "cellar", 300),
    ]
}

fn running(mib: u64) -> Sim {
    let rooms = rooms(&[("attic", mib), ("office", mib), ("cellar", mib)]);
    let mut sim = Sim::new(rooms, PACE);
    let modes = sim.settle(&ring("a"), |_, _| {});
    assert_eq!(modes, [Mode::Alone]);
    sim.generation = 2;
    sim
}

/// Names of the ranks that a Pod has routes to.
fn routes(sim: &Sim, pod: &str) -> Vec<String> {
    let routes: Routes = serde_json::from_str(&sim.pods[pod].view.routes).expect("routes");
    routes.workers.into_iter().map(|route| route.name).collect()
}

#[test]
fn the_head_is_told_where_the_others_are_and_the_gateway_of_the_head_alone() {
    let mut sim = running(400);
    let head = "demo-decode-0-a";
    assert_eq!(routes(&sim, head), ["decode-0", "stage-0", "stage-1"]);
    assert_eq!(routes(&sim, "demo-gateway-0-a"), ["decode-0"]);
    assert!(is_quiet(&sim.decide(&ring("a"))));

    // A stage that is made anew is elsewhere.
    let before = sim.pods[head].view.routes.clone();
    sim.fail("demo-stage-1-a");
    for _ in 0..20 {
        sim.reconcile(&ring("a"));
        sim.turn();
    }
    assert_eq!(routes(&sim, head), ["decode-0", "stage-0", "stage-1"]);
    assert_ne!(sim.pods[head].view.routes, before);
}

#[test]
fn the_members_of_a_ring_stay_as_long_as_its_head() {
    for (mib, mode) in [(1000, Mode::Surge), (400, Mode::OldDownFirst)] {
        let mut sim = running(mib);
        let (old, new) = (ring("a"), ring("b"));
        let before = routes(&sim, "demo-decode-0-a");
        let mut invariants = watch(&old, &new);
        let modes = sim.settle(&new, |sim, steps| {
            invariants(sim, steps);
            let stays = |name: &str| sim.pods.get(name).is_some_and(|pod| !pod.view.is_deleting);
            if stays("demo-decode-0-a") {
                assert!(
                    stays("demo-stage-0-a") && stays("demo-stage-1-a"),
                    "{mode:?}"
                );
                assert_eq!(routes(sim, "demo-decode-0-a"), before);
            }
        });
        assert_eq!(modes, [mode, Mode::Alone]);
        assert_eq!(
            routes(&sim, "demo-decode-0-b"),
            ["decode-0", "stage-0", "stage-1"]
        );
        assert_eq!(routes(&sim, "demo-gateway-0-a"), ["decode-0"]);
    }
}

#[test]
fn a_gateway_gets_the_room_of_a_stage_whose_head_is_elsewhere() {
    let mut sim = running(400);
    let mut new = ring("b");
    // Its node has room for this beside the new stage, and not beside the old one.
    new[2].memory_bytes = 250 * MIB;
    new.push(want("gateway-1", "b", "office", 150));
    let modes = sim.settle(&new, |sim, _| sim.assert_capacity());
    assert_eq!(modes, [Mode::OldDownFirst, Mode::Alone]);
    assert!(sim.serves(&new));
}
