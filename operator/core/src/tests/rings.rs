//! Rings: the head is told where the others are, and a ring is replaced as a whole.

use hearth_crds::{PlanRank, Routes};

use super::rollout::watch;
use super::shared_gpus::of_spec_with;
use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::conditions::READY;
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

/// The KV that is asked for takes room of all CPUs and GPUs together.
#[test]
fn members_on_gpus_request_them_and_the_head_has_routes_to_all() {
    let ring = "strategy: PipedRing\ndecode: {kvCache: {memory: 12Gi}}\n";
    let cluster = of_spec_with(ring, &["attic", "office"], 7 << 30);
    let ready = cluster.condition(READY);
    assert_eq!(ready.reason, "Serving", "{}", ready.message);
    assert_eq!(cluster.observed.plans.len(), 1);
    let plan = &cluster.observed.plans[0].spec;
    let members: Vec<&PlanRank> = plan.group_of("decode-0");
    assert_eq!(members.len(), 4, "{:#?}", plan.why);
    let on_gpus = members.iter().filter(|rank| rank.is_on_gpu());
    let mut on_gpus: Vec<&str> = on_gpus.map(|rank| &*rank.gpu_uuids[0]).collect();
    on_gpus.sort_unstable();
    assert_eq!(on_gpus, ["GPU-attic", "GPU-office"], "{:#?}", plan.why);
    let pod = |rank: &str| {
        let mut pods = cluster.observed.pods.iter();
        pods.find(|pod| pod.rank == rank).expect("a Pod")
    };
    for member in &members {
        let asked = pod(&member.name).gpus;
        assert_eq!(asked, u32::from(member.is_on_gpu()), "{}", member.name);
    }
    let names = |rank: &str| -> Vec<String> {
        let routes: Routes = serde_json::from_str(&pod(rank).routes).expect("routes");
        routes.workers.into_iter().map(|route| route.name).collect()
    };
    let all: Vec<&str> = members.iter().map(|member| &*member.name).collect();
    assert_eq!(names("decode-0"), all);
    assert_eq!(names("gateway-0"), ["decode-0"]);
}
