//! Deployments that keep their workers, in a simulated cluster.

use std::time::Duration;

use super::fake_cluster::FakeCluster;
use super::sharing::{asker, crowded, names, neighbour};
use super::zero::{YAML, idle_for, workers};
use crate::conditions::{PLANNED, READY};
use crate::observed::Neighbour;

const KEEP: &str = "decode: {scaling: {mode: Auto, minReplicas: 0, maxReplicas: 2}}\n\
                    autoscaling: {keep: true}\n";

fn kept() -> FakeCluster {
    let mut cluster = FakeCluster::new(KEEP);
    cluster.observed.demand = idle_for(1.0);
    cluster.settle();
    cluster
}

#[test]
fn kept_workers_stay_without_requests_and_end_for_a_higher_priority_alone() {
    let mut cluster = kept();
    let count = workers(&cluster);
    assert!(count > 0);
    cluster.pass(Duration::from_secs(30 * 24 * 3600));
    cluster.observed.demand = idle_for(2_000_000.0);
    cluster.settle();
    assert_eq!(workers(&cluster), count);
    for priority in [-1, 0] {
        cluster.observed.askers = vec![asker(&cluster, priority)];
        cluster.pass(Duration::from_secs(1000));
        cluster.settle();
        assert_eq!(workers(&cluster), count, "{priority}");
    }
    let (equal, higher) = (asker(&cluster, 0), asker(&cluster, 1));
    cluster.observed.askers = vec![equal, higher];
    cluster.settle();
    assert_eq!(workers(&cluster), 0);
    assert_eq!(cluster.says(READY), ("True", "ScaledToZero"));
}

/// What the one that waits says, and whom it asks.
fn waits(yaml: &str, neighbours: &[&Neighbour]) -> (String, Vec<String>) {
    let mut cluster = crowded(neighbours.iter().map(|it| (*it).clone()).collect());
    cluster.change(yaml);
    let asks = cluster.reconcile().asks;
    let asked = names(&asks).into_iter().map(str::to_owned).collect();
    (cluster.condition(PLANNED).message.clone(), asked)
}

#[test]
fn who_waits_says_who_keeps_the_place() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let (first, second) = (nodes[0], nodes[1]);
    let keeper = |name: &str, priority: i32| Neighbour {
        keeps: true,
        ..neighbour(name, &[first], priority, 900.0)
    };
    let (warm, idle) = (keeper("warm", 3), neighbour("idle", &[second], 0, 900.0));
    let by_warm = "; the place is kept by warm, whose workers end for this deployment only if the spec.priority of this one is above 3";
    let (words, asked) = waits(YAML, &[&warm]);
    assert!(words.ends_with(by_warm), "{words}");
    assert_eq!(asked, [""; 0]);
    // Others that suffice are asked, and nothing is said of those that keep their workers.
    let (words, asked) = waits(YAML, &[&warm, &idle]);
    assert!(
        words.ends_with("; it waits until idle can end its workers"),
        "{words}"
    );
    assert_eq!(asked, ["idle"]);
    let (_, asked) = waits(&format!("{YAML}priority: 4"), &[&warm]);
    assert_eq!(asked, ["warm"]);
    // One that ends already gives its place to anybody.
    let leaving = Neighbour {
        is_leaving: true,
        ..warm.clone()
    };
    assert_eq!(waits(YAML, &[&leaving]).1, ["warm"]);
}

#[test]
fn who_keeps_its_workers_gives_nothing_back_and_asks_whom_it_outranks() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let idle = neighbour("idle", &nodes, 0, 900.0);
    let by_idle = "; the place is taken by idle, whose workers end for this deployment only if the spec.priority of this one is above 0";
    for (yaml, why) in [
        (KEEP, ", as this one has autoscaling.keep"),
        ("", ", as the workers of this one end for nobody"),
    ] {
        let (words, asked) = waits(yaml, &[&idle]);
        assert!(words.ends_with(&format!("{by_idle}{why}")), "{words}");
        assert_eq!(asked, [""; 0]);
    }
    let (_, asked) = waits(&format!("{KEEP}priority: 1"), &[&idle]);
    assert_eq!(asked, ["idle"]);
}

#[test]
fn the_least_priority_that_would_do_is_told_and_none_above_the_highest() {
    let probe = FakeCluster::new("");
    let nodes: Vec<&str> = probe.observed.nodes.keys().map(String::as_str).collect();
    let keeper = |name: &str, node: &str, priority: i32, idle_s: f64| Neighbour {
        keeps: true,
        ..neighbour(name, &[node], priority, idle_s)
    };
    let low = keeper("low", nodes[1], 3, 900.0);
    let high = keeper("high", nodes[0], 7, 5000.0);
    let (words, _) = waits(YAML, &[&high, &low]);
    assert!(
        words.contains("kept by low, ") && words.ends_with("above 3"),
        "{words}"
    );
    let highest = keeper("warm", nodes[0], 1000, 900.0);
    let (words, _) = waits(YAML, &[&highest]);
    assert!(
        words.ends_with("; the place is kept by warm, whose spec.priority 1000 is the highest: these workers end for this deployment only if they are unloaded, or without their autoscaling.keep"),
        "{words}"
    );
}
