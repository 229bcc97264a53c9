//! A new operator, and new worker images, during streams.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Images, condition, wait_until};
use serde_json::{Value, json};

use super::release::{self, PATIENCE, deployment, infd, patch, pods, said, wait_until_settled};
use super::streams::{self, Streams};

pub(super) const DEPLOYMENTS: [&str; 2] = ["demo", "other"];
/// Longest shutdown: a gateway continues for 5 s so that all nodes notice, lets streams of a few seconds end, and
/// closes idle connections after 2 s.
const GATEWAY_END: Duration = Duration::from_secs(40);

/// Returns the uids of both deployments' Pods.
pub(super) fn uids(cluster: &Cluster) -> BTreeSet<String> {
    let pods = DEPLOYMENTS.iter().flat_map(|name| pods(cluster, name, ""));
    pods.filter_map(|pod| pod["metadata"]["uid"].as_str().map(str::to_owned))
        .collect()
}

/// Returns the images of a deployment's Pods.
pub(super) fn images_of(cluster: &Cluster, name: &str) -> BTreeSet<String> {
    let image = |pod: &Value| {
        pod["spec"]["containers"][0]["image"]
            .as_str()
            .map(str::to_owned)
    };
    pods(cluster, name, "").iter().filter_map(image).collect()
}

/// Returns deployments that have Pods with that image that are not ready yet, from a list of all Pods.
///
/// `served`: uids of Pods that were ready once, kept between calls: a probe that fails later does not count as a
/// start.
pub(super) fn starting_with(
    pods: &[Value],
    image: &str,
    served: &mut BTreeSet<String>,
) -> BTreeSet<String> {
    let uid = |pod: &Value| pod["metadata"]["uid"].to_string();
    let ready = pods
        .iter()
        .filter(|pod| pod["status"]["containerStatuses"][0]["ready"] == true);
    served.extend(ready.map(uid));
    let is_starting = |pod: &&Value| {
        pod["spec"]["containers"][0]["image"] == image
            && pod["metadata"]["deletionTimestamp"].is_null()
            && !served.contains(&uid(pod))
    };
    let owner = |pod: &Value| {
        pod["metadata"]["labels"]["hearth.dev/deployment"]
            .as_str()
            .map(str::to_owned)
    };
    pods.iter().filter(is_starting).filter_map(owner).collect()
}

pub(super) fn of_operator_and_workers(cluster: &Cluster, images: &Images) {
    for node in ["node-1", "node-2"] {
        for (name, tag) in [&images.operator, &images.worker] {
            let from = format!("{name}:{tag}");
            cluster
                .node_named(node)
                .tag_image(&from, &format!("{name}:next"));
        }
    }
    for name in DEPLOYMENTS {
        cluster.apply(&deployment(name, json!({})).to_string());
    }
    for name in DEPLOYMENTS {
        wait_until_settled(cluster, name);
    }
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);

    a_new_operator_restarts_nobody(cluster, &images.worker.1);
    streams.wait_for(streams::STREAMS);
    a_new_image_comes_in_turn(cluster, &images.worker.0);
    streams.wait_for(streams::STREAMS);
    a_revert_in_the_middle_is_one(cluster);
    streams.wait_for(streams::STREAMS);
    an_image_that_is_not_there_stops_at_the_first(cluster, &images.worker.0);
    streams.wait_for(streams::STREAMS);
    println!("{} answers through four upgrades", streams.finish());
}

/// Changes the tag, the version in the chart's labels, and other settings of the Pods; the workers' image stays.
fn a_new_operator_restarts_nobody(cluster: &Cluster, worker_tag: &str) {
    let before = uids(cluster);
    let values = [
        &format!("image.workerTag={worker_tag}"),
        "image.tag=next",
        "image.pullPolicy=Never",
        "operator.resync=2s",
        "operator.podAnnotations.version=next",
    ];
    release::upgrade(cluster, &values.join(","));
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(uids(cluster), before);
    for name in DEPLOYMENTS {
        wait_until_settled(cluster, name);
    }
}

fn a_new_image_comes_in_turn(cluster: &Cluster, worker: &str) {
    let next = BTreeSet::from([format!("{worker}:next")]);
    release::upgrade(cluster, "image.workerTag=next");
    let mut ends = Ends::default();
    let mut served = BTreeSet::new();
    wait_until(
        "both deployments run with the new image",
        2 * PATIENCE,
        || {
            let pods = cluster.list("pods", "default", "hearth.dev/role");
            ends.note(&pods);
            let starting = starting_with(&pods, &format!("{worker}:next"), &mut served);
            assert!(starting.len() <= 1, "both change at a time: {starting:?}");
            let is_done = |name: &&str| {
                release::settled(cluster, name).is_some() && images_of(cluster, name) == next
            };
            DEPLOYMENTS.iter().all(is_done).then_some(())
        },
    );
    let longest = ends.longest();
    println!("gateways took {longest:.1?} at most from being asked to end to their end");
    assert!(longest < GATEWAY_END, "{:?}", ends.0);
}

/// First and last times at which gateways were seen after being asked to end, by name.
#[derive(Default)]
struct Ends(BTreeMap<String, (Instant, Instant)>);

impl Ends {
    fn note(&mut self, pods: &[Value]) {
        let now = Instant::now();
        for pod in pods {
            let metadata = &pod["metadata"];
            let is_gateway = metadata["labels"]["hearth.dev/role"] == "gateway";
            if is_gateway && !metadata["deletionTimestamp"].is_null() {
                let name = metadata["name"].as_str().unwrap_or_default().to_owned();
                self.0.entry(name).or_insert((now, now)).1 = now;
            }
        }
    }

    /// Returns the longest of all shutdowns.
    fn longest(&self) -> Duration {
        let took = self.0.values().map(|(first, last)| *last - *first);
        took.max().expect("gateways that ended")
    }
}

/// A change that is reverted while its workers start.
fn a_revert_in_the_middle_is_one(cluster: &Cluster) {
    let before = uids(cluster);
    patch(cluster, "demo", &json!({"decode": {"maxBatch": 3}}));
    wait_until("the change is under way", PATIENCE, || {
        (uids(cluster) != before).then_some(())
    });
    patch(cluster, "demo", &json!({"decode": {"maxBatch": null}}));
    wait_until_settled(cluster, "demo");
}

fn an_image_that_is_not_there_stops_at_the_first(cluster: &Cluster, worker: &str) {
    for name in DEPLOYMENTS {
        let rollout = json!({"rollout": {"progressDeadline": "30s"}});
        patch(cluster, name, &rollout);
        wait_until_settled(cluster, name);
    }
    release::upgrade(cluster, "image.workerTag=absent,agent.enabled=false");
    let is = |name: &str, kind: &str, reason: &str| said(&infd(cluster, name), kind).0 == reason;
    let tried = wait_until(
        "one has tried, and the other is held back",
        2 * PATIENCE,
        || {
            let pairs = [
                (DEPLOYMENTS[0], DEPLOYMENTS[1]),
                (DEPLOYMENTS[1], DEPLOYMENTS[0]),
            ];
            let mut tried = pairs.into_iter().filter(|(first, second)| {
                is(first, "Planned", "RolledBack") && is(second, "Progressing", "ImageHeldBack")
            });
            tried.next().map(|(first, _)| first)
        },
    );
    println!("{tried} tried the image that is not there");
    let old = BTreeSet::from([format!("{worker}:next")]);
    wait_until("nothing is left of it", PATIENCE, || {
        DEPLOYMENTS
            .iter()
            .all(|name| images_of(cluster, name) == old)
            .then_some(())
    });
    for name in DEPLOYMENTS {
        assert_eq!(
            condition(&infd(cluster, name), "Ready"),
            Some("True"),
            "{name}"
        );
    }
}
