//! Plans for nodes whose other programs take memory now and then.

#![allow(clippy::unwrap_used)]

mod support;

use hearth_crds::{InferencePlanSpec, NodeProfileStatus};
use hearth_planner::{PlanError, plan};
use support::{GIB, MIB, dense_1_7b, plan_input, small_vm};

const DEMO: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 8192}\n";

/// A node with so much memory available, of which less was for a while.
fn node(available_bytes: u64, least_bytes: Option<u64>) -> NodeProfileStatus {
    let mut node = small_vm();
    node.memory.total_bytes = 32 * GIB;
    node.memory.available_bytes = available_bytes;
    node.numa_nodes[0].free_bytes = available_bytes;
    node.memory.least_available_bytes = least_bytes;
    node.memory.least_over_seconds = 24 * 3600;
    node
}

fn planned(yaml: &str, node: NodeProfileStatus) -> Result<InferencePlanSpec, PlanError> {
    let spec = serde_norway::from_str(yaml).unwrap();
    plan(&plan_input(&spec, &dense_1_7b(), &[node]))
}

/// The plan without the sentences about memory that others took.
fn work(mut plan: InferencePlanSpec) -> InferencePlanSpec {
    plan.why.retain(|line| !line.contains("other programs"));
    plan
}

fn line(plan: &InferencePlanSpec) -> Option<&String> {
    plan.why.iter().find(|line| line.contains("other programs"))
}

#[test]
fn what_others_took_within_the_day_is_left_to_them() {
    let plan = planned(DEMO, node(22 * GIB, Some(12 * GIB))).unwrap();
    assert_eq!(
        line(&plan).unwrap(),
        "10 GiB of the memory of here were taken by other programs within the last day: they are left to them"
    );
    assert_eq!(
        work(plan.clone()),
        planned(DEMO, node(12 * GIB, None)).unwrap()
    );
    assert_ne!(work(plan), planned(DEMO, node(22 * GIB, None)).unwrap());
}

#[test]
fn what_fits_now_is_not_refused_for_it_but_warned_of() {
    let plan = planned(DEMO, node(22 * GIB, Some(512 * MIB))).unwrap();
    assert_eq!(
        line(&plan).unwrap(),
        "warning: 21.5 GiB of the memory of here were taken by other programs within the last day: the plan counts on them too, since it would not fit otherwise, or be slower at all times"
    );
    assert_eq!(work(plan), planned(DEMO, node(22 * GIB, None)).unwrap());
}

#[test]
fn nothing_is_read_from_a_disk_for_what_happens_now_and_then() {
    // The weights take more than 3 GiB.
    let plan = planned(DEMO, node(22 * GIB, Some(3 * GIB))).unwrap();
    assert!(plan.ranks.iter().all(|rank| rank.disk_weight_bytes() == 0));
    assert!(line(&plan).unwrap().starts_with("warning: 19 GiB"));
}

#[test]
fn what_fits_neither_way_is_refused_with_the_memory_of_now() {
    let yaml =
        "model: {source: {builtin: {name: hearth-demo}}}\ndecode: {kvCache: {memory: 64Gi}}\n";
    let of = |least| {
        planned(yaml, node(22 * GIB, least))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(of(Some(12 * GIB)), of(None));
}

#[test]
fn a_little_comes_and_goes_on_any_machine() {
    let before = planned(DEMO, node(22 * GIB, None)).unwrap();
    for least in [22 * GIB, 19 * GIB, 30 * GIB] {
        assert_eq!(planned(DEMO, node(22 * GIB, Some(least))).unwrap(), before);
    }
}
