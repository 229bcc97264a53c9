//! From the programs of an earlier version to these and back, during streams: `make test-upgrade`.
//!
//! Clients that stream all the while lose no token; a new operator restarts no worker; a new worker image comes to one deployment
//! after the other; the certificate authority stays. In between, this operator has workers of the earlier version; after the rollback,
//! the earlier operator names a plan that it cannot read, whose Pods serve on until this one is back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Images, condition, wait_until};
use hearth_tests::skipped;
use serde_json::{Value, json};

use super::release::{self, PATIENCE, deployment, infd, patch, pods, said, wait_until_settled};
use super::streams::{self, Streams};
use super::uninstall::AUTHORITY;
use super::upgrades::{DEPLOYMENTS, images_of, starting_with, uids};
use super::virtual_devices::{self, plan_of};
use super::{OPTIONS, SYSTEM};

/// Clients of the deployment with a newer plan.
const FEW: usize = 2;

#[test]
#[ignore = "needs programs of an earlier version: make test-upgrade FROM=REF builds them and runs it"]
fn programs_of_an_earlier_version_are_upgraded_and_come_back() {
    let Some(earlier) = std::env::var_os("HEARTH_TEST_EARLIER").map(PathBuf::from) else {
        skipped("HEARTH_TEST_EARLIER is not set: make test-upgrade FROM=REF sets it");
        return;
    };
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let (now, then) = (cluster.import_hearth(), cluster.import_earlier(&earlier));
    install(&cluster, &earlier, &then);
    let read_then = version_read(&cluster);
    let trusted = authority(&cluster);
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);

    this_operator_has_workers_of_that_version(&cluster, &now, &then, &streams);
    release::upgrade(&cluster, &format!("image.workerTag={}", now.worker.1));
    run_in_turn(&cluster, &now);
    streams.wait_for(streams::STREAMS);

    let newer = Newer::start(&cluster, read_then);
    release::roll_back(&cluster, "1");
    run_in_turn(&cluster, &then);
    streams.wait_for(streams::STREAMS);
    if let Some(newer) = &newer {
        newer.assert_left(&cluster);
    }
    release::upgrade(&cluster, &format!("image.tag={}", now.operator.1));
    run_in_turn(&cluster, &now);
    streams.wait_for(streams::STREAMS);
    if let Some(newer) = newer {
        newer.assert_back(&cluster);
    }

    assert_eq!(authority(&cluster), trusted);
    println!(
        "{} answers from one version to the other, back, and forth again",
        streams.finish()
    );
}

/// Installs the earlier version by its own chart, and waits until both deployments serve.
fn install(cluster: &Cluster, earlier: &Path, then: &Images) {
    let chart = earlier.join("source/charts/hearth");
    let registry = then.operator.0.trim_end_matches("/hearth");
    let [first, second] = virtual_devices::values();
    let values = [
        &format!("image.registry={registry}"),
        &format!("image.tag={}", then.operator.1),
        &first,
        &second,
    ];
    release::install_chart(
        cluster,
        chart.to_str().expect("UTF-8"),
        &values.map(String::as_str),
    );
    for name in DEPLOYMENTS {
        // The devices are for the deployment with a newer plan.
        let spec = json!({"prefill": {"gpusPerWorker": 0}});
        cluster.apply(&deployment(name, spec).to_string());
    }
    for name in DEPLOYMENTS {
        wait_until_settled(cluster, name);
        assert_eq!(images_of(cluster, name), of_worker(then), "{name}");
    }
}

/// The operator is of this version, and restarts no worker; then it changes a plan, which workers of the earlier version carry out.
fn this_operator_has_workers_of_that_version(
    cluster: &Cluster,
    now: &Images,
    then: &Images,
    streams: &Streams,
) {
    let before = uids(cluster);
    let (tag, worker_tag) = (&now.operator.1, &then.worker.1);
    release::upgrade(
        cluster,
        &format!("image.tag={tag},image.workerTag={worker_tag}"),
    );
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(uids(cluster), before, "a new operator restarted workers");
    for name in DEPLOYMENTS {
        wait_until_settled(cluster, name);
    }
    streams.wait_for(streams::STREAMS);

    patch(cluster, "demo", &json!({"decode": {"maxBatch": 3}}));
    wait_until_settled(cluster, "demo");
    assert_ne!(uids(cluster), before);
    assert_eq!(images_of(cluster, "demo"), of_worker(then));
    streams.wait_for(streams::STREAMS);
}

/// A deployment with a plan that the earlier version does not read, under streams.
struct Newer {
    plan: String,
    pods: BTreeSet<String>,
    streams: Streams,
}

impl Newer {
    /// Has it planned and waits until it serves; `None` if the earlier version reads all plans of this one.
    ///
    /// `read_then`: highest version of plans that the earlier version's workers, and so its operator, read.
    fn start(cluster: &Cluster, read_then: u64) -> Option<Self> {
        cluster.apply(&virtual_devices::together().to_string());
        let found = wait_until_settled(cluster, "together");
        let needed = plan_of(cluster, &found)["minVersion"].as_u64();
        if needed <= Some(read_then) {
            cluster.kubectl(&["delete", "infd", "together"]);
            println!(
                "both versions read plans up to {read_then}: what the earlier one says of newer plans was not tested"
            );
            return None;
        }
        let streams = Streams::start_many(&cluster.reach("default", "together", 80).v1(), FEW);
        streams.wait_for(FEW);
        let plan = found["status"]["plan"]["name"].as_str();
        Some(Self {
            plan: plan.expect("a plan").to_owned(),
            pods: uids_of(cluster, "together"),
            streams,
        })
    }

    /// Asserts that the earlier operator names the plan and leaves its Pods.
    fn assert_left(&self, cluster: &Cluster) {
        let found = wait_until("the newer plan is named", PATIENCE, || {
            let found = infd(cluster, "together");
            let (reason, message) = said(&found, "Degraded");
            (reason == "NewerPlan" && message.contains(&self.plan)).then_some(found)
        });
        assert_eq!(condition(&found, "Ready"), Some("Unknown"), "{found:#}");
        self.serves_on(cluster);
    }

    /// Asserts that this operator has the plan and its Pods as they were.
    fn assert_back(self, cluster: &Cluster) {
        let found = wait_until_settled(cluster, "together");
        assert_eq!(found["status"]["plan"]["name"], *self.plan, "{found:#}");
        self.serves_on(cluster);
        let right = self.streams.finish();
        println!("{right} answers by the plan that the earlier operator does not read");
    }

    fn serves_on(&self, cluster: &Cluster) {
        self.streams.wait_for(FEW);
        assert_eq!(uids_of(cluster, "together"), self.pods);
    }
}

/// Waits until both deployments run with these images' worker, which comes to one after the other.
fn run_in_turn(cluster: &Cluster, images: &Images) {
    let (name, tag) = &images.worker;
    let image = format!("{name}:{tag}");
    let mut served = BTreeSet::new();
    let what = format!("both deployments run with {tag}");
    wait_until(&what, 3 * PATIENCE, || {
        let pods = cluster.list("pods", "default", "hearth.dev/role");
        let starting = starting_with(&pods, &image, &mut served);
        assert!(starting.len() <= 1, "both change at a time: {starting:?}");
        let is_done = |name: &&str| {
            release::settled(cluster, name).is_some()
                && images_of(cluster, name) == of_worker(images)
        };
        DEPLOYMENTS.iter().all(is_done).then_some(())
    });
}

/// Returns the worker's image, as all Pods of a deployment have it.
fn of_worker(images: &Images) -> BTreeSet<String> {
    let (name, tag) = &images.worker;
    BTreeSet::from([format!("{name}:{tag}")])
}

/// Returns the highest version of plans that the nodes' workers read.
fn version_read(cluster: &Cluster) -> u64 {
    let profiles = cluster.list("nodeprofiles", "", "");
    // Unset in profiles of versions that read 2.
    let read = |profile: &Value| profile["status"]["readerVersion"].as_u64().unwrap_or(2);
    profiles.iter().map(read).max().expect("a profile")
}

fn uids_of(cluster: &Cluster, name: &str) -> BTreeSet<String> {
    let pods = pods(cluster, name, "");
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().map(str::to_owned);
    pods.iter().filter_map(uid).collect()
}

/// Returns the certificate authority.
fn authority(cluster: &Cluster) -> Value {
    let secret = cluster
        .get("secret", SYSTEM, AUTHORITY)
        .expect("an authority");
    let certificate = &secret["data"]["tls.crt"];
    assert!(certificate.is_string(), "no certificate");
    certificate.clone()
}
