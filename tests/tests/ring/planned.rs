//! A ring as the planner has it where a node's device has room for some layers: the others are on the CPUs beside it.

use std::cell::Cell;

use hearth_tests::{Up, UpOptions, deployment, hearth, root, run};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{expected, streams};
use crate::on_three_nodes;

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

/// The example without its strategy, on nodes none of which holds the model.
#[tokio::test]
async fn auto_serves_with_a_ring_where_no_node_holds_the_model() {
    let want = expected(0..4).await;
    let example = root().join("manifests/examples/demo-ring.yaml");
    let text = std::fs::read_to_string(example).expect("the example");
    let parts = text.split_once("  strategy: PipedRing\n");
    let (before, after) = parts.expect("a strategy");
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("ring.yaml");
    std::fs::write(&file, [before, after].concat()).expect("a file");
    let up = Up::start(&UpOptions {
        file: Some(file),
        ..on_three_nodes()
    });
    let plan = std::fs::read_to_string(up.state_dir().join("demo-ring/plan.json"));
    let plan: Value = serde_json::from_str(&plan.expect("the plan")).expect("a plan");
    assert_eq!(plan["strategy"], "PipedRing");
    assert!(members(&plan).len() > 1, "{plan:#}");
    assert!(
        plan["why"].to_string().contains("no node holds the model"),
        "{plan:#}"
    );
    assert_eq!(streams(&up.v1(), 0..4, |_| {}).await, want);
}

/// Following the advice makes the ring.
#[test]
fn what_rules_out_a_ring_is_said_where_no_node_holds_the_model() {
    let directory = tempfile::tempdir().expect("directory");
    let plan = |decode: Value| {
        let file = deployment(directory.path(), |spec| spec["decode"] = decode);
        run(hearth()
            .args(["plan", "-o", "json", "-f"])
            .arg(&file)
            .args(["--node", "attic:memory=420Mi"])
            .args(["--node", "cellar:memory=420Mi", "--state-dir"])
            .arg(directory.path()))
    };
    let cache = json!({"memory": "200Mi"});
    let (code, _, stderr) = plan(json!({"replicas": 2, "kvCache": cache}));
    assert_eq!(code, 1, "{stderr}");
    for words in [
        "let a piped ring hold the model, for which there is room (spec.decode.replicas is 2: ",
        ": write 1)",
    ] {
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
    let (code, plan, stderr) = plan(json!({"replicas": 1, "kvCache": cache}));
    assert_eq!(code, 0, "{stderr}");
    let plan: Value = serde_json::from_str(&plan).expect("a plan");
    assert_eq!(members(&plan).len(), 2, "{plan:#}");
}
