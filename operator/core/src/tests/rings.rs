//! Rings: the head is told where the others are, and a ring is replaced as a whole.

use std::time::Duration;

use hearth_crds::{PlanRank, READER_VERSION, Routes};
use kube_core::ResourceExt;

use super::fake_cluster::FakeCluster;
use super::rollout::watch;
use super::shared_gpus::of_spec_with;
use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::conditions::{PROGRESSING, READY};
use crate::observed::ContainerView;
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
fn the_members_of_a_head_that_is_away_for_a_moment_stay_until_another_ring_serves() {
    let mut old = ring("a");
    old[0].node = "office".to_owned();
    let mut sim = Sim::new(
        rooms(&[("attic", 1000), ("office", 1000), ("cellar", 1000)]),
        PACE,
    );
    sim.settle(&old, |_, _| {});
    let mut head = want("decode-0", "b", "cellar", 300);
    head.group = ["decode-0", "stage-0"].map(str::to_owned).to_vec();
    let new = vec![old[0].clone(), head, want("stage-0", "b", "office", 300)];
    sim.lose("attic");
    sim.generation = 2;
    let mut waited = 0;
    sim.settle(&new, |sim, _| {
        let is_up = |name: &str| sim.pods.get(name).is_some_and(|pod| pod.view.is_ready);
        if !(is_up("demo-decode-0-b") && is_up("demo-stage-0-b")) {
            waited += 1;
            for name in ["demo-stage-0-a", "demo-stage-1-a"] {
                let pod = &sim.pods[name].view;
                assert!(pod.is_ready && !pod.is_deleting, "{name}");
            }
        }
    });
    assert!(waited > 0);
    assert!(!sim.pods.contains_key("demo-stage-0-a"));
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

#[test]
fn a_head_that_waits_for_a_member_makes_no_progress_beside_it() {
    let mut cluster = FakeCluster::new(
        "strategy: PipedRing\ndecode: {kvCache: {memory: 5Gi}}\nrollout: {progressDeadline: 10m}\n",
    );
    for name in ["attic", "office"] {
        cluster.node(name, |node| {
            let profile = node.profile.as_mut().expect("a profile");
            profile.reader_version = Some(READER_VERSION);
        });
    }
    cluster.reconcile();
    cluster.turn();
    cluster.turn();
    let starting = |restarts: u32| ContainerView {
        restarts,
        is_starting: true,
        ..ContainerView::default()
    };
    for (pod, restarts) in [("demo-decode-0", 0), ("demo-stage-0", 0)] {
        cluster.pod(pod, |pod| {
            pod.is_ready = false;
            pod.container = Some(starting(restarts));
        });
    }
    let hour = Duration::from_secs(3600);
    cluster.pass(hour);
    cluster.reconcile();
    assert_eq!(cluster.says(PROGRESSING).0, "True");
    // The stage has ended once; the head is not to blame.
    cluster.pod("demo-stage-0", |pod| pod.container = Some(starting(1)));
    cluster.pass(hour);
    cluster.reconcile();
    assert_eq!(
        cluster.says(PROGRESSING),
        ("False", "ProgressDeadlineExceeded")
    );
    // Once it is there, the head reads on.
    cluster.pod("demo-stage-0", |pod| pod.is_ready = true);
    cluster.reconcile();
    assert_eq!(cluster.says(PROGRESSING).0, "True");
}

#[test]
fn an_eviction_of_a_stage_waits_for_another_ring() {
    let ring = "strategy: PipedRing\ndecode: {kvCache: {memory: 12Gi}}\n";
    let mut cluster = of_spec_with(ring, &["attic", "office"], 7 << 30);
    let decision = cluster.reconcile();
    let mut objects = decision.objects.iter();
    let budget = objects.find(|it| it.name_any() == "demo-stage");
    assert_eq!(budget.expect("a budget").data["spec"]["minAvailable"], 3);
}
