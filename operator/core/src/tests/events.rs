//! Transitions are reported once.

use hearth_crds::{Condition, InferenceDeploymentStatus, PlanRef, PoolStatus};

use crate::conditions::{DECODE_READY, DEGRADED, PLANNED, READY};
use crate::events::transitions;

fn status(conditions: &[(&str, &str, &str)], plan: u64, decode: u32) -> InferenceDeploymentStatus {
    let conditions = conditions.iter().map(|(type_, status, reason)| Condition {
        type_: (*type_).to_owned(),
        status: (*status).to_owned(),
        observed_generation: Some(1),
        last_transition_time: "2026-01-01T00:00:00Z".to_owned(),
        reason: (*reason).to_owned(),
        message: format!("{type_} {reason}"),
    });
    InferenceDeploymentStatus {
        conditions: conditions.collect(),
        plan: (plan > 0).then(|| PlanRef {
            name: format!("demo-{plan}"),
            generation: plan,
        }),
        pool_statuses: vec![PoolStatus {
            name: "decode".to_owned(),
            desired: decode,
            ..PoolStatus::default()
        }],
        ..InferenceDeploymentStatus::default()
    }
}

fn told(old: &InferenceDeploymentStatus, new: &InferenceDeploymentStatus) -> Vec<String> {
    told_of(old, new, false)
}

fn told_of(
    old: &InferenceDeploymentStatus,
    new: &InferenceDeploymentStatus,
    numbers_alone: bool,
) -> Vec<String> {
    let events = transitions(Some(old), new, numbers_alone);
    events.into_iter().map(|event| event.reason).collect()
}

#[test]
fn the_same_status_tells_nothing() {
    for (status_text, reason) in [
        ("True", "Serving"),
        ("False", "InvalidSpec"),
        ("Unknown", "X"),
    ] {
        let all =
            [READY, PLANNED, DECODE_READY, DEGRADED].map(|type_| (type_, status_text, reason));
        let status = status(&all, 3, 2);
        assert!(told(&status, &status).is_empty());
    }
}

#[test]
fn a_first_visit_tells_troubles_and_no_losses() {
    let new = status(
        &[
            (READY, "False", "InvalidSpec"),
            (PLANNED, "False", "InvalidSpec"),
            (DECODE_READY, "False", "NotPlanned"),
        ],
        0,
        1,
    );
    let events = transitions(None, &new, false);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].reason, "InvalidSpec");
    assert!(events[0].is_warning);
}

#[test]
fn scaling_is_no_loss_and_a_loss_is_no_scaling() {
    let old = status(&[(DECODE_READY, "True", "AllReady")], 1, 1);
    let wanted = status(&[(DECODE_READY, "False", "LoadingModel")], 2, 2);
    assert_eq!(told_of(&old, &wanted, true), ["ScaledDecode"]);
    // Something else was changed with the number, or a place was lost with it unchanged.
    assert_eq!(
        told_of(&old, &wanted, false),
        ["PlanReplaced", "ScaledDecode"]
    );
    let moved = status(&[(DECODE_READY, "True", "AllReady")], 2, 1);
    assert_eq!(told_of(&old, &moved, true), ["PlanReplaced"]);
    let lost = status(&[(DECODE_READY, "False", "Crashed")], 1, 1);
    assert_eq!(told(&old, &lost), ["WorkerLost"]);
    assert_eq!(told(&lost, &old), ["WorkerReady"]);
}

#[test]
fn another_trouble_of_the_same_condition_is_told() {
    let lost = status(&[(DEGRADED, "True", "NodeLost")], 1, 1);
    let rolled_back = status(&[(DEGRADED, "True", "RolledBack")], 1, 1);
    assert_eq!(told(&lost, &rolled_back), ["RolledBack"]);
    assert!(told(&lost, &status(&[(DEGRADED, "False", "AsPlanned")], 1, 1)).is_empty());
}

#[test]
fn a_way_back_to_an_older_plan_is_no_replacement() {
    let (old, new) = (status(&[], 3, 1), status(&[], 2, 1));
    assert!(told(&old, &new).is_empty());
    assert_eq!(told(&new, &old), ["PlanReplaced"]);
}
