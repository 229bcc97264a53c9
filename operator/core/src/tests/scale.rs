//! Numbers change, places stay.

use std::collections::BTreeMap;

use hearth_crds::{
    InferencePlanSpec, NodeProfileStatus, PlanRank, PlanRole, PlanRouting, PlanStrategy,
};
use hearth_planner::{CpuOffer, CpuRoom, GpuOffer, PlanInput, plan};

use crate::candidates::Candidates;
use crate::choose::scale::{differ_in_numbers_alone, in_place};
use crate::model::builtin;
use crate::testing::{GIB, MIB, deployment, node};
use crate::tests::fake_cluster::FakeCluster;

fn profiles(memory_bytes: u64) -> Candidates {
    let profile = |name: &str| node(name, 4, memory_bytes).profile.unwrap();
    let room = CpuRoom {
        allocatable_millis: 4000,
        ..CpuRoom::default()
    };
    let names = ["attic", "office"];
    Candidates {
        free: BTreeMap::from(names.map(|name| (name.to_owned(), profile(name)))),
        cpu_rooms: BTreeMap::from(names.map(|name| (name.to_owned(), room))),
        ..Candidates::default()
    }
}

fn planned(yaml: &str, generation: u64, free: &Candidates) -> InferencePlanSpec {
    let deployment = deployment(yaml);
    let profiles: Vec<NodeProfileStatus> = free.free.values().cloned().collect();
    plan(&PlanInput {
        name: "demo",
        namespace: "default",
        generation,
        spec: &deployment.spec,
        facts: &builtin::facts("hearth-demo").unwrap(),
        model_path: "/m",
        profiles: &profiles,
        gpus: GpuOffer::Cluster {
            plugin: &BTreeMap::new(),
            claimable: &BTreeMap::new(),
        },
        cpus: CpuOffer::Requests(&free.cpu_rooms),
    })
    .unwrap()
}

fn decodes(plan: &InferencePlanSpec) -> Vec<String> {
    plan.ranks_of(PlanRole::Decode)
        .map(|rank| format!("{} {}", rank.name, rank.node))
        .collect()
}

#[test]
fn a_plan_in_which_somebody_moves_differs_in_more_than_numbers() {
    let mut cluster = FakeCluster::new("");
    cluster.settle();
    let old = &cluster.observed.plans[0];
    let differs = |change: &dyn Fn(&mut InferencePlanSpec)| {
        let mut new = (**old).clone();
        change(&mut new.spec);
        !differ_in_numbers_alone(old, &new)
    };
    let more = |plan: &mut InferencePlanSpec, role| {
        let decode = plan.ranks_of(PlanRole::Decode).next().unwrap().clone();
        let name = format!("{}-1", PlanRole::as_str(role));
        plan.ranks.push(PlanRank {
            name,
            role,
            ..decode
        });
    };
    assert!(!differs(&|plan| more(plan, PlanRole::Decode)));
    assert!(differs(&|plan| plan.ranks[0].node = "elsewhere".to_owned()));
    assert!(differs(&|plan| more(plan, PlanRole::Stage)));
    assert!(differs(&|plan| plan.strategy = PlanStrategy::PipedRing));
}

#[test]
fn more_workers_come_where_the_planner_would_have_them() {
    let free = profiles(4 * GIB);
    let old = planned("", 1, &free);
    let new = planned("decode: {replicas: 3}\n", 2, &free);
    let scaled = in_place(&old, &new, &free).unwrap();
    assert_eq!(scaled.generation, 2);
    assert_eq!(new.routing, old.routing);
    assert_eq!(scaled.ranks[..old.ranks.len()], old.ranks);
    let count = |plan: &InferencePlanSpec, node: &str| {
        plan.ranks_of(PlanRole::Decode)
            .filter(|rank| rank.node == node)
            .count()
    };
    for node in ["attic", "office"] {
        assert_eq!(count(&scaled, node), count(&new, node), "{node}");
    }
    assert!(scaled.predicted.tokens_per_second > 2.0 * old.predicted.tokens_per_second);
}

#[test]
fn fewer_workers_are_the_first_ones() {
    let free = profiles(4 * GIB);
    let old = planned("decode: {replicas: 3}\n", 1, &free);
    let new = planned("decode: {replicas: 2}\n", 2, &free);
    let scaled = in_place(&old, &new, &free).unwrap();
    assert_eq!(decodes(&scaled), decodes(&old)[..2]);
}

#[test]
fn prompts_are_routed_as_before_but_for_how_long_requests_are_held() {
    let free = profiles(4 * GIB);
    let mut old = planned("", 1, &free);
    // As an earlier version planned.
    (old.routing.max_queue, old.routing.chunked_below_tokens) = (512, 77);
    let zero = "decode: {replicas: 2, scaling: {mode: External, minReplicas: 0}}\n";
    let new = planned(zero, 2, &free);
    assert_ne!(new.routing.hold_timeout_ms, None);
    let expected = PlanRouting {
        hold_timeout_ms: new.routing.hold_timeout_ms,
        ..old.routing.clone()
    };
    assert_eq!(in_place(&old, &new, &free).unwrap().routing, expected);
}

#[test]
fn both_numbers_change_at_once_and_everybody_stays() {
    let free = profiles(4 * GIB);
    let old = planned("decode: {replicas: 2}\n", 1, &free);
    let new = planned("decode: {replicas: 1}\nprefill: {replicas: 2}\n", 2, &free);
    let scaled = in_place(&old, &new, &free).unwrap();
    assert_eq!(decodes(&scaled), decodes(&old)[..1]);
    let prefills = |plan: &InferencePlanSpec| -> Vec<PlanRank> {
        plan.ranks_of(PlanRole::Prefill).cloned().collect()
    };
    assert_eq!(prefills(&scaled)[..1], prefills(&old));
    let names: Vec<String> = prefills(&scaled)
        .into_iter()
        .map(|rank| rank.name)
        .collect();
    assert_eq!(names, ["prefill-0", "prefill-1"]);
    assert_eq!(scaled.why.len(), old.why.len() + 2);
}

#[test]
fn what_changes_more_than_the_number_is_planned_anew() {
    let free = profiles(4 * GIB);
    let old = planned("", 1, &free);
    for yaml in [
        "decode: {replicas: 2}\nprefill: {mode: Chunked}\n",
        "decode: {replicas: 1}\n",
    ] {
        let new = planned(yaml, 2, &free);
        assert_eq!(in_place(&old, &new, &free), None, "{yaml}");
    }
}

#[test]
fn places_that_do_not_suffice_are_given_up() {
    let old = planned("", 1, &profiles(4 * GIB));
    let new = planned("decode: {replicas: 2}\n", 2, &profiles(4 * GIB));
    // Nothing is left on the nodes.
    assert_eq!(in_place(&old, &new, &profiles(200 * MIB)), None);
    // A node of the old plan takes nothing any longer.
    let mut one = profiles(4 * GIB);
    one.free.remove("attic");
    assert_eq!(in_place(&old, &new, &one), None);
    // By now, others request the CPU of a node.
    let mut busy = profiles(4 * GIB);
    for room in busy.cpu_rooms.values_mut() {
        room.requested_millis = 3900;
    }
    assert_eq!(in_place(&old, &new, &busy), None);
}

#[test]
fn cores_of_ones_own_are_not_given_twice() {
    let free = profiles(4 * GIB);
    let mut old = planned("", 1, &free);
    let mut new = planned("decode: {replicas: 2}\n", 2, &free);
    assert!(in_place(&old, &new, &free).is_some());
    for rank in old.ranks.iter_mut().chain(&mut new.ranks) {
        rank.pinning = hearth_crds::Pinning::Exclusive;
    }
    assert_eq!(in_place(&old, &new, &free), None);
}

#[test]
fn another_number_keeps_no_places_where_a_plan_has_followers_and_the_other_has_none() {
    let free = profiles(4 * GIB);
    let old = planned("", 1, &free);
    let new = planned("decode: {replicas: 2}\n", 2, &free);
    assert!(in_place(&old, &new, &free).is_some());
    let mut with_follower = new.clone();
    let mut follower = old.rank("prefill-0").unwrap().clone();
    (follower.name, follower.role) = ("stage-0".to_owned(), PlanRole::Stage);
    with_follower.ranks.push(follower.clone());
    assert!(in_place(&old, &with_follower, &free).is_none());
    // Where both have some, they stay behind the decode ranks.
    let mut had_follower = old;
    had_follower.ranks.push(follower);
    let scaled = in_place(&had_follower, &with_follower, &free).unwrap();
    let names: Vec<&str> = scaled.ranks.iter().map(|rank| &*rank.name).collect();
    assert_eq!(names[2..], ["decode-0", "decode-1", "stage-0"]);
}
