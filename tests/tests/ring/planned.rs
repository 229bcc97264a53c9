//! A ring as the planner has it where a node's device has room for some layers: the others are on the CPUs beside it.

use std::cell::Cell;

use hearth_tests::{Up, UpOptions, root};
use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{expected, streams};

/// The node's memory holds one layer with its KV beside the processes' own, and the device three.
const ARGUMENTS: [&str; 4] = [
    "--virtual-device",
    "virtual:memory=240Mi",
    "--node",
    "attic:memory=500Mi,gpus=1",
];

/// The members of a plan's ring.
fn members(plan: &Value) -> Vec<&Value> {
    let ranks = plan["ranks"].as_array().into_iter().flatten();
    ranks.filter(|rank| !rank["ring"].is_null()).collect()
}

#[tokio::test]
async fn a_planned_ring_has_layers_on_a_device_and_on_the_cpus_beside_it() {
    let want = expected(0..4).await;
    let up = Up::start(&UpOptions {
        file: Some(root().join("manifests/examples/demo-ring.yaml")),
        arguments: ARGUMENTS.map(str::to_owned).to_vec(),
        ..UpOptions::default()
    });
    let plan = std::fs::read_to_string(up.state_dir().join("demo-ring/plan.json"));
    let plan: Value = serde_json::from_str(&plan.expect("the plan")).expect("a plan");
    let is_on_device = |rank: &&Value| rank["virtualDevice"].is_string();
    let (on_device, on_cpus): (Vec<&Value>, Vec<&Value>) =
        members(&plan).into_iter().partition(is_on_device);
    assert_eq!((on_device.len(), on_cpus.len()), (1, 1), "{plan:#}");
    assert_eq!(streams(&up.v1(), 0..4, |_| {}).await, want);

    // Its process is started again on the device.
    let name = on_device[0]["name"].as_str().expect("a name");
    let begun = Cell::new(0);
    let kill = |_| {
        begun.set(begun.get() + 1);
        if begun.get() == 2 {
            up.signal(name, Signal::KILL);
        }
    };
    assert_eq!(streams(&up.v1(), 0..4, kill).await, want, "{name}");
}
