//! An operator that is killed between two writes: the next one, which knows the same as the API server alone, comes to where the
//! killed one would have come.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeploymentStatus, InferencePlanStatus};

use super::decide::OTHER_GATEWAY;
use super::fake_cluster::FakeCluster;
use super::zero::{YAML, asked, idle_for};
use crate::conditions::{DEGRADED, NODES_TAKEN, READY, ROLLED_BACK};
use crate::decide::decide;
use crate::observed::Holding;
use crate::status::told_first;
use crate::testing::GIB;

/// Reconciles of a course, ten seconds apart.
const RECONCILES: usize = 40;

/// The last write before the end, in the order of `apply`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// The status, where it is written first as the deployment is about to be Ready no more.
    EarlyStatus,
    /// What is written about plans.
    Plans,
    /// The creation of Pods.
    Creations,
    /// The deletion of Pods and plans: all but the status.
    Deletions,
}

const ALL: [After; 4] = [
    After::EarlyStatus,
    After::Plans,
    After::Creations,
    After::Deletions,
];

/// What happens in a cluster, by the number of the reconcile that sees it.
type Course<'a> = &'a [(usize, fn(&mut FakeCluster))];

/// What is left at the end, without times: one reconcile more may bring it there earlier.
#[derive(Debug, PartialEq)]
struct End {
    status: InferenceDeploymentStatus,
    plans: Vec<Option<InferencePlanStatus>>,
    pods: Vec<String>,
}

/// Writes a part of what the operator decides now.
fn killed(cluster: &mut FakeCluster, after: After) {
    let before = cluster.observed.deployment.status.clone();
    let mut part = decide(&cluster.observed);
    let early = told_first(before.as_ref(), &part);
    let early = early.filter(|_| after == After::EarlyStatus);
    let told = early.or(before);
    part.events.clear();
    part.scaler = None;
    if after != After::Deletions {
        part.mark_pods.clear();
        part.delete_pods.clear();
        part.delete_plans.clear();
    }
    if !matches!(after, After::Creations | After::Deletions) {
        part.create_pods.clear();
    }
    if after == After::EarlyStatus {
        part.create_plan = None;
        part.plan_statuses.clear();
    }
    cluster.apply(&part);
    Arc::make_mut(&mut cluster.observed.deployment).status = told;
}

/// The end of a course whose operator is killed in the reconcile of that number, if any, and the reasons of its events.
fn end(yaml: &str, course: Course<'_>, kill: Option<(usize, After)>) -> (End, Vec<String>) {
    let mut cluster = FakeCluster::new(yaml);
    for reconcile in 0..RECONCILES {
        let happens = course.iter().filter(|(at, _)| *at == reconcile);
        happens.for_each(|(_, happens)| happens(&mut cluster));
        if let Some((_, after)) = kill.filter(|(at, _)| *at == reconcile) {
            killed(&mut cluster, after);
        }
        cluster.reconcile();
        cluster.turn();
        cluster.pass(Duration::from_secs(9));
    }
    let plans = cluster.observed.plans.iter();
    let pods = cluster.observed.pods.iter();
    let mut status = cluster.status().clone();
    for condition in &mut status.conditions {
        condition.last_transition_time.clear();
    }
    let end = End {
        status,
        plans: plans.map(|plan| plan.status.clone()).collect(),
        pods: pods.map(|pod| pod.name.clone()).collect(),
    };
    (end, cluster.told())
}

/// Kills the operator after each write of each reconcile of a course. Returns where it ends otherwise.
fn whenever_it_is_killed(yaml: &str, course: Course<'_>) -> (End, Vec<String>) {
    let (usual, told) = end(yaml, course, None);
    for reconcile in 0..RECONCILES {
        for after in ALL {
            let (end, events) = end(yaml, course, Some((reconcile, after)));
            assert_eq!(end, usual, "killed in {reconcile}, {after:?}");
            // Events follow a status that is news, and an early one is none any more.
            if after != After::EarlyStatus {
                assert_eq!(events, told, "killed in {reconcile}, {after:?}");
            }
        }
    }
    (usual, told)
}

fn reason<'a>(end: &'a End, type_: &str) -> &'a str {
    let mut conditions = end.status.conditions.iter();
    let condition = conditions.find(|condition| condition.type_ == type_);
    &condition.expect("a condition").reason
}

const LATE: &str = "rollout: {progressDeadline: 1m}\n";

fn changes_to_one_that_is_never_ready(cluster: &mut FakeCluster) {
    cluster.broken_from = 2;
    cluster.change(&format!("{LATE}decode: {{maxBatch: 4}}\n"));
}

/// The nodes have no room for the Pods of the first plan any more, which end.
fn others_take_the_place_of_the_first(cluster: &mut FakeCluster) {
    let taken = Holding {
        memory_bytes: 4 * GIB - 64,
        ..Holding::default()
    };
    let nodes = cluster.observed.nodes.keys();
    let held = nodes.map(|node| (node.clone(), taken.clone()));
    cluster.observed.held_by_others = held.collect();
    let pods = &mut cluster.observed.pods;
    pods.retain(|pod| pod.role.is_gateway() || pod.plan_generation > 1);
}

#[test]
fn a_plan_that_serves_is_told_as_serving() {
    let (end, told) = whenever_it_is_killed("", &[]);
    assert_eq!(reason(&end, READY), "Serving");
    assert!(told.contains(&"Planned".to_owned()), "{told:?}");
}

#[test]
fn a_plan_that_is_given_up_is_told_as_given_up() {
    let course: Course<'_> = &[(8, changes_to_one_that_is_never_ready)];
    let (end, told) = whenever_it_is_killed(LATE, course);
    assert_eq!(reason(&end, DEGRADED), ROLLED_BACK);
    assert!(told.contains(&"RolledBack".to_owned()), "{told:?}");
}

#[test]
fn a_plan_that_comes_back_without_a_place_is_told_as_such() {
    let course: Course<'_> = &[
        (8, changes_to_one_that_is_never_ready),
        (10, others_take_the_place_of_the_first),
    ];
    let (end, _) = whenever_it_is_killed(LATE, course);
    assert_eq!(reason(&end, DEGRADED), NODES_TAKEN);
}

#[test]
fn workers_that_end_and_start_again_are_told_as_such() {
    let course: Course<'_> = &[
        (0, |cluster| cluster.observed.demand = idle_for(1.0)),
        (8, |cluster| {
            cluster.observed.demand = idle_for(301.0);
            cluster.pass(Duration::from_secs(301));
        }),
        (20, |cluster| cluster.observed.demand = asked()),
    ];
    let (end, told) = whenever_it_is_killed(YAML, course);
    assert_eq!(reason(&end, READY), "Serving");
    for reason in ["ScaledToZero", "ScalingFromZero"] {
        assert!(told.contains(&reason.to_owned()), "{told:?}");
    }
}

#[test]
fn a_change_that_needs_the_room_of_what_runs_is_one_plan() {
    let course: Course<'_> = &[
        (0, |cluster| drop(cluster.observed.nodes.remove("attic"))),
        (8, |cluster| cluster.change(OTHER_GATEWAY)),
    ];
    let (end, _) = whenever_it_is_killed("decode: {kvCache: {memory: 1500Mi}}\n", course);
    assert_eq!(reason(&end, READY), "Serving");
    assert_eq!(end.status.plan.map(|plan| plan.generation), Some(2));
}

#[test]
fn pods_that_ended_are_counted_once() {
    let course: Course<'_> = &[(2, |cluster| {
        for name in ["demo-gateway-0", "demo-decode-0"] {
            cluster.pod(name, |pod| {
                (pod.is_ready, pod.phase) = (false, "Failed".to_owned());
            });
        }
    })];
    let (end, _) = whenever_it_is_killed("", course);
    assert_eq!(reason(&end, READY), "Serving");
}
