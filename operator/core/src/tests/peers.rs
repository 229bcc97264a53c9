//! Peers: the head is told where the others are, be they in Pods of their own or in those of decode ranks.

use hearth_crds::{PlanRole, Routes};

use super::rollout::watch;
use super::shared_gpus::{of_spec, on_gpus};
use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::conditions::READY;
use crate::observed::SecondRank;
use crate::rollout::{Mode, Want};

/// A gateway, a decode rank with a follower in its Pod, the head of three peers, and another follower.
fn peers(hash: &str) -> Vec<Want> {
    let mut head = want("prefill-0", hash, "attic", 300);
    head.group = ["prefill-0", "stage-0", "stage-1"]
        .map(str::to_owned)
        .to_vec();
    let mut decode = want("decode-0", hash, "office", 300);
    decode.second = Some(SecondRank {
        rank: "stage-0".to_owned(),
        role: PlanRole::Stage,
    });
    vec![
        want("gateway-0", "a", "attic", 50),
        head,
        decode,
        want("stage-1", hash, "cellar", 300),
    ]
}

fn running(mib: u64) -> Sim {
    let rooms = rooms(&[("attic", mib), ("office", mib), ("cellar", mib)]);
    let mut sim = Sim::new(rooms, PACE);
    let modes = sim.settle(&peers("a"), |_, _| {});
    assert_eq!(modes, [Mode::Alone]);
    sim.generation = 2;
    sim
}

/// Names of the ranks that a Pod has routes to, with their ports.
fn routes(sim: &Sim, pod: &str) -> Vec<String> {
    told(&sim.pods[pod].view.routes)
}

fn told(routes: &str) -> Vec<String> {
    let routes: Routes = serde_json::from_str(routes).expect("routes");
    let mut told: Vec<String> = routes
        .workers
        .into_iter()
        .map(|route| {
            let (_, port) = route.endpoint.rsplit_once(':').expect("a port");
            format!("{} at {port}", route.name)
        })
        .collect();
    told.sort_unstable();
    told
}

const OF_HEAD: [&str; 3] = ["prefill-0 at 9400", "stage-0 at 9403", "stage-1 at 9400"];
const OF_GATEWAY: [&str; 2] = ["decode-0 at 9400", "prefill-0 at 9400"];

#[test]
fn the_head_is_told_of_followers_alone_and_the_gateway_of_none() {
    let mut sim = running(400);
    assert_eq!(routes(&sim, "demo-prefill-0-a"), OF_HEAD);
    assert_eq!(routes(&sim, "demo-gateway-0-a"), OF_GATEWAY);
    assert!(is_quiet(&sim.decide(&peers("a"))));

    // The Pod of decode rank and follower is made anew elsewhere.
    let before = sim.pods["demo-prefill-0-a"].view.routes.clone();
    sim.fail("demo-decode-0-a");
    for _ in 0..20 {
        sim.reconcile(&peers("a"));
        sim.turn();
    }
    assert_eq!(routes(&sim, "demo-prefill-0-a"), OF_HEAD);
    assert_ne!(sim.pods["demo-prefill-0-a"].view.routes, before);
}

#[test]
fn followers_stay_as_long_as_their_head() {
    for (mib, mode) in [(1000, Mode::Surge), (400, Mode::OldDownFirst)] {
        let mut sim = running(mib);
        let (old, new) = (peers("a"), peers("b"));
        let mut invariants = watch(&old, &new);
        let modes = sim.settle(&new, |sim, steps| {
            invariants(sim, steps);
            let stays = |name: &str| sim.pods.get(name).is_some_and(|pod| !pod.view.is_deleting);
            if stays("demo-prefill-0-a") {
                let stay = ["demo-decode-0-a", "demo-stage-1-a"].map(stays);
                assert_eq!(stay, [true, true], "{mode:?}");
            }
        });
        assert_eq!(modes, [mode, Mode::Alone]);
        assert_eq!(routes(&sim, "demo-prefill-0-b"), OF_HEAD);
        assert_eq!(routes(&sim, "demo-gateway-0-a"), OF_GATEWAY);
    }
}

/// With a GPU on each of two nodes, a decode rank and a follower share one and the head has the other.
#[test]
fn a_plan_of_peers_is_carried_out_with_a_gpu_on_each_node() {
    let yaml = "prefill: {mode: DistributedStreamLoading, chunkedBelowTokens: 0}\ndecode: {maxBatch: 4, dualBatch: 'On'}\n";
    let cluster = of_spec(yaml, &["attic", "office"]);
    let ranks = on_gpus(&cluster);
    let in_pods: Vec<(&str, Option<&str>)> = ranks
        .iter()
        .map(|(rank, _, host)| (rank.as_str(), host.as_deref()))
        .collect();
    assert_eq!(
        in_pods,
        [
            ("prefill-0", None),
            ("decode-0", None),
            ("stage-0", Some("decode-0"))
        ]
    );
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let routes = |rank: &str| {
        let mut pods = cluster.observed.pods.iter();
        let pod = pods.find(|pod| pod.rank == rank).expect("a Pod");
        told(&pod.routes)
    };
    assert_eq!(
        routes("prefill-0"),
        ["prefill-0 at 9400", "stage-0 at 9403"]
    );
    assert_eq!(routes("gateway-0"), OF_GATEWAY);
    let pools = cluster.status().pool_statuses.iter();
    let pools: Vec<_> = pools
        .map(|pool| (pool.name.as_str(), pool.summary.as_str()))
        .collect();
    assert!(pools.contains(&("stage", "1/1")), "{pools:?}");
}
